"""Kernels of decoding on a CPU: torch's attention and norms to bfloat16's rounding, and torch itself as a fallback."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cpu_marks import served, sets
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.attention import ScoreRules
from magicrl.models.kv_cache import CacheShape, DecodeAttention, SlotCache

CPU = torch.device("cpu")
BF16 = torch.bfloat16
EVERY_SET = cpu_kernels._SETS


@pytest.fixture(scope="module", autouse=True, params=sets or [()], ids=lambda names: names[-1] if names else "torch")
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the tests of this file with each set of instructions that the processor has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "_SETS", (request.param,) if request.param else cpu_kernels._SETS)
        cpu_kernels._found.cache_clear()
        yield
    cpu_kernels._found.cache_clear()


@pytest.fixture
def anew() -> Iterator[None]:
    """Search for kernels again within the test, and after it."""
    cpu_kernels._found.cache_clear()
    yield
    cpu_kernels._found.cache_clear()


def test_speed_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock by which each round's float32 products take that ratio of seconds, and bfloat16's one second."""
    readings = np.cumsum([seconds for ratio in (4, 2, 3, 7, 1, 6) for seconds in (0, ratio, 0, 1)])
    clock = iter([float(reading) for reading in readings])
    threads: list[int] = []

    def thread_time() -> float:
        threads.append(torch.get_num_threads())
        return next(clock)

    monkeypatch.setattr(cpu_kernels.time, "thread_time", thread_time)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu_kernels.bfloat16_speeds.__wrapped__(64, 64) == pytest.approx((3, 6))
        assert torch.get_num_threads() == 2, "the caller's threads are restored"
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


