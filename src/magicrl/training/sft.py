"""Supervised start: the model that a run begins with, made from a recorded recipe.

A supervised step is the learner of reinforcement learning with another row of the loss table: ``nll``, the mean
negative log-likelihood of the response tokens, the end token included; prompts carry no loss.

A recipe has phases, each with its demonstrations and learning rate. Every phase begins with fresh optimizer moments:
those of the phase before belong to other data and another rate. Randomness is a function of (seed, phase, step), so
that a run killed at any instant goes on from its last checkpoint to the same weights, bit for bit on the same machine,
versions and thread count.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.errors import RecipeError
from magicrl.config.loader import config_hash, load_start_recipe, to_toml
from magicrl.config.schema import RunConfig, SftConfig, StartConfig
from magicrl.files import only_writer, write_atomically
from magicrl.models.loading import LoadedModel, describe_policy, load_policy, resolve_device
from magicrl.models.small_models import make_tiny, prepare_gguf_package
from magicrl.records import TrainBatch, TrainSample
from magicrl.training.checkpoint import Checkpoint, CheckpointWriter, join_state, load_latest, split_state
from magicrl.training.demonstrations import demonstrations, described, named_by_content, vocabulary
from magicrl.training.learner import LocalLearner, release_free_memory
from magicrl.training.model_card import front_matter, read_base_model
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls, Learner

SUPERVISED = AlgorithmConfig(loss="nll")
"""The ``algorithm`` of a learner's settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedStep:
    """What one supervised step did.

    Attributes:
        index: its number within the schedule, from 0.
        loss: mean nats per response token, before the update.
        learning_rate: of this update.
        tokens: prompt and response tokens of the batch.
        loss_tokens: response tokens of the batch.
    """

    index: int
    loss: float
    learning_rate: float
    tokens: int
    loss_tokens: int


def supervised_steps(
    learner: Learner, batches: Iterable[Sequence[TrainSample]], schedule: Callable[[int], float], *, first: int = 0
) -> Iterator[SupervisedStep]:
    """Make one SGD step a batch, whatever the samples' source (demonstrations, a model's own correct responses).

    Args:
        learner: with the loss row ``nll``.
        batches: the samples of each step.
        schedule: learning rate of step ``i``.
        first: number of the first step, when an interrupted run goes on.

    Raises:
        FloatingPointError: a loss or gradient is not finite (from the learner).
    """
    for index, samples in enumerate(batches, start=first):
        batch = TrainBatch.of(samples)
        rate = schedule(index)
        metrics = learner.update(batch, Controls(learning_rate=rate))
        release_free_memory()
        yield SupervisedStep(
            index=index,
            loss=float(metrics.values["loss"]),
            learning_rate=rate,
            tokens=sum(len(sample) for sample in samples),
            loss_tokens=batch.num_loss_tokens,
        )


def phase_schedule(
    rate: float, *, steps: int, warmup_steps: int, decay: Literal["constant", "linear", "cosine"]
) -> Callable[[int], float]:
    """Learning rate of step 0 to ``steps - 1``: warm-up to ``rate``, then down to a tenth of it.

    Example:
        >>> at = phase_schedule(1.0, steps=5, warmup_steps=2, decay="linear")
        >>> [round(at(i), 3) for i in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    def at(step: int) -> float:
        if step < warmup_steps:
            # + 1: the first step has a rate, too
            return rate * (step + 1) / warmup_steps
        if decay == "constant":
            return rate
        # - 1: the last step is to have the tenth
        gone = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps - 1))
        left = 1 - gone if decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return rate * (0.1 + 0.9 * left)

    return at


RECORD = "sft.json"
SCHEMA_VERSION = 1
_PACKAGES = ("magicrl", "torch", "transformers", "tokenizers", "numpy")


OnStep = Callable[[int, int], None]
"""Told after each step: steps done of the whole recipe, and of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftResult:
    """A supervised model.

    Attributes:
        folder: the model folder; its ``sft.json`` is the record of how it was made.
        reused: it was there already, made by the same recipe.
        losses: loss curve of each phase, one value a step.
        tokens: prompt and response tokens learned from.
        seconds: wall-clock seconds of training (of all processes, where it was resumed).
    """

    folder: Path
    reused: bool
    losses: tuple[tuple[float, ...], ...]
    tokens: int
    seconds: float


@dataclass(kw_only=True, slots=True)
class _Journal:
    """What a run has done so far; lives in its checkpoints and ends in ``sft.json``."""

    losses: list[list[float]] = field(default_factory=list[list[float]])
    tokens: int = 0
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return sum(len(phase) for phase in self.losses)


def recipe_hash(config: SftConfig) -> str:
    """Identifies what decides the weights: everything but the run's name, output, device and thread count."""
    phases = tuple(named_by_content(phase) for phase in config.phases)
    return config_hash(config.model_copy(update={"run": RunConfig(seed=config.run.seed), "phases": phases}))


