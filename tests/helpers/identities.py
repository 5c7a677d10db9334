"""Print every identity and invariance that the library promises, with its measured error and its tolerance.

    python tests/helpers/identities.py

Exits with 1 if one fails. `CHECKS` lists the families of checks. A further family is one more function there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from learner_invariances import rows as learner_rows
from reference import LinearResponse, log_softmax_policy, random_responses, random_weights
from tabular import GROUP, PROMPTS, Path, exact_group, expected_reward, path_probability, paths, sampling_logits
from torch import Tensor

from magicrl.algorithms.advantages import score_group, scored_advantages
from magicrl.algorithms.entropy import measure_entropy
from magicrl.algorithms.loss_terms import loss_terms
from magicrl.algorithms.losses import LOSSES, LossRow
from magicrl.algorithms.token_weights import LossInputs, correction_of, reducer_of, response_weights
from magicrl.selfcheck.slow_loss import reference_loss

MAX_TOKENS = 12
FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise. The measured ``error`` must not exceed ``tolerance``."""

    name: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- identities by full enumeration -------------------------------------------------------------------------


def tabular_inputs(logits: Tensor, ref: Tensor | None = None) -> tuple[LossInputs, Tensor, Tensor]:
    """Return the exact groups of all prompts as one packed micro-batch, with lengths and groups of the responses."""
    scored, members = [], list[Path]()
    for prompt in range(PROMPTS):
        group, verdicts, found = exact_group(prompt)
        scored.append(score_group(group, verdicts))
        members += found
    advantages = torch.from_numpy(np.concatenate(scored_advantages(scored, normalise_std=False)))
    lengths = torch.tensor([len(p.tokens) for p in members])
    row = torch.repeat_interleave(torch.arange(len(members)), lengths)
    states = torch.tensor([s for p in members for s in p.states])
    tokens = torch.tensor([a for p in members for a in p.tokens])
    table = torch.log_softmax(logits, dim=-1)
    old = torch.log_softmax(sampling_logits(), dim=-1)[states, tokens]
    inputs = LossInputs(
        logprobs=table[states, tokens],
        advantages=advantages[row],
        loss_mask=torch.ones_like(row, dtype=torch.bool),
        sample_index=row,
        old_logprobs=old,
        sampler_logprobs=old,
        ref_logprobs=None if ref is None else torch.log_softmax(ref, dim=-1)[states, tokens],
        entropy=-(table.exp() * table).sum(-1)[states],
    )
    return inputs, lengths, torch.repeat_interleave(torch.arange(PROMPTS), GROUP)


def sequence_weights(inputs: LossInputs, lengths: Tensor, group_index: Tensor) -> Tensor:
    weights = response_weights(reducer_of("sequence_sum"), lengths, group_index, num_loss_tokens=int(lengths.sum()))
    return weights[inputs.sample_index]


def other_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    start = sampling_logits()
    return start + 0.5 * torch.randn(start.shape, dtype=torch.float64, generator=generator)


def policy_gradient_identity() -> list[Check]:
    """Check that the gradient of L_PG (and of L_PPO) at theta_k is -grad J."""
    logits = sampling_logits().requires_grad_()
    (expected,) = torch.autograd.grad(-expected_reward(logits), logits)
    checks = []
    for name in ("pg", "ppo"):
        inputs, lengths, groups = tabular_inputs(logits)
        loss = loss_terms(LOSSES[name], inputs, sequence_weights(inputs, lengths, groups)).loss
        (found,) = torch.autograd.grad(loss, logits)
        checks.append(
            Check(name=f"grad L_{name} at theta_k = -grad J", error=relative_error(found, expected), tolerance=1e-12)
        )
    return checks


def without_rewards(inputs: LossInputs) -> LossInputs:
    """Return the same tokens with advantages of 0, which leaves the entropy and KL terms of the loss."""
    return inputs._replace(advantages=torch.zeros_like(inputs.advantages))


def kl_identity() -> list[Check]:
    """Check that the mean of k3 under pi_theta is KL(pi_theta || pi_ref)."""
    logits, ref = sampling_logits(), other_logits(7)
    inputs, lengths, groups = tabular_inputs(logits, ref)
    weights = sequence_weights(inputs, lengths, groups)
    outputs = loss_terms(LOSSES["pg"], without_rewards(inputs), weights, beta=1.0)
    expected = (
        torch.stack(
            [
                path_probability(logits, p) * (path_probability(logits, p).log() - path_probability(ref, p).log())
                for p in paths()
            ]
        ).sum()
        / PROMPTS
    )
    return [Check(name="E[k3] = KL(pi_theta || pi_ref)", error=relative_error(outputs.loss, expected), tolerance=1e-12)]