@served
def test_speed_of_bfloat16_is_that_of_decodings_products(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def watched(name: str) -> Callable[..., Tensor]:
        plain = getattr(cpu_kernels, name)
        return lambda *args, **kwargs: (used.append(name), plain(*args, **kwargs))[1]

    for name in ("multiply", "multiply_rows"):
        monkeypatch.setattr(cpu_kernels, name, watched(name))
    monkeypatch.setattr(cpu_kernels, "_FACTORS", 1)
    cpu_kernels.bfloat16_speeds.__wrapped__(64, 64)
    assert set(used) == {"multiply", "multiply_rows"}


class Step:
    """A decoding step of one layer over random numbers."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        prompts: Sequence[int],
        members: int,
        longest: int,
        dtype: torch.dtype = BF16,
    ) -> None:
        kv_heads, group, dim = heads
        torch.manual_seed(0)
        random = np.random.default_rng(0)
        rows = len(prompts) * members
        kind = (kv_heads, dim, dim)
        self.cache = SlotCache(CacheShape(attending={0: kind}, dtype=dtype), rows, max(prompts), longest + 1, CPU)
        for store in (self.cache.prompts, self.cache.responses):
            for block in store.keys[0] + store.values[0]:
                block.normal_()
        self.owners = random.permutation(np.repeat(np.arange(len(prompts)), members))
        self.prompt_lengths = np.array(prompts)[self.owners]
        self.held = np.sort(random.integers(0, longest + 1, rows))[::-1].copy()
        self.query, self.key, self.value = (
            torch.randn(1, count, rows, dim, dtype=dtype) for count in (kv_heads * group, kv_heads, kv_heads)
        )
        self.scaling = dim**-0.5

    def attend(self, rows: int | None = None, rules: ScoreRules | None = None) -> Tensor:
        """Return the attention of the first ``rows`` rows, or of all."""
        part = slice(0, rows)
        context = DecodeAttention(
            self.cache,
            owners=self.owners[part],
            prompt_lengths=self.prompt_lengths[part],
            response_lengths=self.held[part],
        )
        given = (tensor[:, :, part] for tensor in (self.query, self.key, self.value))
        return context.attend(0, *given, self.scaling, rules or ScoreRules())

    def expected(self) -> Tensor:
        """Return torch's attention in float32, row by row. The new tokens must be in the cache."""
        found: list[Tensor] = []
        for row, (owner, prompt, held) in enumerate(zip(self.owners, self.prompt_lengths, self.held, strict=True)):
            keys, values = (
                torch.cat([self.held_by(before[0], owner, prompt), self.held_by(after[0], row, held + 1)], dim=1)
                for before, after in (
                    (self.cache.prompts.keys, self.cache.responses.keys),
                    (self.cache.prompts.values, self.cache.responses.values),
                )
            )
            query = self.query[:, :, row : row + 1].float()
            found.append(F.scaled_dot_product_attention(query, keys[None], values[None], enable_gqa=True)[0, :, 0])
        return torch.stack(found)[None]

    @staticmethod
    def held_by(blocks: list[Tensor], place: int, length: int) -> Tensor:
        return torch.cat([block[place] for block in blocks], dim=1)[:, :length].float()


STEPS = {
    "SmolLM2": ((3, 3, 64), [128, 5, 77], 4, 130),
    "one token": ((2, 1, 32), [1], 1, 0),
    "many of a prompt": ((2, 4, 128), [300, 17], 23, 40),
    "one each": ((1, 8, 96), [10, 20, 30, 40, 33], 1, 700),
    "wide": ((2, 5, 256), [600, 129], 3, 100),
}


@served
@pytest.mark.parametrize("name", STEPS)
def test_attention_is_torchs_and_closer_to_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the float32 result: within one rounding to bfloat16, and closer than torch in bfloat16."""
    step = Step(*STEPS[name])
    found = step.attend()
    expected = step.expected()
    assert torch.equal(step.held_by(step.cache.responses.keys[0], 0, int(step.held[0]) + 1)[:, -1], step.key[0, :, 0])
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=3e-3)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    plain = step.attend()
    assert not torch.equal(plain, found)
    error, plain_error = (float((x.float() - expected).square().mean()) for x in (found, plain))
    assert error < plain_error


@served
@pytest.mark.parametrize("name", STEPS)
def test_attention_in_float32_is_torchs(name: str) -> None:
    step = Step(*STEPS[name], dtype=torch.float32)
    found = step.attend()
    assert cpu_kernels.has_both(torch.float32, CPU, step.query.shape[3])
    torch.testing.assert_close(found, step.expected(), rtol=1e-5, atol=2e-6)
    last = int(step.held[0])
    for blocks, new in ((step.cache.responses.keys[0], step.key), (step.cache.responses.values[0], step.value)):
        assert torch.equal(step.held_by(blocks, 0, last + 1)[:, -1], new[0, :, 0]), "the new token is in the cache"


@served
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    """Check that another number of rows or threads changes nothing."""
    step = Step((2, 3, 64), [70, 40], 20, 90, dtype)
    whole = step.attend()
    assert torch.equal(step.attend(7), whole[:, :7])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(step.attend(), whole)
    finally:
        torch.set_num_threads(threads)


@served
def test_what_is_not_finite_is_seen_and_what_lies_behind_is_not() -> None:
    step = Step((2, 3, 64), [70, 40], 2, 90)
    row = 1
    for store in (step.cache.responses.keys[0], step.cache.responses.values[0]):
        store[(int(step.held[row]) + 1) // 64][row, :, (int(step.held[row]) + 1) % 64 :] = torch.nan
    assert step.attend().isfinite().all()
    step.cache.responses.keys[0][0][row, 0, 0] = torch.nan
    found = step.attend().isnan()
    assert found[0, row, :3].all()
    assert int(found.sum()) == 3 * 64


@served
def test_layers_with_rules_of_their_own_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step((2, 3, 64), [70, 40], 2, 90)
    rules = [ScoreRules(window=50), ScoreRules(softcap=5.0), ScoreRules(sinks=torch.ones(6))]
    found = [step.attend(rules=each) for each in rules]
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    for each, seen in zip(rules, found, strict=True):
        assert torch.equal(step.attend(rules=each), seen)


in_both = pytest.mark.parametrize(("dtype", "rounding"), [(BF16, 2**-8), (torch.float32, 1e-6)])


@served
@in_both
def test_norms_are_torchs(dtype: torch.dtype, rounding: float) -> None:
    x, weight = torch.randn(3, 5, 96).mul(7).to(dtype), torch.rand(96).to(dtype)
    found = cpu_kernels.normalised(x[:, 1:4], weight, 1e-2)
    expected = F.rms_norm(x[:, 1:4].double(), (96,), weight.double(), 1e-2)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=0)


@served
@in_both
def test_gates_are_torchs(dtype: torch.dtype, rounding: float) -> None:
    x = torch.randn(7, 2 * 48).mul(4).to(dtype)
    x[0, 0], x[1, 1], x[2, 2] = 200, -200, -0.0
    found = cpu_kernels.gated(*x.chunk(2, dim=-1))
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=rounding, atol=1e-30)
    x[3, 5] = torch.nan
    assert cpu_kernels.gated(*x.chunk(2, dim=-1)).isnan().nonzero().tolist() == [[3, 5]]


def gradients(function: Callable[..., Tensor], given: Sequence[Tensor], pull: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a function of float64 numbers."""
    leaves = [x.detach().double().requires_grad_() for x in given]
    return torch.autograd.grad(function(*leaves), leaves, pull.double())


@served
@in_both
def test_gradients_of_norms_are_float64s(dtype: torch.dtype, rounding: float) -> None:
    x, weight, pull = (y.to(dtype) for y in (torch.randn(150, 96).mul(3), torch.rand(96), torch.randn(150, 96)))
    found = cpu_kernels.normalised_backward(pull, x, weight, 1e-2)
    wanted = gradients(lambda a, b: F.rms_norm(a, (96,), b, 1e-2), (x, weight), pull)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=2 * rounding, atol=rounding / 32)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=2 * rounding, atol=rounding / 4 + 5e-6)


