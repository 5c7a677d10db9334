"""The same questions to TRL: its released ``GRPOTrainer`` on the checks' own models, responses and rewards.

TRL is used as its documentation says: responses and rewards enter through ``rollout_func`` and a reward function, and
everything else is TRL's. The checks only observe. A difference of definition is named as one.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback

from magicrl.models.loading import quiet_bars
from magicrl.selfcheck.setup import Proof, Setup, relative_error, worst
from magicrl.selfcheck.slow_loss import (
    NOT_DIVIDED,
    Response,
    in_own_precision,
    reference_advantages,
    reference_loss,
    slow_scores,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # silences a warning that rollout_func may change

trl: Any = importlib.import_module("trl")  # after the setting that it reads, and without its partial types
TOLERANCE = 1e-5
GROUPS, MEMBERS, T = 4, 4, 16
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DAPO": ("dapo", {"loss_type": "dapo"}, {}),
    "DAPO, 4 micro-batches": ("dapo", {"loss_type": "dapo", "gradient_accumulation_steps": 4}, {}),
    "DAPO, KL 0.1": ("dapo", {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}, {"beta": 0.1}),
    "DAPO, entropy 0.03": ("dapo", {"loss_type": "dapo", "entropy_coef": 0.03}, {"alpha": 0.03}),
    "DAPO, truncated masked": ("dapo", {"loss_type": "dapo", "mask_truncated_completions": True}, {"masked": True}),
    "GRPO": ("grpo", {"loss_type": "grpo"}, {}),
    "GRPO, 4 micro-batches": ("grpo", {"loss_type": "grpo", "gradient_accumulation_steps": 4}, {}),
    "GSPO": ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
    "Dr. GRPO": ("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "CISPO": ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}, {"clip_low": 1.0, "clip_high": 4.0}),
    "SAPO": ("sapo", {"loss_type": "sapo"}, {}),
    "DAPO, KL 0.1, TRL's default": ("dapo", {"loss_type": "dapo", "beta": 0.1}, {"beta": 0.1}),
    "DAPO, entropy 0.03, 4 micro-batches": (
        "dapo",
        {"loss_type": "dapo", "entropy_coef": 0.03, "gradient_accumulation_steps": 4},
        {"alpha": 0.03},
    ),
}
"""Row of `slow_loss`, TRL's settings, and what the reference is told beside the defaults."""
DEFINED: Mapping[str, str] = {
    "DAPO, KL 0.1, TRL's default": "TRL documents that it multiplies k3 by the importance ratio by default",
    "DAPO, entropy 0.03, 4 micro-batches": "TRL documents its entropy bonus as a mean over each micro-batch",
}
"""Cases whose difference is a matter of definition."""


class Watch(TrainerCallback):
    """Keeps the weights before each update, and its gradients."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append({name: w.detach().clone() for name, w in kwargs["model"].named_parameters()})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({name: w.grad.detach().clone() for name, w in named if w.grad is not None})


def trl_loss(setup: Setup) -> Proof:
    """Return how far TRL's gradients are from the slow reference, on-policy and in a second update."""
    errors = {name: trl_error(setup, name) for name in (list(CASES)[:2] if setup.quick else CASES)}
    same = {name: error for name, error in errors.items() if name not in DEFINED}
    off = {name: error for name, error in same.items() if not error <= TOLERANCE}
    defined = [name for name in errors if name in DEFINED]
    others = "".join(f"; by definition: {name} {errors[name]:.1e} ({DEFINED[name]})" for name in defined)
    named = f" ({', '.join(f'{name} {error:.1e}' for name, error in off.items())})" if off else ""
    return Proof(
        status="peer",
        figure=f"{len(off)} of {len(same)} settings differ by more than {TOLERANCE:.0e} in the gradient{named}; worst "
        f"of the others {worst(e for n, e in same.items() if n not in off):.1e}; advantages with TRL's own epsilon of "
        f"1e-4{others}",
        against="the same slow loops, first update and a second one on the same responses",
        details=errors,
    )


