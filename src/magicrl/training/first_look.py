"""How a model answers a few of one's problems: asked in several ways, read in both, before a recipe is written."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magicrl.config.schema import ModelConfig, VerifierConfig
from magicrl.evaluation.engines import in_process_engine
from magicrl.evaluation.sampling import JudgedGroup, sample_problems
from magicrl.models.loading import LoadedModel
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, RolloutRequest, SamplingParams
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.diagnosis import Judging, SampledAnswers, answers_of
from magicrl.training.learner import LocalLearner
from magicrl.training.protocols import Controls
from magicrl.training.supervised import supervised_sample
from magicrl.verifiers.base import Extract, Reasoning
from magicrl.verifiers.pool import VerifierPool

SAMPLES = 4
"""Answers a problem and way of asking, at temperature 1."""
SECONDS_A_WAY = 15.0
"""That a way of asking may take, about."""
FULLER = 2.5
"""A token of all answers takes so much longer than one of eight."""
LEAST_LIMIT, FIRST_LIMIT = 64, 256
MAX_ROWS, CACHE_MB = 64, 2048
BOXED = "{prompt}\n\nPut the final answer in \\boxed{}."
STEPWISE = "{prompt}\n\nThink step by step, briefly, and put the final answer in \\boxed{}."
QUESTION = "Question: {prompt}\nAnswer:"
QUESTION_BOXED = "Question: {prompt}\nThink step by step and put the final answer in \\boxed{}.\nAnswer:"
READS: tuple[Extract, ...] = ("box", "lenient")
BOX_WORTH = 0.8
"""Reading boxes alone is taken where it gives at least this share of the signal: a box cannot be hit by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way of asking and of reading the answer: ``data.train.template`` and ``verifier.extract``."""

    template: str
    extract: Extract


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What came of one way.

    Attributes:
        way: of asking and reading.
        answers: at temperature 1.
        per_problem: share of right answers of each problem.
        lengths: tokens of the answers that ended by themselves, ascending.
        example: an answer's text.
    """

    way: Way
    answers: SampledAnswers
    per_problem: tuple[float, ...]
    lengths: tuple[int, ...]
    example: str

    @property
    def signal(self) -> float:
        """What ways are compared by: groups with differing rewards, and right answers where these are as many."""
        worth = 1.0 if self.way.extract == "box" else BOX_WORTH
        return worth * (self.answers.mixed + 0.1 * self.answers.correct)

    def length(self, quantile: float) -> int:
        """A quantile of the lengths; T where no answer ended."""
        return int(np.quantile(self.lengths, quantile)) if self.lengths else self.answers.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What was measured on this machine.

    Attributes:
        sampled: tokens a second of the in-process engine with its rows full.
        learned: prompt and response tokens a second of a forward and backward pass.
    """

    sampled: float
    learned: float


def templates_for(problem: Problem, encoder: PromptEncoder, *, chat: bool) -> tuple[str, ...]:
    """Ways of asking that are worth a try and that the tokenizer has words for: the prompt alone first."""
    hints = () if problem.verifier == "code" else (BOXED, STEPWISE) if chat else (QUESTION, QUESTION_BOXED)

    def known(template: str) -> bool:
        try:
            encoder.encode(asked(problem, template))
        except ValueError:
            return False
        return True

    return ("{prompt}", *filter(known, hints))


def asked(problem: Problem, template: str) -> Problem:
    """The problem with the text around its prompt."""
    return dataclasses.replace(problem, prompt=template.replace("{prompt}", problem.prompt))


class FirstLook:
    """Samples and judges with one engine.

    Args:
        policy: the model, which is the engine's from here on.
        encoder: its prompts.
        reasoning: what an unfinished ``<think>`` means.
        verifier: of the problems.
    """

    def __init__(self, policy: LoadedModel, encoder: PromptEncoder, reasoning: Reasoning, verifier: str) -> None:
        self._encoder = encoder
        self._reasoning: Reasoning = reasoning
        self.engine: InProcessEngine = in_process_engine(
            policy, encoder.decode, max_rows=MAX_ROWS, memory_limit_mb=CACHE_MB, device=policy.model.device
        )
        self.engine.load_weights(dict(policy.model.named_parameters()), 0)
        self._judges = {
            extract: VerifierPool.from_config(VerifierConfig(extract=extract, reasoning=reasoning)) for extract in READS
        }
        for judge in self._judges.values():
            judge.warm_up({verifier})
        self.tokens, self.seconds = 0, 0.0

    def affordable_limit(self, problem: Problem) -> int:
        """T of a first look: what a way of asking may take, at the pace of a few tokens of a few answers."""
        sampling = SamplingParams(temperature=1.0, max_tokens=8)
        tokens = self._encoder.encode(problem)
        for turns in (1, 8):  # the first pass sets things up
            sampling = dataclasses.replace(sampling, max_tokens=turns)
            began = time.perf_counter()
            self.engine.submit(
                [RolloutRequest(draw=0, problem=problem, prompt_tokens=tokens, group_size=8, sampling=sampling)]
            )
            list(self.engine.finished())
        a_turn = FULLER * (time.perf_counter() - began) / 8  # pyright: ignore[reportPossiblyUnboundVariable]
        return max(LEAST_LIMIT, min(FIRST_LIMIT, 32 * int(SECONDS_A_WAY / a_turn / 32)))

    def ask(
        self,
        problems: Sequence[Problem],
        template: str,
        *,
        max_tokens: int,
        temperature: float = 1.0,
    ) -> list[Look]:
        """One way of asking, read in both ways (once for code); ``SAMPLES`` answers a problem, one at temperature 0."""
        began = time.perf_counter()
        boxed = sample_problems(
            self.engine,
            self._judges["box"],
            [asked(problem, template) for problem in problems],
            self._encoder.encode,
            samples=SAMPLES if temperature else 1,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=0,
        )
        self.seconds += time.perf_counter() - began
        self.tokens += sum(group.group.num_tokens for group in boxed)
        read = {"box": boxed, "lenient": self._read_again(boxed)}
        return [self._look(Way(template=template, extract=extract), read[extract], max_tokens) for extract in READS]

    def _read_again(self, groups: Sequence[JudgedGroup]) -> list[JudgedGroup]:
        judge = self._judges["lenient"]
        tickets = [judge.submit(g.group.request.problem, [c.text for c in g.group.completions]) for g in groups]
        pairs = zip(groups, tickets, strict=True)
        return [JudgedGroup(group=g.group, verdicts=judge.result(ticket)) for g, ticket in pairs]

    def close(self) -> None:
        """Free the cache and end the judges."""
        self.engine.close()
        for judge in self._judges.values():
            judge.close()

    def _look(self, way: Way, groups: Sequence[JudgedGroup], max_tokens: int) -> Look:
        code = all(g.group.request.problem.verifier == "code" for g in groups)
        judging = Judging() if code else Judging(way.extract, self._reasoning)
        ended = sorted(len(c) for g in groups for c in g.group.completions if not c.truncated)
        return Look(
            way=way,
            answers=answers_of(groups, max_tokens=max_tokens, judging=judging),
            per_problem=tuple(float(g.correct[g.counted].mean()) for g in groups if g.counted.any()),
            lengths=tuple(ended),
            example=groups[0].group.completions[0].text,
        )


def learning_speed(
    policy: LoadedModel, model: ModelConfig, encoder: PromptEncoder, problems: Sequence[Problem]
) -> float:
    """Tokens a second of a forward and backward pass over prompts and answers of a usual length.

    Args:
        policy: the model in float32; it is the learner's from here on.
        model: precision and micro-batches.
        encoder: its prompts.
        problems: whose prompts are taken.
    """
    learner = LocalLearner(policy.model, valid_vocab=policy.valid_vocab, loss="nll", model_config=model)
    prompts = [encoder.encode(problem) for problem in problems[:4]]
    samples = [supervised_sample(prompt, np.resize(prompt, 96), index) for index, prompt in enumerate(prompts)]
    weights = np.full(len(samples), 1e-3)
    seconds = 0.0
    for _ in range(2):  # the first pass also sets things up
        began = time.perf_counter()
        learner.accumulate(samples, torch.from_numpy(weights), Controls())
        seconds = time.perf_counter() - began
    return sum(len(sample) for sample in samples) / seconds
