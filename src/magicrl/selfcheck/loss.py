"""The loss is the formula: random mini-batches and whole training steps, compared with slow loops in float64.

Cases differ by seed in loss, groups, truncation, advantage mask, missing verdicts, tokens without loss, distance of the
policies, alpha, beta, clips, correction and size of the micro-batches. The library's side is what training calls, from
verdicts to gradients. The other side is `slow_loss`, and a forward pass per response by transformers' own code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from magicrl.algorithms.advantages import reject_zero_advantage, score_group
from magicrl.algorithms.losses import LOSSES
from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig
from magicrl.records import Outcome, Problem, TrainBatch, TrainSample, Verdict, frozen_floats
from magicrl.selfcheck.setup import Proof, Setup, judged, relative_error, rollout_group, worst
from magicrl.selfcheck.slow_loss import (
    NOT_DIVIDED,
    Response,
    in_own_precision,
    reference_advantages,
    reference_loss,
    slow_scores,
)
from magicrl.selfcheck.slow_steps import whole_steps
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls
from magicrl.training.step import train_samples

TOLERANCE = 1e-10
STEP_TOLERANCE = 1e-5
"""Float32 of a run against float64."""
VOCABULARY = 29
T = 24
MASKS = ("none", "before", "after")
CORRECTIONS = ("none", "tis", "mis")
OUTCOMES: Mapping[float | None, Outcome] = {None: Outcome.NOT_JUDGED, 1.0: Outcome.CORRECT, 0.0: Outcome.WRONG}
PROBLEM = Problem(id="case", prompt="", references=("1",), verifier="exact", source="selfcheck")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mini-batch as sampled, and everything that decides its loss. ``None`` in ``rewards`` was not judged."""

    loss: str
    mask: str
    correction: str
    controls: Controls
    budget: int
    groups: Sequence[Sequence[NDArray[np.int64]]]
    rewards: Sequence[Sequence[float | None]]
    truncated: Sequence[Sequence[bool]]
    on_policy: bool


def check_loss(setup: Setup) -> Proof:
    """Return whether loss and gradient of all cases, and the steps of a run, equal the slow loops."""
    count = 2 if setup.quick else 8
    errors = {
        f"{loss}, case {i}": case_error(random_case(loss, setup.seed, i)) for loss in LOSSES for i in range(count)
    }
    steps = whole_steps(setup, steps=2 if setup.quick else 5)
    off = [name for name, error in errors.items() if not error <= TOLERANCE]
    steps_off = [name for name, error in steps.items() if not error <= STEP_TOLERANCE]
    text = (
        f"{len(off)} of {len(errors)} cases of {len(LOSSES)} losses differ by more than {TOLERANCE:.0e} in loss or "
        f"gradient (worst {worst(errors.values()):.1e}); {len(steps_off)} of {len(steps)} figures of whole steps by "
        f"more than {STEP_TOLERANCE:.0e} (worst {worst(steps.values()):.1e})"
    )
    first = "".join(f"; first: {name}" for name in (off + steps_off)[:1])
    details = {"cases": errors, "steps": steps, "off": off + steps_off}
    return Proof(
        status=judged(not off and not steps_off),
        figure=text + first,
        against="slow loops in float64 over responses and tokens; a naive loop over the steps of a run",
        details=details,
    )


