"""Supervised fine-tuning: the initial model of a run, from a recorded recipe.

A supervised step uses the learner of reinforcement learning with the loss row ``nll``: the mean negative log-likelihood
of the response tokens, including the end token. Prompts carry no loss.

A recipe has phases, each with its demonstrations and learning rate: demonstrations of a generated family, or worked
solutions of the user's problems. Every phase starts with new optimizer moments, since those of the previous one belong
to other data and another rate. Randomness is a function of (seed, phase, step), so that a run killed at any time
continues from its last checkpoint to the same weights, bit for bit on the same machine, versions and thread count.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.loader import config_hash, load_start_recipe, to_toml
from magicrl.config.schema import RunConfig, StartConfig
from magicrl.config.sft_schema import SftConfig, SftPhaseConfig
from magicrl.data.families import make_family
from magicrl.data.sources import held_out_keys, load_source
from magicrl.evaluation.engines import opens_reasoning
from magicrl.files import only_writer, write_atomically
from magicrl.models.loading import LoadedModel, describe_policy, load_policy, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_tiny, prepare_gguf_package
from magicrl.records import Problem, TokenArray, TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.checkpoint import Checkpoint, CheckpointWriter, join_state, load_latest, split_state
from magicrl.training.learner import LocalLearner, release_free_memory
from magicrl.training.model_card import front_matter, read_base_model
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls, Learner
from magicrl_verifiers.extraction import AFTER_HASHES, CLOSE_TAG, last_box

_log = logging.getLogger(__name__)

SUPERVISED = AlgorithmConfig(loss="nll")
"""``algorithm`` section of a supervised learner."""


def supervised_steps(
    learner: Learner, batches: Iterable[Sequence[TrainSample]], schedule: Callable[[int], float], *, first: int = 0
) -> Iterator[tuple[float, int]]:
    """Make one update per batch, whatever the samples' source (demonstrations, a model's own correct responses).

    Yields the loss before each update in nats per response token, and the prompt and response tokens of its batch.

    Args:
        learner: Learner with the loss row ``nll``.
        batches: Samples of each step.
        schedule: Returns the learning rate of step ``i``.
        first: Number of the first step, if an interrupted run continues.

    Raises:
        FloatingPointError: A loss or gradient is not finite.
    """
    for index, samples in enumerate(batches, start=first):
        metrics = learner.update(TrainBatch.of(samples), Controls(learning_rate=schedule(index)))
        release_free_memory()
        yield float(metrics["loss"]), sum(len(sample) for sample in samples)


def phase_schedule(
    rate: float, *, steps: int, warmup_steps: int, decay: Literal["constant", "linear", "cosine"]
) -> Callable[[int], float]:
    """Return the learning rate by step, from 0 to ``steps - 1``: warm-up to ``rate``, then decay to a tenth of it.

    Example:
        >>> at = phase_schedule(1.0, steps=5, warmup_steps=2, decay="linear")
        >>> [round(at(i), 3) for i in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    def at(step: int) -> float:
        if step < warmup_steps:
            # + 1: the first step must not have rate 0.
            return rate * (step + 1) / warmup_steps
        if decay == "constant":
            return rate
        # - 1: the last step has a tenth of the rate.
        gone = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps - 1))
        left = 1 - gone if decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return rate * (0.1 + 0.9 * left)

    return at


RECORD = "sft.json"
SCHEMA_VERSION = 1
_PACKAGES = ("magicrl", "torch", "transformers", "tokenizers", "numpy")


OnStep = Callable[[int, int], None]
"""Called after each step with the number of finished steps and of all steps of the recipe."""


def recipe_hash(config: SftConfig) -> str:
    """Return a hash of what decides the weights: everything but the run's name, output, device and threads."""
    phases = tuple(named_by_content(phase) for phase in config.phases)
    return config_hash(config.model_copy(update={"run": RunConfig(seed=config.run.seed), "phases": phases}))