def trl_error(setup: Setup, name: str) -> float:
    """Return the largest relative error of TRL's gradients of one case."""
    row, settings, told = CASES[name]
    rng = np.random.default_rng([setup.seed, *name.encode()])
    model, tokenizer = starting_model(setup, torch.float64)
    vocabulary, end = len(tokenizer), tokenizer.eos_token_id
    given = random_responses(rng, vocabulary, end)
    watch = Watch()
    before = copy.deepcopy(model).requires_grad_(False)  # first: the trainer replaces the model's forward
    trainer = make_trainer(
        setup,
        model,
        given,
        watch,
        max_steps=2,
        num_iterations=2,
        max_completion_length=T,
        learning_rate=3e-3,
        **settings,
    )
    trainer.train()
    assert len(watch.gradients) == 2, "TRL made another number of updates"
    return worst(
        relative_error(list(found.values()), expected(before, weights, given, row, told, found))
        for weights, found in zip(watch.weights, watch.gradients, strict=True)
    )


def random_responses(rng: np.random.Generator, vocabulary: int, end: int) -> list[dict[str, Any]]:
    """Return ``GROUPS`` groups of responses of random tokens. Each group has different rewards, some are truncated."""
    found: list[dict[str, Any]] = []
    for group in range(GROUPS):
        for member in range(MEMBERS):
            cut = bool(rng.random() < 0.25)
            tokens = rng.integers(2, vocabulary, T if cut else int(rng.integers(1, T - 1))).tolist()
            found.append(
                {
                    "group": group,
                    "prompt": list(range(2, 6 + group)),
                    "tokens": tokens if cut else [*tokens, end],
                    "reward": float(member == 0) + (0.25 * member if member > 1 else 0.0),
                    "truncated": cut,
                }
            )
    return found


