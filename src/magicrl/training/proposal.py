"""From what was seen of a model and its problems to a recipe that will learn: every number with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from magicrl.config.errors import without_secrets
from magicrl.config.schema import ModelConfig
from magicrl.records import Problem
from magicrl.training.first_look import MAX_ROWS, Look, Speed

TRAINING_SHARE, TEST_SHARE, FILTER_SHARE = 0.7, 0.15, 0.15
"""Of the time: the loop, the tests before and after, the filter before."""
FEW_STEPS = 10
LARGE = 1e9
SMALL = 5e6
"""Parameters: above, the report's entropy control; below, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is known before a recipe is proposed.

    Attributes:
        model: folder or hub name, as the recipe is to have it.
        data: file, folder or hub name, likewise.
        hub: ``data`` is a hub name.
        columns: of the prompt and the answer where the user named them.
        problems: all of them.
        verifier: that judges them, where it is not what their columns say.
        parameters: of the model.
        context: its longest sequence, tokens.
        prompt_lengths: tokens of every prompt in the chosen way of asking, ascending.
        reasoning: of the verifier.
        minutes: that the run may take.
    """

    model: str
    data: str
    hub: bool
    columns: dict[str, str]
    problems: Sequence[Problem]
    verifier: str | None
    parameters: int
    context: int
    prompt_lengths: Sequence[int]
    reasoning: str
    minutes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The numbers of a recipe, each with its reason in ``text``.

    Attributes:
        text: the recipe.
        step_seconds: expected of a training step.
        steps: of all stages.
    """

    text: str
    step_seconds: float
    steps: int


def group_size(per_problem: Sequence[float]) -> tuple[int, float]:
    """M, and the share of groups that are expected to have answers of differing reward with it.

    8 where that gives half of the groups a signal, else 16. Each problem's chance is shrunk towards the mean of all,
    since a handful of samples tells little of one.
    """
    mean = sum(per_problem) / len(per_problem)
    chances = [(p + 0.5 * mean) / 1.5 for p in per_problem]
    size, expected = 0, 0.0
    for size in (8, 16):
        expected = sum(1 - p**size - (1 - p) ** size for p in chances) / len(chances)
        if expected >= 0.5:
            break
    return size, expected


def response_limit(look: Look, room: int) -> tuple[int, str]:
    """T of the first stage and why; ``room`` is what the model's context leaves beside the longest prompt."""
    seen, cut = look.answers.max_tokens, look.answers.truncated
    if cut > 0.1:
        return min(2 * seen, room), f"{100 * cut:.0f} % of the answers were cut at {seen} tokens"
    longest = look.length(0.95)
    limit = min(room, max(32, 32 * math.ceil(1.5 * longest / 32)))
    return limit, f"95 % of the answers have at most {longest} tokens"


def learning_rate(parameters: int) -> float:
    """2e-5 at 135 million parameters, falling with the root of their number; between 1e-6 and 1e-3."""
    rate = min(1e-3, max(1e-6, 2e-5 * math.sqrt(135e6 / parameters)))
    return float(f"{rate:.1g}")


