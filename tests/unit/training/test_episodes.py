"""Responses to an environment: observations are in the context and in no count, no mean and no loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import SIZES, completion, problem, request
from learning import learning
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.algorithms.advantages import score_group
from magicrl.algorithms.entropy import measure_entropy
from magicrl.algorithms.token_weights import M2PO
from magicrl.config.model_schema import ModelConfig
from magicrl.evaluation.samples import sample_row
from magicrl.planning.costs import SequenceWork
from magicrl.records import (
    Completion,
    Episode,
    FinishReason,
    Outcome,
    RolloutGroup,
    ScoredGroup,
    TrainBatch,
    TrainSample,
    Verdict,
    frozen_floats,
)
from magicrl.rollout.protocol import Capabilities
from magicrl.selfcheck.slow_loss import in_own_precision
from magicrl.training.learner import LocalLearner
from magicrl.training.meters import StalenessMeter, sampled_work
from magicrl.training.metrics import rollout_metrics
from magicrl.training.protocols import Controls
from magicrl.training.repeating import Attributor
from magicrl.training.step import buffer_samples, train_samples, with_logprobs, with_policy_mask
from magicrl_verifiers.records import make_verdict

END = 1
# tokens with the observations, and by hand the positions of the model's tokens
RESPONSES: tuple[tuple[list[int], tuple[tuple[int, int], ...], list[int]], ...] = (
    ([5, 6, END, 9, 9, 8, 7, END], ((3, 3),), [0, 1, 2, 6, 7]),
    ([5, END, 8, 6, 7, END, 9, 8, 4], ((2, 1), (6, 2)), [0, 1, 3, 4, 5, 8]),
    ([7, END], (), [0, 1]),
)
PLACES = [places for *_, places in RESPONSES]
CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-3, clip_low=0.15, clip_high=0.25, kl_coefficient=0.1)


def played(tokens: Sequence[int], observed: tuple[tuple[int, int], ...], **further: Any) -> Completion:
    """Return a response of an episode, with -1 nat and an entropy of 2 at each sampled token."""
    sampled = np.ones(len(tokens))
    for first, count in observed:
        sampled[first : first + count] = 0
    given: dict[str, Any] = {
        "sampler_logprobs": frozen_floats(-sampled),
        "sampler_entropies": frozen_floats(2 * sampled),
        "finish_reason": FinishReason.STOP if tokens[-1] == END else FinishReason.LENGTH,
        "episode": Episode(observed=observed, answer=""),
    }
    return completion(tokens, **given | further)


def scored(*completions: Completion, draw: int = 0) -> ScoredGroup:
    """Return a group of all of them to one prompt of three tokens. The first response is correct."""
    asked = request(draw, [3, 4, 2], size=len(completions), asked=problem("guess"))
    verdicts = [make_verdict("matched" if i == 0 else "mismatch", decided_by="test") for i in range(len(completions))]
    return score_group(RolloutGroup(request=asked, completions=completions), verdicts)


def episodes(draw: int = 0) -> ScoredGroup:
    return scored(*(played(tokens, observed) for tokens, observed, _ in RESPONSES), draw=draw)


def model() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, initializer_range=0.3)
        return in_own_precision(LlamaForCausalLM(config).double())


def learner(budget: int = 1000, share: bool = True, **algorithm: Any) -> LocalLearner:
    settings = ModelConfig(micro_batch_tokens=budget, head_chunk_tokens=7, share_prompts=share)
    return LocalLearner(model(), learning(model=settings, **algorithm))


def with_neighbours(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Return samples with log-probs of nearby policies at the sampled tokens, and absurd ones elsewhere."""
    rng = np.random.default_rng(1)
    found: list[TrainSample] = []
    logprobs, _ = learner().logprobs(samples, CONTROLS.temperature)
    for sample, values, places in zip(samples, logprobs, PLACES * 2, strict=True):

        def near(scale: float, values: Any = values, places: list[int] = places) -> Any:
            moved = np.full(len(values), -300.0)
            moved[places] = values[places] + rng.normal(0, scale, len(places))
            return frozen_floats(moved)

        moved = with_logprobs([sample], "old_logprobs", [near(0.3)])[0]
        found.append(dataclasses.replace(moved, ref_logprobs=near(0.5), sampler_logprobs=near(0.4)))
    return found


