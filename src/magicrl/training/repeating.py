"""A training step of a recorded run repeated bit for bit or with other settings, and the contribution of each token.

The run's files are only read: the step is repeated in a separate folder, from the newest checkpoint before it, or from
the start. Hashes of the run's records show whether the repetition is equal.

A mini-batch's loss depends on the weights only through the log-prob and the entropy of each of its tokens. With a and b
its derivatives by those two, g_t = a_t grad(logp_t) + b_t grad(H_t) is token t's share of the gradient g = sum_t g_t,
whatever the loss. Its inner product with any direction v needs no gradient of a single token: it is a_t and b_t times
the derivatives of logp_t and H_t along v. These are computed in float64 at the weights before the update: gradients by
autograd, derivatives along a direction by a central difference of two forward passes, which gives eight digits and
works for every architecture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from magicrl.algorithms.attribution import gain_weights, own_step
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.config.overrides import override_of
from magicrl.config.schema import STAGE_SETTINGS, CheckpointConfig, LoggingConfig, StartConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.files import write_atomically
from magicrl.models.loading import LoadedModel, load_policy, resolve_device, resolve_dtype
from magicrl.models.packing import PackedBatch
from magicrl.records import Problem, ScoredGroup, StepMetrics, TrainBatch, TrainSample, Verdict
from magicrl.rollout.recording import ReplayEngine
from magicrl.training.assemble import LocalParts, make_reference
from magicrl.training.checkpoint import Checkpoint, checkpoint_folders, join_state, load_checkpoint, step_of
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings, entropy_controller
from magicrl.training.protocols import Controls, TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import StopRequest, open_session
from magicrl.training.start_checks import check_run
from magicrl.training.step import StepResult, Trainer, buffer_samples
from magicrl.training.teacher import make_teacher
from magicrl_verifiers.references import LIVE

COPIES = 7
"""Number of float64 copies of the weights that an attribution holds in addition to the learner."""
_SHIFT = 1e-5
"""Half step of a central difference, relative to the norm of the weights."""


def flat_values(tensors: Iterable[Tensor]) -> Tensor:
    """Return all values of the tensors as one float64 vector on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors])


def weights_of(state: Mapping[str, Any]) -> Tensor:
    """Return the weights of a learner, ``[P]`` float32 on the CPU, by name."""
    return torch.cat([state[f"weights/{name}"].detach().reshape(-1).float().cpu() for name in weight_names(state)])


def weight_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of a learner's weights, in the order of every ``[P]``."""
    return sorted(name.removeprefix("weights/") for name in state if name.startswith("weights/"))


def _flat(state: Mapping[str, Any], prefix: str, name: str) -> Tensor:
    """Return the moment of one weight; zeros before the first update."""
    return flat_values([state.get(f"{prefix}/{name}", torch.zeros_like(state[f"weights/{name}"]))])