@served
@in_both
def test_gradients_of_gates_are_float64s(dtype: torch.dtype, rounding: float) -> None:
    gate, up, pull = (torch.randn(7, 64).mul(3).to(dtype) for _ in range(3))
    out, *found = cpu_kernels.gated_backward(pull, gate, up)
    assert torch.equal(out, cpu_kernels.gated(gate, up)), "the result again"
    wanted = gradients(lambda a, b: F.silu(a) * b, (gate, up), pull)
    for own, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=2 * rounding, atol=1e-6)


@served
def test_an_update_is_torchs_adamw() -> None:
    torch.manual_seed(0)
    weight, gradient = torch.randn(3, 32), torch.randn(3, 32)
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.5}
    expected = torch.nn.Parameter(weight.clone())
    adam = torch.optim.AdamW([expected], **settings, fused=True)
    copy, moments = torch.empty(3, 32, dtype=BF16), (torch.zeros(3, 32), torch.zeros(3, 32))
    for step in (1, 2, 3):
        given = gradient * step
        expected.grad = given * 0.25
        adam.param_groups[0]["lr"] = 0.1 / step
        adam.step()
        finite = cpu_kernels.adamw(
            weight, copy, given, moments, step=step, learning_rate=0.1 / step, factor=0.25, **settings
        )  # fmt: skip
        assert finite
        assert not given.any(), "gradients are cleared"
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(copy, weight.to(BF16))
    torch.testing.assert_close(moments[1], adam.state[expected]["exp_avg_sq"], rtol=1e-6, atol=0)


@served
@pytest.mark.parametrize(("place", "rate", "finite"), [(0, 1e39, False), (19, 1e39, False), (19, 1e36, True)])
def test_an_update_tells_of_weights_that_overflow(place: int, rate: float, finite: bool) -> None:
    weight, gradient = torch.zeros(20), torch.zeros(20)
    gradient[place] = 1.0
    given = weight, torch.empty(20, dtype=BF16), gradient, (torch.zeros(20), torch.zeros(20))
    settings: dict[str, Any] = {"step": 1, "betas": (0.9, 0.999), "weight_decay": 0.0, "factor": 1.0}
    assert cpu_kernels.adamw(*given, learning_rate=rate, eps=1e-8, **settings) is finite
    assert bool(weight.isfinite().all()) is finite


