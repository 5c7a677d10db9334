"""What a supervised phase shows: demonstrations of a generated family, or worked solutions of one's own problems."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import SftConfig, SftPhaseConfig
from magicrl.data.families import make_family
from magicrl.data.sources import held_out_keys, load_source
from magicrl.evaluation.engines import opens_reasoning
from magicrl.models.loading import LoadedModel
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, TokenArray, TrainSample, frozen_floats, frozen_tokens
from magicrl_verifiers.extraction import CLOSE_TAG, last_box

_log = logging.getLogger(__name__)


def supervised_sample(
    prompt_tokens: TokenArray, response_tokens: TokenArray, index: int, taught: NDArray[np.bool_] | None = None
) -> TrainSample:
    """A sample for the ``nll`` row: advantage 1, its own group, the ``taught`` tokens in the loss (None: all)."""
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
    """The response of an episode, ``[T]``, and which of its tokens the model would have written.

    Args:
        encoder: of the model.
        problem: with the environment that takes part.
        texts: turn, observation, turn, ..., turn.

    Raises:
        ValueError: the texts end in an observation, or the vocabulary lacks a symbol.
    """
    if len(texts) % 2 == 0:
        raise ValueError(
            f"problem {problem.id!r}: its demonstration has {len(texts)} texts; give turn, observation, turn, ..., "
            "turn, an odd number"
        )
    pieces = [
        encoder.observation(problem, text) if place % 2 else encoder.encode_response(text)
        for place, text in enumerate(texts)
    ]
    taught = np.repeat(np.arange(len(pieces)) % 2 == 0, [len(piece) for piece in pieces])
    return frozen_tokens(np.concatenate(pieces)), taught


def demonstrations(config: SftConfig, number: int, policy: LoadedModel, first: int = 0) -> Iterator[list[TrainSample]]:
    """The batches of phase ``number`` from step ``first`` on, the same whatever ``first`` was.

    Raises:
        RecipeError: the phase's data cannot be read, or has no worked solution to show.
        ValueError: a demonstration of a family is longer than the model's context.
    """
    phase = config.phases[number]
    if phase.data is None:
        return _of_family(config, number, policy, first)
    return _of_solutions(config, number, encoded_solutions(phase, policy, number), first)


def trial_batches(config: SftConfig, policy: LoadedModel) -> list[list[TrainSample]]:
    """The first batch of every phase, with the longest of its worked solutions: what a phase cannot do shows there."""
    batches: list[list[TrainSample]] = []
    for number, phase in enumerate(config.phases):
        if phase.data is None:
            batches.append(next(demonstrations(config, number, policy)))
            continue
        shown = encoded_solutions(phase, policy, number)
        longest = max((sample for samples in shown for sample in samples), key=len)
        # the longest in the place of another: the batch is as large as the phase's are
        batches.append([longest, *next(_of_solutions(config, number, shown, 0))[1:]])
    return batches


def demonstrated_keys(config: SftConfig) -> set[str]:
    """Keys of the recorded problems whose solutions the recipe shows."""
    own = (number for number, phase in enumerate(config.phases) if phase.data is not None)
    return {problem.key for number in own for problem, _ in worked_solutions(config.phases[number], number)}


def vocabulary(phases: Sequence[SftPhaseConfig]) -> list[str]:
    """Every symbol of the phases' families, each once, in order of appearance.

    Raises:
        ValueError: a phase shows natural language.
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


def described(phase: SftPhaseConfig) -> str:
    """What the phase shows, for a model card."""
    if phase.data is None:
        return f"demonstrations of {phase.family}"
    place = phase.data.hub or phase.data.source or Path(str(phase.data.path)).name
    return f"worked solutions of {place}"


def named_by_content(phase: SftPhaseConfig) -> SftPhaseConfig:
    """The phase with the SHA-256 of its file, or of a folder's files, in the path's place: a moved file is the same
    data, a changed one is not. What is not there keeps its path, and is refused when it is read."""
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
    assert phase.family is not None, "the caller chose"
    family = make_family(phase.family, phase.options)
    # of the phase: two phases of one family are to show different problems
    seed = int(np.random.SeedSequence([config.run.seed, number]).generate_state(1)[0])
    # one stream: what the steps before showed is drawn again and left out
    problems = islice(family.stream(seed=seed, split="train", levels=phase.levels), first * phase.batch_size, None)
    for step in range(first, phase.steps):
        # of the step alone, so that a phase that is resumed shows what it would have shown
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
    """Passes over the problems, each in an order of its own; a problem's solutions take turns from pass to pass."""
    phase = config.phases[number]
    orders: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = {}
    for step in range(first, phase.steps):
        batch: list[TrainSample] = []
        for index in range(phase.batch_size):
            turn, place = divmod(step * phase.batch_size + index, len(shown))
            if turn not in orders:  # a batch spans two passes at most times, so few orders are kept
                orders = {turn - 1: orders[turn - 1]} if turn - 1 in orders else {}
                orders[turn] = np.random.default_rng([config.run.seed, number, turn]).permutation(len(shown))
            samples = shown[int(orders[turn][place])]
            batch.append(replace(samples[turn % len(samples)], group_index=index))
        yield batch