def own_part(config: TrainConfig, controls: Controls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Tensor:
    """Return the part of an update that its own gradient causes, without earlier moments and decay, ``[P]`` float32.

    ``before`` and ``after`` are the learner's states.
    """
    optimizer = config.optimizer
    names = weight_names(before)
    # Float32 is as precise as the learner's own state and needs half of the gradients' memory.
    found, at = torch.zeros(sum(before[f"weights/{name}"].numel() for name in names)), 0
    for name in names:  # one weight at a time: temporaries of a whole model are ten times its size
        part = own_step(
            _flat(before, "exp_avg", name),
            *(_flat(after, prefix, name) for prefix in ("exp_avg", "exp_avg_sq")),
            step=int(after["meta"]["optimizer_steps"]),
            learning_rate=controls.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )
        found[at : (at := at + len(part))] = part
    return found


class PrecisePolicy:
    """The policy in float64 at given weights.

    Args:
        config: Recipe of the run.
        folder: Folder of its initial model, for the architecture.
    """

    def __init__(self, config: TrainConfig, folder: str) -> None:
        policy = load_policy(folder, dtype="float32", device=resolve_device(config.run.device))
        plain = {"compile": False, "exact": False, "head_dtype": None, "dtype": "float32"}
        # Float64 activations of a whole micro-batch would need most of the memory.
        settings = config.model.model_copy(update={**plain, "gradient_checkpointing": True})
        learning = LearnerSettings.of(config.model_copy(update={"model": settings}))
        self._learner = LocalLearner(policy.model, learning, valid_vocab=policy.valid_vocab)
        # After the learner replaced transformers' normalisation, which would compute in float32.
        self._learner.scorer.model.double()
        self._dtype = resolve_dtype(config.model.dtype)
        self._weights = [t for name, t in sorted(self._learner.state().items()) if name.startswith("weights/")]
        self._shapes = [weight.numel() for weight in self._weights]
        self.size = sum(self._shapes)

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        """Load the weights, ``[P]``, rounded to the compute precision of the run."""
        for own, given in zip(self._weights, weights.split(self._shapes), strict=True):
            own.copy_(given.to(self._dtype).view_as(own))

    @torch.no_grad()
    def scores(self, samples: Sequence[TrainSample], temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of every token, ``[tokens]`` each."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for members, packed in self._learner.scorer.micro_batches(samples):
            both = self._learner.scorer.forward(packed, temperature)
            parts = zip(*(array.cpu().split(packed.response_lengths) for array in both), strict=True)
            found.update(zip(members, parts, strict=True))
        ordered = [found[i] for i in range(len(samples))]
        return torch.cat([logprobs for logprobs, _ in ordered]), torch.cat([entropies for _, entropies in ordered])

    def gradient(
        self, samples: Sequence[TrainSample], by_logprob: Tensor, by_entropy: Tensor, temperature: float
    ) -> Tensor:
        """Return the ``[P]`` gradient of the sum of by_logprob * log-prob + by_entropy * entropy over the tokens."""
        lengths = [len(sample.tokens) for sample in samples]
        weights = list(zip(by_logprob.split(lengths), by_entropy.split(lengths), strict=True))
        for members, packed in self._learner.scorer.micro_batches(samples):
            logprobs, entropies = self._learner.scorer.forward(packed, temperature)
            a, b = (torch.cat([weights[i][k] for i in members]).to(logprobs.device) for k in (0, 1))
            ((a * logprobs).sum() + (b * entropies).sum()).backward()
        gradients = self._learner.gradients()
        found = flat_values(gradients[name] for name in sorted(gradients))
        # Set to zero here, since no optimizer step follows that would do it.
        for gradient in gradients.values():
            gradient.zero_()
        return found

    def along(self, direction: Tensor, samples: Sequence[TrainSample], temperature: float) -> tuple[Tensor, Tensor]:
        """Return the derivatives of log-probs and entropies along ``direction`` (``[P]``), ``[tokens]`` each."""
        length = float(direction.norm())
        if not length:
            zeros = torch.zeros(sum(len(sample.tokens) for sample in samples), dtype=torch.float64)
            return zeros, zeros
        at = [weight.detach().clone() for weight in self._weights]
        half = _SHIFT * float(torch.stack([weight.norm() for weight in at]).norm()) / length
        found: list[tuple[Tensor, Tensor]] = []
        # The last shift, 0, restores the weights exactly, which adding and subtracting would not.
        for shift in (half, -half, 0.0):
            with torch.no_grad():
                for own, weight, part in zip(self._weights, at, direction.split(self._shapes), strict=True):
                    own.copy_(weight).add_(part.view_as(own).to(own.device), alpha=shift)
            if shift:
                found.append(self.scores(samples, temperature))
        (up, up_entropy), (down, down_entropy) = found
        return (up - down) / (2 * half), (up_entropy - down_entropy) / (2 * half)

    def derivatives(self, batch: TrainBatch, controls: Controls) -> tuple[Tensor, Tensor]:
        """Return the loss's derivatives by each token's log-prob and entropy, ``[tokens]`` each."""
        logprobs, entropies = (t.requires_grad_() for t in self.scores(batch.samples, controls.temperature))
        packed = PackedBatch.of(batch.samples, "cpu")
        objective = self._learner.objective
        job = (batch.samples, objective.sample_weights(batch), packed)
        objective.terms(job, logprobs, entropies, controls, objective.statistics(batch)).loss.backward()
        by_logprob, by_entropy = (torch.zeros_like(t) if t.grad is None else t.grad for t in (logprobs, entropies))
        return by_logprob, by_entropy


class Attributor:
    """Sums over the updates of one step of their effects on the responses of its buffer.

    Args:
        config: Recipe of the run, in the step's stage.
        probe: The policy in float64.
        groups: Whole buffer of the step.

    Attributes:
        samples: Every response of the buffer, in order.
        lengths: Their numbers of tokens.
        sampled: ``[tokens]`` bool, False for observations of an environment.
        gain: ``[tokens]``, weight of each log-prob in a group's gain.
        temperature: tau.
        norm: ``[tokens]``, share of each token in its gradient's norm. Over an update's tokens they sum to that norm.
        grad_norms: Gradient norm of each update so far: recorded, and in float64.
        own: ``[P]``, part of the change of the weights that the step's gradients caused (`own_part`).
        moved: ``[P]``, whole change of the weights.
    """

    def __init__(self, config: TrainConfig, probe: PrecisePolicy, groups: Sequence[ScoredGroup]) -> None:
        self._config, self._probe, self._groups = config, probe, groups
        self.temperature = config.rollout.temperature
        self.samples = buffer_samples(scored.group for scored in groups)
        self.lengths = [len(sample.tokens) for sample in self.samples]
        starts = np.cumsum([0, *self.lengths])
        # Compared by identity: samples of a batch share their arrays with the completions.
        # A step may train on a response several times, so a sample must be found by its response.
        self._start = {id(s.tokens): int(n) for s, n in zip(self.samples, starts[:-1], strict=True)}
        mask = [np.ones(len(s.tokens), bool) if s.loss_mask is None else s.loss_mask for s in self.samples]
        self.sampled = torch.from_numpy(np.concatenate(mask))
        self.gain = self._gain_weights() * self.sampled
        self.norm = torch.zeros(int(starts[-1]), dtype=torch.float64)
        self.grad_norms: list[tuple[float, float]] = []
        self.own, self.moved = torch.zeros(probe.size), torch.zeros(probe.size)

    def _gain_weights(self) -> Tensor:
        weights: list[Tensor] = []
        lengths = torch.tensor([s.num_loss_tokens for s in self.samples], dtype=torch.float64)
        parts = lengths.split([len(g.rewards) for g in self._groups])
        for group, tokens in zip(self._groups, parts, strict=True):
            rewards, counted = (
                torch.from_numpy(group.rewards.astype(np.float64)),
                torch.from_numpy(group.counted.copy()),
            )
            weights.append(gain_weights(rewards, counted, tokens))
        return torch.cat(weights).repeat_interleave(torch.tensor(self.lengths))

    def by_group(self, values: Tensor) -> list[float]:
        """Return the sum of values of the buffer's tokens, ``[tokens]``, per group."""
        sums = [0.0] * len(self._groups)
        for sample, part in zip(self.samples, values.split(self.lengths), strict=True):
            sums[sample.group_index] += float(part.sum())
        return sums

    def add(self, noted: Noted, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Add one update of the step, as `NotingLearner.again` yields it. Call it in the order of the updates."""
        batch, controls, grad_norm = noted
        probe, tau, samples = self._probe, self.temperature, batch.samples
        weights = weights_of(before)
        self.own += own_part(self._config, controls, before, after)
        self.moved += weights_of(after) - weights
        probe.put(weights)
        del weights
        by_logprob, by_entropy = probe.derivatives(batch, controls)
        gradient = probe.gradient(samples, by_logprob, by_entropy, tau)
        norm = float(gradient.norm())
        self.grad_norms.append((grad_norm, norm))
        logprob_along, entropy_along = probe.along(gradient, samples, tau)
        shares = (by_logprob * logprob_along + by_entropy * entropy_along) / (norm or 1.0)
        for sample, part in zip(samples, shares.split([len(s.tokens) for s in samples]), strict=True):
            first = self._start[id(sample.tokens)]
            self.norm[first : first + len(part)] += part


CLOCK = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
"""Prefixes of metrics that depend on the clock or the machine, so that no repetition has them again."""
KEEP_ALL = 1_000_000
Noted: TypeAlias = tuple[TrainBatch, Controls, float]
"""Mini-batch and controls of an update, and its gradient norm."""
WHAT_IF = ("algorithm.", "entropy.", "optimizer.", "reference.coefficient=", "reward=")
"""Settings that ``--what-if`` may change: those of the update, and the reward."""


class NotingLearner(LocalLearner):
    """A learner that stores the inputs and the gradient norm of each update of the current step."""

    noted: tuple[Noted, ...] = ()

    def __init__(self, config: TrainConfig, policy: LoadedModel) -> None:
        super().__init__(policy.model, LearnerSettings.of(config), valid_vocab=policy.valid_vocab)
        self.start, self.tokenizer = policy.folder, policy.tokenizer

    def update(self, batch: TrainBatch, controls: Controls) -> dict[str, float]:
        found = super().update(batch, controls)
        self.noted = (*self.noted, (batch, controls, found["grad_norm"]))
        return found

    def again(
        self, start: Mapping[str, Any], noted: Sequence[Noted]
    ) -> Iterator[tuple[Noted, Mapping[str, Any], Mapping[str, Any]]]:
        """Repeat the updates from the state ``start``. Yield each with the learner's state before and after it."""
        self.restore(start)
        before = start
        for index, update in enumerate(noted, 1):
            batch, controls, _ = update
            super().update(batch, controls)
            # The state shares memory with the learner, so the next update would change it. The last one needs no copy.
            after = self.state() if index == len(noted) else copied(self.state())
            yield update, before, after
            before = after


class _Parts(LocalParts):
    """Parts of a run with a `NotingLearner`."""

    made: NotingLearner

    def learner(self, policy: LoadedModel) -> NotingLearner:
        self.made = NotingLearner(self._config, policy)
        return self.made


class _Watch(NullObserver):
    """Collects the warnings of the repetition and reports each step."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self._report = report

    def step(self, metrics: StepMetrics) -> None:
        self._report(f"step {metrics.step}")

    def event(self, event: Mapping[str, object]) -> None:
        if event["kind"] == "warning":
            self.warnings.append(str(event["message"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """A repeated step.

    Attributes:
        config: Recipe of the run, with its initial model on this machine.
        metrics: Metrics of the repeated step.
        begun: Step of the checkpoint it started from; 0 for the start of the run.
        checkpoint: Whole state before the step.
        after: ``[P]``, weights after it.
        groups: Its whole buffer.
        updates: Inputs and gradient norm of each of its updates.
        learner: Learner that can repeat the updates.
        checks: Comparisons with the record.
        warnings: Warnings of the repetition, such as another environment.
    """

    config: TrainConfig
    metrics: StepMetrics
    begun: int
    checkpoint: Checkpoint
    after: torch.Tensor
    groups: tuple[ScoredGroup, ...]
    updates: tuple[Noted, ...]
    learner: NotingLearner
    checks: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether everything that could be compared is equal."""
        return all(check["equal"] is not False for check in self.checks)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a learner's state on the CPU, which its next update does not change."""
    return {name: t.detach().cpu().clone() if isinstance(t, torch.Tensor) else t for name, t in state.items()}


def newest_before(run: Path, step: int) -> Path | None:
    """Return the newest checkpoint saved before ``step``, or None."""
    found = [path for path in checkpoint_folders(run) if step_of(path) < step]
    return found[-1] if found else None


def recorded_config(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the recipe of a run, with the initial model on this machine.

    Raises:
        ValueError: The run cannot be repeated here. The text says why.
    """
    recipe = run / "config.toml"
    # Before the recipe is loaded: another process finds a mistake in each setting that names an object of Python.
    live = re.search(rf'= "[^"\n]*({LIVE}\w+@\w+)', recipe.read_text(encoding="utf-8")) if recipe.exists() else None
    if live:
        raise ValueError(f"{run}: {live[1]} was passed in Python and is in no file, so the run cannot be repeated")
    config = load_train_recipe(recipe, list(overrides))
    refused = {
        "cluster": config.cluster is not None and "other processes add up its sums in another order",
        "rollout.engine": config.rollout.engine not in ("in_process", "replay")
        and f"{config.rollout.engine!r} does not promise the same tokens twice",
        "verifier.judge": config.verifier.judge is not None and "a served judge may answer differently and costs money",
    }
    for key, why in refused.items():
        if why:
            raise ValueError(f"{run}: a run with {key} cannot be repeated: {why}")
    if config.optimizer.kind == "muon":  # refused before the step is repeated, which may take hours
        raise ValueError(
            f'{run}: optimizer.kind = "muon": explain can take apart AdamW updates only; its list of steps works'
        )
    start = str(json.loads((run / "run.json").read_text(encoding="utf-8")).get("start_model", ""))
    for folder in (run.parent / "models" / Path(start).name, Path(start)):
        if (folder / "config.json").exists():
            found = StartConfig.model_construct(model=str(folder.absolute()), sft=None)
            return config.model_copy(update={"start": found})
    return config  # it is trained, or loaded, again


def repeat(run: Path, step: int, report: Callable[[str], None] = lambda _: None) -> Repeated:
    """Repeat a step of a run and compare it with the record. The run's files are not changed.

    Args:
        run: Run folder.
        step: Number of the step, from 1 to the last recorded one.
        report: Called with the name of each step.

    Raises:
        ValueError: The run or step does not exist, or the run cannot be repeated here. The text says why.
    """
    rows = recorded_lines(run)
    if step not in rows:
        raise ValueError(f"{run} has no step {step}: it recorded the steps {min(rows)} to {max(rows)}; choose one")
    config, source = recorded_config(run), newest_before(run, step)
    with tempfile.TemporaryDirectory(prefix="magicrl-explain-") as scratch:
        folder = Path(scratch) / "run"
        made = _scratch(run, folder, config, source)
        ready = check_run(made, folder, resume=True)
        parts, watch = _Parts(made), _Watch(report)
        with open_session(made, folder, watch, ready=ready, resume=True, stop=StopRequest(), parts=parts) as session:
            while session.steps_done < step - 1:
                if session.step() is None:
                    break
            parts.made.noted = ()
            before = load_checkpoint(session.save())
            found = session.step()
            if found is None:
                raise ValueError(f"{run}: the repeated run ended at step {session.steps_done}, before step {step}")
            metrics, groups = found
            after = copied(parts.made.state())
        checks = _checks(run, folder, rows[step], metrics, after)
    return Repeated(
        config=config,
        metrics=metrics,
        begun=0 if source is None else step_of(source),
        checkpoint=before,
        after=weights_of(after),
        groups=groups,
        updates=parts.made.noted,
        learner=parts.made,
        checks=checks,
        warnings=tuple(watch.warnings),
    )


def recorded_lines(run: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` by step.

    Raises:
        ValueError: It is not a run folder, or has no step yet.
    """
    checkpoint_folders(run)  # refuses other folders
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {int(row["step"]): row for row in map(json.loads, lines)}
    if not found:
        raise ValueError(f"{run} has no training step yet")
    return found


def _scratch(run: Path, folder: Path, config: TrainConfig, source: Path | None) -> TrainConfig:
    """Create a folder in which the run continues after ``source``, and return its recipe: nothing is removed or
    tracked."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "difficulty.json"):
        if (run / name).exists():
            shutil.copy(run / name, folder / name)
    # The evaluations are copied, so they do not run again.
    if (run / "evaluations").is_dir():
        shutil.copytree(run / "evaluations", folder / "evaluations")
    if source is not None:
        (folder / "checkpoints" / source.name).symlink_to(source.absolute())
    made = config.model_copy(
        update={
            "checkpoint": CheckpointConfig(every=KEEP_ALL, keep_last=KEEP_ALL, keep_best=False),
            "logging": LoggingConfig(),
        }
    )
    write_atomically(folder / "config.toml", to_toml(made, folder.absolute()))
    return made


def _checks(
    run: Path, folder: Path, row: Mapping[str, Any], metrics: StepMetrics, after: Mapping[str, Any]
) -> tuple[dict[str, Any], ...]:
    """Compare the step's metrics, responses and weights with the record. Returns the rows that ``explain`` prints."""
    name = f"step-{metrics.step:06d}"
    was, now = (
        {key: value for key, value in values.items() if not key.startswith(CLOCK)}
        for values in (row["values"], json.loads(json.dumps(dict(metrics.values))))
    )
    differing = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
    note = "" if not differing else f"differs in {', '.join(differing[:4])}" + (" ..." if differing[4:] else "")
    checks = [check_row("metrics", _digest(was), _digest(now), note)]
    rollouts = run / "rollouts" / f"{name}.parquet"
    again = _rollouts_hash(folder / "rollouts" / f"{name}.parquet")
    recorded = _rollouts_hash(rollouts) if rollouts.exists() else None
    note = "" if recorded else "the run did not record the responses of this step (logging.rollouts_every)"
    checks.append(check_row("responses", recorded, again, note))
    kept, note = run / "checkpoints" / name, "the run keeps no checkpoint of this step"
    recorded = None
    if kept.exists():
        recorded, note = state_hash(load_checkpoint(kept).learner_state()), "weights and moments after the step"
    checks.append(check_row("weights", recorded, state_hash(after), note))
    return tuple(checks)


def check_row(name: str, recorded: str | None, repeated: str, note: str) -> dict[str, Any]:
    """Return the hash of a record of the run, and of its repetition; None where nothing was recorded.

    ``note`` says what differs, or why nothing can be compared.
    """
    equal = None if recorded is None else recorded == repeated
    return {"name": name, "recorded": recorded, "repeated": repeated, "note": note, "equal": equal}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _rollouts_hash(path: Path) -> str:
    """Return a hash of every response and verdict, without their times."""
    return _digest(pq.read_table(path).drop_columns(["seconds"]).to_pylist())


def state_hash(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a learner's weights and moments, by name."""
    found = hashlib.sha256()
    for name in sorted(name for name, value in state.items() if isinstance(value, torch.Tensor)):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


class _Drawn(PromptSampler):
    """Returns a step's problems in the order in which they were drawn."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list({problem.id: problem for problem in problems}.values()), seed=0)
        self._left = list(problems)

    def next(self, n: int) -> list[Problem]:
        if n > len(self._left):
            raise ValueError("it needs more prompts than the step sampled, and no further ones are sampled")
        taken, self._left = self._left[:n], self._left[n:]
        return taken


class _RecordedVerdicts:
    """Returns the recorded verdicts of the step's responses: a `VerifierService` without workers."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self._verdicts: dict[tuple[str, tuple[str, ...]], tuple[Verdict, ...]] = {}
        for scored in groups:
            # Responses that an environment judged are not submitted.
            judged = [
                (c.text if c.episode is None else c.episode.answer, verdict)
                for c, verdict in zip(scored.group.completions, scored.verdicts, strict=True)
                if c.episode is None or c.episode.verdict is None
            ]
            key = scored.group.request.problem.id, tuple(text for text, _ in judged)
            self._verdicts[key] = tuple(verdict for _, verdict in judged)

    def submit(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        return self._verdicts[problem.id, tuple(responses)]

    def result(self, ticket: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
        return ticket

    def ready(self, ticket: tuple[Verdict, ...]) -> bool:
        return True

    def close(self) -> None: ...


def varied_config(run: Path, words: str) -> TrainConfig:
    """Return the run's recipe with the settings of one ``--what-if``: KEY=VALUE, separated by spaces.

    Raises:
        ValueError: The step cannot run with a setting, or a setting does not affect the update.
    """
    settings = words.split()
    for setting in settings:
        if not setting.startswith(WHAT_IF):
            raise RecipeError(
                f"--what-if {words}: the responses are those that the run sampled, so only settings of the "
                f"update can change ({', '.join(name.rstrip('.=') for name in WHAT_IF)}), as KEY=VALUE"
            )
    config = recorded_config(run, settings)
    # A stage's own value would replace the setting.
    given = {override_of(setting).key for setting in settings}
    own = {name: None for name, place in STAGE_SETTINGS.items() if ".".join(place) in given}
    config = config.model_copy(update={"stages": tuple(stage.model_copy(update=own) for stage in config.stages)})
    if config.rollout.max_staleness:
        raise RecipeError(
            f"--what-if {words}: with rollout.max_staleness = {config.rollout.max_staleness} the step's buffer depends "
            "on the requests in flight; without --what-if the step can be repeated"
        )
    return config


def vary(repeated: Repeated, config: TrainConfig, words: str) -> tuple[StepResult, Tensor, Tensor, Tensor]:
    """Repeat the step with other settings, from the same state and responses.

    Verdicts are those of the step, unless ``words`` name another reward, which then judges every response.

    Returns:
        The step, ``own`` and ``moved`` as in `Attributor`, and the weights after it, ``[P]`` each.

    Raises:
        ValueError: The step cannot run with them. The text says why.
    """
    parts, state = LocalParts(config), repeated.checkpoint.state
    stage, start = repeated.metrics.stage, repeated.learner.start
    policy = parts.policy(start)
    learner = NotingLearner(config, policy)
    learner.restore(repeated.checkpoint.learner_state())
    rejudged = any(setting.startswith("reward=") for setting in words.split())
    problems = [group.group.request.problem for group in repeated.groups]
    if rejudged:
        problems = [replace(problem, verifier=config.data.train[0].verifier) for problem in problems]
    prompts = {p.id: g.group.request.prompt_tokens for p, g in zip(problems, repeated.groups, strict=True)}
    controller = entropy_controller(config.entropy)
    with contextlib.closing(parts.judge() if rejudged else _RecordedVerdicts(repeated.groups)) as judge:
        engine = ReplayEngine([group.group for group in repeated.groups])
        engine.sync_weights(learner)
        trainer = Trainer(
            config,
            engine=engine,
            learner=learner,
            judge=judge,
            encode=lambda problem: prompts[problem.id],
            sampler=_Drawn(problems),
            controller=controller,
            reference=make_reference(config, start),
            teacher=make_teacher(config, policy, learner),
        )
        trainer.restore(join_state("trainer", repeated.checkpoint.tensors, {**state["trainer"], "again": []}))
        if config.entropy.controller == repeated.config.entropy.controller:
            controller.restore(state["controller"])
        try:
            result = trainer.step(config.stages[stage], stage)
        except (ValueError, TrainingStopped) as error:
            raise ValueError(f"--what-if {words}: {error}") from error
    start_state = repeated.checkpoint.learner_state()
    weights = moved = weights_of(start_state)
    own = torch.zeros_like(weights)
    for (_, controls, _), before, after in learner.again(start_state, learner.noted):
        own += own_part(config, controls, before, after)
        moved = weights_of(after)
    return result, own, moved - weights, moved