@served
@pytest.mark.parametrize("count", [1, 63, (1 << 14) + 17])
def test_squares_are_summed(count: int) -> None:
    x = torch.randn(count)
    threads = torch.get_num_threads()
    found = []
    for many in (1, 2):
        torch.set_num_threads(many)
        found.append(float(cpu_kernels.square_sum(x)))
    torch.set_num_threads(threads)
    assert found[0] == found[1] == pytest.approx(float(x.double().square().sum()), rel=1e-6)


@served
def test_gradients_are_added_in_float32() -> None:
    total, part = torch.randn(5, 7), torch.randn(5, 7).to(BF16)
    expected = total + part.float()
    cpu_kernels.add_widened(total, part)
    assert torch.equal(total, expected)


@served
@in_both
def test_heads_are_rotated_as_by_halves(dtype: torch.dtype, rounding: float) -> None:
    heads, (cos, sin) = torch.randn(5, 4, 64).to(dtype), torch.randn(2, 5, 64).to(dtype)
    expected = heads.double() * cos[:, None].double() + heads.double().roll(32, -1) * sin[:, None].double()
    whole = heads.clone()
    cpu_kernels.rotate(whole[:, :3], cos, sin)
    torch.testing.assert_close(whole[:, :3].double(), expected[:, :3], rtol=rounding, atol=1e-6)
    assert torch.equal(whole[:, 3], heads[:, 3]), "values stay"


@served
@pytest.mark.parametrize("width", [20, 256, 700])
def test_sums_of_a_softmax_are_torchs(width: int) -> None:
    x = torch.randn(4, 1000).mul(5).to(BF16)[:, :width]
    x[0, 3], x[1, 7] = -torch.inf, -300.0
    factor = torch.tensor([1.0, 0.5, 2.0, 1.0])
    largest, sums, log_totals, entropies = cpu_kernels.softmax_sums(x, factor, 256)
    below = x.double() * factor[:, None]
    below -= below.amax(-1, keepdim=True)
    weights = below.exp()
    assert torch.equal(largest, (x.float() * factor[:, None]).amax(-1))
    blocks = torch.stack([part.sum(-1) for part in weights.split(256, dim=-1)], dim=-1)
    torch.testing.assert_close(sums, blocks, rtol=1e-5, atol=0)
    torch.testing.assert_close(log_totals, weights.sum(-1).log(), rtol=1e-5, atol=1e-6)
    shares = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(entropies, torch.special.entr(shares).sum(-1), rtol=1e-5, atol=1e-6)
    first = cpu_kernels.softmax_sums(x[:1], factor[:1], 256)
    for own, of_all in zip(first, (largest, sums, log_totals, entropies), strict=True):
        assert torch.equal(own[0], of_all[0])
    for broken in (torch.nan, torch.inf):
        x[2, width - 1] = broken
        assert cpu_kernels.softmax_sums(x, factor, 256)[1].sum(-1).isnan().tolist() == [False, False, True, False]


@served
@pytest.mark.parametrize("slope", [False, True])
@pytest.mark.parametrize("width", [9, 304])
def test_a_heads_gradient_is_the_formulas(width: int, slope: bool) -> None:
    x, (constant, slopes, pull) = torch.randn(5, width).mul(3).to(BF16), torch.randn(3, 5)
    targets = torch.tensor([0, width - 1, 5, -2, width])  # the last two are in another piece
    z = x.double() * 0.7
    log_sums = z.logsumexp(-1)
    given = slopes.double()[:, None] if slope else torch.zeros(5, 1, dtype=torch.float64)
    expected = (z - log_sums[:, None]).exp() * (constant.double()[:, None] - given * z)
    for row in range(3):
        expected[row, targets[row]] += pull[row].double()
    found = x.clone()
    cpu_kernels.softmax_pull(found, 0.7, log_sums.float(), constant, slopes if slope else None, pull, targets)
    torch.testing.assert_close(found.double(), 0.7 * expected, rtol=2**-7, atol=1e-6)