def supervised_start(start: StartConfig, models_root: Path) -> tuple[SftConfig, Path]:
    """Return the supervised recipe of a run's start, and the folder in ``models_root`` of the model that it trains.

    The folder has the recipe's name, so that another file can name the model. If another recipe's model has that name
    already, the recipe's hash is appended.

    Raises:
        RecipeError: The recipe cannot be read.
    """
    assert start.sft is not None, "the start is a supervised recipe"
    try:
        recipe = load_start_recipe(start.sft)
    except RecipeError as error:
        raise RecipeError(str(error), key="start.sft") from error
    named = models_root / recipe.run.name
    hashed = models_root / f"{recipe.run.name}-{recipe_hash(recipe)}"
    # A recipe that started under its longer name keeps it.
    begun = hashed.exists() or _partial(hashed).exists()
    if not begun:
        try:
            finished_model(recipe, named)
        except ValueError:  # a model, or unfinished work, of something else than this recipe
            begun = True
    return recipe, hashed if begun else named


def _partial(output: Path) -> Path:
    """Return the folder of the unfinished work for ``output``."""
    return output.with_name(f"{output.name}.partial")


_CHECKPOINT_SECONDS = 120.0  # between checkpoints; changes no result


def run_sft(config: SftConfig, output: Path, on_step: OnStep | None = None) -> Path:
    """Train the recipe's model into ``output``: a complete model folder with ``sft.json``, or nothing.

    A model that the same recipe trained there is reused. Unfinished work is in ``<output>.partial`` next to it, from
    which an interrupted run continues.

    Args:
        config: The recipe.
        output: Model folder to write.
        on_step: Progress callback.

    Returns:
        ``output``.

    Raises:
        ValueError: The output holds another recipe's model or something else, a family is unknown, a demonstration
            exceeds the model's context, or the initial model is missing.
    """
    partial = _partial(output)
    if finished_model(config, output) is None:
        with only_writer(partial, wait=True):  # of several runs with the same initial model, one trains it
            # Checked again inside: another process may have trained it in the meantime.
            if finished_model(config, output) is None:
                _make(config, output, partial, on_step)
    # Also removes what a process left that was killed after its last move.
    shutil.rmtree(partial, ignore_errors=True)
    return output