def slow_loss(plain: LlamaForCausalLM, samples: Sequence[TrainSample], c: Controls, *, cap: float) -> Tensor:
    """Compute Eq. 3.1 with its entropy and KL terms and TIS, only at the positions written down by hand."""
    total = torch.zeros((), dtype=torch.float64)
    t_k = sum(len(places) for places in PLACES) * 2
    for s, places in zip(samples, PLACES * 2, strict=True):
        row = torch.from_numpy(np.concatenate([s.prompt_tokens, s.tokens])).long()
        logits = plain(input_ids=row[None], use_cache=False).logits[0] / c.temperature
        assert s.old_logprobs is not None
        assert s.ref_logprobs is not None
        for t in places:
            logp = logits[len(s.prompt_tokens) + t - 1].log_softmax(-1)
            token = int(s.tokens[t])
            rho = (logp[token] - float(s.old_logprobs[t])).exp()
            policy = min(rho * s.advantage, rho.clamp(1 - c.clip_low, 1 + c.clip_high) * s.advantage)
            policy = policy * min(cap, math.exp(float(s.old_logprobs[t]) - float(s.sampler_logprobs[t])))
            log_r = float(s.ref_logprobs[t]) - logp[token]
            entropy, k3 = -(logp.exp() * logp).sum(), log_r.exp() - log_r - 1
            total = total - (policy + c.alpha * entropy - c.kl_coefficient * k3) / t_k
    return total


def test_what_is_learned_from_is_what_was_sampled() -> None:
    groups = [episodes(0), scored(completion([5, 6, END]), completion([7, END]), draw=1)]
    samples = train_samples(groups, mask="none")
    masks = [None if s.loss_mask is None else np.flatnonzero(s.loss_mask).tolist() for s in samples]
    assert masks == [*PLACES, None, None], "a response without environment has no mask"
    assert [s.num_loss_tokens for s in samples] == [5, 6, 2, 3, 2]
    assert TrainBatch.of(samples).num_loss_tokens == 18
    assert [s.num_loss_tokens for s in buffer_samples(g.group for g in groups)] == [5, 6, 2, 3, 2]
    assert [len(s) for s in samples] == [11, 12, 5, 6, 5], "the model reads all of it"


@pytest.mark.parametrize(("budget", "share"), [(1000, True), (1000, False), (25, True), (1, False)])
def test_the_loss_leaves_observations_out_and_the_context_has_them(budget: int, share: bool) -> None:
    samples = with_neighbours(train_samples([episodes(0), episodes(1)], mask="none"))
    plain = model()
    plain.set_attn_implementation("sdpa")
    loss = slow_loss(plain, samples, CONTROLS, cap=1.2)
    loss.backward()

    batch = TrainBatch.of(samples)
    ours = learner(budget, share, correction="tis", correction_cap=1.2)
    ours.accumulate(batch.samples, ours.objective.sample_weights(batch), CONTROLS)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours.gradients()[name], parameter.grad, rtol=1e-9, atol=1e-12)
    ours = learner(budget, share, correction="tis", correction_cap=1.2)
    metrics = ours.update(batch, CONTROLS)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert metrics["tokens"] == 26
    gaps = [np.abs(s.old_logprobs - s.sampler_logprobs)[p] for s, p in zip(samples, PLACES * 2, strict=True)]  # pyright: ignore[reportOptionalOperand]
    assert metrics["sampler_gap_mean"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-6)


def test_an_episode_teaches_what_its_turns_teach_in_their_contexts() -> None:
    """Compare with the same turns as separate responses, each to the prompt of everything before it."""
    samples = train_samples([episodes()], mask="none")
    turns: list[TrainSample] = []
    for sample, places in zip(samples, PLACES, strict=True):
        starts = [t for t in places if t - 1 not in places]
        for start in starts:
            stop = next(t for t in range(start + 1, len(sample.tokens) + 1) if t not in places)
            context = np.concatenate([sample.prompt_tokens, sample.tokens[:start]])
            kept = {"prompt_tokens": context, "tokens": sample.tokens[start:stop], "loss_mask": None}
            turns.append(dataclasses.replace(sample, **kept, sampler_logprobs=sample.sampler_logprobs[start:stop]))
    assert [len(turn.tokens) for turn in turns] == [3, 2, 2, 3, 1, 2]
    gradients: list[dict[str, Tensor]] = []
    for each in (samples, turns):
        one, batch = learner(), TrainBatch.of(each)
        one.accumulate(
            batch.samples, one.objective.sample_weights(batch), dataclasses.replace(CONTROLS, kl_coefficient=0.0)
        )
        gradients.append(one.gradients())
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], rtol=1e-9, atol=1e-12)


def test_the_second_moment_is_of_sampled_tokens() -> None:
    """Squared gaps of 0.09 and 0.01: their mean 0.05 is above 0.04, so one is masked. Two zeros would dilute it."""
    (sample, _) = train_samples([scored(played([5, 9, 9, END], ((1, 2),)), completion([END]))], mask="none")
    sample = dataclasses.replace(sample, old_logprobs=frozen_floats([-0.7, 0, 0, -0.9]))
    batch = with_policy_mask(TrainBatch.of([sample]), M2PO, 0.04)
    assert batch.samples[0].policy_mask is not None
    assert batch.samples[0].policy_mask.tolist() == [False, False, False, True]


