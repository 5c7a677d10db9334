"""What ``magicrl init`` computes: how a model answers a few problems, and a recipe from which it will learn.

Problems are asked in several ways and answers read in both, then every number of the recipe follows with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from magicrl.algorithms.advantages import score_group
from magicrl.config.schema import ModelConfig
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.job import sample_problems
from magicrl.models.loading import LoadedModel
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, RolloutRequest, SamplingParams, ScoredGroup
from magicrl.rollout.engines import in_process_engine
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.demonstrations import supervised_sample
from magicrl.training.diagnosis import Judging, SampledAnswers
from magicrl.training.learner import LocalLearner
from magicrl.training.metrics import answers_of
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls
from magicrl.training.sft import SUPERVISED
from magicrl_verifiers.records import Extract, Reasoning
from magicrl_verifiers.secrets import without_secrets

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


class Way(NamedTuple):
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


class Speed(NamedTuple):
    """Tokens a second on this machine: sampled with the engine's rows full, learned in a forward and backward pass."""

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
        # both at once: an answer is sampled once and read in two ways
        self._judges = {extract: VerifierConfig(extract=extract, reasoning=reasoning).pool() for extract in READS}
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

    def _read_again(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        judge = self._judges["lenient"]
        tickets = [judge.submit(g.group.request.problem, [c.text for c in g.group.completions]) for g in groups]
        pairs = zip(groups, tickets, strict=True)
        return [score_group(g.group, judge.result(ticket)) for g, ticket in pairs]

    def close(self) -> None:
        """Free the cache and end the judges."""
        self.engine.close()
        for judge in self._judges.values():
            judge.close()

    def _look(self, way: Way, groups: Sequence[ScoredGroup], max_tokens: int) -> Look:
        code = all(g.group.request.problem.verifier == "code" for g in groups)
        judging = Judging() if code else Judging(way.extract, self._reasoning)
        ended = sorted(c.num_sampled for g in groups for c in g.group.completions if not c.truncated)
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
    learner = LocalLearner(
        policy.model, LearnerSettings(algorithm=SUPERVISED, model=model), valid_vocab=policy.valid_vocab
    )
    prompts = [encoder.encode(problem) for problem in problems[:4]]
    # any tokens will do: the time depends on their number alone
    samples = [supervised_sample(prompt, np.resize(prompt, 96), index) for index, prompt in enumerate(prompts)]
    weights = np.full(len(samples), 1e-3)
    seconds = 0.0
    for _ in range(2):  # the first pass also sets things up
        began = time.perf_counter()
        learner.accumulate(samples, torch.from_numpy(weights), Controls())
        seconds = time.perf_counter() - began
    return sum(len(sample) for sample in samples) / seconds


TRAINING_SHARE, TEST_SHARE, FILTER_SHARE, START_SHARE = 0.7, 0.15, 0.15, 0.3
"""Of the time: the loop, the tests before and after, the filter before; of all of it, a supervised start."""
PASSES, LEAST_START_STEPS, START_BATCH = 3, 20, 8
"""A supervised start: most passes over the solutions, fewest steps, solutions a step."""
START_RATE = 10.0
"""Its learning rate, in the run's."""
FEW_STEPS = 10
LARGE = 1e9
SMALL = 5e6
"""Parameters: above, the report's entropy control; below, float32."""


class Setting(NamedTuple):
    """What is known before a recipe is proposed; names are as the recipe is to have them."""

    model: str
    data: str
    hub: bool
    """``data`` is a hub name, not a path."""
    columns: dict[str, str]
    """Of the prompt and the answer, where the user named them."""
    problems: Sequence[Problem]
    verifier: str | None
    """Where it is not what the problems' columns say."""
    parameters: int
    context: int
    prompt_lengths: Sequence[int]
    """Tokens of every prompt in the chosen way of asking, ascending."""
    reasoning: str
    minutes: float
    """That the run may take."""


class Proposal(NamedTuple):
    """A recipe, the seconds expected of one of its steps, the steps of all stages, and a supervised start's recipe."""

    text: str
    step_seconds: float
    steps: int
    start: str | None = None


class Solved(NamedTuple):
    """Worked solutions to start from."""

    recipe: str
    """How the training recipe names the supervised one."""
    problems: int
    """With a solution."""
    tokens: Sequence[int]
    """Of every solution, ascending."""
    why: str
    """The start is needed."""


def group_size(per_problem: Sequence[float]) -> tuple[int, float]:
    """M, and the share of groups that are expected to have answers of differing reward with it.

    8 where that gives half of the groups a signal, else 16. Each problem's chance is shrunk towards the mean of all,
    since a handful of samples tells little of one.
    """
    mean = sum(per_problem) / len(per_problem)
    chances = [(p + 0.5 * mean) / 1.5 for p in per_problem]
    size, expected = 0, 0.0
    for size in (8, 16):
        # neither all wrong nor all right: such a group has an advantage
        expected = sum(1 - p**size - (1 - p) ** size for p in chances) / len(chances)
        if expected >= 0.5:
            break
    return size, expected


def response_limit(look: Look, room: int) -> tuple[int, str]:
    """T of the first stage and why; ``room`` is what the model's context leaves beside the longest prompt."""
    seen, cut = look.answers.max_tokens, look.answers.truncated
    if cut > 0.1:
        # how long they would be is not known: twice what was seen
        return min(2 * seen, room), f"{100 * cut:.0f} % of the answers were cut at {seen} tokens"
    longest = look.length(0.95)
    # half as much again, for answers that grow in training
    limit = min(room, max(32, 32 * math.ceil(1.5 * longest / 32)))
    return limit, f"95 % have at most {longest} tokens"


def learning_rate(parameters: int) -> float:
    """2e-5 at 135 million parameters, falling with the root of their number; between 1e-6 and 1e-3."""
    rate = min(1e-3, max(1e-6, 2e-5 * math.sqrt(135e6 / parameters)))
    return float(f"{rate:.1g}")


class Numbers(NamedTuple):
    """What a recipe sets, before it is written."""

    group_size: int
    signal: str
    """What ``group_size`` is expected to give."""
    limit: int
    why_limit: str
    prompt_limit: int
    held_out: int
    filtered: int
    """Samples a problem of the difficulty filter; 0: none."""
    batch: int
    step_seconds: float
    steps: int
    later: int
    """Of the steps, those of a second stage."""


def numbers(setting: Setting, look: Look, speed: Speed, *, solved: bool) -> Numbers:
    """The sizes that fit the model's answers, its context and the time; ``solved``: after a supervised start."""
    size, expected = group_size(look.per_problem)
    longest = setting.prompt_lengths[-1]
    # the median, as they are ascending
    prompt = setting.prompt_lengths[len(setting.prompt_lengths) // 2]
    # half of the context at least is the answer's
    prompt_limit = min(longest, setting.context // 2)
    limit, why_limit = response_limit(look, setting.context - prompt_limit)
    mean = min(limit, sum(look.lengths) / len(look.lengths) if look.lengths else limit)
    # sampled, then learned; a group's prompt is learned once for its M responses
    a_response = mean / speed.sampled + (mean + prompt / size) / speed.learned
    seconds = 60 * setting.minutes * (1 - START_SHARE if solved else 1)
    # two tests, before and after, each of 5 answers a problem: the greedy one and 4 at temperature 1 (`propose`)
    held = _held_out(len(setting.problems), TEST_SHARE * seconds / 2 / (5 * mean / speed.sampled))
    train = len(setting.problems) - held
    batch = 4
    # doubled as long as there is time for 40 steps
    while batch < 32 and 2 * batch <= train and 2 * batch * size * a_response <= TRAINING_SHARE * seconds / 40:
        batch *= 2
    step = batch * size * a_response
    steps = max(FEW_STEPS, min(400, round(TRAINING_SHARE * seconds / step)))
    # a second stage with room for longer answers, where answers were cut and there are steps to spend on it
    cut = look.answers.truncated > 0.1 and 2 * limit <= setting.context - prompt_limit
    return Numbers(
        group_size=size,
        signal="the start decides how many have a signal" if solved else f"{_percent(expected)} should have a signal",
        limit=limit,
        why_limit=why_limit,
        prompt_limit=prompt_limit,
        held_out=held,
        filtered=_filter_samples(train, FILTER_SHARE * seconds, mean / speed.sampled) if expected < 0.5 else 0,
        batch=batch,
        step_seconds=step,
        steps=steps,
        later=steps // 3 if cut and steps >= 3 * FEW_STEPS else 0,
    )


def propose(setting: Setting, look: Look, model: ModelConfig, speed: Speed, solved: Solved | None = None) -> Proposal:
    """A recipe for ``setting`` on the best way of asking, each number with its reason.

    With ``solved`` it begins with a supervised start, and answers are expected to be like the solutions.
    """
    n = numbers(setting, look, speed, solved=solved is not None)
    longest = setting.prompt_lengths[-1]
    sections = [
        [
            f"# Written by magicrl init for {setting.minutes:g} minutes on this machine.",
            f"# Seen of {look.answers.groups} problems: {_percent(look.answers.correct)} of the answers right, "
            f"{_percent(look.answers.mixed)} of the groups with right and wrong ones.",
        ],
        ["[run]", f"name = {_text(_name(setting.model))}"],
        ["[start]", f"sft = {_text(solved.recipe)}  # {solved.why}" if solved else f"model = {_text(setting.model)}"],
        _precision("[model]", model),
        [
            "[data]",
            f"holdout = {n.held_out}  # problems of the test before and after; never trained on",
            f"max_prompt_tokens = {n.prompt_limit}  # the longest prompt has {longest}",
            'overlong_prompts = "drop"' if n.prompt_limit < longest else "",
        ],
        _source("[[data.train]]", setting, look.way),
        [
            "[data.difficulty_filter]",
            f"samples = {n.filtered}  # drops the problems that are never or always solved: here they are many",
        ]
        if n.filtered
        else [],
        ["[rollout]", f"max_rows = {MAX_ROWS}", "memory_limit_mb = 2048"],
        [
            "[verifier]",
            f"extract = {_text(look.way.extract)}  # {_why_extract(look.way.extract)}",
            f"reasoning = {_text(setting.reasoning)}",
        ],
        [
            "[algorithm]",
            'refill = "until_full"  # samples further problems in place of those without a signal',
            "refill_rounds = 2",
        ],
        ["[entropy]", 'preset = "small"', "step = 0.001", "maximum = 0.01"]
        if setting.parameters < LARGE
        else ["[entropy]", 'preset = "report"'],
        [
            "[optimizer]",
            f"learning_rate = {learning_rate(setting.parameters):g}  # by the size of the model",
            "warmup_steps = 3",
        ],
        _stage(
            (n.limit, f"  # T: {n.why_limit}"),
            (n.group_size, f"  # M: of the groups, {n.signal}"),
            (n.batch, f"  # D_R: about {n.step_seconds:.0f} s a step"),
            n.steps - n.later,
        ),
        _stage((2 * n.limit, "  # longer answers, once they have grown"), (n.group_size, ""), (n.batch, ""), n.later)
        if n.later
        else [],
        ["[evaluation]", "temperatures = [0.0, 1.0]", "samples = 4", "pass_at = [4]"],
        ["[checkpoint]", f"every = {max(5, min(20, n.steps // 4))}"],
    ]
    start = _start(setting, look.way, model, speed, solved, n.held_out) if solved else None
    return Proposal(text=_written(sections), step_seconds=n.step_seconds, steps=n.steps, start=start)


def _start(setting: Setting, way: Way, model: ModelConfig, speed: Speed, solved: Solved, held: int) -> str:
    """The recipe of the supervised start: a few passes over the solutions, in its share of the time."""
    a_solution = sum(solved.tokens) / len(solved.tokens) + setting.prompt_lengths[len(setting.prompt_lengths) // 2]
    a_step = START_BATCH * a_solution / speed.learned
    shown = max(1, solved.problems - held)
    affordable = int(START_SHARE * 60 * setting.minutes / a_step)
    steps = max(LEAST_START_STEPS, min(affordable, math.ceil(PASSES * shown / START_BATCH)))
    passes = steps * START_BATCH / shown
    sections = [
        [f"# Written by magicrl init: {solved.why}."],
        ["[run]", f"name = {_text(f'{_name(setting.model)}-start')}"],
        ["[model]", f"folder = {_text(setting.model)}"],
        _precision("[training]", model),
        [
            "[[phases]]",
            f"steps = {steps}  # {passes:.1f} passes over {shown} solved problems, about {steps * a_step:.0f} s",
            f"batch_size = {START_BATCH}",
            f"learning_rate = {START_RATE * learning_rate(setting.parameters):g}  # by the size of the model",
            f"warmup_steps = {max(1, steps // 10)}",
            f"holdout = {held}  # those of the training recipe: the test's problems are not shown",
        ],
        _source("[phases.data]", setting, way),
    ]
    return _written(sections)


def _written(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(filter(None, lines)) for lines in sections if lines) + "\n"


def _precision(table: str, model: ModelConfig) -> list[str]:
    return [
        table,
        f"dtype = {_text(model.dtype)}",
        f"micro_batch_tokens = {model.micro_batch_tokens}  # fits this machine's memory",
        f"head_chunk_tokens = {model.head_chunk_tokens}",
    ]


def _held_out(problems: int, affordable: float) -> int:
    """Problems of the test before and after: a fifth at most, as many as the time allows, 8 at least, 100 at most."""
    return max(1, min(100, problems // 5, max(8, int(affordable))))


def _filter_samples(problems: int, seconds: float, a_response: float) -> int:
    """N of the difficulty filter that the time allows; 0: none."""
    return next((n for n in (16, 8, 4) if problems * n * a_response <= seconds), 0)


def _source(table: str, setting: Setting, way: Way) -> list[str]:
    columns = ", ".join(f"{name} = {_text(column)}" for name, column in setting.columns.items())
    return [
        table,
        f"{'hub' if setting.hub else 'path'} = {_text(setting.data)}",
        f"template = {_text(way.template)}",
        f"verifier = {_text(setting.verifier)}  # the answers are words" if setting.verifier else "",
        f"fields = {{ {columns} }}" if columns else "",
    ]


def _stage(limit: tuple[int, str], size: tuple[int, str], batch: tuple[int, str], steps: int) -> list[str]:
    """A stage; each of its numbers with the comment behind it."""
    return [
        "[[stages]]",
        f"max_tokens = {limit[0]}{limit[1]}",
        f"group_size = {size[0]}{size[1]}",
        f"rollout_batch = {batch[0]}{batch[1]}",
        f"max_steps = {steps}",
        'transition = { rule = "fixed" }',
    ]


def _why_extract(extract: str) -> str:
    if extract == "box":
        return "only a \\boxed{} counts: it is not hit by chance"
    return "what an answer ends with counts too: too few of them box it"


def _name(model: str) -> str:
    # a recipe is shared: no password of a URL
    return without_secrets(model.rstrip("/").rsplit("/", 1)[-1]).lower() or "run"


def _text(value: str) -> str:
    # a JSON string is a TOML string
    return json.dumps(value, ensure_ascii=False)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
