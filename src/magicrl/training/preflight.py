"""Measurements of ``magicrl preflight``: some of the model's answers, the reward, the prompts and the first updates.

Nothing is stored: the learner is a copy in memory, and no run folder is created. ``preflight_rules.py`` interprets the
figures, from `Facts` only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from magicrl.algorithms.advantages import Signal, advantage_of, group_signal, part_scores, reads_parts
from magicrl.config.data_schema import SourceConfig
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.data.sources import load_parts
from magicrl.evaluation.job import evaluation_seed, sample_problems
from magicrl.evaluation.statistics import Estimate, Interval, paired_difference, share, unbiased_pass_at_k
from magicrl.models.prompts import PromptEncoder, render
from magicrl.planning.hardware import known_hardware, load_hardware
from magicrl.planning.memory import GIB, host_memory, run_terms
from magicrl.planning.planner import Options, make_plan
from magicrl.planning.shapes import ModelShape
from magicrl.planning.workload import lengths_of_mean
from magicrl.records import Problem, ScoredGroup, StepMetrics
from magicrl.training.assemble import Built, OwnedVerifiers
from magicrl.training.diagnosis import SampledAnswers, judging_of
from magicrl.training.learner import LocalLearner
from magicrl.training.metrics import answers_of
from magicrl.training.objective import entropy_controller
from magicrl.training.protocols import NotFiniteError, TrainingStopped
from magicrl.training.reward_probes import RewardFacts, probe_reward
from magicrl.training.start_checks import known_shape
from magicrl.training.step import Trainer, buffer_samples

Report: TypeAlias = Callable[[str], None]
"""Called with the name of the next measurement."""

PILOT, LEAST = 4, 16
"""Problems of the first round, which doubles from round to round, and fewest problems if there is time."""
SAMPLING, UPDATES = 0.4, 0.3
"""Fractions of the time budget for sampling and for training steps."""
STEPS, ATTEMPTS = 2, 4
"""Training steps on the copy, and most attempts until one has a group to learn from. The next step samples with its
weights."""
PROBED, ASKED_AGAIN = 12, 32
"""Most problems that are sampled again with a larger T, and with another prompt format."""
CUT = 0.25
"""Share of truncated answers from which a larger T is tried."""
LONGER, LEAST_LONGER = 8, 2
"""Factor of the larger T, and the smallest one where the context is short."""
FEW_RIGHT = 0.5
"""Share of correct answers below which other prompt formats are tried."""
_CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|<[a-z_]{2,20}>|\[[A-Z_]{2,20}\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learnable:
    """Signal to learn from in the initial model's answers, at the first stage's T and M. Intervals are over problems.

    ``entropy`` is in nats per token, None where the engine does not report it. ``lengths`` are the median, 95 %
    quantile and maximum of the tokens of complete answers, () without one.
    """

    answers: SampledAnswers
    group_size: int
    pass_1: Estimate
    pass_all: Estimate
    signal: Estimate
    entropy: float | None
    uniform_entropy: float
    """Entropy of a uniform choice from the vocabulary in nats: the largest possible."""
    lengths: tuple[int, ...]
    mean_length: float
    example: str
    """Text of an answer."""
    example_references: tuple[str, ...]
    """Reference answers of its problem."""
    example_verdict: str
    """Outcome and status of its verdict; for a graded reward with the score."""
    constant: bool
    """Whether all complete answers with a verdict have the same reward."""
    rewards: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict[str, Mapping[str, float]])
    """Several rewards by name: ``weight``, ``mean`` of the scores (before the weight), share of groups with unequal
    ones (``signal``) and of responses ``not_judged``. Empty for a single reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongerAnswers:
    """The same problems with a larger T: shares truncated and correct, 95 % quantile of complete answers' lengths."""

    max_tokens: int
    truncated: float
    correct: float
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherForm:
    """The same problems with another prompt format: gain in accuracy, paired by problem."""

    name: str
    remedy: str
    before: float
    after: float
    rise: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts:
    """Prompt format of the model.

    Attributes:
        chat: Whether it has a chat template.
        prompt: First prompt, as text.
        end: Token that ends a response.
        foreign: Control tokens of the template that this vocabulary splits into several tokens.
        begins: Number of begin-of-text tokens at the start of a prompt.
        opens: Whether the generation prompt opens the model's turn; None without a chat template.
        system: System prompt that the template adds.
        other_ends: Share of truncated answers that contain a control token which ends nothing, by its name.
        other_form: Best prompt format of those tried, None where none was tried.
    """

    chat: bool
    prompt: str
    end: str
    foreign: tuple[str, ...]
    begins: int
    opens: bool | None
    system: str
    other_ends: Mapping[str, float]
    other_form: OtherForm | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A training step on a copy of the model, at the recipe's full learning rate, and the step after it.

    Attributes:
        rate: Learning rate.
        prompts: Prompts per step.
        updates: Updates per step.
        kl: Nats per token between the policy that sampled the first step's answers and the one after it.
        change: Mean absolute change of a log-prob by that step, in nats.
        grad_norm: Gradient norm of the first step, before clipping.
        entropy: Entropy of each step's answers, in nats per token.
        correct: Share of correct answers of each step.
        warmup: Whether the recipe has a warm-up, which was skipped here.
        failure: Error of a step that failed.
        finite: Whether every loss, gradient and weight was finite.
    """

    rate: float
    prompts: int
    updates: int
    kl: float | None
    change: float | None
    grad_norm: float | None
    entropy: tuple[float, ...]
    correct: tuple[float, ...]
    warmup: bool = False
    failure: str = ""
    finite: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFacts:
    """Predicted cost of the run: the planner's model, scaled to the time of the steps here.

    Attributes:
        step_seconds: Predicted seconds per step of each stage.
        hours: Hours of all stages, without evaluations.
        factor: Measured divided by planned seconds; None where only the number of responses scales the time.
        peak_gib: Peak memory of this process so far.
        planned_gib: Planned memory of the whole run; None for an architecture that the planner does not know.
        available_gib: Memory of the device, or of this machine.
    """

    step_seconds: tuple[float, ...]
    hours: float
    factor: float | None
    peak_gib: float
    planned_gib: float | None
    available_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All measurements; None where budget or recipe left one out."""

    learnable: Learnable
    longer: LongerAnswers | None
    reward: RewardFacts
    template: TemplateFacts
    update: Update | None
    cost: CostFacts | None
    problems: int
    """Number of training problems in their sources."""
    conflicting: int
    """Number of problems left out because an earlier one has the same prompt and other reference answers."""
    later_tokens: int
    """Largest T of the recipe's later stages; 0 without one."""
    filtered: bool
    """Whether the recipe first drops problems that are never or always solved."""
    temperature: float
    """Sampling temperature of the first stage."""
    own: tuple[str, ...] = ()
    """Settings that the first stage states itself."""
    alpha: float
    """Fixed entropy coefficient of the recipe, 0 with another controller."""
    kl_coefficient: float
    """Largest beta of all stages; 0 without a reference in the loss."""
    taught: bool
    """Whether a teacher gives every token an advantage."""
    seconds: float