def supervised_start(start: StartConfig, models_root: Path) -> tuple[SftConfig, Path]:
    """The supervised recipe of a run's start, and the folder in ``models_root`` of the model that it makes.

    The folder has the recipe's name, so that another file can name the model; with the recipe's hash behind it where
    another recipe's model has that name already.

    Raises:
        RecipeError: it cannot be read.
    """
    assert start.sft is not None, "the start is a supervised recipe"
    try:
        recipe = load_start_recipe(start.sft)
    except RecipeError as error:
        raise RecipeError(str(error), key="start.sft") from error
    named = models_root / recipe.run.name
    hashed = models_root / f"{recipe.run.name}-{recipe_hash(recipe)}"
    # a recipe that has begun under its longer name stays there, whoever has the short one by now
    begun = hashed.exists() or _partial(hashed).exists()
    return recipe, hashed if begun or _is_of_another(recipe, named) else named


def _is_of_another(config: SftConfig, output: Path) -> bool:
    """Whether there is something in ``output``, or unfinished for it, that this recipe did not make."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        record = output / RECORD
        return not record.is_file() or json.loads(record.read_text()).get("recipe_hash") != recipe_hash(config)
    claim = _partial(output) / "recipe_hash"
    return claim.is_file() and claim.read_text(encoding="utf-8").strip() != recipe_hash(config)


def _partial(output: Path) -> Path:
    """Where the unfinished work for ``output`` lies."""
    return output.with_name(f"{output.name}.partial")


def run_sft(
    config: SftConfig,
    output: Path,
    on_step: OnStep | None = None,
    *,
    checkpoint_seconds: float = 120.0,
) -> SftResult:
    """Make the recipe's model in ``output``: a model folder with ``sft.json``, whole or not at all.

    A model that the same recipe made there is reused. Unfinished work lies beside it in ``<output>.partial``, from
    where an interrupted run goes on.

    Args:
        config: the recipe.
        output: the model folder to write.
        on_step: progress.
        checkpoint_seconds: wall-clock time between checkpoints; when they are written changes no result.

    Raises:
        ValueError: the output holds another recipe's model or something else; an unknown family; a demonstration
            longer than the model's context; a missing start model.
    """
    partial = _partial(output)
    found = _finished(config, output)
    if found is None:
        # asked again inside: another process may have made it while this one waited
        with only_writer(partial, wait=True):  # several runs may want the same start model: one makes it
            found = _finished(config, output) or _make(config, output, partial, on_step, checkpoint_seconds)
    # also what a process left that was killed behind its last move
    shutil.rmtree(partial, ignore_errors=True)
    return found


def _make(
    config: SftConfig,
    output: Path,
    partial: Path,
    on_step: OnStep | None,
    checkpoint_seconds: float,
) -> SftResult:
    write_atomically(
        partial / "recipe_hash", recipe_hash(config)
    )  # claims the folder; `made_model` has seen that it may
    with _threads(config.run.threads):
        policy = start_policy(config, output)
        with CheckpointWriter(partial) as writer:
            journal, learner = _train(config, policy, partial, writer, on_step, checkpoint_seconds)
        record = _record(config, journal, policy)
        model = partial / "model"
        learner.save_hf(model)
    # before the folder gets its name: a model without its record is taken for somebody else's
    (model / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    (model / "recipe.toml").write_text(to_toml(config, output.absolute()), encoding="utf-8")
    (model / "README.md").write_text(_card(config, policy), encoding="utf-8")
    # last of all and in one move: a model folder is whole, or is not there
    model.replace(output)
    return _result(output, record, reused=False)


def _finished(config: SftConfig, output: Path) -> SftResult | None:
    """The model that is in ``output``, None if there is nothing."""
    if made_model(config, output) is None:
        return None
    record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    return _result(output, record, reused=True)


def made_model(config: SftConfig, output: Path) -> Path | None:
    """``output`` where it holds the recipe's model, None where there is nothing yet.

    Raises:
        ValueError: it holds something else, or unfinished work of another recipe lies beside it.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        claim = _partial(output) / "recipe_hash"
        if claim.is_file():
            _check_hash(config, claim.parent, claim.read_text(encoding="utf-8").strip())
        return None
    record_file = output / RECORD
    if not record_file.is_file():
        raise ValueError(f"{output} exists and was not made by `magicrl sft`; pass another --output or delete it")
    record = json.loads(record_file.read_text(encoding="utf-8"))
    _check_hash(config, output, str(record.get("recipe_hash")))
    return output


def _check_hash(config: SftConfig, folder: Path, found: str) -> None:
    wanted = recipe_hash(config)
    if found != wanted:
        raise ValueError(
            f"{folder} belongs to another supervised recipe (hash {found}, this one is {wanted}); "
            "pass another --output or delete that folder"
        )


