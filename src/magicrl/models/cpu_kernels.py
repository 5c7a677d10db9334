"""Kernels for CPUs with AVX512 or AVX2, some also for AMX (folder `kernels`).

They compute attention, in decoding and over packed rows, norms, gates, rotary embeddings, the head's softmax, and the
passes of an update over all weights. Those of decoding, norms, gates and rotary embeddings compute in float32 too.

The machine's C++ compiler builds them on first use, in seconds, in ``magicrl/kernels`` in ``$XDG_CACHE_HOME`` or
``~/.cache``, under a digest of source and flags. If that folder is not writable, each process builds its own. Without a
compiler or the instructions, torch computes these parts with other rounding, and the log and ``magicrl doctor`` say so.
Matrix products are torch's, except those of decoding and, on AMX, of weights' gradients. Their fastest precision is
measured (`bfloat16_speeds`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.products import INTEL, processor_flags, product

_SOURCES = Path(__file__).with_name("kernels")
_AVX512 = ("fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16 = "avx512_bf16"
_AMX = ("amx_tile", "amx_bf16")
_AVX2 = ("avx2", "fma")
# of a processor's instructions, and its maker where that decides; the first that it has is used
_SETS = ((*_AVX512, _BF16, *_AMX), (*_AVX512, _BF16, INTEL), (*_AVX512, _BF16), _AVX512, _AVX2)
_FLAGS = (
    "-O3",
    "-ffp-contract=off",  # the source says where a product is rounded before a sum
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
)
_COMPILER_TIMEOUT = 120.0  # seconds; the compiler usually takes two
_VECTOR = 32  # numbers of a bfloat16 vector; widths must be multiples of it
FEW_ROWS = 128  # of `multiply_rows`; torch keeps more of them in caches
LANES = 16  # numbers that the kernels of norms and gates take at a time
_BOTH = (torch.float32, torch.bfloat16)
_WIDEST = 2048  # of the timed products: wider ones take seconds and have the same ratio
_FACTORS = 500_000_000  # multiplications that are timed together, at least a millisecond
_BLOCK = 64  # rows whose shares of a norm's gradient are added together first
_PART = 16  # rows of one prompt that are computed together, over all threads
_log = logging.getLogger(__name__)

_Integers = NDArray[np.int64]


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, None if there are none."""
    found = _found()
    return None if isinstance(found, str) else found


def kernels() -> ctypes.CDLL:
    """Return the compiled kernels. Call it only after `has_kernels` returned True."""
    found = library()
    assert found is not None, "call `has_kernels` first"
    return found


def missing() -> str | None:
    """Return why there are no kernels, None if there are some."""
    found = _found()
    return found if isinstance(found, str) else None


def has_kernels(dtype: torch.dtype, device: torch.device, width: int | None, multiple: int = _VECTOR) -> bool:
    """Return whether bfloat16 kernels exist for this precision, device and width of heads or rows (None means different
    widths), which must be a multiple of ``multiple``.
    """
    fits = dtype == torch.bfloat16 and device.type == "cpu" and width is not None and width % multiple == 0
    return fits and library() is not None


def has_both(dtype: torch.dtype, device: torch.device, width: int | None, multiple: int = _VECTOR) -> bool:
    """Return the same for the kernels that compute in float32 too: of decoding, norms, gates and rotations."""
    return has_kernels(torch.bfloat16 if dtype == torch.float32 else dtype, device, width, multiple)


def serves(*tensors: Tensor) -> bool:
    """Return whether bfloat16 kernels can read these tensors, which are on the CPU with memory of their own.

    Fake and distributed tensors name a device too, and have no memory there.
    """
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return plain and all(has_kernels(x.dtype, x.device, _VECTOR) for x in tensors)


def serves_both(*tensors: Tensor, width: int, multiple: int = LANES) -> bool:
    """Return the same for the kernels that compute in float32 too. The tensors have one precision and rows of
    ``width``.
    """
    alike = {(type(x) in (Tensor, torch.nn.Parameter), x.dtype) for x in tensors} == {(True, tensors[0].dtype)}
    return alike and all(has_both(x.dtype, x.device, width, multiple) for x in tensors)