def test_entropy_is_of_sampled_tokens() -> None:
    """Use 13 tokens at 2 nats, and 3 at 0.5: 27.5 / 16 and, by their log-probs, (13 + 3 * 4) / 16."""
    other = completion(
        [5, 6, END], sampler_entropies=frozen_floats([0.5] * 3), sampler_logprobs=frozen_floats([-4.0] * 3)
    )
    buffer = [*episodes().group.completions, other]
    exact, sampled = (measure_entropy(buffer, estimator) for estimator in ("exact", "sampled"))
    assert exact is not None
    assert sampled is not None
    assert exact.mean == pytest.approx(27.5 / 16)
    assert sampled.mean == pytest.approx(25 / 16)


def test_lengths_and_work_are_of_sampled_tokens() -> None:
    group = episodes()
    values = rollout_metrics([group])
    assert [values[f"length/{name}"] for name in ("min", "max", "mean")] == [2, 6, pytest.approx(13 / 3)]
    assert values["tokens/sampled"] == group.group.num_tokens == 13
    assert values["train/truncation/ratio"] == pytest.approx(1 / 3)
    # entering: 3 of the prompt, 7 + 8 + 1; seen: 1 + 2 + 3, then 3 n + n (n + 1) / 2 of n = 7, 8 and 1
    assert sampled_work([group]) == SequenceWork(tokens=19, predicted=13, seen=6 + 49 + 60 + 4, prompts=3)


def test_a_group_s_gain_is_of_sampled_tokens() -> None:
    """Use one correct of three responses: (1 - 1/3) and (0 - 1/3), over the 13 tokens that the model wrote."""
    config: Any = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
    probe: Any = SimpleNamespace(size=1)
    found = Attributor(config, probe, [episodes()])
    expected = np.concatenate([np.zeros(len(tokens)) for tokens, *_ in RESPONSES])
    start = 0
    for weight, (tokens, _, places) in zip((2 / 39, -1 / 39, -1 / 39), RESPONSES, strict=True):
        expected[[start + place for place in places]] = weight
        start += len(tokens)
    assert found.gain.tolist() == pytest.approx(expected.tolist())


def test_staleness_is_of_sampled_tokens() -> None:
    """Version 0 wrote 3 tokens; 1 was loaded while the environment answered, and wrote 2: 3 of 5 are a step old."""
    spans = ((0, 3), (1, 5))
    tokens, observed, _ = RESPONSES[0]
    late = played(tokens, observed, policy_version=0, version_spans=spans)
    fresh = played(*RESPONSES[1][:2], policy_version=1)
    meter = StalenessMeter(1)
    for version in (0, 1):
        meter.begin_step(SimpleNamespace(policy_version=version, capabilities=Capabilities()))  # pyright: ignore[reportArgumentType]
    groups = [scored(late, fresh)]
    meter.check(groups)
    # the learner's log-probs of observations do not matter
    learned = [np.full(len(tokens), -1.0), np.full(9, -70.0)]
    learned[1][PLACES[1]] = -1.5
    values = meter.metrics(groups, {(0, i): frozen_floats(each) for i, each in enumerate(learned)})
    assert values["staleness/share_1/ratio"] == values["staleness/mean"] == pytest.approx(3 / 11)
    assert values["staleness/fresh_gap/mean"] == pytest.approx(0.5)


def test_a_sample_s_row_counts_what_the_model_wrote() -> None:
    tokens, observed, _ = RESPONSES[0]
    verdict = Verdict(outcome=Outcome.CORRECT, status="matched")
    row = sample_row("p", 0, played(tokens, observed), verdict, keep_tokens=True)
    assert (row.tokens, row.entropy, row.logprob) == (5, 2.0, -5.0)
    assert (row.token_ids, row.token_entropies) == ((5, 6, END, 7, END), (2.0,) * 5)


def test_numbers_of_environments_are_means_over_judged_episodes() -> None:
    given = [
        Episode(observed=((3, 3),), answer="", metrics={"calls": 3.0}, cut=1),
        Episode(observed=((2, 1), (6, 2)), answer="", metrics={"calls": 0.0, "errors": 2.0}),
        Episode(observed=(), answer="", metrics={"calls": 100.0}),
    ]
    responses = zip(RESPONSES, given, strict=True)
    group = scored(*(played(tokens, observed, episode=episode) for (tokens, observed, _), episode in responses))
    judged = dataclasses.replace(group, counted=np.array([True, True, False]))
    values = {name: value for name, value in rollout_metrics([judged]).items() if name.startswith("environment/")}
    assert values == {
        "environment/calls": 1.5,
        "environment/errors": 2.0,
        "environment/turns": 2.5,
        "environment/observed_tokens": 3.0,
        "environment/observations_cut": 0.5,
    }