def measure(
    config: TrainConfig, built: Built, judge: OwnedVerifiers, report: Report, *, seconds: float, samples: int
) -> Facts:
    """Measure what the time budget allows.

    Args:
        config: The recipe. Only its first stage is measured.
        built: Its parts. The learner is changed.
        judge: Its verifiers, warmed up.
        report: Called with the name of the next measurement.
        seconds: Time limit.
        samples: Most responses sampled first.

    Raises:
        UnjudgedError: No answer has a verdict.
    """
    began = time.perf_counter()
    bench = _Bench(config, built, judge)
    built.engine.sync_weights(built.learner)
    report("sampling answers")
    groups = bench.sampled(seconds, samples)
    learnable = _learnable(config, groups, len(built.start.tokenizer))
    longer, other = None, None
    probed = [g.group.request.problem for g in groups][:PROBED]
    left = seconds - (time.perf_counter() - began)
    if learnable.answers.truncated >= CUT and left > UPDATES * seconds:
        report("sampling with a larger T")
        longer = bench.longer(probed)
    left = seconds - (time.perf_counter() - began)
    if learnable.answers.correct < FEW_RIGHT and left > UPDATES * seconds:
        report("asking in other forms")
        other = bench.other_form(groups[:ASKED_AGAIN])
    report("asking the reward")
    reward = probe_reward(judge, config.verifier, built.data.train, groups)
    report("making steps on a copy")
    update, steps = bench.updates(groups, min(left, UPDATES * seconds))
    return Facts(
        learnable=learnable,
        longer=longer,
        reward=reward,
        template=_template(built, groups, other),
        update=update,
        cost=None if not steps else _cost(config, built, steps, update.prompts, learnable),
        problems=len(built.data.train) + built.data.dropped_conflicting,
        conflicting=built.data.dropped_conflicting,
        later_tokens=max((stage.max_tokens for stage in config.stages[1:]), default=0),
        filtered=config.data.difficulty_filter is not None,
        temperature=config.in_stage(0).rollout.temperature,
        own=tuple(config.stages[0].own()),
        alpha=(config.entropy.alpha or 0.0) if config.entropy.controller == "fixed" else 0.0,
        kl_coefficient=max(config.in_stage(i).reference.coefficient for i in range(len(config.stages))),
        taught=config.teacher is not None,
        seconds=time.perf_counter() - began,
    )