@served
@pytest.mark.parametrize("names", EVERY_SET, ids=lambda names: names[-1])
def test_the_kernels_compile_for_every_processor(names: tuple[str, ...], tmp_path: Path) -> None:
    """Check also sets of instructions that this processor lacks: there, training would use torch, which is slower."""
    options = ("-O0", *cpu_kernels._FLAGS[1:], *cpu_kernels._units(names))
    assert cpu_kernels._compiled(tmp_path, options).is_file()


@served
# the last block of columns is full or not; results of many rows are written past the caches
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 150), (5, 150), (12, 150), (13, 150), (31, 150), (70, 160), (150, 160)]
)
def test_products_are_rounded_once(rows: int, columns: int) -> None:
    shapes = ((rows, 96), (columns, 96), (columns,), (rows, columns))
    x, weight, bias, residual = (torch.randn(*n).to(BF16) for n in shapes)
    packed = cpu_kernels.packed_weight(weight)
    plain = x.double() @ weight.double().T
    for given, expected in (((), plain), ((bias,), plain + bias), ((bias, residual), plain + bias + residual)):
        found = cpu_kernels.multiply(x, packed, columns, *given)
        assert found.dtype == BF16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)
    spread = torch.stack((x, x), dim=2)[..., 0]  # numbers of a row do not follow each other
    assert torch.equal(cpu_kernels.multiply(spread, packed, columns), cpu_kernels.multiply(x, packed, columns))


