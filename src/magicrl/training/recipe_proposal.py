"""Computations of ``magicrl init``: how a model answers a few problems, and a recipe from which it will learn.

Each problem is sampled with several prompt templates, and answers are read with both extractions. Every number of the
recipe then follows, with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from magicrl.algorithms.advantages import score_group
from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.evaluation.job import sample_problems
from magicrl.models.loading import LoadedModel
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, RolloutRequest, SamplingParams, ScoredGroup, TokenArray, TrainBatch, frozen_floats
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import in_process_engine
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.diagnosis import Judging, SampledAnswers
from magicrl.training.learner import LocalLearner
from magicrl.training.metrics import answers_of
from magicrl.training.objective import LearnerSettings
from magicrl.training.preflight import divergence
from magicrl.training.protocols import Controls
from magicrl.training.sft import supervised_sample
from magicrl_verifiers.progress import duration
from magicrl_verifiers.records import Extract, Reasoning
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.table import verifier_spec

SAMPLES = 4
"""Answers per problem and prompt template, at temperature 1."""
SECONDS_A_WAY = 15.0
"""Approximate time budget per prompt template, in seconds."""
FULLER = 2.5
"""Time per token with all answers in progress, relative to eight answers."""
LEAST_LIMIT, FIRST_LIMIT = 64, 256
MAX_ROWS, CACHE_MB = 64, 2048
BOXED = "{prompt}\n\nPut the final answer in \\boxed{}."
STEPWISE = "{prompt}\n\nThink step by step, briefly, and put the final answer in \\boxed{}."
QUESTION = "Question: {prompt}\nAnswer:"
QUESTION_BOXED = "Question: {prompt}\nThink step by step and put the final answer in \\boxed{}.\nAnswer:"
READS: tuple[Extract, ...] = ("box", "lenient")
MEASURED = 8
"""Answers of the update whose KL is measured."""
LARGEST_KL = 0.02
"""KL of one update in nats per token up to which a learning rate is proposed: PPO's customary bound (Spinning Up)."""
_WHY_EXTRACT: dict[Extract, str] = {
    "box": "only a \\boxed{} counts: it is never right by chance",
    "lenient": "the end of an answer counts too: too few answers have a box",
}
BOX_WORTH = 0.8
"""Smallest share of the signal for which only boxes are read: a box is never right by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Result of one prompt template and extraction.

    Attributes:
        template: Prompt template (``data.train.template``).
        extract: Extraction (``verifier.extract``).
        answers: Answers at temperature 1.
        per_problem: Share of correct answers per problem.
        lengths: Tokens of the complete answers, ascending.
        example: Text of an answer.
        sampled: Tokens of a few prompts, each with those of an answer.
        others: The same prompts with another answer.
    """

    template: str
    extract: Extract
    answers: SampledAnswers
    per_problem: tuple[float, ...]
    lengths: tuple[int, ...]
    example: str
    sampled: tuple[tuple[TokenArray, TokenArray], ...] = ()
    others: tuple[tuple[TokenArray, TokenArray], ...] = ()

    @property
    def signal(self) -> float:
        """Score for comparison: groups with different rewards, then correct answers."""
        worth = 1.0 if self.extract == "box" else BOX_WORTH
        return worth * (self.answers.mixed + 0.1 * self.answers.correct)

    @property
    def group(self) -> tuple[int, float]:
        """M and the expected share of groups with an advantage; graded rewards differ although no answer is correct."""
        if self.answers.correct == 0 and self.answers.mixed > 0:
            return (8 if self.answers.mixed >= 0.5 else 16), self.answers.mixed
        return group_size(self.per_problem)

    def length(self, quantile: float) -> int:
        """Return a quantile of the lengths; T where no answer is complete."""
        return int(np.quantile(self.lengths, quantile)) if self.lengths else self.answers.max_tokens