class _Bench:
    """Parts of the run, and the measurements with its model."""

    def __init__(self, config: TrainConfig, built: Built, judge: OwnedVerifiers) -> None:
        # The steps are synchronous. The learner measures the entropy only in asynchronous mode.
        entropy = {} if built.engine.capabilities.entropies else {"estimator": "sampled"}
        first = config.in_stage(0)
        self._config = first.model_copy(update={"entropy": first.entropy.model_copy(update=entropy)})
        self._built = built
        self._judge = judge
        self._stage = config.stages[0]
        # Files are often sorted by difficulty or topic, so the first problems would not represent them.
        order = np.random.default_rng(config.run.seed).permutation(len(built.data.train))
        self._problems = [built.data.train[place] for place in order]
        self._seconds_a_group = 0.0

    def sampled(self, seconds: float, samples: int) -> list[ScoredGroup]:
        """Return M answers to as many problems as the budget allows, in rounds that double."""
        most = max(PILOT, samples // self._stage.group_size)
        began, count = time.perf_counter(), PILOT
        groups: list[ScoredGroup] = []
        while len(groups) < min(most, len(self._problems)):
            asked = self._problems[len(groups) : min(len(groups) + count, most)]
            # Each round has another name, which changes its random numbers.
            groups += self._ask(asked, samples=self._stage.group_size, name=f"preflight {len(groups)}")
            spent = time.perf_counter() - began
            self._seconds_a_group = spent / len(groups)
            # Too few groups say nothing: for these the whole budget may be spent.
            until = seconds * (SAMPLING if len(groups) >= LEAST else 1.0)
            affordable = int((until - spent) / self._seconds_a_group)
            if affordable < 1:
                break
            count = min(2 * count, affordable)
        return groups

    def longer(self, problems: Sequence[Problem]) -> LongerAnswers | None:
        """Sample two answers per problem with a larger T; None where the engine's context or memory is too small."""
        # Prompt and response share the context, so the longest prompt limits T for all.
        longest = max(len(self._built.encoder.encode(problem)) for problem in problems)
        if self._built.data.environments():
            longest += self._config.environment.most_observed
        limit = min(LONGER * self._stage.max_tokens, self._built.engine.max_context - longest)
        # A T that is hardly larger does not show whether the answers end.
        if limit < LEAST_LONGER * self._stage.max_tokens:
            return None
        try:
            groups = self._ask(problems, samples=2, name="preflight longer", max_tokens=limit)
        except ValueError:  # one response of this length exceeds rollout.memory_limit_mb
            return None
        completions = [c for group in groups for c in group.group.completions]
        ended = [c.num_sampled for c in completions if not c.truncated]
        return LongerAnswers(
            max_tokens=limit,
            truncated=1 - len(ended) / len(completions),
            correct=float(np.mean([group.correct.mean() for group in groups])),
            length=int(np.quantile(ended, 0.95)) if ended else limit,
        )

    def other_form(self, groups: Sequence[ScoredGroup]) -> OtherForm | None:
        """Return the best of: the prompt without the recipe's template, and without the chat template."""
        problems = [group.group.request.problem for group in groups]
        before = [float(group.correct.mean()) for group in groups]
        forms: list[OtherForm] = []
        candidates: list[tuple[str, str, Sequence[Problem], PromptEncoder]] = []
        sources, tokenizer = self._config.data.train, self._built.start.tokenizer
        if any(source.template is not None for source in sources):
            plain = [source.model_copy(update={"template": None}) for source in sources]
            own = {p.key: p.prompt for part in load_parts(cast("Sequence[SourceConfig]", plain)) for p in part}
            bare = [dataclasses.replace(p, prompt=own.get(p.key, p.prompt)) for p in problems]
            remedy = "leave data.train.N.template out, or change its text"
            candidates.append(("the prompt without the template of the data", remedy, bare, self._built.encoder))
        if tokenizer.chat_template:
            untemplated = copy.deepcopy(tokenizer)
            untemplated.chat_template = None
            remedy = (
                "the model was not trained with this chat template: remove chat_template (tokenizer_config.json or "
                "chat_template.jinja in the model's folder), or replace it by the original one"
            )
            encoder = PromptEncoder(untemplated, self._config.data.max_prompt_tokens)
            candidates.append(("the prompt without the chat template", remedy, problems, encoder))
        for name, remedy, asked, encoder in candidates:
            try:
                for problem in asked:
                    encoder.encode(problem)
            except ValueError:  # the vocabulary lacks a word, or a conversation has no template
                continue
            again = self._ask(asked, samples=self._stage.group_size, name=f"preflight {name}", encoder=encoder)
            after = [float(group.correct.mean()) for group in again]
            rise = paired_difference(after, before)
            forms.append(
                OtherForm(
                    name=name, remedy=remedy, before=float(np.mean(before)), after=float(np.mean(after)), rise=rise
                )
            )
        return max(forms, key=lambda form: form.after, default=None)

    def _ask(
        self,
        problems: Sequence[Problem],
        *,
        samples: int,
        name: str,
        max_tokens: int | None = None,
        encoder: PromptEncoder | None = None,
    ) -> list[ScoredGroup]:
        return sample_problems(
            self._built.engine,
            self._judge,
            problems,
            (encoder or self._built.encoder).encode,
            samples=samples,
            temperature=self._config.rollout.temperature,
            max_tokens=max_tokens or self._stage.max_tokens,
            seed=evaluation_seed(self._config.run.seed, name),
        )

    def updates(self, groups: Sequence[ScoredGroup], seconds: float) -> tuple[Update, list[StepMetrics]]:
        """Run a step that learns and the one after it, with as many prompts as were sampled and time allows.

        After ``seconds`` no further step begins. The KL is measured on responses of ``groups``, which the step is not
        made from (see `divergence`).
        """
        began = time.perf_counter()
        affordable = int(seconds / STEPS / 2 / max(self._seconds_a_group, 1e-9))  # half of a step's time is sampling
        config, stage = short_steps(self._config, max(PILOT, min(len(groups), affordable)))
        prompts, measured = self._split(groups, stage.rollout_batch)
        learner = self._built.learner
        trainer = Trainer(
            config,
            engine=self._built.engine,
            learner=learner,
            judge=self._judge,
            encode=self._built.encoder.encode,
            sampler=PromptSampler(prompts, seed=config.run.seed),
            controller=entropy_controller(config.entropy),
            reference=self._built.reference,
            teacher=self._built.teacher,
        )
        steps: list[StepMetrics] = []
        moved: tuple[float, float] | None = None
        failure, finite = "", True
        try:
            for _ in range(ATTEMPTS):
                result = trainer.step(stage, 0)
                steps.append(result.metrics)
                trainer.check(result.metrics)
                if moved is not None:
                    break
                if int(result.metrics.values["groups/trained"] or 0):
                    samples = buffer_samples(scored.group for scored in measured)
                    after, _ = learner.logprobs(samples, config.rollout.temperature)
                    moved = divergence([s.sampler_logprobs for s in samples], after, [s.loss_mask for s in samples])
                    del steps[:-1]  # the figures start with the step that moved the policy
                if time.perf_counter() - began > seconds:
                    break
        except (NotFiniteError, TrainingStopped) as error:
            failure, finite = str(error), isinstance(error, TrainingStopped)

        def series(*keys: str) -> tuple[float, ...]:
            found = (next((s.values[key] for key in keys if s.values.get(key) is not None), None) for s in steps)
            return tuple(float(value) for value in found if value is not None)

        norms, optimizer = series("learner/grad_norm"), self._config.optimizer
        update = Update(
            rate=optimizer.learning_rate,
            warmup=optimizer.warmup_steps > 0,
            prompts=stage.rollout_batch,
            updates=stage.num_minibatches,
            kl=None if moved is None else moved[0],
            change=None if moved is None else moved[1],
            grad_norm=norms[0] if norms else None,
            entropy=series("entropy/exact/mean", "entropy/sampled/mean"),
            correct=series("train/accuracy/mean"),
            failure=failure,
            finite=finite,
        )
        return update, steps

    def _split(self, groups: Sequence[ScoredGroup], count: int) -> tuple[list[Problem], list[ScoredGroup]]:
        """Return ``count`` prompts for a step, and as many sampled groups to measure it on, of other prompts first.

        The step takes the prompts whose sampled answers had the most different rewards: of others it may learn nothing,
        and a step with a long T takes minutes.
        """
        signal = _signal_of(self._config)
        mixed = [group for group in groups if signal(group) is Signal.MIXED]
        mixed.sort(key=lambda group: -float(group.rewards[group.counted].std()))
        likely = {group.group.request.problem.key: group.group.request.problem for group in mixed}
        # The problems that were sampled stand first, so the last ones leave their groups to the KL.
        others = (problem for problem in reversed(self._problems) if problem.key not in likely)
        prompts = [*likely.values(), *others][:count]
        stepped = {problem.key for problem in prompts}
        measured = sorted(groups, key=lambda group: group.group.request.problem.key in stepped)
        return prompts, measured[:count]


def short_steps(config: TrainConfig, prompts: int) -> tuple[TrainConfig, StageConfig]:
    """Return the recipe for a few synchronous steps of its first stage: fewer prompts, as many updates, no warm-up."""
    stage = config.in_stage(0).stages[0]
    # The recipe's number of updates per step, if there are enough prompts.
    parts = min(stage.num_minibatches, prompts)
    prompts = min(stage.rollout_batch, prompts // parts * parts)
    small = stage.model_copy(
        update={"rollout_batch": prompts, "mini_batch": None if parts == 1 else max(1, prompts // parts)}
    )
    changed = config.model_copy(
        update={
            "stages": (small, *config.stages[1:]),
            "optimizer": config.optimizer.model_copy(update={"warmup_steps": 0}),
            "algorithm": config.algorithm.model_copy(update={"refill": "none", "stop_after_empty_steps": 1_000_000}),
            "rollout": config.rollout.model_copy(update={"max_staleness": 0, "weight_lag": 0}),
        }
    )
    return changed, small


def divergence(
    before: Sequence[np.ndarray], after: Sequence[np.ndarray], masks: Sequence[np.ndarray | None]
) -> tuple[float, float]:
    """Return KL(before || after) in nats per token of samples of ``before``, and the mean absolute change of a log-
    prob.

    The estimator is k3 (Schulman 2020), r - 1 - log r with r the ratio of after to before. It is never negative. It is
    unbiased only for samples that the update was not made from: an update raises the log-probs of its own tokens, and
    one rare token can be half of the mean. On SmolLM2 the estimate on these was 3 to 7 times the exact KL.
    """
    changes = [
        (new - old if mask is None else (new - old)[mask]).astype(np.float64)
        for old, new, mask in zip(before, after, masks, strict=True)
    ]
    change = np.concatenate(changes)
    return float(np.mean(np.expm1(np.minimum(change, 50.0)) - change)), float(np.mean(np.abs(change)))


def _signal_of(config: TrainConfig) -> Callable[[ScoredGroup], Signal]:
    """Return the test by which training rejects a group."""
    mask, by_parts = config.algorithm.advantage_mask, reads_parts(advantage_of(config.algorithm.advantage))
    return lambda group: group_signal(group, mask, by_parts=by_parts)


def _learnable(config: TrainConfig, groups: Sequence[ScoredGroup], vocabulary: int) -> Learnable:
    problems = [group.group.request.problem for group in groups]
    limit = groups[0].group.request.sampling.max_tokens
    answers = answers_of(groups, max_tokens=limit, judging=judging_of(config.verifier, problems))
    prompts = config.in_stage(0).stages[0].rollout_batch
    judged = [group for group in groups if group.counted.any()]
    clusters = [group.group.request.problem.cluster for group in judged]
    right = [(int(group.correct[group.counted].sum()), int(group.counted.sum())) for group in judged]
    completions = [c for group in groups for c in group.group.completions]
    ended = [c.num_sampled for c in completions if not c.truncated]
    values = {
        float(reward)
        for group in groups
        for reward, counted, c in zip(group.rewards, group.counted, group.group.completions, strict=True)
        if counted and not c.truncated
    }
    graded = any(v.score is not None for group in groups for v in group.verdicts)
    rewards = [float(group.rewards[group.counted].mean()) for group in judged]
    verdict = groups[0].verdicts[0]
    shown = f"{verdict.outcome.value} ({verdict.status})".replace("_", " ")
    signal = _signal_of(config)
    mixed = [float(signal(group) is Signal.MIXED) for group in judged]
    return Learnable(
        answers=dataclasses.replace(
            answers,
            # As training rejects: by part, and under the mask.
            mixed=sum(mixed) / len(groups),
            reward=float(np.mean(rewards)) if graded else None,
            groups_per_step=prompts,
        ),
        group_size=max(n for _, n in right),
        pass_1=share([count / n for count, n in right], clusters),
        pass_all=share([unbiased_pass_at_k(count, n, n) for count, n in right], clusters),
        signal=share(mixed, clusters),
        entropy=answers.entropy,
        uniform_entropy=float(np.log(vocabulary)),
        lengths=tuple(int(np.quantile(ended, q)) for q in (0.5, 0.95, 1.0)) if ended else (),
        mean_length=float(np.mean([c.num_sampled for c in completions])),
        example=completions[0].text,
        example_references=problems[0].references,
        example_verdict=shown if verdict.score is None else f"{shown}, score {verdict.score:.3g}",
        constant=len(values) == 1,
        rewards=_each_reward(judged),
    )


def _each_reward(groups: Sequence[ScoredGroup]) -> dict[str, dict[str, float]]:
    """Return the facts of each of several rewards, see `Learnable.rewards`."""
    columns: dict[str, tuple[float, list[NDArray[np.float64]]]] = {}
    for group in groups:
        for name, (weight, scores) in part_scores(group.group, group.verdicts).items():
            columns.setdefault(name, (weight, []))[1].append(scores[group.counted])
    found: dict[str, dict[str, float]] = {}
    for name, (weight, scores) in columns.items():
        known = [values[~np.isnan(values)] for values in scores]
        judged = np.concatenate(known)
        found[name] = {
            "weight": weight,
            "mean": float(judged.mean()) if len(judged) else 0.0,
            "signal": float(np.mean([len(np.unique(values)) > 1 for values in known])),
            "not_judged": 1.0 - len(judged) / sum(map(len, scores)),
        }
    return found


def _template(built: Built, groups: Sequence[ScoredGroup], other: OtherForm | None) -> TemplateFacts:
    tokenizer = built.start.tokenizer
    request = groups[0].group.request
    prompt = [int(token) for token in request.prompt_tokens]
    text = str(tokenizer.decode(prompt))
    chat, foreign, opened, closed = bool(tokenizer.chat_template), (), "", ""
    if chat:
        opened, closed = (render(tokenizer, [("user", "?")], generation_prompt=one) for one in (True, False))
        names = dict.fromkeys(re.findall(r"<\|[^|<>\s]{1,40}\|>", opened))
        foreign = tuple(n for n in names if len(tokenizer(n, add_special_tokens=False)["input_ids"]) > 1)  # pyright: ignore[reportArgumentType]
    system, begins = _system(closed), 0
    while begins < len(prompt) and prompt[begins] == tokenizer.bos_token_id:
        begins += 1
    return TemplateFacts(
        chat=chat,
        prompt=text,
        end=str(tokenizer.convert_ids_to_tokens(built.encoder.end_token)),
        foreign=foreign,
        begins=begins,
        opens=opened != closed if chat else None,
        system=system if system in " ".join(text.split()) else "",  # a conversation may have its own
        other_ends=_other_ends(built, groups),
        other_form=other,
    )


def _system(rendered: str) -> str:
    """Return the text before the user's message ``?``, if it is more than control tokens and roles."""
    before = re.sub(r"<[^<>]*>|\[[A-Z_]+\]", " ", rendered.partition("?")[0])
    # roles are at both ends; inside, "assistant" is a word of the text
    text = re.sub(r"(?i)^(system\s+)+|(\b(user|human)\W*)+$", "", " ".join(before.split())).strip()
    return text if len(text.split()) > 2 else ""


def _other_ends(built: Built, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return control tokens that answers contain and that end none, with their share of the truncated answers."""
    cut = [c for group in groups for c in group.group.completions if c.truncated]
    tokenizer = built.start.tokenizer
    known = {*tokenizer.all_special_ids} - built.start.end_tokens
    found: dict[str, float] = {}
    for completion in cut:
        for token in {int(token) for token in completion.tokens} - built.start.end_tokens:
            name = str(tokenizer.convert_ids_to_tokens(token))
            if token in known or _CONTROL.fullmatch(name):
                found[name] = found.get(name, 0.0) + 1 / len(cut)
    return dict(sorted(found.items(), key=lambda item: -item[1])[:5])


def _cost(
    config: TrainConfig, built: Built, steps: Sequence[StepMetrics], prompts: int, learnable: Learnable
) -> CostFacts:
    """Return seconds by stage from the last step here, which had no set-up, and memory."""
    measured = float(steps[-1].values["time/step"] or 0.0)
    shape, planned = known_shape(built.start), None
    if shape is not None:
        # The planner may not know the teacher's architecture, or find no layout.
        with contextlib.suppress(ValueError):
            planned = _planned_seconds(config, shape, built, prompts, learnable)
    if planned is not None:
        factor = measured / planned[1]
        seconds = tuple(factor * value for value in planned[0])
    else:
        factor = None
        first = config.in_stage(0).stages[0]
        a_token = measured / (prompts * first.group_size * first.max_tokens)
        seconds = tuple(a_token * s.rollout_batch * s.group_size * s.max_tokens for s in config.stages)
    longest = max(len(built.encoder.encode(problem)) for problem in built.data.train[:200])
    device = built.start.model.device
    learner = built.learner
    return CostFacts(
        step_seconds=seconds,
        hours=sum(s * stage.max_steps for s, stage in zip(seconds, config.stages, strict=True)) / 3600,
        factor=factor,
        peak_gib=learner.peak_mb() / 1024 if isinstance(learner, LocalLearner) else 0.0,
        planned_gib=None if shape is None else sum(run_terms(config, config.model, shape, longest).values()) / GIB,
        available_gib=(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_memory()) / GIB,
    )


def _planned_seconds(
    config: TrainConfig, shape: ModelShape, built: Built, prompts: int, learnable: Learnable
) -> tuple[tuple[float, ...], float]:
    """Return the planned seconds per step: of each stage of the recipe, and of the short step here."""
    device = built.start.model.device
    name = "cpu-2core"
    if device.type == "cuda":
        cuda = torch.cuda.get_device_name(device)
        name = next((n for n, known in known_hardware().items() if cuda in known.cuda_names), "H100-80G")
    first, longest = config.stages[0].max_tokens, max(stage.max_tokens for stage in config.stages)
    mean = min(learnable.mean_length, 0.95 * first)
    # The recipe's cluster is not used here: one accelerator, as measured.
    alone = config.model_copy(update={"cluster": None})
    kept = min(1.0, max(0.05, learnable.signal.mean))
    mean = lengths_of_mean(mean, first).at(longest).mean
    options = Options(gpus=1, mean_length=mean, kept=kept)
    small, _ = short_steps(alone, prompts)
    # With the longest stage in both, so that lengths have the same distribution.
    plans = [make_plan(recipe, shape, load_hardware(name), options, what_if=False) for recipe in (alone, small)]
    return tuple(stage.seconds for stage in plans[0].stages), plans[1].stages[0].seconds