def start_policy(config: SftConfig, output: Path) -> LoadedModel:
    """The float32 model that training towards ``output`` starts from."""
    device = resolve_device(config.run.device)
    if config.model.tiny is not None:
        model, tokenizer = make_tiny(config.model.tiny, vocabulary(config.phases), config.run.seed)
        model.to(device)  # pyright: ignore[reportArgumentType]
        return describe_policy(model, tokenizer, folder="tiny")
    if config.model.gguf_package is not None:
        folder = prepare_gguf_package(config.model.gguf_package, output.with_name(config.model.gguf_package))
        return load_policy(folder, dtype="float32", device=device)
    assert config.model.folder is not None, "the schema asks for one"
    return load_policy(config.model.folder, dtype="float32", device=device)


def _train(
    config: SftConfig,
    policy: LoadedModel,
    partial: Path,
    writer: CheckpointWriter,
    on_step: OnStep | None,
    checkpoint_seconds: float,
) -> tuple[_Journal, LocalLearner]:
    """All phases, from the last checkpoint where there is one."""
    journal, restored = _resume(partial)
    learner = _learner(config, policy)
    if restored is not None:
        learner.restore(restored)
    total = sum(phase.steps for phase in config.phases)
    began = saved = time.monotonic()
    before = journal.seconds
    # from the last phase that was begun, which goes on where its losses end
    for number in range(max(0, len(journal.losses) - 1), len(config.phases)):
        if number == len(journal.losses):
            # they belong to other data and another rate
            _forget_moments(learner)
            journal.losses.append([])
        phase = config.phases[number]
        first = len(journal.losses[-1])
        rates = phase_schedule(
            phase.learning_rate, steps=phase.steps, warmup_steps=phase.warmup_steps, decay=phase.decay
        )
        for step in supervised_steps(learner, demonstrations(config, number, policy, first), rates, first=first):
            writer.check()
            now = time.monotonic()
            journal.losses[-1].append(step.loss)
            journal.tokens += step.tokens
            # of all attempts together
            journal.seconds = before + now - began
            if on_step is not None:
                on_step(journal.steps, total)
            if now - saved >= checkpoint_seconds:
                tensors, rest = split_state("learner", learner.state())
                state = {"learner": rest, "journal": asdict(journal)}
                writer.begin(Checkpoint(step=journal.steps, tensors=tensors, state=state), keep_last=1)
                saved = time.monotonic()
    return journal, learner


def _learner(config: SftConfig, policy: LoadedModel) -> LocalLearner:
    return LocalLearner(
        policy.model,
        LearnerSettings(algorithm=SUPERVISED, optimizer=config.optimizer, model=config.training),
        tokenizer=policy.tokenizer,
        valid_vocab=policy.valid_vocab,
    )


def _forget_moments(learner: LocalLearner) -> None:
    """Begin anew with AdamW: weights stay, moments and their step count go."""
    weights = {name: tensor for name, tensor in learner.state().items() if name.startswith("weights/")}
    learner.restore({**weights, "meta": {"optimizer_steps": 0}})


def _resume(partial: Path) -> tuple[_Journal, dict[str, Any] | None]:
    """What an interrupted run had done and its learner's state; a fresh journal and None without one."""
    checkpoint = load_latest(partial)
    if checkpoint is None:
        return _Journal(), None
    learner = join_state("learner", checkpoint.tensors, checkpoint.state["learner"])
    return _Journal(**checkpoint.state["journal"]), learner


def _record(config: SftConfig, journal: _Journal, policy: LoadedModel) -> dict[str, Any]:
    """What ``sft.json`` says: enough to make the model again and to see how it went."""
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe_hash": recipe_hash(config),
        "recipe": config.model_dump(mode="json"),
        "started_from": policy.folder,
        "losses": journal.losses,
        "tokens": journal.tokens,
        "seconds": round(journal.seconds, 1),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
    }


def _card(config: SftConfig, policy: LoadedModel) -> str:
    """A model card that passes the start model's licence on."""
    licence = policy.licence or ("apache-2.0" if config.model.tiny is not None else "unknown")
    shown = ", ".join(dict.fromkeys(described(phase) for phase in config.phases))
    head = front_matter(licence=licence, base=read_base_model(Path(policy.folder)), tags=("sft",))
    return (
        f"{head}\n# {config.run.name}\n\nMade by `magicrl sft` from {policy.folder} with "
        f"{shown}. `recipe.toml` is the whole recipe, `{RECORD}` what happened.\n"
    )


def _result(folder: Path, record: dict[str, Any], *, reused: bool) -> SftResult:
    return SftResult(
        folder=folder,
        reused=reused,
        losses=tuple(tuple(float(x) for x in phase) for phase in record["losses"]),
        tokens=int(record["tokens"]),
        seconds=float(record["seconds"]),
    )


@contextmanager
def _threads(wanted: int | None) -> Generator[None]:
    """Use the recipe's number of torch threads, if it names one, and then the former number again."""
    former = torch.get_num_threads()
    torch.set_num_threads(wanted or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)
