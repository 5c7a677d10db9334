"""The learner's update compared with a slow reference, and its independence of how a batch is split."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learning import learning
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.algorithms.losses import LOSSES
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.selfcheck.slow_loss import in_own_precision
from magicrl.training.learner import LocalLearner, ReferenceModel
from magicrl.training.protocols import Controls, Learner

VOCAB, VALID = 40, 37
CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-3, clip_low=0.15, clip_high=0.25)
WITH_KL = dataclasses.replace(CONTROLS, kl_coefficient=0.1)


def tiny(dtype: torch.dtype = torch.float64, tied: bool = True, seed: int = 0, spread: float = 0.3) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=spread,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return in_own_precision(LlamaForCausalLM(config).to(dtype))


def learner(
    dtype: torch.dtype = torch.float64, tied: bool = True, budget: int = 10_000, chunk: int = 64, **kwargs: Any
) -> LocalLearner:
    compute = "bfloat16" if dtype == torch.bfloat16 else "float32"
    master = torch.float32 if dtype == torch.bfloat16 else dtype
    settings = {"dtype": compute, "micro_batch_tokens": budget, "head_chunk_tokens": chunk} | kwargs.pop("model", {})
    return LocalLearner(
        tiny(master, tied),
        learning(
            model=ModelConfig(**settings),
            optimizer=kwargs.pop("optimizer", OptimizerConfig(max_grad_norm=0.5)),
            **kwargs,
        ),
        valid_vocab=VALID,
    )


def plain_samples(groups: int = 4, members: int = 3) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    for group in range(groups):
        prompt = frozen_tokens(rng.integers(0, VALID, rng.integers(1, 9)))
        for member in range(members):
            tokens = rng.integers(0, VALID, rng.integers(1, 25))
            samples.append(
                TrainSample(
                    prompt_tokens=prompt,
                    tokens=frozen_tokens(tokens),
                    advantage=float(rng.normal()),
                    group_index=2 * group + 5,
                    sample_index=member,
                    sampler_logprobs=frozen_floats(rng.normal(-3, 1, len(tokens))),
                    policy_version=0,
                )
            )
    return samples


@functools.cache
def off_policy_samples() -> tuple[TrainSample, ...]:
    """Return samples with some clipped and some unclipped ratios, a reference, a mask, and an advantage of 0."""
    rng = np.random.default_rng(1)
    samples = plain_samples()
    logprobs, _ = learner().logprobs(samples, CONTROLS.temperature)

    def near(values: np.ndarray, scale: float) -> Any:
        return frozen_floats(values + rng.normal(0, scale, len(values)))

    moved = [
        dataclasses.replace(
            sample,
            old_logprobs=near(values, 0.3),
            ref_logprobs=near(values, 0.5),
            sampler_logprobs=near(values, 0.4),
        )
        for sample, values in zip(samples, logprobs, strict=True)
    ]
    longest = max(range(len(moved)), key=lambda i: len(moved[i].tokens))
    mask = np.arange(len(moved[longest].tokens)) % 3 != 1
    moved[longest] = dataclasses.replace(moved[longest], loss_mask=mask)
    moved[1] = dataclasses.replace(moved[1], advantage=0.0)
    return tuple(moved)


def gradient(one: LocalLearner, samples: Sequence[TrainSample], controls: Controls = CONTROLS) -> dict[str, Tensor]:
    batch = TrainBatch.of(samples, max_response_tokens=32)
    one.accumulate(batch.samples, one.objective.sample_weights(batch), controls)
    return {name: value.clone() for name, value in one.gradients().items()}


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[k] - theirs[k]).double().square().sum()) for k in ours)
    return (difference / sum(float(v.double().square().sum()) for v in theirs.values())) ** 0.5


def reference_loss(model: LlamaForCausalLM, samples: Sequence[TrainSample], c: Controls, beta: float) -> Tensor:
    """Compute Eq. 3.1 with its entropy and KL terms: one response, one token at a time, on whole logits."""
    total = torch.zeros((), dtype=torch.float64)
    t_k = sum(s.num_loss_tokens for s in samples)
    for s in samples:
        row = torch.from_numpy(np.concatenate([s.prompt_tokens, s.tokens])).long()
        logits = model(input_ids=row[None], use_cache=False).logits[0, :, :VALID] / c.temperature
        for t, token in enumerate(s.tokens.tolist()):
            if s.loss_mask is not None and not s.loss_mask[t]:
                continue
            logp = logits[len(s.prompt_tokens) + t - 1].log_softmax(-1)
            assert s.old_logprobs is not None
            assert s.ref_logprobs is not None
            rho = (logp[token] - float(s.old_logprobs[t])).exp()
            policy = min(rho * s.advantage, rho.clamp(1 - c.clip_low, 1 + c.clip_high) * s.advantage)
            log_r = float(s.ref_logprobs[t]) - logp[token]
            total = total - (policy + c.alpha * -(logp.exp() * logp).sum() - beta * (log_r.exp() - log_r - 1)) / t_k
    return total


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_is_eq_3_1_and_adamw(tied: bool) -> None:
    samples = off_policy_samples()
    # the plain model: transformers' attention, padded vocabulary removed, one response at a time
    plain = tiny(tied=tied)
    plain.set_attn_implementation("sdpa")
    loss = reference_loss(plain, samples, CONTROLS, beta=0.1)
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    assert norm > 0.5, "the clip must act in this test"
    torch.optim.AdamW(plain.parameters(), lr=CONTROLS.learning_rate, weight_decay=0.01).step()

    ours = learner(tied=tied, budget=60, chunk=7)
    metrics = ours.update(TrainBatch.of(samples), WITH_KL)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert metrics["tokens"] == sum(s.num_loss_tokens for s in samples)
    assert 0 < metrics["clip_ratio"] < 1
    weights = ours.weights()
    assert ("lm_head.weight" in weights) is not tied
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("loss", "dtype", "tolerance"),
    [(name, torch.float64, 1e-10) for name in sorted(LOSSES)]
    + [(name, torch.float32, 1e-5) for name in ("magic", "grpo", "gspo", "nll")],
)
def test_gradient_does_not_depend_on_packing_order_or_chunks(loss: str, dtype: torch.dtype, tolerance: float) -> None:
    samples = off_policy_samples()
    settings: dict[str, Any] = {"loss": loss, "correction": "tis", "correction_cap": 1.2}
    whole = gradient(learner(dtype, **settings), samples, WITH_KL)
    assert relative_error(gradient(learner(dtype, budget=1, chunk=3, **settings), samples, WITH_KL), whole) < tolerance
    shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
    assert (
        relative_error(gradient(learner(dtype, budget=70, chunk=11, **settings), shuffled, WITH_KL), whole) < tolerance
    )


@pytest.mark.parametrize("loss", ["magic", "grpo", "gspo"])
def test_metrics_do_not_depend_on_the_micro_batches(loss: str) -> None:
    batch = TrainBatch.of(off_policy_samples(), max_response_tokens=32)
    settings: dict[str, Any] = {"loss": loss, "correction": "mis"}
    whole = learner(**settings).update(batch, WITH_KL)
    parts = learner(budget=1, **settings).update(batch, WITH_KL)
    assert whole.keys() == parts.keys()
    assert dict(parts) == pytest.approx(dict(whole), rel=1e-9)


@pytest.mark.parametrize("loss", ["magic", "grpo", "pg", "dr_grpo"])
def test_two_workers_with_a_share_each_make_the_same_gradient(loss: str) -> None:
    samples = off_policy_samples()
    whole = gradient(learner(loss=loss), samples, WITH_KL)
    batch = TrainBatch.of(samples, max_response_tokens=32)
    shares: list[dict[str, Tensor]] = []
    for share in ([0, 3, 4, 11], [1, 2, 5, 6, 7, 8, 9, 10]):
        worker = learner(loss=loss)
        worker.accumulate([samples[i] for i in share], worker.objective.sample_weights(batch)[share], WITH_KL)
        shares.append(worker.gradients())
    added = {name: shares[0][name] + shares[1][name] for name in whole}
    assert relative_error(added, whole) < 1e-10


def test_rejected_groups_in_memory_change_nothing() -> None:
    samples = off_policy_samples()
    kept = [s for s in samples if s.group_index != 7]
    alone, after = learner(), learner()
    after.logprobs(samples, 0.8)  # scores survivors and rejected samples before the update
    for one in (alone, after):
        one.update(TrainBatch.of(kept), WITH_KL)
    for name, value in alone.weights().items():
        assert torch.equal(value, after.weights()[name])
    # and survival is not the same as an advantage of 0: that group would still count in T_k and the entropy term
    zeroed = [dataclasses.replace(s, advantage=0.0) if s.group_index == 7 else s for s in samples]
    assert relative_error(gradient(learner(), zeroed), gradient(learner(), kept)) > 0.01


def test_on_policy_the_ratio_is_exactly_one() -> None:
    values = learner(torch.float32).update(TrainBatch.of(plain_samples()), CONTROLS)
    assert values["ratio_mean"] == values["ratio_min"] == values["ratio_max"] == 1.0
    assert values["clip_ratio"] == 0.0
    assert values["sampler_gap_mean"] > 0


def test_on_policy_equals_old_logprobs_of_the_same_weights() -> None:
    samples = plain_samples()
    one = learner()
    old, _ = one.logprobs(samples, CONTROLS.temperature)
    carried = [dataclasses.replace(s, old_logprobs=o) for s, o in zip(samples, old, strict=True)]
    assert relative_error(gradient(learner(), carried), gradient(one, samples)) < 1e-6  # records are float32


@pytest.mark.parametrize(("correction", "factors"), [("none", (1.0, 1.0)), ("tis", (0.5, 2.0)), ("mis", (0.5, 0.0))])
def test_a_correction_weighs_the_policy_term_alone(correction: Any, factors: tuple[float, float]) -> None:
    """Of two one-token responses the sampler found one twice as likely as the learner, one a quarter as likely."""
    samples = [dataclasses.replace(s, tokens=s.tokens[:1]) for s in plain_samples(groups=1, members=2)]
    logprobs, _ = learner().logprobs(samples, CONTROLS.temperature)
    gaps = [np.log(2.0), -np.log(4.0)]
    given = [
        dataclasses.replace(s, sampler_logprobs=frozen_floats(own + gap))
        for s, own, gap in zip(samples, logprobs, gaps, strict=True)
    ]
    scaled = [
        dataclasses.replace(s, advantage=s.advantage * factor, sampler_logprobs=own)
        for s, own, factor in zip(samples, logprobs, factors, strict=True)
    ]
    corrected = gradient(learner(correction=correction, correction_cap=2.0), given)
    assert relative_error(corrected, gradient(learner(), scaled)) < 1e-6  # records are float32


def test_logprobs_are_the_plain_models() -> None:
    samples = plain_samples()
    plain = tiny()
    plain.set_attn_implementation("sdpa")
    for scorer in (learner(budget=50), ReferenceModel(tiny(), valid_vocab=VALID)):
        logprobs, entropies = scorer.logprobs(samples, 0.7)
        for s, ours, entropy in zip(samples, logprobs, entropies, strict=True):
            row = torch.from_numpy(np.concatenate([s.prompt_tokens, s.tokens])).long()
            with torch.no_grad():
                logits = plain(input_ids=row[None], use_cache=False).logits[0, len(s.prompt_tokens) - 1 : -1, :VALID]
            logp = (logits / 0.7).log_softmax(-1)
            expected = logp.gather(1, torch.tensor(s.tokens.tolist())[:, None])[:, 0]
            np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(entropy, -(logp.exp() * logp).sum(-1).numpy(), rtol=1e-6, atol=1e-6)
            assert ours.dtype == np.float32


def test_supervised_samples_need_no_sampler() -> None:
    samples = [
        dataclasses.replace(s, advantage=1.0, sampler_logprobs=frozen_floats([])) for s in plain_samples(members=1)
    ]
    one = learner(loss="nll")
    logprobs, _ = one.logprobs(samples, 1.0)
    values = one.update(TrainBatch.of(samples), Controls(learning_rate=1e-3))
    assert values["loss"] == pytest.approx(-float(np.concatenate(logprobs).mean()), rel=1e-6)
    assert values["sampler_gap_max"] == 0.0
    assert one.update(TrainBatch.of(samples), Controls(learning_rate=1e-3))["loss"] < values["loss"]


def test_gradient_checkpointing_changes_no_gradient() -> None:
    samples = off_policy_samples()
    kept = learner(model={"gradient_checkpointing": True})
    assert relative_error(gradient(kept, samples, WITH_KL), gradient(learner(), samples, WITH_KL)) < 1e-12
    assert not any(m.training for m in kept._model.modules() if isinstance(m, torch.nn.Dropout))


def test_a_positive_advantage_makes_its_response_likelier() -> None:
    samples = [dataclasses.replace(s, advantage=1.0 if s.sample_index == 0 else -1.0) for s in plain_samples()]
    one = learner(optimizer=OptimizerConfig(weight_decay=0.0))
    before, _ = one.logprobs(samples, 1.0)
    one.update(TrainBatch.of(samples), Controls(learning_rate=1e-3))
    after, _ = one.logprobs(samples, 1.0)
    change = [
        (s.advantage, float(a.sum() - b.sum())) for s, b, a in zip(samples, before, after, strict=True) if len(a) > 3
    ]
    assert all(advantage * moved > 0 for advantage, moved in change)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="unknown loss 'magik'"):
        learner(loss="magik")
    samples = off_policy_samples()
    mixed = [dataclasses.replace(samples[0], old_logprobs=None), *samples[1:]]
    with pytest.raises(ValueError, match="11 of 12 samples have old_logprobs"):
        gradient(learner(), mixed)
    outside = dataclasses.replace(samples[0], tokens=frozen_tokens([VALID] * len(samples[0].tokens)))
    with pytest.raises(ValueError, match="token 37 lies outside the vocabulary of 37"):
        gradient(learner(), [outside])
    assert isinstance(learner(), Learner)