def tiny_model(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a small Llama that computes in ``dtype`` throughout, always with the same weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return in_own_precision(LlamaForCausalLM(config).to(dtype))  # pyright: ignore[reportArgumentType]


def random_case(loss: str, seed: int, number: int) -> Case:
    """Return a random case of a loss. Each group has different rewards, so that none is rejected."""
    rng = np.random.default_rng([seed, number, *loss.encode()])
    low, high = LOSSES[loss].clip or (0.2, 0.2)
    groups: list[list[NDArray[np.int64]]] = []
    rewards: list[list[float | None]] = []
    truncated: list[list[bool]] = []
    for _ in range(rng.integers(2, 5)):
        members = int(rng.integers(3, 6))
        scores: list[float | None] = [float(value) for value in rng.integers(0, 2, members)]
        cuts = [bool(value) for value in rng.random(members) < 0.2]
        # One correct and one wrong response that ended by themselves: no mask leaves the group without a signal.
        scores[0], scores[1], cuts[0], cuts[1] = 1.0, 0.0, False, False
        if rng.random() < 0.3:
            scores[-1] = None
        rewards.append([0.0 if cut and score is not None else score for score, cut in zip(scores, cuts, strict=True)])
        groups.append([rng.integers(0, VOCABULARY, T if cut else rng.integers(1, T)) for cut in cuts])
        truncated.append(cuts)
    controls = Controls(
        alpha=float(rng.choice([0.0, 0.03])),
        kl_coefficient=float(rng.choice([0.0, 0.1])),
        clip_low=low * float(rng.uniform(0.3, 1.0)),
        clip_high=high * float(rng.uniform(0.3, 1.0)),
        temperature=float(rng.choice([0.7, 1.0])),
    )
    return Case(
        loss=loss,
        mask=MASKS[number % 3],
        correction=CORRECTIONS[int(rng.integers(3))],
        controls=controls,
        budget=int(rng.choice([1, 70, 10_000])),
        groups=groups,
        rewards=rewards,
        truncated=truncated,
        on_policy=bool(rng.random() < 0.2),
    )


def case_error(case: Case) -> float:
    """Return the larger of the relative errors of loss and gradient."""
    model = tiny_model()
    learner = LocalLearner(
        copy.deepcopy(model),
        LearnerSettings(
            algorithm=AlgorithmConfig(loss=case.loss, correction=case.correction),
            model=ModelConfig(dtype="float32", micro_batch_tokens=case.budget, head_chunk_tokens=7),
        ),
    )
    samples = library_samples(case, model)
    batch = TrainBatch.of(samples, max_response_tokens=T)
    found = learner.accumulate(batch.samples, learner.objective.sample_weights(batch), case.controls).values()["loss"]
    model.requires_grad_(True)
    expected = slow_loss(case, *slow_responses(case, model, samples))
    expected.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = learner.gradients()
    return worst(
        (
            abs(found - float(expected.detach())) / abs(float(expected.detach())),
            relative_error([gradients[name] for name in wanted], list(wanted.values())),
        )
    )


def library_samples(case: Case, model: PreTrainedModel) -> list[TrainSample]:
    """Return the case's samples as training makes them, with log-probs near the policy's."""
    scored = [
        score_group(
            rollout_group(
                PROBLEM,
                prompt(number),
                members,
                case.truncated[number],
                max_tokens=T,
                draw=number,
                temperature=case.controls.temperature,
            ),
            [Verdict(outcome=OUTCOMES[reward], status="selfcheck") for reward in case.rewards[number]],
        )
        for number, members in enumerate(case.groups)
    ]
    kept = [scored[i] for i in reject_zero_advantage(scored, case.mask).kept]  # pyright: ignore[reportArgumentType]
    samples = train_samples(kept, mask=case.mask, normalise_std=LOSSES[case.loss].normalise_std)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(len(samples))
    found: list[TrainSample] = []
    for sample in samples:
        with torch.no_grad():
            logprobs = slow_scores(model, prompt(sample.group_index), sample.tokens, case.controls.temperature)[0]

        def near(scale: float, values: Tensor = logprobs) -> Any:
            return frozen_floats(values.numpy() + rng.normal(0, scale, len(values)))

        some = rng.random(len(sample.tokens)) > 0.1
        some[0] = True
        found.append(
            replace(
                sample,
                loss_mask=some,
                old_logprobs=None if case.on_policy else near(0.3),
                sampler_logprobs=near(0.4),
                ref_logprobs=near(0.5),
            )
        )
    return found


def prompt(group: int) -> NDArray[np.int64]:
    """Return the prompt of a group, another one for each."""
    return np.arange(1 + group, 6 + 2 * group) % VOCABULARY


def slow_responses(
    case: Case, model: PreTrainedModel, samples: Sequence[TrainSample]
) -> tuple[list[Response], list[tuple[Tensor, Tensor]]]:
    """Return the case's responses, and log-probs and entropies of their tokens.

    Of the library's samples only the random log-probs and masks are read.
    """
    drawn = {(one.group_index, one.sample_index): one for one in samples}
    responses: list[Response] = []
    scored: list[tuple[Tensor, Tensor]] = []
    for group, members in enumerate(case.groups):
        divide = case.loss not in NOT_DIVIDED
        advantages = reference_advantages(case.rewards[group], case.truncated[group], mask=case.mask, divide=divide)
        assert advantages is not None, "each group has a correct and a wrong response"
        for member, tokens in enumerate(members):
            if case.rewards[group][member] is None:
                continue
            given = drawn[group, member]
            logprobs, entropies = slow_scores(model, prompt(group), tokens, case.controls.temperature)
            sampler, ref = (torch.tensor(values).double() for values in (given.sampler_logprobs, given.ref_logprobs))
            old = logprobs.detach() if given.old_logprobs is None else torch.tensor(given.old_logprobs).double()
            mask = torch.ones(len(tokens), dtype=torch.bool) if given.loss_mask is None else given.loss_mask
            responses.append(
                Response(
                    group=group,
                    advantage=advantages[member],
                    old=old,
                    sampler=sampler,
                    ref=ref,
                    mask=torch.as_tensor(mask),
                )
            )
            scored.append((logprobs, entropies))
    return responses, scored


def slow_loss(case: Case, responses: Sequence[Response], scored: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the case's loss by slow loops."""
    return reference_loss(
        case.loss,
        responses,
        scored,
        alpha=case.controls.alpha,
        beta=case.controls.kl_coefficient,
        clip_low=case.controls.clip_low,
        clip_high=case.controls.clip_high,
        max_tokens=T,
        correction=case.correction,
    )