@functools.cache
def bfloat16_speeds(width: int = 576, inner: int = 1536) -> tuple[float, float]:
    """Return how many times faster than in float32 one thread multiplies matrices in bfloat16.

    The products are those of decoding and of training. CPU time of one thread counts, so that a busy machine gives the
    same answer. Takes about 0.2 s.

    Args:
        width: Hidden size of the model; the default is SmolLM2-135M's.
        inner: Width of its feed-forward layers.

    Returns:
        The ratio for products of 64 rows, as in decoding, and of 1,024 rows, as in training.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights = [torch.ones(min(inner, _WIDEST), min(width, _WIDEST), dtype=dtype) for dtype in _BOTH]
        few = _bfloat16_speed(64, [_decoding_product(weight) for weight in weights], weights)
        many = _bfloat16_speed(1024, [functools.partial(product, right=weight.T) for weight in weights], weights)
    finally:
        torch.set_num_threads(threads)
    return few, many


def _decoding_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if can_multiply(weight):
        return functools.partial(multiply, packed=packed_weight(weight), columns=len(weight))
    if can_multiply_rows(weight):
        return functools.partial(multiply_rows, weight=weight)
    return functools.partial(product, right=weight.T)


def _bfloat16_speed(rows: int, multiplied: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[Tensor]) -> float:
    """Return the median of three ratios. ``multiplied`` and ``weights`` are those of `_BOTH`."""
    products = max(1, _FACTORS // (rows * weights[0].numel()))
    ratios: list[float] = []
    while len(ratios) < 3:
        taken = []
        for multiply_by, weight in zip(multiplied, weights, strict=True):
            x = weight.new_ones(rows, weight.shape[1])
            multiply_by(x)  # the first product of a shape prepares its kernel
            begun = time.thread_time()
            for _ in range(products):
                multiply_by(x)
            taken.append(time.thread_time() - begun)
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


@functools.cache
def _found() -> ctypes.CDLL | str:
    """Return the kernels, or why there are none. They only affect speed, so a run never fails without them."""
    try:
        found = _loaded()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.info("bfloat16 on this CPU is left to torch, which is slower: %s", error)
        return str(error)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kinds = {"p": pointer, "i": integer, "d": ctypes.c_double, "f": ctypes.c_float, "t": ctypes.c_int}
    arguments = {
        "adamw": "ppppppifddddddt",
        "add_gradient": "ppppiiit",
        "add_widened": "ppit",
        "attend": "tppippiippippippiipppiiift",
        "attend_row": "pp" + 3 * "pii" + "ppiiiift",
        "attend_row_backward": "pppppp" + 3 * "pii" + "pppiiiift",
        "attend_row_exactly": "tpp" + 3 * "pii" + "ppiiiift",
        "decode_layers": "ttpppip" + "ppff" + "iippiipppt",
        "gated": "tpppiiit",
        "gated_backward": "tppppppit",
        "multiply_packed": "pppppiiit",
        "multiply_rows": "pppiiit",
        "normalise": "tpppiift",
        "normalise_backward": "tpppppiiift",
        "pack_weight": "ppiit",
        "rotate": "tpipippiiit",
        "softmax_pull": "pfpppppiit",
        "softmax_sums": "pppppipiiit",
        "square_sum": "ppit",
    }
    for name, given in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = [kinds[kind] for kind in given], None
    _log.info("bfloat16 on this CPU uses magicrl's own kernels")
    return found


def _instructions() -> tuple[str, ...]:
    """Return the first of the sets that the processor has.

    Raises:
        RuntimeError: It has too few.
    """
    flags = processor_flags()
    for names in _SETS:
        if flags.issuperset(names):
            return names
    raise RuntimeError(f"the processor lacks {', '.join(name for name in _AVX2 if name not in flags)}")


def _units(names: tuple[str, ...]) -> list[str]:
    """Return the compiler's options for such a set."""
    return [
        "-DSLOW_PAIRS" if name == INTEL else f"-m{name.replace('_', '-' if name in _AMX else '')}" for name in names
    ]