def encoded_solutions(phase: SftPhaseConfig, policy: LoadedModel, number: int = 0) -> list[tuple[TrainSample, ...]]:
    """The samples of every problem that is shown; solutions that the context cannot hold are left out and counted.

    Raises:
        RecipeError: as `worked_solutions`, or no solution fits.
        ValueError: the vocabulary lacks a symbol of a prompt or a solution.
    """
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    shown: list[tuple[TrainSample, ...]] = []
    whole = 0
    # where the prompt ends in an opened <think>, what is shown has to close it
    reasoning = opens_reasoning(policy.tokenizer, encoder)
    for problem, texts in worked_solutions(phase, number):
        whole += len(texts)
        if not encoder.fits(problem):
            continue
        prompt = encoder.encode(problem)
        responses = (encoder.encode_response(as_response(text, problem, reasoning=reasoning)) for text in texts)
        samples = [supervised_sample(prompt, response, 0) for response in responses]
        fitting = tuple(sample for sample in samples if len(sample) <= policy.max_context)
        if fitting:
            shown.append(fitting)
    kept = sum(map(len, shown))
    if not kept:
        raise RecipeError(
            f"none of its {whole} worked solutions fits the context of {policy.folder} ({policy.max_context} tokens) "
            "beside its prompt; use shorter solutions or another model",
            key=f"phases.{number}.data",
        )
    if kept < whole:
        text = "phases.%d.data: %d of %d worked solutions exceed the context of %d tokens and are left out"
        _log.warning(text, number, whole - kept, whole, policy.max_context)
    return shown


def worked_solutions(phase: SftPhaseConfig, number: int = 0) -> list[tuple[Problem, tuple[str, ...]]]:
    """The problems that a phase's data shows, each with its solutions as the source has them.

    Args:
        phase: with ``data``.
        number: of the phase, for errors.

    Raises:
        RecipeError: no such place, or no problem in it has a worked solution.
        ValueError: the content of a record is wrong.
    """
    assert phase.data is not None, "the caller chose"
    key = f"phases.{number}.data"
    with under(key):
        loaded = load_source(phase.data, key=key)
    # by key, so that `data.holdout` of the run means the same problems
    held = held_out_keys(loaded.problems, phase.holdout)
    shown = [
        (problem, loaded.solutions[problem.id])
        for problem in loaded.problems
        if problem.id in loaded.solutions and problem.key not in held
    ]
    if not shown:
        raise RecipeError(
            f"none of its {len(loaded.problems)} problems has a worked solution"
            + (f" beside the {phase.holdout} held out" if phase.holdout else "")
            + "; a solution stands in a column solution, or ends in the answer, after #### or in a box (docs/data.md)",
            key=key,
        )
    return shown


_CALCULATION = re.compile(r"<<[^<>]*>>")
_ANSWER_LINE = re.compile(r"(?:^|\n)####[^\n]*\s*\Z")


def as_response(solution: str, problem: Problem, *, reasoning: bool = False) -> str:
    """A worked solution as the verifier can read it: a program in a block, else a text that ends in a boxed answer.

    GSM8K's notes for a calculator (``<<2+3=5>>``) and its last line (``#### 5``) are taken out.

    Args:
        solution: as its source has it.
        problem: that it solves.
        reasoning: the prompt ends in an opened ``<think>``: the solution is the reasoning, closed before the answer.

    Example:
        >>> sum_ = Problem(id="s", prompt="2 + 3?", references=("5",), verifier="maths", source="doc")
        >>> as_response("Add: 2 + 3 = <<2+3=5>>5\\n#### 5", sum_)
        'Add: 2 + 3 = 5\\nThe answer is \\\\boxed{5}.'
    """
    if problem.verifier == "code":
        program = solution if "```" in solution else f"```python\n{solution.strip()}\n```"
        return f"{CLOSE_TAG}\n\n{program}" if reasoning else program
    text = _ANSWER_LINE.sub("", _CALCULATION.sub("", solution)).strip()
    # written as a reasoning model answers already, or without a reference answer to put into a box
    if CLOSE_TAG in text or not problem.references:
        return text
    boxed = last_box(text) is not None
    if not reasoning and boxed:
        return text
    # of several reference answers any one is right; the box of a solution says which one it reached
    reference = last_box(text) if boxed else problem.references[0]
    between = f"{CLOSE_TAG}\n\n" if reasoning else ""
    return f"{text}\n{between}The answer is \\boxed{{{reference}}}."