def propose(setting: Setting, look: Look, model: ModelConfig, speed: Speed) -> Proposal:
    """A recipe for ``setting`` on the best way of asking."""
    size, expected = group_size(look.per_problem)
    longest = setting.prompt_lengths[-1]
    prompt = setting.prompt_lengths[len(setting.prompt_lengths) // 2]
    prompt_limit = min(longest, setting.context // 2)
    limit, why_limit = response_limit(look, setting.context - prompt_limit)
    mean = min(limit, sum(look.lengths) / len(look.lengths) if look.lengths else limit)
    a_response = mean / speed.sampled + (mean + prompt / size) / speed.learned
    seconds = 60 * setting.minutes
    held = _held_out(len(setting.problems), TEST_SHARE * seconds / 2 / (5 * mean / speed.sampled))
    train = len(setting.problems) - held
    batch = 4
    while batch < 32 and 2 * batch <= train and 2 * batch * size * a_response <= TRAINING_SHARE * seconds / 40:
        batch *= 2
    step = batch * size * a_response
    steps = max(FEW_STEPS, min(400, round(TRAINING_SHARE * seconds / step)))
    filtered = _filter_samples(train, FILTER_SHARE * seconds, mean / speed.sampled) if expected < 0.5 else 0
    text = _recipe(
        setting,
        look,
        model,
        sizes=(size, expected, batch, steps, step),
        limits=(limit, why_limit, prompt_limit, longest),
        held=held,
        filtered=filtered,
    )
    return Proposal(text=text, step_seconds=step, steps=steps)


def _held_out(problems: int, affordable: float) -> int:
    """Problems of the test before and after: a fifth at most, as many as the time allows, 8 at least, 100 at most."""
    return max(1, min(100, problems // 5, max(8, int(affordable))))


def _filter_samples(problems: int, seconds: float, a_response: float) -> int:
    """N of the difficulty filter that the time allows; 0: none."""
    return next((n for n in (16, 8, 4) if problems * n * a_response <= seconds), 0)


def _recipe(
    setting: Setting,
    look: Look,
    model: ModelConfig,
    *,
    sizes: tuple[int, float, int, int, float],
    limits: tuple[int, str, int, int],
    held: int,
    filtered: int,
) -> str:
    size, expected, batch, steps, step = sizes
    limit, why_limit, prompt_limit, longest = limits
    answers, way = look.answers, look.way
    cut = answers.truncated > 0.1 and 2 * limit <= setting.context - prompt_limit
    later = steps // 3 if cut and steps >= 3 * FEW_STEPS else 0  # steps of a second stage
    small = setting.parameters < LARGE
    lines = [
        f"# Written by magicrl init for {setting.minutes:g} minutes on this machine.",
        f"# Seen of {answers.groups} problems: {_percent(answers.correct)} of the answers right, "
        f"{_percent(answers.mixed)} of the groups with right and wrong ones.",
        "",
        "[run]",
        f"name = {_text(_name(setting.model))}",
        "",
        "[start]",
        f"model = {_text(setting.model)}",
        "",
        "[model]",
        f"dtype = {_text(model.dtype)}",
        f"micro_batch_tokens = {model.micro_batch_tokens}  # fits this machine's memory",
        f"head_chunk_tokens = {model.head_chunk_tokens}",
        "",
        "[data]",
        f"holdout = {held}  # problems of the test before and after; never trained on",
        f"max_prompt_tokens = {prompt_limit}  # the longest prompt has {longest}",
        *(['overlong_prompts = "drop"'] if prompt_limit < longest else []),
        "",
        "[[data.train]]",
        f"{'hub' if setting.hub else 'path'} = {_text(setting.data)}",
        f"template = {_text(way.template)}",
        *([f"verifier = {_text(setting.verifier)}  # the answers are words"] if setting.verifier else []),
        *(
            ["fields = { " + ", ".join(f"{k} = {_text(v)}" for k, v in setting.columns.items()) + " }"]
            if setting.columns
            else []
        ),
        "",
        *(
            [
                "[data.difficulty_filter]",
                f"samples = {filtered}  # drops the problems that are never or always solved: here they are many",
                "",
            ]
            if filtered
            else []
        ),
        "[rollout]",
        f"max_rows = {MAX_ROWS}",
        "memory_limit_mb = 2048",
        "",
        "[verifier]",
        f"extract = {_text(way.extract)}  # {_why_extract(way.extract)}",
        f"reasoning = {_text(setting.reasoning)}",
        "",
        "[algorithm]",
        'refill = "until_full"  # samples further problems in place of those without a signal',
        "refill_rounds = 2",
        "",
        "[entropy]",
        *(['preset = "small"', "step = 0.001", "maximum = 0.01"] if small else ['preset = "report"']),
        "",
        "[optimizer]",
        f"learning_rate = {learning_rate(setting.parameters):g}  # by the size of the model",
        "warmup_steps = 3",
        "",
        "[[stages]]",
        f"max_tokens = {limit}  # T: {why_limit}",
        f"group_size = {size}  # M: {_percent(expected)} of the groups should have a signal",
        f"rollout_batch = {batch}  # D_R: about {step:.0f} s a step",
        f"max_steps = {steps - later}",
        'transition = { rule = "fixed" }',
        *(_second_stage(limit, size, batch, later) if later else []),
        "",
        "[evaluation]",
        "temperatures = [0.0, 1.0]",
        "samples = 4",
        "pass_at = [4]",
        "",
        "[checkpoint]",
        f"every = {max(5, min(20, steps // 4))}",
        "",
    ]
    return "\n".join(lines)


def _second_stage(limit: int, size: int, batch: int, steps: int) -> list[str]:
    return [
        "",
        "[[stages]]",
        f"max_tokens = {2 * limit}  # longer answers, once they have grown",
        f"group_size = {size}",
        f"rollout_batch = {batch}",
        f"max_steps = {steps}",
        'transition = { rule = "fixed" }',
    ]


def _why_extract(extract: str) -> str:
    if extract == "box":
        return "only a \\boxed{} counts: it is not hit by chance"
    return "what an answer ends with counts too: too few of them box it"


def _name(model: str) -> str:
    return without_secrets(model.rstrip("/").rsplit("/", 1)[-1]).lower() or "run"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