def _make(
    config: SftConfig,
    output: Path,
    partial: Path,
    on_step: OnStep | None,
) -> None:
    write_atomically(partial / "recipe_hash", recipe_hash(config))  # claims the folder, as `finished_model` allowed
    former = torch.get_num_threads()
    torch.set_num_threads(config.run.threads or former)
    try:
        policy = start_policy(config, output)
        with CheckpointWriter(partial) as writer:
            journal, learner = _train(config, policy, partial, writer, on_step)
        # What is needed to reproduce the model, and how training went.
        record = {
            "schema_version": SCHEMA_VERSION,
            "recipe_hash": recipe_hash(config),
            "recipe": config.model_dump(mode="json"),
            "started_from": policy.folder,
            "losses": journal["losses"],
            "tokens": journal["tokens"],
            "seconds": round(journal["seconds"], 1),
            "threads": torch.get_num_threads(),
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in _PACKAGES},
            },
        }
        model = partial / "model"
        learner.save_hf(model)
    finally:
        torch.set_num_threads(former)
    # Written before the folder gets its name: a model without its record counts as foreign.
    (model / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    (model / "recipe.toml").write_text(to_toml(config, output.absolute()), encoding="utf-8")
    licence = policy.licence or ("apache-2.0" if config.model.tiny is not None else "unknown")
    shown = ", ".join(dict.fromkeys(phase_title(phase) for phase in config.phases))
    head = front_matter(licence=licence, base=read_base_model(Path(policy.folder)), tags=("sft",))
    card = (
        f"{head}\n# {config.run.name}\n\nMade by `magicrl sft` from {policy.folder} with "
        f"{shown}. `recipe.toml` is the whole recipe, `{RECORD}` the record of its training.\n"
    )
    (model / "README.md").write_text(card, encoding="utf-8")
    # Last and in one move: a model folder is complete or absent.
    model.replace(output)


def finished_model(config: SftConfig, output: Path) -> Path | None:
    """Return ``output`` if it holds the recipe's model, None if there is nothing yet.

    Raises:
        ValueError: It holds something else, or unfinished work of another recipe is next to it.
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
    """Return the float32 model that training towards ``output`` starts from."""
    device = resolve_device(config.run.device)
    if config.model.tiny is not None:
        model, tokenizer = make_tiny(config.model.tiny, vocabulary(config.phases), config.run.seed)
        model.to(device)  # pyright: ignore[reportArgumentType]
        return describe_policy(model, tokenizer, folder="tiny")
    if config.model.gguf_package is not None:
        folder = prepare_gguf_package(config.model.gguf_package, output.with_name(config.model.gguf_package))
        return load_policy(folder, dtype="float32", device=device)
    assert config.model.folder is not None, "the schema requires one of the three"
    return load_policy(config.model.folder, dtype="float32", device=device)


def _train(
    config: SftConfig,
    policy: LoadedModel,
    partial: Path,
    writer: CheckpointWriter,
    on_step: OnStep | None,
) -> tuple[dict[str, Any], LocalLearner]:
    """Train all phases, from the last checkpoint if there is one. Returns losses by phase, tokens and seconds."""
    learner = LocalLearner(
        policy.model,
        LearnerSettings(algorithm=SUPERVISED, optimizer=config.optimizer, model=config.training),
        tokenizer=policy.tokenizer,
        valid_vocab=policy.valid_vocab,
    )
    journal: dict[str, Any] = {"losses": [], "tokens": 0, "seconds": 0.0}  # of all attempts
    checkpoint = load_latest(partial)
    if checkpoint is not None:
        journal = checkpoint.state["journal"]
        learner.restore(join_state("learner", checkpoint.tensors, checkpoint.state["learner"]))
    losses: list[list[float]] = journal["losses"]
    before, total = journal["seconds"], sum(phase.steps for phase in config.phases)
    began = saved = time.monotonic()
    # Start with the last phase in progress, after its recorded losses.
    for number in range(max(0, len(losses) - 1), len(config.phases)):
        if number == len(losses):
            # Reset AdamW but keep the weights: the moments belong to other data and another rate.
            weights = {name: tensor for name, tensor in learner.state().items() if name.startswith("weights/")}
            learner.restore({**weights, "meta": {"optimizer_steps": 0}})
            losses.append([])
        phase = config.phases[number]
        first = len(losses[-1])
        rates = phase_schedule(
            phase.learning_rate, steps=phase.steps, warmup_steps=phase.warmup_steps, decay=phase.decay
        )
        for loss, count in supervised_steps(learner, demonstrations(config, number, policy, first), rates, first=first):
            writer.check()
            now = time.monotonic()
            losses[-1].append(loss)
            journal |= {"tokens": journal["tokens"] + count, "seconds": before + now - began}
            done = sum(map(len, losses))
            if on_step is not None:
                on_step(done, total)
            if now - saved >= _CHECKPOINT_SECONDS:
                tensors, rest = split_state("learner", learner.state())
                state = {"learner": rest, "journal": journal}
                writer.begin(Checkpoint(step=done, tensors=tensors, state=state), keep_last=1)
                saved = time.monotonic()
    return journal, learner


def supervised_sample(
    prompt_tokens: TokenArray, response_tokens: TokenArray, index: int, taught: NDArray[np.bool_] | None = None
) -> TrainSample:
    """Return a sample for the ``nll`` row: advantage 1, its own group, loss on the ``taught`` tokens (None: all)."""
    return TrainSample(
        prompt_tokens=prompt_tokens,
        tokens=response_tokens,
        advantage=1.0,
        group_index=index,
        sample_index=0,
        sampler_logprobs=frozen_floats(np.zeros(len(response_tokens))),
        policy_version=0,
        loss_mask=taught,
    )


def encoded_turns(
    encoder: PromptEncoder, problem: Problem, texts: Sequence[str]
) -> tuple[TokenArray, NDArray[np.bool_]]:
    """Return the response of an episode, ``[T]``, and a mask of the tokens that the model would have written.

    Args:
        encoder: Encoder of the model.
        problem: Problem with the environment of the episode.
        texts: Turn, observation, turn, ..., turn.

    Raises:
        ValueError: The texts end in an observation, or the vocabulary lacks a symbol.
    """
    if len(texts) % 2 == 0:
        raise ValueError(
            f"problem {problem.id!r}: its demonstration has {len(texts)} texts; pass turn, observation, turn, ..., "
            "turn, an odd number"
        )
    pieces = [
        encoder.observation(problem, text) if place % 2 else encoder.encode_response(text)
        for place, text in enumerate(texts)
    ]
    taught = np.repeat(np.arange(len(pieces)) % 2 == 0, [len(piece) for piece in pieces])
    return frozen_tokens(np.concatenate(pieces)), taught


def demonstrations(config: SftConfig, number: int, policy: LoadedModel, first: int = 0) -> Iterator[list[TrainSample]]:
    """Return the batches of phase ``number`` from step ``first`` on. They do not depend on ``first``.

    Raises:
        RecipeError: The phase's data cannot be read, or has no worked solution.
        ValueError: A demonstration of a family exceeds the model's context.
    """
    phase = config.phases[number]
    if phase.data is None:
        return _of_family(config, number, policy, first)
    return _of_solutions(config, number, encoded_solutions(phase, policy, number), first)


def trial_batches(config: SftConfig, policy: LoadedModel) -> list[list[TrainSample]]:
    """Return the first batch of every phase, with its longest worked solution, to find what a phase cannot do."""
    batches: list[list[TrainSample]] = []
    for number, phase in enumerate(config.phases):
        if phase.data is None:
            batches.append(next(demonstrations(config, number, policy)))
            continue
        shown = encoded_solutions(phase, policy, number)
        longest = max((sample for samples in shown for sample in samples), key=len)
        # The longest replaces another sample, so that the batch has the phase's size.
        batches.append([longest, *next(_of_solutions(config, number, shown, 0))[1:]])
    return batches


def demonstrated_keys(config: SftConfig) -> set[str]:
    """Return the keys of the problems whose recorded solutions the recipe trains on."""
    own = (number for number, phase in enumerate(config.phases) if phase.data is not None)
    return {problem.key for number in own for problem, _ in worked_solutions(config.phases[number], number)[0]}


def vocabulary(phases: Sequence[SftPhaseConfig]) -> list[str]:
    """Return every symbol of the phases' families once, in order of appearance.

    Raises:
        ValueError: A phase trains on natural language.
    """
    symbols: dict[str, None] = {}
    for phase in phases:
        known = None if phase.family is None else make_family(phase.family, phase.options).vocabulary
        if known is None:
            what = "data" if phase.family is None else f"family {phase.family!r}"
            raise ValueError(
                f"{what} is natural language and has no fixed vocabulary, which model.tiny needs; "
                "use model.folder or model.gguf_package"
            )
        symbols.update(dict.fromkeys(known))
    return list(symbols)


def phase_title(phase: SftPhaseConfig) -> str:
    """Return the phase's data in words, for a model card."""
    if phase.data is None:
        return f"demonstrations of {phase.family}"
    place = phase.data.hub or phase.data.source or Path(str(phase.data.path)).name
    return f"worked solutions of {place}"


def named_by_content(phase: SftPhaseConfig) -> SftPhaseConfig:
    """Return the phase with the SHA-256 of its file, or of a folder's files, in place of the path.

    A moved file is then the same data, a changed one is not. A missing path is kept, and refused when it is read.
    """
    if phase.data is None or phase.data.path is None:
        return phase
    path = Path(phase.data.path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(file.read_bytes())
    content = digest.hexdigest() if path.exists() else phase.data.path
    return phase.model_copy(update={"data": phase.data.model_copy(update={"path": content})})


def _of_family(config: SftConfig, number: int, policy: LoadedModel, first: int) -> Iterator[list[TrainSample]]:
    phase = config.phases[number]
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    assert phase.family is not None, "the caller checked"
    family = make_family(phase.family, phase.options)
    # A seed per phase: two phases of one family have different problems.
    seed = int(np.random.SeedSequence([config.run.seed, number]).generate_state(1)[0])
    # One stream: the problems of earlier steps are drawn again and skipped.
    problems = islice(family.stream(seed=seed, split="train", levels=phase.levels), first * phase.batch_size, None)
    for step in range(first, phase.steps):
        # A function of the step only, so that a resumed phase continues with the same demonstrations.
        rng = np.random.default_rng([config.run.seed, number, step])
        batch: list[TrainSample] = []
        for index, problem in enumerate(islice(problems, phase.batch_size)):
            shown = family.demonstration(problem, rng)
            if isinstance(shown, str):
                sample = supervised_sample(encoder.encode(problem), encoder.encode_response(shown), index)
            else:
                response, taught = encoded_turns(encoder, problem, shown)
                sample = supervised_sample(encoder.encode(problem), response, index, taught)
            if len(sample) > policy.max_context:
                raise ValueError(
                    f"problem {problem.id!r} and its demonstration have {len(sample)} tokens, more than the context "
                    f"of {policy.folder} ({policy.max_context}); raise model.tiny.max_context or shorten the "
                    "demonstrations"
                )
            batch.append(sample)
        yield batch


def _of_solutions(
    config: SftConfig, number: int, shown: Sequence[Sequence[TrainSample]], first: int
) -> Iterator[list[TrainSample]]:
    """Yield passes over the problems, each in its own order. A problem's solutions alternate from pass to pass."""
    phase = config.phases[number]

    @lru_cache(maxsize=2)  # A batch spans few passes.
    def order(turn: int) -> NDArray[np.int64]:
        return np.random.default_rng([config.run.seed, number, turn]).permutation(len(shown))

    for step in range(first, phase.steps):
        batch: list[TrainSample] = []
        for index in range(phase.batch_size):
            turn, place = divmod(step * phase.batch_size + index, len(shown))
            samples = shown[int(order(turn)[place])]
            batch.append(replace(samples[turn % len(samples)], group_index=index))
        yield batch


def encoded_solutions(phase: SftPhaseConfig, policy: LoadedModel, number: int = 0) -> list[tuple[TrainSample, ...]]:
    """Return the samples of every problem. Warnings count records without a solution and solutions above the context.

    Raises:
        RecipeError: As `worked_solutions`, or no solution fits.
        ValueError: The vocabulary lacks a symbol of a prompt or a solution.
    """
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    shown: list[tuple[TrainSample, ...]] = []
    whole = 0
    # If the prompt ends in an opened <think>, the solution must close it.
    reasoning = opens_reasoning(policy.tokenizer, encoder)
    solved, without = worked_solutions(phase, number)
    if without:
        text = "phases.%d.data: %d of %d records have no worked solution and are left out (the first: %s)"
        _log.warning(text, number, len(without), len(without) + len(solved), without[0])
    for problem, texts in solved:
        whole += len(texts)
        if not encoder.fits(problem):
            continue
        prompt = encoder.encode(problem)
        try:
            responses = [encoder.encode_response(as_response(text, problem, reasoning=reasoning)) for text in texts]
        except ValueError as error:
            reason = str(error).removeprefix("response: ")
            raise ValueError(
                f"phases.{number}.data: problem {problem.id!r}: its worked solution, with the boxed answer that is "
                f"added where it has none: {reason}"
            ) from None
        samples = [supervised_sample(prompt, response, 0) for response in responses]
        fitting = tuple(sample for sample in samples if len(sample) <= policy.max_context)
        if fitting:
            shown.append(fitting)
    kept = sum(map(len, shown))
    if not kept:
        raise RecipeError(
            f"none of its {whole} worked solutions fits the context of {policy.folder} ({policy.max_context} tokens) "
            "with its prompt; use shorter solutions or another model",
            key=f"phases.{number}.data",
        )
    if kept < whole:
        text = "phases.%d.data: %d of %d worked solutions exceed the context of %d tokens and are left out"
        _log.warning(text, number, whole - kept, whole, policy.max_context)
    return shown


def worked_solutions(phase: SftPhaseConfig, number: int = 0) -> tuple[list[tuple[Problem, tuple[str, ...]]], list[str]]:
    """Return the problems of a phase's data, each with its solutions as in the source, and which records have none.

    Args:
        phase: Phase with ``data``.
        number: Number of the phase, for errors.

    Raises:
        RecipeError: The source is missing, or no problem in it has a worked solution.
        ValueError: The content of a record is wrong.
    """
    assert phase.data is not None, "the caller checked"
    key = f"phases.{number}.data"
    with under(key):
        problems, set_aside, solutions = load_source(phase.data, key=key)
    # Chosen by key, so that `data.holdout` of the run holds out the same problems.
    held = held_out_keys(problems, phase.holdout)
    shown = [
        (problem, solutions[problem.id]) for problem in problems if problem.id in solutions and problem.key not in held
    ]
    if not shown:
        raise RecipeError(
            f"none of its {len(problems)} problems has a worked solution"
            + (f" except the {phase.holdout} held out" if phase.holdout else "")
            + "; a solution is in a column solution, or ends in the answer, after #### or in a box; with a reward "
            "function as verifier, any last assistant turn or completion is one (docs/start/own-data.md)",
            key=key,
        )
    without = [f"{where}: {reason}" for where, reason in set_aside]
    return shown, without + [problem.id for problem in problems if problem.id not in solutions]


_CALCULATION = re.compile(r"<<[^<>]*>>")


def as_response(solution: str, problem: Problem, *, reasoning: bool = False) -> str:
    """Return a worked solution that the verifier can read: a program in a block, or a text that ends in a boxed answer.

    GSM8K's notes for a calculator (``<<2+3=5>>``) and its last line (``#### 5``) are removed.

    Args:
        solution: Solution as in its source.
        problem: The problem that it solves.
        reasoning: Whether the prompt ends in an opened ``<think>``. The solution is then the reasoning, closed before
            the answer.

    Example:
        >>> sum_ = Problem(id="s", prompt="2 + 3?", references=("5",), verifier="maths", source="doc")
        >>> as_response("Add: 2 + 3 = <<2+3=5>>5\\n#### 5", sum_)
        'Add: 2 + 3 = 5\\nThe answer is \\\\boxed{5}.'
    """
    if problem.verifier == "code":
        program = solution if "```" in solution else f"```python\n{solution.strip()}\n```"
        return f"{CLOSE_TAG}\n\n{program}" if reasoning else program
    if solution in problem.references:  # of a custom reward: the whole response
        return f"{CLOSE_TAG}\n\n{solution}" if reasoning else solution
    text = AFTER_HASHES.sub("", _CALCULATION.sub("", solution)).strip()
    # Already written as a reasoning model answers, or without a reference answer to box.
    if CLOSE_TAG in text or not problem.references:
        return text
    boxed = last_box(text) is not None
    if not reasoning and boxed:
        return text
    # Any of several reference answers is correct. The solution's box says which one it reached.
    reference = last_box(text) if boxed else problem.references[0]
    between = f"{CLOSE_TAG}\n\n" if reasoning else ""
    return f"{text}\n{between}The answer is \\boxed{{{reference}}}."