def entropy_identity() -> list[Check]:
    """Check that the bonus' gradient is -alpha times that of H over the states that pi_k visits, by both estimators."""
    alpha = 0.3
    logits = other_logits(8).requires_grad_()
    inputs, lengths, groups = tabular_inputs(logits)
    weights = sequence_weights(inputs, lengths, groups)
    loss = loss_terms(LOSSES["pg"], without_rewards(inputs), weights, alpha=alpha).loss
    (found,) = torch.autograd.grad(loss, logits)
    # by hand: dH/dz_i = -p_i (log p_i + H), weighted by how often pi_k visits the state
    visits = torch.zeros(len(logits), dtype=torch.float64)
    for path in paths():
        for state in path.states:
            visits[state] += float(path_probability(sampling_logits(), path)) / PROMPTS
    log_p = torch.log_softmax(logits.detach(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    expected = alpha * visits[:, None] * log_p.exp() * (log_p + entropy)

    completions = [c for prompt in range(PROMPTS) for c in exact_group(prompt)[0].completions]
    exact, sampled = measure_entropy(completions, "exact"), measure_entropy(completions, "sampled")
    assert exact is not None
    assert sampled is not None
    return [
        Check(name="gradient of the bonus = -alpha grad H", error=relative_error(found, expected), tolerance=1e-12),
        # The records hold float32.
        Check(name="E[sampled entropy] = exact entropy", error=abs(exact.mean - sampled.mean), tolerance=1e-6),
    ]


def accuracy_identity() -> list[Check]:
    """Check that J = E[p_nontrunc * r_nontrunc], with the rewards that the library gives."""
    products = []
    for prompt in range(PROMPTS):
        group, verdicts, _ = exact_group(prompt)
        scored = score_group(group, verdicts)
        ended = ~scored.truncated
        products.append(float(ended.mean()) * float(scored.rewards[ended].mean()))
    error = abs(float(np.mean(products)) - float(expected_reward(sampling_logits())))
    return [Check(name="J = E[p_nontrunc * r_nontrunc]", error=error, tolerance=1e-7)]


# --- compared with the slow reference, and invariances -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of the loss. Entropy and KL terms are on."""

    name: str
    alpha: float = 0.03
    beta: float = 0.02
    correction: str = "none"

    @property
    def row(self) -> LossRow:
        return LOSSES[self.name]

    @property
    def clip(self) -> tuple[float, float]:
        low, high = self.row.clip or (0.2, 0.2)
        return low / 8, high / 8  # few ratios of these responses reach a row's limits


def pack(responses: Sequence[LinearResponse], weights: Tensor, filler: int = 0) -> LossInputs:
    """Return one micro-batch. ``filler`` masked tokens (like a prompt) precede each response."""
    dtype = weights.dtype
    columns: dict[str, list[Tensor]] = {k: [] for k in ("logp", "adv", "mask", "row", "old", "sampler", "ref", "ent")}
    for number, r in enumerate(responses):
        logprobs, entropies = log_softmax_policy(weights, r.features.to(dtype), r.tokens)
        junk = torch.full((filler,), 3.0, dtype=dtype)
        length = filler + len(r.tokens)
        columns["logp"].append(torch.cat([junk, logprobs]))
        columns["ent"].append(torch.cat([junk, entropies]))
        columns["mask"].append(torch.cat([torch.zeros(filler, dtype=torch.bool), r.mask]))
        columns["adv"].append(torch.full((length,), r.advantage, dtype=torch.float64))
        columns["row"].append(torch.full((length,), number))
        for key in ("old", "sampler", "ref"):
            columns[key].append(torch.cat([-junk, getattr(r, key).to(dtype)]))
    packed = {key: torch.cat(parts) for key, parts in columns.items()}
    return LossInputs(
        logprobs=packed["logp"],
        advantages=packed["adv"],
        loss_mask=packed["mask"],
        sample_index=packed["row"],
        old_logprobs=packed["old"],
        sampler_logprobs=packed["sampler"],
        ref_logprobs=packed["ref"],
        entropy=packed["ent"],
    )


def library_step(
    settings: Settings,
    responses: Sequence[LinearResponse],
    micro_batches: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float64,
    filler: int = 0,
    rejected: Sequence[LinearResponse] = (),
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of a mini-batch, accumulated over micro-batches given as response numbers.

    ``rejected`` responses are in every micro-batch, with weight 0.
    """
    lengths = torch.tensor([int(r.mask.sum()) for r in responses])
    groups = torch.tensor([r.group for r in responses])
    per_response = response_weights(
        settings.row.reducer, lengths, groups, num_loss_tokens=int(lengths.sum()), max_tokens=MAX_TOKENS
    )
    weights = random_weights().to(dtype).requires_grad_()
    total = torch.zeros((), dtype=dtype)
    gradient = torch.zeros_like(weights)
    for numbers in micro_batches:
        inputs = pack([*(responses[i] for i in numbers), *rejected], weights, filler)
        row_weights = torch.cat([per_response[list(numbers)], torch.zeros(len(rejected), dtype=torch.float64)])
        share = loss_terms(
            settings.row,
            inputs._replace(clip_low=settings.clip[0], clip_high=settings.clip[1]),
            row_weights[inputs.sample_index],
            alpha=settings.alpha,
            beta=settings.beta,
            correction=correction_of(settings.correction),
        ).loss
        gradient += torch.autograd.grad(share, weights)[0]
        total += share.detach()
    return total, gradient


def reference_step(settings: Settings, responses: list[LinearResponse]) -> tuple[Tensor, Tensor]:
    weights = random_weights().requires_grad_()
    loss = reference_loss(
        settings.name,
        responses,
        [log_softmax_policy(weights, r.features, r.tokens) for r in responses],
        alpha=settings.alpha,
        beta=settings.beta,
        clip_low=settings.clip[0],
        clip_high=settings.clip[1],
        max_tokens=MAX_TOKENS,
        correction=settings.correction,
    )
    return loss.detach(), torch.autograd.grad(loss, weights)[0]


def step_error(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Return the larger of the relative errors of loss and gradient."""
    errors = [relative_error(f, e) for f, e in zip(found, expected, strict=True)]
    return float(np.max(errors))  # unlike max(), it keeps a NaN


def loop_reference_checks() -> list[Check]:
    """Compare every row of the table with loops, including entropy and KL terms and sampler corrections."""
    responses = random_responses(1, groups=3, members=4)
    whole = [list(range(len(responses)))]
    cases = [Settings(name=name) for name in LOSSES]
    cases += [Settings(name="magic", correction=kind) for kind in ("tis", "mis")]
    return [
        Check(
            name=f"{case.name}, correction {case.correction}: loss and gradient = loops",
            error=step_error(library_step(case, responses, whole), reference_step(case, responses)),
            tolerance=FLOAT64_TOLERANCE,
        )
        for case in cases
    ]


def invariance_checks() -> list[Check]:
    """Check that loss and gradient do not depend on how the mini-batch is split, ordered, packed or spread."""
    responses = random_responses(2, groups=4, members=4)
    rejected = random_responses(3, groups=2, members=4)
    count = len(responses)
    order = [int(i) for i in np.random.default_rng(0).permutation(count)]
    one = [list(range(count))]
    variants: dict[str, dict[str, object]] = {
        "micro-batch split": {"micro_batches": [list(range(i, min(i + 3, count))) for i in range(0, count, 3)]},
        "one response a micro-batch": {"micro_batches": [[i] for i in range(count)]},
        "order": {"micro_batches": [order]},
        "packing with masked tokens": {"micro_batches": one, "filler": 4},
        # Gradients of workers add up like those of micro-batches: three workers of unequal share.
        "three workers": {"micro_batches": [order[:3], order[3:10], order[10:]]},
        "rejected groups in memory": {"micro_batches": one, "rejected": rejected},
    }
    worst: dict[tuple[str, torch.dtype], float] = {}
    for name in LOSSES:
        settings = Settings(name=name)
        expected = library_step(settings, responses, one)
        for variant, arguments in variants.items():
            for dtype in (torch.float64, torch.float32):
                found = library_step(settings, responses, dtype=dtype, **arguments)  # pyright: ignore[reportArgumentType]
                key = (variant, dtype)
                worst[key] = float(np.maximum(worst.get(key, 0.0), step_error(found, expected)))
    return [
        Check(
            name=f"invariance to {variant}, {str(dtype).removeprefix('torch.')}, worst of {len(LOSSES)} losses",
            error=error,
            tolerance=FLOAT64_TOLERANCE if dtype is torch.float64 else FLOAT32_TOLERANCE,
        )
        for (variant, dtype), error in worst.items()
    ]


def learner_checks() -> list[Check]:
    """Check a transformer's gradient of the whole loss, including entropy and KL terms and sampler correction."""
    return [
        Check(name=f"{name} ({str(dtype).removeprefix('torch.')})", error=error, tolerance=tolerance)
        for dtype, tolerance in ((torch.float64, FLOAT64_TOLERANCE), (torch.float32, FLOAT32_TOLERANCE))
        for name, error in learner_rows(dtype)
    ]


CHECKS: list[tuple[str, Callable[[], list[Check]]]] = [
    ("policy gradient by enumeration", policy_gradient_identity),
    ("KL by enumeration", kl_identity),
    ("entropy by enumeration", entropy_identity),
    ("accuracy by enumeration", accuracy_identity),
    ("losses against slow loops", loop_reference_checks),
    ("invariances of the losses", invariance_checks),
    ("invariances of the learner", learner_checks),
]  # families of checks in the order in which they are printed


def main() -> int:
    torch.set_num_threads(1)
    failed = 0
    print(f"{'identity or invariance':<72} {'error':>9} {'tolerance':>9}")
    for title, family in CHECKS:
        print(f"\n{title}")
        for check in family():
            failed += not check.passed
            print(
                f"  {check.name:<70} {check.error:>9.1e} {check.tolerance:>9.0e} {'ok' if check.passed else 'FAILED'}"
            )
    print(f"\n{'all hold' if not failed else f'{failed} FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