def expected(
    start_model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    given: Sequence[Mapping[str, Any]],
    row: str,
    told: Mapping[str, Any],
    names: Mapping[str, Tensor],
) -> list[Tensor]:
    """Return the reference's gradient at ``weights`` of responses sampled by ``start_model``."""
    model = copy.deepcopy(start_model).requires_grad_(True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    responses: list[Response] = []
    scored: list[tuple[Tensor, Tensor]] = []
    for group in range(GROUPS):
        members = [one for one in given if one["group"] == group]
        advantages = reference_advantages(
            [one["reward"] for one in members],
            [False] * len(members),
            mask="none",
            divide=row not in NOT_DIVIDED,
            epsilon=1e-4,
        )
        assert advantages is not None
        for one, advantage in zip(members, advantages, strict=True):
            with torch.no_grad():
                old = slow_scores(start_model, one["prompt"], one["tokens"], 1.0)[0]
            hidden = told.get("masked", False) and one["truncated"]
            mask = torch.full((len(one["tokens"]),), not hidden)
            responses.append(Response(group=group, advantage=advantage, old=old, sampler=old, ref=old, mask=mask))
            scored.append(slow_scores(model, one["prompt"], one["tokens"], 1.0))
    reference_loss(
        row,
        responses,
        scored,
        alpha=told.get("alpha", 0.0),
        beta=told.get("beta", 0.0),
        clip_low=told.get("clip_low", 0.2),
        clip_high=told.get("clip_high", 0.2),
        max_tokens=T,
    ).backward()
    found = dict(model.named_parameters())
    return [torch.zeros_like(found[name]) if (g := found[name].grad) is None else g for name in names]


def starting_model(setup: Setup, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the starting model in ``dtype``, and its tokenizer."""
    with quiet_bars():
        model = AutoModelForCausalLM.from_pretrained(setup.start, local_files_only=True, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(setup.start, local_files_only=True)
    return (in_own_precision(model) if dtype == torch.float64 else model), tokenizer


def make_trainer(
    setup: Setup,
    model: PreTrainedModel,
    given: Sequence[Mapping[str, Any]] | None,
    callback: TrainerCallback,
    *,
    rewards: Callable[..., Any] | None = None,
    folder: str = "trl",
    **settings: Any,
) -> Any:
    """Return TRL's trainer. With ``given`` it trains on these responses, else it samples with transformers."""
    accumulate = settings.pop("gradient_accumulation_steps", 1)
    rows = [json.loads(line) for line in setup.problems.read_text(encoding="utf-8").splitlines()]
    prompts = [str(group) for group in range(GROUPS)] if given is not None else [row["problem"] for row in rows]
    options: dict[str, Any] = {
        "output_dir": str(setup.folder / folder),
        "per_device_train_batch_size": GROUPS * MEMBERS // accumulate,
        "gradient_accumulation_steps": accumulate,
        "num_generations": MEMBERS,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": given is None,
        "seed": 0,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    config = trl.GRPOConfig(**options | settings)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=rewards or _given_rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(setup.start, local_files_only=True),
        callbacks=[callback],
        **({} if given is None else {"rollout_func": _replay(given)}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _replay(given: Sequence[Mapping[str, Any]]) -> Callable[[list[str], Any], dict[str, Any]]:
    """Return a rollout function that answers prompts (numbers of groups) with given responses, in order."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        left = {str(group): [one for one in given if one["group"] == group] for group in range(GROUPS)}
        taken = [left[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [one["prompt"] for one in taken],
            "completion_ids": [one["tokens"] for one in taken],
            "logprobs": [[0.0] * len(one["tokens"]) for one in taken],
            "given": [one["reward"] for one in taken],
        }

    return rollout


def _given_rewards(given: list[float | None], **kwargs: Any) -> list[float | None]:
    return given


def _threes(completions: list[str], **kwargs: Any) -> list[float]:
    return [text.split().count("3") / max(len(text.split()), 1) for text in completions]


def trl_agreement(setup: Setup) -> Proof:
    """Return the gap between transformers' ``generate`` and TRL's own log-probs of the same tokens."""
    found = {
        name: trl_gaps(setup, bf16=bf16) for name, bf16 in (("float32", False), ("bf16 = true, TRL's default", True))
    }
    figures = "; ".join(f"{name} {gap['mean']:.2g} (most {gap['max']:.2g})" for name, gap in found.items())
    return Proof(
        status="peer",
        figure=f"mean gap of a token in nats: {figures}; there is no exact mode",
        against="transformers' generate, which TRL samples with, and the log-probs that its loss reads",
        details=found,
    )


def trl_gaps(setup: Setup, *, bf16: bool) -> dict[str, float]:
    """Train two steps with generation by transformers and return the gaps of all tokens."""
    model, _ = starting_model(setup, torch.float32)
    sampled: dict[tuple[int, ...], Tensor] = {}
    found: list[float] = []
    trainer = make_trainer(
        setup, model, None, TrainerCallback(), rewards=_threes, max_steps=2, max_completion_length=T,
        learning_rate=1e-3, bf16=bf16,
    )  # fmt: skip
    generate, score = model.generate, trainer._get_per_token_logps_and_entropies
    pad, end = trainer.processing_class.pad_token_id, trainer.processing_class.eos_token_id

    def generating(*arguments: Any, **options: Any) -> Tensor:
        out = generate(*arguments, **options, return_dict_in_generate=True, output_logits=True)
        table = torch.stack(out.logits, 1).float().log_softmax(-1)
        tokens = out.sequences[:, -table.shape[1] :]
        for row, logprobs in zip(out.sequences, table.gather(-1, tokens[..., None])[..., 0], strict=True):
            sampled[_key(row, pad, end, table.shape[1])] = logprobs
        return out.sequences

    def scoring(model: Any, ids: Tensor, mask: Tensor, keep: int, *arguments: Any, **options: Any) -> Any:
        out = score(model, ids, mask, keep, *arguments, **options)
        for row, there, logprobs in zip(ids, mask, out[0], strict=True):
            count = int(there[-keep:].sum())
            then = sampled[_key(row, pad, end, keep)]
            found.extend((logprobs[:count].detach().float() - then[:count]).abs().tolist())
        return out

    model.generate = generating
    trainer._get_per_token_logps_and_entropies = scoring
    trainer.train()
    return {"tokens": len(found), "mean": sum(found) / len(found), "max": max(found)}


def _key(row: Tensor, pad: int, end: int, keep: int) -> tuple[int, ...]:
    """Return prompt and response of a padded row, up to the response's end token."""
    prompt, answer = row[:-keep].tolist(), row[-keep:].tolist()
    answer = answer[: answer.index(end) + 1] if end in answer else answer
    return (*(token for token in prompt if token != pad), -1, *answer)


def trl_resume(setup: Setup) -> Proof:
    """Return whether TRL, resumed from its checkpoint after half of the steps, ends with the same data and weights."""
    found = {
        "default settings": trl_resumed(setup, {}),
        "checkpoint within a generation batch (steps_per_generation = 2)": trl_resumed(
            setup, {"steps_per_generation": 2}
        ),
    }
    words = [
        f"{name}: {'same' if one['order'] else 'another'} data order, {'same' if one['weights'] else 'other'} weights"
        for name, one in found.items()
    ]
    return Proof(
        status="peer",
        figure="; ".join(words),
        against="6 steps without a stop, and resumed after step 3 (resume_from_checkpoint); float32, sampled by "
        "transformers",
        details=found,
    )


def trl_resumed(setup: Setup, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Train once without a stop, and once resumed in the middle; return what is equal."""
    ends: list[dict[str, Tensor]] = []
    orders: list[list[str]] = []
    folder = f"trl-resume-{len(settings)}"
    for again in (False, True):
        model, _ = starting_model(setup, torch.float32)
        asked: list[str] = []

        def rewards(prompts: list[str], completions: list[str], asked: list[str] = asked, **kwargs: Any) -> list[float]:
            asked += prompts
            return _threes(completions)

        trainer = make_trainer(
            setup, model, None, TrainerCallback(), rewards=rewards, folder=folder, max_steps=6, save_strategy="steps",
            save_steps=3, max_completion_length=T, learning_rate=1e-2, **settings,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(setup.folder / folder / "checkpoint-3") if again else None)
        ends.append({name: w.detach().clone() for name, w in model.named_parameters()})
        orders.append(asked)
    whole, later = orders
    return {
        "order": whole[-len(later) :] == later,
        "weights": all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]),
    }


def trl_judging(setup: Setup) -> Proof:
    """Return what TRL makes of a reward that is None for one response, and of one that raises."""
    rng = np.random.default_rng(setup.seed)
    model, tokenizer = starting_model(setup, torch.float32)
    given = random_responses(rng, len(tokenizer), tokenizer.eos_token_id)
    given[3]["reward"] = None
    trainer = make_trainer(setup, model, given, TrainerCallback(), max_steps=1, max_completion_length=T)
    trainer.train()
    found = sorted(torch.cat([part["advantages"] for part in trainer._buffered_inputs]).tolist())
    wanted: list[float] = []
    for group in range(GROUPS):
        rewards = [one["reward"] for one in given if one["group"] == group]
        wanted += reference_advantages(rewards, [False] * MEMBERS, mask="none", divide=True, epsilon=1e-4) or []
    out = bool(np.allclose(found, sorted(wanted), atol=1e-5))

    def raises(**kwargs: Any) -> list[float]:
        raise KeyError("a bug of the reward")

    model, _ = starting_model(setup, torch.float32)
    try:
        trainer = make_trainer(setup, model, given, TrainerCallback(), rewards=raises, max_steps=1)
        trainer.train()
        stopped = False
    except KeyError:
        stopped = True
    return Proof(
        status="peer",
        figure=f"a reward of None {'leaves' if out else 'does not leave'} the mean of its group; a reward that raises "
        f"{'stops' if stopped else 'does not stop'} the training",
        against="the group without that response",
        details={"None leaves the mean": out, "raising stops": stopped},
    )