def _loaded() -> ctypes.CDLL:
    """Load the kernels. Raises ``OSError``, ``RuntimeError`` or ``SubprocessError`` if that is impossible."""
    options = (*_FLAGS, *_units(_instructions()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magicrl" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A library that another user wrote would run as this user.
        if folder.stat().st_uid == os.getuid():
            return ctypes.CDLL(str(_compiled(folder, options)))
    except OSError as error:
        _log.info("no kernels are kept in %s: %s", folder, error)
    with tempfile.TemporaryDirectory() as own:
        return ctypes.CDLL(str(_compiled(Path(own), options)))


def _compiled(folder: Path, options: tuple[str, ...]) -> Path:
    """Return the library in ``folder``, compiled with ``options`` if it does not exist."""
    sources = sorted(_SOURCES.iterdir())
    content = b"".join(source.read_bytes() for source in sources)
    kept = folder / f"{hashlib.sha256(content + ' '.join(options).encode()).hexdigest()[:16]}.so"
    if kept.is_file():
        return kept
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++ or clang++)")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = {str(source): str(Path(name, f"{source.stem}.o")) for source in sources if source.suffix == ".cpp"}
        out = Path(name, "kernels.so")
        # Linked without OpenMP: its functions are found in the runtime that torch has loaded, so both share their
        # threads.
        commands = [[compiler, *options, "-c", source, "-o", target] for source, target in made.items()]
        for command in (*commands, [compiler, "-shared", *made.values(), "-o", str(out)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        # Atomic, because other processes may compile at the same time.
        out.replace(kept)
    return kept


def _wide(x: Tensor) -> bool:
    """Return whether a kernel for both precisions reads ``x`` as float32."""
    return x.dtype == torch.float32


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of tensors for a kernel, None for none."""
    return [x if x is None else x.data_ptr() for x in tensors]


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last axis of ``x``, in bfloat16 or float32, rounded once."""
    x = x.contiguous()
    out, width = torch.empty_like(x), len(weight)
    kernels().normalise(_wide(x), *addresses(out, x, weight), x.numel() // width, width, eps, torch.get_num_threads())
    return out


def normalised_backward(pull: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weight`` from that of `normalised`'s result, each rounded once."""
    pull, x = pull.contiguous(), x.contiguous()
    out, width = torch.empty_like(x), len(weight)
    rows = x.numel() // width
    sums = torch.empty(-(-rows // _BLOCK), width)
    given = addresses(out, sums, pull, x, weight)
    kernels().normalise_backward(_wide(x), *given, rows, width, _BLOCK, eps, torch.get_num_threads())
    return out, sums.sum(dim=0).to(weight.dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``[rows, width]`` each, in bfloat16 or float32, rounded once.

    Both have contiguous rows and the same distance between rows.
    """
    assert gate.stride() == up.stride(), "rows must lie alike"
    assert gate.stride(1) == 1, "rows must be contiguous"
    out = gate.new_empty(gate.shape)
    kernels().gated(_wide(gate), *addresses(out, gate, up), gate.stride(0), *gate.shape, torch.get_num_threads())
    return out


def gated_backward(pull: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `gated`'s result again, and the gradients of ``gate`` and ``up`` from that of the result."""
    given = [x.contiguous() for x in (pull, gate, up)]
    found = [torch.empty_like(given[0]) for _ in range(3)]
    kernels().gated_backward(_wide(gate), *addresses(*found, *given), pull.numel(), torch.get_num_threads())
    return found[0], found[1], found[2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> None:
    """Rotate bfloat16 or float32 ``[rows, heads, dim]`` by ``cos`` and ``sin`` ``[rows, dim]``, in place or to ``out``.

    The sine includes its signs, minus in its first half. Heads are contiguous.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    out = x if out is None else out
    rows, heads, dim = x.shape
    assert all(y.stride(2) == 1 and (heads == 1 or y.stride(1) == dim) for y in (x, out)), "heads must be contiguous"
    kernels().rotate(
        _wide(x), out.data_ptr(), out.stride(0), x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows,
        heads, dim, torch.get_num_threads(),
    )  # fmt: skip


def can_multiply(weight: Tensor) -> bool:
    """Return whether `multiply` serves a linear layer's ``weight``, ``[columns, width]``."""
    return has_kernels(weight.dtype, weight.device, weight.shape[1])


def packed_shape(columns: int, width: int) -> tuple[int, int, int, int]:
    """Return the shape of a packed weight, ``[blocks, width / 2, n, 2]``.

    A block has n columns, as pairs of neighbours: 32 with AMX, else 48. The last block is filled with zeros.
    """
    block = 32 if _AMX[0] in _instructions() else 48
    return -(-columns // block), width // 2, block, 2


def packed_rooms(shapes: Sequence[tuple[int, int, int, int]]) -> list[Tensor]:
    """Return memory for packed weights of these shapes, one after the other in large pages.

    Decoding reads all weights in each step. Large pages save up to a third of the time of reading.
    """
    sizes = [math.prod(shape) for shape in shapes]
    memory = np.empty(sum(sizes), dtype=np.int16)  # numpy requests large pages where the system has them
    parts = torch.from_numpy(memory).view(torch.bfloat16).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def packed_weight(weight: Tensor, room: Tensor | None = None) -> Tensor:
    """Return a copy of ``weight``, ``[columns, width]``, of `packed_shape`, as `multiply` reads it, in ``room`` if
    given.
    """
    weight = weight.contiguous()
    columns, width = weight.shape
    found = weight.new_empty(packed_shape(columns, width)) if room is None else room
    kernels().pack_weight(found.data_ptr(), weight.data_ptr(), columns, width // 2, torch.get_num_threads())
    return found


def multiply(
    x: Tensor, packed: Tensor, columns: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return ``x`` times the transposed weight, plus ``bias`` and ``residual``, summed in float32 and rounded once.

    Args:
        x: bfloat16 ``[rows, width]``.
        packed: The weight, by `packed_weight`.
        columns: Rows that the weight had before.
        bias: ``[columns]``.
        residual: ``[rows, columns]``.

    Returns:
        ``[rows, columns]``. The bits of a row don't depend on the other rows.
    """
    given = (x.contiguous(), packed, bias, None if residual is None else residual.contiguous())
    rows = len(x)
    out = x.new_empty(rows, columns)
    kernels().multiply_packed(*addresses(out, *given), rows, x.shape[1] // 2, columns, torch.get_num_threads())
    return out


def adds_gradients(weight: Tensor) -> bool:
    """Return whether `add_gradient` serves a linear layer's weight, and is faster than torch: on AMX tiles."""
    return serves(weight) and _AMX[0] in _instructions()


def add_gradient(total: Tensor, pull: Tensor, x: Tensor) -> None:
    """Add a linear layer's gradient of its weight to ``total``, without rounding it to bfloat16 first.

    Args:
        total: float32 ``[columns, width]``.
        pull: The gradient of the layer's result, bfloat16 ``[rows, columns]``.
        x: Input of the layer, bfloat16 ``[rows, width]``.
    """
    assert total.is_contiguous(), "rows must be contiguous"
    pull, x = pull.contiguous(), x.contiguous()
    sizes = (*pull.shape, x.shape[1])
    rows, columns, width = (-(-size // _VECTOR) * _VECTOR for size in sizes)
    room = torch.empty((columns + width) * rows, dtype=torch.bfloat16)
    kernels().add_gradient(*addresses(total, pull, x, room), *sizes, torch.get_num_threads())


def can_multiply_rows(weight: Tensor) -> bool:
    """Return whether `multiply_rows` serves a linear layer's ``weight``, ``[columns, width]``."""
    served = weight.dtype == torch.float32 and has_both(weight.dtype, weight.device, weight.shape[1], LANES)
    return served and len(weight) >= 4 and weight.is_contiguous()


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return float32 ``x`` times the transposed ``weight``, plus ``bias``; faster than torch for up to `FEW_ROWS`.

    Args:
        x: ``[rows, width]``.
        weight: ``[columns, width]``.
        bias: ``[columns]``.

    Returns:
        ``[rows, columns]``. The bits of a row don't depend on the other rows.
    """
    x = x.contiguous()
    out = x.new_empty(len(x), len(weight))
    kernels().multiply_rows(*addresses(out, x, weight), *x.shape, len(weight), torch.get_num_threads())
    return out if bias is None else out.add_(bias)


def softmax_sums(x: Tensor, factor: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reduce each row of bfloat16 ``x`` times ``factor`` to its softmax statistics. Other rows don't change its bits.

    Args:
        x: ``[rows, width]`` with contiguous rows.
        factor: ``[rows]`` float32, above 0.
        block: Size of a block, a multiple of 16. The last block may be shorter.

    Returns:
        The row's maximum m, ``[rows]`` float32; the sums of e^(x - m) over blocks of neighbours, ``[rows, blocks]``
        float64; the logarithm of their total and the entropy, ``[rows]`` float64 each.
    """
    factor = factor.contiguous()
    rows, width = x.shape
    largest, sums = torch.empty(rows), torch.empty(rows, -(-width // block), dtype=torch.float64)
    log_totals, entropies = torch.empty(2, rows, dtype=torch.float64)
    found = addresses(largest, sums, log_totals, entropies, x)
    kernels().softmax_sums(*found, x.stride(0), factor.data_ptr(), rows, width, block, torch.get_num_threads())
    return largest, sums, log_totals, entropies


def softmax_pull(
    x: Tensor,
    factor: float,
    log_sums: Tensor,
    constant: Tensor,
    slope: Tensor | None,
    pull: Tensor,
    targets: Tensor,
) -> None:
    """Write ``factor * (p * (constant - slope * z) + pull * onehot)`` over bfloat16 ``x``, with z = x factor, p = e^(z
    - L).

    Args:
        x: ``[rows, width]``, contiguous.
        factor: A number.
        log_sums, constant, slope, pull: ``[rows]`` float32 each. No slope means 0.
        targets: ``[rows]`` int64, the index of the one. Out of range for none.
    """
    rows = [tensor if tensor is None else tensor.contiguous() for tensor in (log_sums, constant, slope, pull, targets)]
    kernels().softmax_pull(x.data_ptr(), factor, *addresses(*rows), *x.shape, torch.get_num_threads())


def add_widened(total: Tensor, part: Tensor) -> None:
    """Add bfloat16 ``part`` to float32 ``total``, both contiguous."""
    assert total.is_contiguous(), "the sum must be contiguous"
    part = part.contiguous()  # held until the kernel has read it
    kernels().add_widened(*addresses(total, part), total.numel(), torch.get_num_threads())


def square_sum(x: Tensor) -> Tensor:
    """Return the sum of squares of float32 ``x``, in float64."""
    x = x.contiguous()
    found = torch.empty((), dtype=torch.float64)
    kernels().square_sum(*addresses(found, x), x.numel(), torch.get_num_threads())
    return found


def adamw(
    weight: Tensor,
    copy: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: float,
) -> bool:
    """Make one step of AdamW, write the weights' rounded copy and clear the gradients.

    The operations are those of torch's fused AdamW, in its order.

    Args:
        weight, gradient: float32, contiguous, of one shape.
        copy: bfloat16, the same.
        moments: ``exp_avg`` and ``exp_avg_sq``, like the weights.
        step: Number of this step, from 1.
        learning_rate, betas, eps, weight_decay: As in `torch.optim.AdamW`.
        factor: Multiplies the gradients first, for clipping.

    Returns:
        Whether every weight is finite afterwards.
    """
    finite = torch.ones(1, dtype=torch.int32)
    tensors = (weight, copy, gradient, *moments, finite)
    assert all(x.is_contiguous() for x in tensors), "weights must be contiguous"
    kernels().adamw(
        *addresses(*tensors), weight.numel(), factor, 1 - learning_rate * weight_decay, *betas,
        learning_rate / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step), eps, torch.get_num_threads(),
    )  # fmt: skip
    return bool(finite)


class DecodeKernel:
    """Attention of one new token for each row of a `magicrl.models.kv_cache.SlotCache`.

    Keys and values are read once for all query heads that share them, a prompt's once for all its rows, and none past a
    row's length. Scores, their sums and the sums of values are float32. In bfloat16, weights are rounded to it before
    the product with values.
    """

    def __init__(
        self, blocks: Tensor, widths: tuple[int, int], owners: _Integers, prompt_lengths: _Integers, held: _Integers
    ) -> None:
        """Prepare a step.

        Args:
            blocks, widths: Where the cache is, by `magicrl.models.kv_cache.SlotCache.addressed`.
            owners: ``[rows]`` slot of the row's prompt.
            prompt_lengths: ``[rows]`` tokens of that prompt.
            held: ``[rows]`` tokens of the response so far.
        """
        self._blocks, self._widths = blocks, widths
        self._threads = torch.get_num_threads()
        order, most = np.argsort(owners, kind="stable"), max(1, _PART // self._threads)
        ends = np.cumsum(np.bincount(owners)).tolist()
        parts = [
            (start, min(start + most, end))
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
            for start in range(begin, end, most)
        ]
        tables = (order, np.array(parts), owners, prompt_lengths, held)
        self._tables = [torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64)) for table in tables]
        self._parts, self._most = len(parts), max(end - start for start, end in parts)

    def _step(self) -> tuple[int | None, ...]:
        """Return addresses and sizes of the step for a kernel."""
        order, parts, *lengths = addresses(*self._tables)
        return order, parts, self._parts, self._most, *lengths

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append keys and values to the responses, and attend.

        Args:
            layer: Its place in the cache.
            query, key, value: ``[1, heads, rows, dim]``, bfloat16 or float32, as the cache.
            scaling: Factor on the scores.

        Returns:
            ``[1, rows, heads, dim]``.
        """
        # [1, heads, rows, dim] -> [rows, heads, dim] with contiguous heads
        by_row = (x[0].transpose(0, 1) for x in (query, key, value))
        q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in by_row)
        rows, heads, dim = q.shape
        out = q.new_empty(1, rows, heads, dim)
        prompt_keys, prompt_values, keys, values = self._blocks[layer].tolist()
        prompt_width, width = self._widths
        kernels().attend(
            _wide(q), out.data_ptr(), q.data_ptr(), q.stride(0), k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0),
            prompt_keys, prompt_values, prompt_width, keys, values, width, *self._step(), k.shape[1],
            heads // k.shape[1], dim, scaling, self._threads,
        )  # fmt: skip
        return out

    def run_layers(
        self, x: Tensor, layers: Tensor, inner: int, heads: tuple[int, int, int], rotation: tuple[Tensor, Tensor],
        *, eps: float, scaling: float, exact: bool,
    ) -> None:  # fmt: skip
        """Run all layers of a model on ``x`` in place, with the bits of the single kernels.

        Args:
            x: bfloat16 or float32 ``[rows, d]``, contiguous.
            layers: Addresses of weights, ``[layers, 12]``, in the order of ``Layer`` in ``step.cpp``.
            inner: Width of the feed-forward layers.
            heads: Heads of keys, heads of queries for each of them, and their width.
            rotation: Cosines and sines as for `rotate`.
            eps: Of all norms.
            scaling: Factor on the scores.
            exact: Round a product before it is added to ``x``.
        """
        cos, sin = (part.contiguous() for part in rotation)
        sizes = torch.tensor([*x.shape, inner, *heads])
        kernels().decode_layers(
            _wide(x), exact, *addresses(x, layers, self._blocks), len(layers), sizes.data_ptr(),
            *addresses(cos, sin), eps, scaling, *self._widths, *self._step(), self._threads,
        )  # fmt: skip