@served
def test_a_products_rows_are_their_own() -> None:
    """Check that the other rows and the number of threads change no bit. Halves cancel, so that rounding shows."""
    half, columns = torch.randn(40, 48), torch.randn(64, 48)
    x, weight = torch.cat((half, half), dim=1).to(BF16), torch.cat((columns, -columns), dim=1).to(BF16)
    packed = cpu_kernels.packed_weight(weight)
    whole = cpu_kernels.multiply(x, packed, 64)
    assert whole.count_nonzero()
    for rows in range(1, 37):
        assert torch.equal(cpu_kernels.multiply(x[3:][:rows], packed, 64), whole[3:][:rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(cpu_kernels.packed_weight(weight), packed)
        assert torch.equal(cpu_kernels.multiply(x, packed, 64), whole)
    finally:
        torch.set_num_threads(threads)


@served
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 63, 128])
@pytest.mark.parametrize(("width", "columns"), [(16, 4), (48, 1205), (4096, 23)])
def test_float32_products_of_few_rows(rows: int, width: int, columns: int) -> None:
    x, weight, bias = torch.randn(rows, width), torch.randn(columns, width), torch.randn(columns)
    plain = x.double() @ weight.double().T
    found = cpu_kernels.multiply_rows(x, weight)
    torch.testing.assert_close(found.double(), plain, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(cpu_kernels.multiply_rows(x, weight, bias).double(), plain + bias, rtol=1e-5, atol=1e-3)
    spread = torch.stack((x, x), dim=2)[..., 0]  # numbers of a row do not follow each other
    assert torch.equal(cpu_kernels.multiply_rows(spread, weight), found)
    assert torch.equal(cpu_kernels.multiply_rows(x[-1:], weight), found[-1:]), "a row is its own"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(cpu_kernels.multiply_rows(x, weight), found)
    finally:
        torch.set_num_threads(threads)


@served
def test_weights_whose_products_are_torchs() -> None:
    weights = [torch.zeros(*shape) for shape in ((61, 48), (3, 48), (60, 40))]
    weights += [torch.zeros(60, 48, dtype=BF16), torch.zeros(60, 96)[:, ::2]]
    assert [cpu_kernels.can_multiply_rows(weight) for weight in weights] == [True, *[False] * 4]


@served
def test_weights_that_are_not_packed() -> None:
    served, narrow = (torch.zeros(60, width, dtype=BF16) for width in (96, 80))
    assert [cpu_kernels.can_multiply(weight) for weight in (served, narrow, served.float())] == [True, False, False]


def test_other_tensors_are_not_served() -> None:
    assert not cpu_kernels.has_kernels(torch.float32, CPU, 64)
    assert not cpu_kernels.has_both(torch.float64, CPU, 64)
    assert not cpu_kernels.has_both(torch.float32, torch.device("meta"), 64)
    assert not cpu_kernels.has_both(torch.float32, CPU, 48)
    assert not cpu_kernels.has_kernels(BF16, torch.device("meta"), 64)
    assert not cpu_kernels.has_kernels(BF16, CPU, 48)
    assert not cpu_kernels.has_kernels(BF16, CPU, None)
    shapes = {0: (1, 64, 32)}
    assert CacheShape(attending=shapes, dtype=BF16).head_dim is None


@pytest.mark.usefixtures("anew")
class TestMaking:
    """The machine's compiler, or its absence."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return tmp_path

    @served
    def test_many_processes_make_one_library(self, home: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(cpu_kernels._compiled, home, (*cpu_kernels._FLAGS, "-mavx2", "-mfma")) for _ in range(2)
            ]
            made = [done.result() for done in asked]
        assert made[0] == made[1]
        assert list(home.iterdir()) == [made[0]]

    @served
    def test_a_broken_or_foreign_library_is_not_used(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cpu_kernels.library() is not None
        (kept,) = (home / "magicrl" / "kernels").iterdir()
        kept.unlink()
        kept.write_bytes(b"cut off")
        cpu_kernels._found.cache_clear()
        assert cpu_kernels.library() is not None
        assert kept.read_bytes() == b"cut off"
        monkeypatch.setattr(os, "getuid", lambda: -1)
        monkeypatch.setattr(cpu_kernels, "_compiled", self.refuse_in(home))
        cpu_kernels._found.cache_clear()
        assert cpu_kernels.missing() == "in a folder of its own"

    @staticmethod
    def refuse_in(home: Path):
        def compiled(folder: Path, options: tuple[str, ...]) -> Path:
            raise RuntimeError("in the home" if home in folder.parents else "in a folder of its own")

        return compiled

    def test_without_a_compiler_torch_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_kernels, "_instructions", tuple)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        assert "no C++ compiler" in str(cpu_kernels.missing())
        step = Step((2, 3, 64), [70, 40], 2, 90)
        torch.testing.assert_close(step.attend().float(), step.expected(), rtol=2**-6, atol=1e-2)

    @pytest.mark.parametrize("flag", ["-no-such-flag", None])
    def test_a_compiler_that_fails_or_hangs_fails_no_run(
        self, flag: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpu_kernels, "_instructions", tuple)
        if flag is None:
            monkeypatch.setattr(cpu_kernels, "_COMPILER_TIMEOUT", 1e-3)
        else:
            monkeypatch.setattr(cpu_kernels, "_FLAGS", (flag,))
        assert cpu_kernels.library() is None
        assert not list((home / "magicrl" / "kernels").iterdir())

    def test_another_processor_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_kernels, "_SETS", (cpu_kernels._AVX2,))
        monkeypatch.setattr(cpu_kernels, "processor_flags", lambda: frozenset({"avx", "avx2"}))
        assert cpu_kernels.missing() == "the processor lacks fma"

    @pytest.mark.parametrize(
        ("flags", "used"),
        [
            ("avx2 fma avx512f amx_tile amx_bf16", "avx2 fma"),
            (
                "GenuineIntel avx2 fma avx512f avx512bw avx512vl avx512dq",
                "fma avx512f avx512bw avx512vl avx512dq",
            ),
            (
                "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile",
                "fma avx512f avx512bw avx512vl avx512dq avx512_bf16",
            ),
            (
                "GenuineIntel avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16",
                "fma avx512f avx512bw avx512vl avx512dq avx512_bf16 GenuineIntel",
            ),
            (
                "GenuineIntel avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
                "fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
            ),
        ],
    )
    def test_the_processors_instructions_are_used(self, flags: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_kernels, "_SETS", EVERY_SET)
        monkeypatch.setattr(cpu_kernels, "processor_flags", lambda: frozenset(flags.split()))
        assert cpu_kernels._instructions() == tuple(used.split())
