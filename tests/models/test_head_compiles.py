"""The head's kernels compile for Hopper and Ampere: no GPU is needed for that, and the interpreter checks no types."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

from magicrl.models.head import TRITON_INSTALLED, Tiles

pytestmark = [
    pytest.mark.skipif(not TRITON_INSTALLED, reason="no GPU: Triton comes with CUDA builds of torch"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
]

CONSTANTS: dict[str, Any] = {"SCALE": 1.0, "TEMPERATURE": 0.6, "WIDTH": 1536, "hidden_col": 1, "weight_col": 1}
FLOATS = ("largest_out", "total_out", "weighted_out", "chosen_out", "log_sums", "constants", "pulls", "entropy_pulls")


@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel"])
@pytest.mark.parametrize(("capability", "tiles"), [(90, Tiles(words=256)), (80, Tiles(words=128))])
@pytest.mark.parametrize("extras", [False, True])
def test_kernel_compiles(kernel: str, capability: int, tiles: Tiles, extras: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from magicrl.models import head_triton

    function = getattr(head_triton, kernel)
    constants = CONSTANTS | {
        "SOFTCAP": 30.0 if extras else 0.0, "WITH_BIAS": extras, "ROUND": not extras, "WITH_ENTROPY": extras,
        "TOKENS": tiles.tokens, "WORDS": tiles.words, "INNER": tiles.inner, "GROUP": tiles.group,
        "PER_PROGRAM": tiles.words_per_program,
    }  # fmt: skip
    pointers = {"hidden": "*bf16", "weight": "*bf16", "bias": "*fp32", "targets": "*i64", "out": "*bf16"}
    pointers |= dict.fromkeys(FLOATS, "*fp32")
    names = list(inspect.signature(function.fn).parameters)
    source = ASTSource(
        fn=function,
        signature={n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names},
        constexprs={n: constants[n] for n in names if n in constants},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert ("wgmma" if capability == 90 else "mma.sync") in compiled.asm["ptx"], "the products run on no tensor core"