def templates_for(problem: Problem, encoder: PromptEncoder, *, chat: bool) -> tuple[str, ...]:
    """Return prompt templates that the tokenizer can encode. The first is only the prompt."""
    hints = () if problem.verifier == "code" else (BOXED, STEPWISE) if chat else (QUESTION, QUESTION_BOXED)

    def known(template: str) -> bool:
        try:
            encoder.encode(with_template(problem, template))
        except ValueError:
            return False
        return True

    return ("{prompt}", *filter(known, hints))


def with_template(problem: Problem, template: str) -> Problem:
    """Return the problem with the template around its prompt."""
    return dataclasses.replace(problem, prompt=template.replace("{prompt}", problem.prompt))


class FirstLook:
    """Samples and verifies with one engine.

    Args:
        policy: Model, which the engine owns from here on.
        encoder: Prompt encoder.
        reasoning: Meaning of an unfinished ``<think>``.
        verifier: Verifier of the problems.
    """

    def __init__(self, policy: LoadedModel, encoder: PromptEncoder, reasoning: Reasoning, verifier: str) -> None:
        self._encoder = encoder
        self._reasoning: Reasoning = reasoning
        settings = EngineSettings(model=policy.folder, max_rows=MAX_ROWS, memory_limit_mb=CACHE_MB)
        self.engine: InProcessEngine = in_process_engine(policy, encoder.decode, settings)
        self.engine.load_weights(dict(policy.model.named_parameters()), 0)
        # An answer is sampled once and read in both ways. A reward function reads the whole answer: it is called once.
        self._reads = verifier_spec(verifier).reads_extract
        reads = READS if self._reads else READS[:1]
        self._judges = {extract: VerifierConfig(extract=extract, reasoning=reasoning).pool() for extract in reads}
        for judge in self._judges.values():
            judge.warm_up({verifier})
        self.tokens, self.seconds = 0, 0.0

    def affordable_limit(self, problem: Problem) -> int:
        """Return T of a first look: the time budget of a template at the measured pace of a few tokens."""
        sampling = SamplingParams(temperature=1.0, max_tokens=8)
        tokens = self._encoder.encode(problem)
        for turns in (1, 8):  # the first pass includes set-up
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
        samples: int = SAMPLES,
        seed: int = 0,
    ) -> list[Look]:
        """Sample with one template and read both ways: ``samples`` answers per problem, one at temperature 0."""
        began = time.perf_counter()
        boxed = sample_problems(
            self.engine,
            self._judges["box"],
            [with_template(problem, template) for problem in problems],
            self._encoder.encode,
            samples=samples if temperature else 1,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
        self.seconds += time.perf_counter() - began
        self.tokens += sum(group.group.num_tokens for group in boxed)
        read: dict[Extract, list[ScoredGroup]] = {"box": boxed}
        if judge := self._judges.get("lenient"):
            tickets = [judge.submit(g.group.request.problem, [c.text for c in g.group.completions]) for g in boxed]
            read["lenient"] = [
                score_group(g.group, judge.result(ticket)) for g, ticket in zip(boxed, tickets, strict=True)
            ]
        return [self._look(template, extract, groups, max_tokens) for extract, groups in read.items()]

    def close(self) -> None:
        """Free the cache and stop the verifiers."""
        self.engine.close()
        for judge in self._judges.values():
            judge.close()

    def _look(self, template: str, extract: Extract, groups: Sequence[ScoredGroup], max_tokens: int) -> Look:
        judging = Judging(extract, self._reasoning) if self._reads else Judging()
        ended = sorted(c.num_sampled for g in groups for c in g.group.completions if not c.truncated)
        return Look(
            template=template,
            extract=extract,
            answers=answers_of(groups, max_tokens=max_tokens, judging=judging),
            per_problem=tuple(float(g.correct[g.counted].mean()) for g in groups if g.counted.any()),
            lengths=tuple(ended),
            example=groups[0].group.completions[0].text,
            sampled=tuple((g.group.request.prompt_tokens, g.group.completions[0].tokens) for g in groups[:MEASURED]),
            others=tuple((g.group.request.prompt_tokens, g.group.completions[-1].tokens) for g in groups[:MEASURED]),
        )


def measured_step(
    policy: LoadedModel,
    model: ModelConfig,
    sampled: Sequence[tuple[TokenArray, TokenArray]],
    others: Sequence[tuple[TokenArray, TokenArray]],
    rate: float,
) -> tuple[float, float]:
    """Return tokens per second of a forward and backward pass, and the KL of one update in nats per token.

    Every second answer has advantage 1, the others -1: AdamW's first update moves each weight by about the rate,
    whatever the size of the gradient, so that the KL hardly depends on which answers are correct.

    Args:
        policy: Model in float32, which the learner owns from here on.
        model: Precision and micro-batches.
        sampled: Prompts and an answer of the model to each, for the update.
        others: Prompts with other answers, for the KL (see `divergence`).
        rate: Learning rate of the update.
    """
    learner = LocalLearner(
        policy.model, LearnerSettings(algorithm=AlgorithmConfig(loss="pg"), model=model), valid_vocab=policy.valid_vocab
    )
    samples = [
        dataclasses.replace(supervised_sample(prompt, answer, index), advantage=1.0 - 2.0 * (index % 2))
        for index, (prompt, answer) in enumerate(sampled)
    ]
    unseen = [supervised_sample(prompt, answer, index) for index, (prompt, answer) in enumerate(others)]
    sampler_logprobs, _ = learner.logprobs(samples, 1.0)  # includes set-up
    samples = [
        dataclasses.replace(sample, sampler_logprobs=frozen_floats(values))
        for sample, values in zip(samples, sampler_logprobs, strict=True)
    ]
    before, _ = learner.logprobs(unseen, 1.0)
    began = time.perf_counter()
    learner.update(TrainBatch.of(samples), Controls(learning_rate=rate))
    seconds = time.perf_counter() - began
    after, _ = learner.logprobs(unseen, 1.0)
    kl, _ = divergence(before, after, [None] * len(unseen))
    return sum(len(sample) for sample in samples) / seconds, kl


def checked_learning_rate(proposed: float, kl: float) -> float:
    """Return the proposed rate, or a lower one at which a step has a KL of ``LARGEST_KL``: KL grows with its square."""
    return proposed if kl <= LARGEST_KL else float(f"{proposed * (LARGEST_KL / kl) ** 0.5:.1g}")


TRAINING_SHARE, TEST_SHARE, FILTER_SHARE, START_SHARE = 0.7, 0.15, 0.15, 0.3
"""Fractions of the time for the loop, the evaluations and the filter, and of the whole time for a supervised start."""
PASSES, LEAST_START_STEPS, START_BATCH = 3, 20, 8
"""Supervised start: most passes over the solutions, fewest steps, solutions per step."""
START_RATE = 10.0
"""Learning rate of the supervised start, relative to the run's."""
FEW_STEPS = 10
REFILL_ROUNDS = 2
LARGE = 1e9
SMALL = 5e6
"""Numbers of parameters from which the report's entropy control is used, and below which float32 is used."""


class Setting(NamedTuple):
    """Facts from which a recipe is proposed. Names are written into the recipe."""

    model: str
    data: str
    kind: Literal["path", "hub", "family"]
    """What ``data`` is."""
    columns: dict[str, str]
    """Columns of prompt and answer, where the user named them."""
    problems: Sequence[Problem]
    verifier: str | None
    """Verifier, where it differs from what the problems' columns imply."""
    parameters: int
    context: int
    prompt_lengths: Sequence[int]
    """Tokens of every prompt with the chosen template, ascending."""
    reasoning: str
    minutes: float
    """Time budget of the run."""
    precision: ModelConfig
    """Precision and micro-batches that fit this machine."""
    sampled: float
    """Tokens per second on this machine, sampled with all rows in use."""
    learned: float
    """Tokens per second on this machine, learned in a forward and backward pass."""
    kl: float
    """Nats per token of one update at the proposed learning rate."""


class Solved(NamedTuple):
    """Worked solutions for a supervised start."""

    recipe: str
    """Path of the supervised recipe in the training recipe."""
    problems: int
    """Number of problems with a solution."""
    tokens: Sequence[int]
    """Tokens of every solution, ascending."""
    why: str
    """Why the start is needed."""


def group_size(per_problem: Sequence[float]) -> tuple[int, float]:
    """Return M, and the expected share of groups whose answers have different rewards.

    M is 8 where that share is at least half, else 16. Each problem's success rate is shrunk towards the mean, since a
    few samples say little about one problem.
    """
    mean = sum(per_problem) / len(per_problem)
    chances = [(p + 0.5 * mean) / 1.5 for p in per_problem]
    size, expected = 0, 0.0
    for size in (8, 16):
        # A group has an advantage if it is neither all wrong nor all correct.
        expected = sum(1 - p**size - (1 - p) ** size for p in chances) / len(chances)
        if expected >= 0.5:
            break
    return size, expected


def response_limit(look: Look, room: int) -> tuple[int, str]:
    """Return T of the first stage and why; ``room`` is the rest of the context after the longest prompt."""
    seen, cut = look.answers.max_tokens, look.answers.truncated
    if cut > 0.1:
        # The complete length is unknown: use twice what was seen.
        return min(2 * seen, room), f"{100 * cut:.0f} % of the answers were truncated at {seen} tokens"
    longest = look.length(0.95)
    # Half as much again, since answers grow in training.
    limit = min(room, max(32, 32 * math.ceil(1.5 * longest / 32)))
    return limit, f"95 % have at most {longest} tokens"


def proposed_learning_rate(parameters: int) -> float:
    """Return 2e-5 at 135 million parameters, falling with the square root of their number; between 1e-6 and 1e-3."""
    rate = min(1e-3, max(1e-6, 2e-5 * math.sqrt(135e6 / parameters)))
    return float(f"{rate:.1g}")


class Numbers(NamedTuple):
    """Numbers of a recipe."""

    group_size: int
    signal: str
    """Expected result of ``group_size``."""
    limit: int
    why_limit: str
    prompt_limit: int
    held_out: int
    filtered: int
    """Samples per problem of the difficulty filter; 0 without one."""
    batch: int
    step_seconds: float
    steps: int
    seconds: float
    """Of the run: steps, evaluations, difficulty filter and supervised start."""
    later: int
    """Number of the steps that belong to a second stage."""


def numbers(setting: Setting, look: Look, *, solved: bool) -> Numbers:
    """Return the sizes that fit the model's answers, its context and the time; ``solved``: after a supervised start."""
    size, expected = look.group
    longest = setting.prompt_lengths[-1]
    # The median, since they are ascending.
    prompt = setting.prompt_lengths[len(setting.prompt_lengths) // 2]
    # At least half of the context is left for the answer.
    prompt_limit = min(longest, setting.context // 2)
    limit, why_limit = response_limit(look, setting.context - prompt_limit)
    cut = look.answers.truncated
    ended = sum(look.lengths) / len(look.lengths) if look.lengths else limit
    # The length of a truncated answer is unknown: it is taken as halfway from what was seen to T.
    mean = (1 - cut) * min(limit, ended) + cut * min(limit, (look.answers.max_tokens + limit) / 2)
    # Groups without an advantage are replaced in further rounds, and only the others are learned from. After a
    # supervised start their share is unknown.
    lost = 1 - (0.5 if solved else expected)
    asked, kept = sum(lost**n for n in range(REFILL_ROUNDS + 1)), 1 - lost ** (REFILL_ROUNDS + 1)
    # A group's prompt is learned once for its M responses.
    a_group = size * (asked * mean / setting.sampled + kept * (mean + prompt / size) / setting.learned)
    seconds = 60 * setting.minutes * (1 - START_SHARE if solved else 1)
    # Two evaluations, each with 5 answers per problem: a greedy one and 4 at temperature 1 (`propose`). At most a fifth
    # of the problems and 100, at least 8, as many as the time allows.
    affordable = int(TEST_SHARE * seconds / 2 / (5 * mean / setting.sampled))
    held = max(1, min(100, len(setting.problems) // 5, max(8, affordable)))
    train = len(setting.problems) - held
    batch = 4
    # Doubled while there is time for 40 steps.
    while batch < 32 and 2 * batch <= train and 2 * batch * a_group <= TRAINING_SHARE * seconds / 40:
        batch *= 2
    step = batch * a_group
    steps = max(FEW_STEPS, min(400, round(TRAINING_SHARE * seconds / step)))
    # N of the difficulty filter that the time allows; 0 for none.
    budget = FILTER_SHARE * seconds
    filtered = next((n for n in (16, 8, 4) if train * n * mean / setting.sampled <= budget), 0) if expected < 0.5 else 0
    # A second stage with a larger T, if answers were truncated and there are enough steps.
    second = cut > 0.1 and 2 * limit <= setting.context - prompt_limit
    return Numbers(
        group_size=size,
        signal="the start decides how many can teach" if solved else f"{_percent(expected)} should have an advantage",
        limit=limit,
        why_limit=why_limit,
        prompt_limit=prompt_limit,
        held_out=held,
        filtered=filtered,
        batch=batch,
        step_seconds=step,
        steps=steps,
        seconds=steps * step
        + (2 * 5 * held + train * filtered) * mean / setting.sampled
        + (START_SHARE * 60 * setting.minutes if solved else 0),
        later=steps // 3 if second and steps >= 3 * FEW_STEPS else 0,
    )


def propose(setting: Setting, look: Look, solved: Solved | None) -> tuple[str, Numbers, str]:
    """Return a recipe for ``setting`` with the best prompt template, each number with its reason.

    With ``solved`` it starts with a supervised start, and answers are expected to resemble the solutions.

    Returns:
        The text of the recipe, its numbers, and the text of the supervised start's recipe, empty without one.
    """
    n = numbers(setting, look, solved=solved is not None)
    rate = proposed_learning_rate(setting.parameters)
    longest = setting.prompt_lengths[-1]
    sections = [
        [
            f"# Written by magicrl init for {setting.minutes:g} minutes on this machine.",
            f"# On {look.answers.groups} problems {_percent(look.answers.correct)} of the answers were correct, "
            f"{_percent(look.answers.mixed)} of the groups had correct and wrong ones.",
        ],
        [
            "[run]",
            f"name = {_text(_name(setting.model, setting.data))}",
            f"expected_minutes = {max(0.1, n.seconds / 60):.1f}",
        ],
        ["[start]", f"sft = {_text(solved.recipe)}  # {solved.why}" if solved else f"model = {_text(setting.model)}"],
        _precision("[model]", setting.precision),
        [
            "[data]",
            f"holdout = {n.held_out}  # problems of the evaluations before and after; never trained on",
            f"max_prompt_tokens = {n.prompt_limit}  # the longest prompt has {longest}",
            'overlong_prompts = "drop"' if n.prompt_limit < longest else "",
        ],
        _source("[[data.train]]", setting, look.template),
        [
            "[data.difficulty_filter]",
            f"samples = {n.filtered}  # drops the many problems that are never or always solved",
        ]
        if n.filtered
        else [],
        ["[rollout]", f"max_rows = {MAX_ROWS}", "memory_limit_mb = 2048"],
        [
            "[verifier]",
            f"extract = {_text(look.extract)}  # {_WHY_EXTRACT[look.extract]}",
            f"reasoning = {_text(setting.reasoning)}",
        ]
        if look.answers.judging.extract is not None  # a reward function and tests get the whole response
        else [],
        [
            "[algorithm]",
            'refill = "until_full"  # samples further problems in place of those without an advantage',
            f"refill_rounds = {REFILL_ROUNDS}",
        ],
        ["[entropy]", 'controller = "none"  # control of entropy has shown no gain below 1B parameters']
        if setting.parameters < LARGE
        else ["[entropy]", 'preset = "report"'],
        [
            "[optimizer]",
            f"learning_rate = {checked_learning_rate(rate, setting.kl):g}  # by the size of the model: {rate:g}; "
            f"there, an update has a KL of {setting.kl:.1g} nats per token",
            "warmup_steps = 3",
        ],
        _stage(
            (n.limit, f"  # T: {n.why_limit}"),
            (n.group_size, f"  # M: of the groups, {n.signal}"),
            (n.batch, f"  # D_R: about {duration(n.step_seconds)} per step"),
            n.steps - n.later,
        ),
        _stage((2 * n.limit, "  # longer answers later"), (n.group_size, ""), (n.batch, ""), n.later)
        if n.later
        else [],
        ["[evaluation]", "temperatures = [0.0, 1.0]", "samples = 4", "pass_at = [4]"],
        ["[checkpoint]", f"every = {max(5, min(20, n.steps // 4))}"],
    ]
    return _written(sections), n, _start(setting, look.template, solved, n.held_out) if solved else ""


def _start(setting: Setting, template: str, solved: Solved, held: int) -> str:
    """Return the recipe of the supervised start: a few passes over the solutions, in its share of the time."""
    a_solution = sum(solved.tokens) / len(solved.tokens) + setting.prompt_lengths[len(setting.prompt_lengths) // 2]
    a_step = START_BATCH * a_solution / setting.learned
    shown = max(1, solved.problems - held)
    affordable = int(START_SHARE * 60 * setting.minutes / a_step)
    steps = max(LEAST_START_STEPS, min(affordable, math.ceil(PASSES * shown / START_BATCH)))
    passes = steps * START_BATCH / shown
    sections = [
        [f"# Written by magicrl init: {solved.why}."],
        ["[run]", f"name = {_text(f'{_name(setting.model, setting.data)}-start')}"],
        ["[model]", f"folder = {_text(setting.model)}"],
        _precision("[training]", setting.precision),
        [
            "[[phases]]",
            f"steps = {steps}  # {passes:.1f} passes over {shown} solved problems, about {steps * a_step:.0f} s",
            f"batch_size = {START_BATCH}",
            f"learning_rate = {START_RATE * proposed_learning_rate(setting.parameters):g}  # by the size of the model",
            f"warmup_steps = {max(1, steps // 10)}",
            f"holdout = {held}  # as in the training recipe: no evaluation problem is trained on",
        ],
        _source("[phases.data]", setting, template),
    ]
    return _written(sections)


def _written(sections: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(filter(None, lines)) for lines in sections if lines) + "\n"


def _precision(table: str, model: ModelConfig) -> list[str]:
    return [
        table,
        f"dtype = {_text(model.dtype)}",
        f"micro_batch_tokens = {model.micro_batch_tokens}  # fits this machine's memory",
    ]


def _source(table: str, setting: Setting, template: str) -> list[str]:
    columns = ", ".join(f"{name} = {_text(column)}" for name, column in setting.columns.items())
    return [
        table,
        f"{setting.kind} = {_text(setting.data)}",
        f"count = {len(setting.problems)}" if setting.kind == "family" else "",
        f"template = {_text(template)}",
        f"verifier = {_text(setting.verifier)}" + ("  # the answers are words" if setting.verifier == "exact" else "")
        if setting.verifier
        else "",
        f"fields = {{ {columns} }}" if columns else "",
    ]


def _stage(limit: tuple[int, str], size: tuple[int, str], batch: tuple[int, str], steps: int) -> list[str]:
    """Return a stage, with a comment after each of its numbers."""
    return [
        "[[stages]]",
        f"max_tokens = {limit[0]}{limit[1]}",
        f"group_size = {size[0]}{size[1]}",
        f"rollout_batch = {batch[0]}{batch[1]}",
        f"max_steps = {steps}",
        'transition = { rule = "fixed" }',
    ]


def _name(model: str, data: str) -> str:
    """Return the run's name, of model and data: runs on another data set have another folder."""
    # A recipe is shared, so a password in a URL must not be in it.
    parts = [without_secrets(text.rstrip("/").rsplit("/", 1)[-1]).lower() for text in (model, data)]
    return "-".join(re.sub(r"\.(jsonl?|csv|tsv|parquet)$", "", part) for part in parts if part) or "run"


def _text(value: str) -> str:
    # A JSON string is a valid TOML string.
    return json.dumps(value, ensure_ascii=False)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
