"""The head's kernels compile for Hopper and Ampere and spill no registers. The test needs no GPU."""

from __future__ import annotations

import inspect
import os
import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from magicrl.models.head import TRITON_INSTALLED, Tiles

pytestmark = [
    pytest.mark.skipif(not TRITON_INSTALLED, reason="no GPU: Triton comes with CUDA builds of torch"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
]

CONSTANTS: dict[str, Any] = {"SCALE": 1.0, "TEMPERATURE": 0.6, "WIDTH": 1536, "hidden_col": 1, "weight_col": 1}
FLOATS = ("largest_out", "total_out", "weighted_out", "chosen_out", "log_sums", "constants", "pulls", "entropy_pulls")


DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(kernel: str, dtype: torch.dtype, capability: int, tiles: Tiles, *, extras: bool, softcap: bool) -> Any:
    """Return a kernel's machine code; ``extras``: a bias, entropies, and logits that are never rounded."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from magicrl.models import head_triton

    function = getattr(head_triton, kernel)
    constants = CONSTANTS | {
        "SOFTCAP": 30.0 if softcap else 0.0, "WITH_BIAS": extras, "ROUND": not extras, "WITH_ENTROPY": extras,
        "TOKENS": tiles.tokens, "WORDS": tiles.words, "INNER": tiles.inner, "GROUP": tiles.group,
        "PER_PROGRAM": tiles.words_per_program,
    }  # fmt: skip
    pointers = {"bias": "*fp32", "targets": "*i64"} | dict.fromkeys(("hidden", "weight", "out"), f"*{DTYPES[dtype]}")
    pointers |= dict.fromkeys(FLOATS, "*fp32")
    names = list(inspect.signature(function.fn).parameters)
    # alignment at a launch: tensors and rows begin at multiples of 16 bytes
    even = [i for i, name in enumerate(names) if name in pointers or name in ("hidden_row", "weight_row", "out_row")]
    source = ASTSource(
        fn=function,
        signature={n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names},
        constexprs={n: constants[n] for n in names if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Room:
    """Shared memory per block of a device."""

    def __init__(self, size: int) -> None:
        self.shared_memory_per_block_optin = size


@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("extras", "softcap"), [(False, False), (True, False), (True, True)])
def test_kernels_for_hopper_spill_no_registers(
    kernel: str, dtype: torch.dtype, extras: bool, softcap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the tiles of each dtype, and tensor cores where the dtype has them."""
    from magicrl.models.head_triton import tiles_for

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Room(232448))
    tiles = tiles_for(torch.device("cuda"), dtype, softcap=softcap)
    found = compiled(kernel, dtype, 90, tiles, extras=extras, softcap=softcap)
    assert found.metadata.shared <= 232448
    assert ("wgmma" in found.asm["ptx"]) == (dtype != torch.float32)
    spilled = len(re.findall(r"\b(?:STL|LDL)\b", found.asm["sass"]))
    # a handful around the loop costs nothing; a tile that does not fit causes thousands. The tiles were chosen with
    # Triton 3.6, that of the GPU builds of torch 2.11; 3.9 keeps up to 241 words of the statistics in memory
    assert spilled <= (16 if triton_release() < (3, 7) else 256), "registers of a tile are kept in memory"


def triton_release() -> tuple[int, ...]:
    return Version(version("triton")).release


@pytest.mark.parametrize("kernel", ["statistics_kernel", "gradient_kernel"])
def test_kernels_compile_for_ampere(kernel: str) -> None:
    found = compiled(kernel, torch.bfloat16, 80, Tiles(words=128), extras=True, softcap=True)
    assert "mma.sync" in found.asm["ptx"], "the products run on no tensor core"
