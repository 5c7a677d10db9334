"""Interpretation of ``magicrl preflight``: findings, each with a setting that fixes it.

Pure functions of `Facts`. A ``stop`` would prevent a run from learning, and the command then exits with status 3. A
``warning`` costs some of it. ``diagnosis.py`` explains why answers give nothing to learn from, as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from magicrl.training.diagnosis import ENOUGH, SCARCE, Cause, diagnose, percent
from magicrl.training.preflight import Facts
from magicrl.training.reward_probes import NOTHING, OFTEN, REFERENCE, SEVERAL, WRONG
from magicrl_verifiers.progress import plural

KL_TOO_LARGE, KL_WARMED_UP = 0.1, 1.0
"""Nats per token in one training step. The second applies to a recipe with a warm-up, which avoids AdamW's first step
at the full rate. PPO's customary bound for a whole batch is 0.01 to 0.02 (Spinning Up)."""
KL_NOTHING = 1e-9
"""KL below which the weights hardly move: float32 rounds a log-prob by about 1e-6, whose KL is smaller."""
OFTEN_CUT = 0.5
"""Share of truncated answers that is worth a warning if a larger T would complete them."""
NOISY = 0.5
"""Share of noise in the variance of the rewards that stops a run."""
NO_LONGER_CUT = 2 / 3
"""Largest share of the truncated answers that a larger T leaves truncated if T is the cause."""
MOSTLY_CUT = 0.75
"""Share of truncated answers that stops a run if a larger T finds twice as many correct ones."""
CONFLICTING = 0.02
"""Share of problems with an earlier one's prompt and other reference answers that is worth a warning."""
WRITES_ANOTHER_END = 0.5
"""Share of the truncated answers with the same control token that makes it their end token."""
UNREAD = 0.2
"""Share of unreadable reference answers that stops a run."""
BETTER_FORM = 0.1
"""Gain in accuracy by another prompt format from which the recipe's is a fault."""
NEARLY_UNIFORM = 0.75
"""Share of the largest possible entropy from which answers are close to random tokens."""
AGAINST, AGREEING, LEAST_PROBLEMS = 0.75, 0.1, 16
"""Label noise: share of the agreed answers that the reference answers contradict, share of the problems whose answers
agree, and fewest problems. A model may agree on wrong answers to most problems, but its answers fit the right labels
better than those of other rows."""
LARGE_ALPHA = 0.2
"""Entropy coefficient from which a nat of entropy at each token is worth a fifth of the reward's standard deviation.
On the tiny tasks 0.1 slows learning and 0.3 ends it within 10 steps (ablation 8); on long responses 5e-4 does."""
LARGE_BETA = 1.0
"""Coefficient of the KL term from which a nat per token costs a standard deviation of the reward. Published recipes use
1e-3 to 0.1 (the report's ablation 5: 1e-3 already stops progress)."""


Finding: TypeAlias = dict[str, str]
"""A fault, as ``magicrl preflight --json`` prints it: ``name``, ``severity``, ``message`` (the figures), ``remedy``."""


def preflight_findings(facts: Facts) -> list[Finding]:
    """Return all findings, causes before their effects, stops before warnings."""
    found: list[Finding] = []
    for rule in RULES:
        found += rule(facts, [item["name"] for item in found])
    return sorted(found, key=lambda item: item["severity"] != "stop")


Named: TypeAlias = Sequence[str]
"""Findings so far."""


def _stop(name: str, message: str, remedy: str) -> Finding:
    return {"name": name, "severity": "stop", "message": message, "remedy": remedy}


def _warning(name: str, message: str, remedy: str) -> Finding:
    return {"name": name, "severity": "warning", "message": message, "remedy": remedy}


def nothing_judged(reason: str) -> Finding:
    """Return the only finding where no sampled answer has a verdict, so that nothing else can be measured."""
    return _stop(
        "nothing_judged", reason, "Correct the reward or verifier: magicrl verify reward judges your own lines."
    )


def _key(facts: Facts, name: str, table: str) -> str:
    """Return the key of a setting that the first stage may state itself."""
    return f"{'stages.0' if name in facts.own else table}.{name}"


def reward_faults(facts: Facts, _: Named) -> Iterable[Finding]:
    """Unreadable references, or a reward that ignores the answer or pays for responses without one."""
    seen = facts.reward
    if seen.unread:
        make = _stop if seen.unread > UNREAD * seen.references else _warning
        yield make(
            "references_unread",
            f"{seen.unread} of {seen.references} reference answers are not accepted as the answer, e.g. {seen.example}",
            "Correct these reference answers, name the right column (data.train.N.fields.answer), or another verifier "
            "(data.train.N.verifier); the steps of magicrl data drop what cannot be read.",
        )
    if facts.conflicting > CONFLICTING * facts.problems:
        yield _warning(
            "conflicting_references",
            f"{facts.conflicting} of {facts.problems} problems have the prompt of an earlier one and other references",
            "Find out which are correct before training: if copies disagree, other references may be wrong too.",
        )
    if seen.unsteady:
        share = f", and {percent(min(1.0, seen.noise))} of the variance of all rewards is such noise"
        yield (_stop if seen.noise > NOISY else _warning)(
            "reward_unsteady",
            f"{percent(seen.unsteady)} of the answers that were judged twice have two different rewards"
            + (share if seen.noise else ""),
            "Let the reward depend on problem and response only: random.Random(problem.id), a judge at temperature 0. "
            "Neither --resume nor magicrl explain repeats such a run.",
        )
    if seen.fitting is not None and seen.fitting.high < 0:
        yield _warning(
            "reward_against_references",
            f"answers that fit their reference earn {-seen.fitting.mean:.2g} less than others to the same problem "
            f"(95 %: {-seen.fitting.high:.2g} to {-seen.fitting.low:.2g})",
            "Check the sign of the reward and how it reads problem.references, unless it pays for something else.",
        )
    earned = seen.earned
    top = earned.get(REFERENCE)
    rewards = ", ".join(f"{kind} earns {value:.2g}" for kind, value in earned.items())
    pays_nothing = NOTHING in earned and (top is None or earned[NOTHING] >= top)
    pays_wrong = top is not None and earned.get(WRONG, -1.0) >= top
    if facts.learnable.constant and (pays_nothing or len(set(earned.values())) == 1):
        yield _stop(
            "constant_reward",
            f"the reward does not depend on the answer: every complete answer has the same reward, and {rewards}",
            "Correct the reward (data.train.N.verifier): magicrl verify reward FILE.py:NAME judges your own lines.",
        )
    elif top is not None and (pays_nothing or pays_wrong) and top > 0:
        yield _stop("reward_pays_wrong", f"a wrong answer has the reward of a correct one: {rewards}", _HARDER)
    elif (
        top
        and not seen.unsteady
        and any(earned.get(kind, 0.0) >= (top if kind == SEVERAL else top + 0.01) for kind in (SEVERAL, OFTEN))
    ):
        yield _warning("reward_pays_hedging", f"a response without one answer has a reward: {rewards}", _HARDER)


_HARDER = (
    "A policy exploits such a reward: accept only the last answer, and no empty one "
    "(verifier.extract = 'box' only counts a box)."
)


def each_reward(facts: Facts, _: Named) -> Iterable[Finding]:
    """One of several rewards that judges nothing, or that never distinguishes the responses to a problem."""
    for name, seen in facts.learnable.rewards.items():
        if seen["not_judged"] == 1:
            yield _stop(
                "reward_never_judges",
                f"the reward {name} (weight {seen['weight']:g}) judged none of the responses",
                "Correct it (magicrl verify reward shows its error), or take it out of data.train.N.verifier.",
            )
        elif seen["weight"] and not seen["signal"]:
            yield _warning(
                "reward_without_signal",
                f"the reward {name} (weight {seen['weight']:g}) is equal for all responses to each problem, "
                f"{seen['mean']:.3g} on average, so that it has no effect",
                "Correct it, or take it out of data.train.N.verifier; for a log line only, give it weight 0.",
            )


def shifted_references(facts: Facts, named: Named) -> Iterable[Finding]:
    """Answers that fit the reference answers of other rows better than their own."""
    seen = facts.reward.neighbour
    # Four offsets are tried, so that a 95 % interval alone would give false alarms. The best must be twice as good as
    # the row's own answers and as the mean over all offsets, which is chance where labels are noise.
    if seen is None or "temperature" in named or seen.rise.low <= 0:
        return
    if seen.there < 2 * max(seen.own, seen.own - seen.skill.mean):
        return
    yield _stop(
        "shifted_references",
        f"{percent(seen.own)} of the answers fit their own reference, and {percent(seen.there)} those of the row "
        f"{abs(seen.offset)} {'below' if seen.offset > 0 else 'above'} it: references are shifted against prompts",
        "Build the data again from its source, with prompt and reference from one record. Check a few rows by hand.",
    )


def label_noise(facts: Facts, named: Named) -> Iterable[Finding]:
    """Answers that agree with each other and fit their reference answers no better than those of other problems."""
    seen, problems = facts.reward, facts.learnable.answers.groups
    explained = {"temperature", "shifted_references", "end_token", "template"} & {*named}
    # Without any correct answer the problems may as well be too hard.
    if seen.neighbour is None or explained or seen.neighbour.own == 0 or seen.neighbour.skill.low > 0:
        return
    agreeing = problems >= LEAST_PROBLEMS and seen.consensus >= AGREEING * problems
    if agreeing and seen.against >= AGAINST * seen.consensus:
        chance = seen.neighbour.own - seen.neighbour.skill.mean
        yield _stop(
            "label_noise",
            f"{percent(seen.neighbour.own)} of the answers fit their own reference answer, {percent(chance)} those "
            f"of other problems; most answers agree in {seen.consensus} of {problems} problems, and in {seen.against} "
            "of these the reference answer contradicts them",
            "Compare a few reference answers with their problems by hand: most are wrong or belong to other problems, "
            "or the model gives one answer to every problem.",
        )


def near_random_answers(facts: Facts, _: Named) -> Iterable[Finding]:
    """Answers that are close to random tokens."""
    seen = facts.learnable
    if seen.entropy is None or seen.entropy < NEARLY_UNIFORM * seen.uniform_entropy:
        return
    hot = facts.temperature > 1
    yield _stop(
        "temperature",
        f"answers are close to random tokens: {seen.entropy:.2g} nats per token at temperature {facts.temperature:g}, "
        f"and a uniform choice has {seen.uniform_entropy:.2g}",
        f"Set {_key(facts, 'temperature', 'rollout')} = 1, as the report does."
        if hot
        else "Train the model with supervised fine-tuning first ([start] of the recipe): it has learned too little.",
    )


def entropy_bonus(facts: Facts, _: Named) -> Iterable[Finding]:
    """A fixed entropy coefficient that outweighs the reward."""
    if facts.alpha >= LARGE_ALPHA:
        yield _stop(
            "entropy_bonus",
            f"entropy.alpha = {facts.alpha:g}: a nat of entropy at each token is worth {facts.alpha:g} standard "
            "deviations of the reward, so that the policy moves towards random tokens",
            'Set entropy.alpha to 0.01 or less, or entropy.controller = "adaptive".',
        )


def kl_coefficient(facts: Facts, _: Named) -> Iterable[Finding]:
    """A coefficient of the KL term that keeps the policy at the reference."""
    if facts.kl_coefficient >= LARGE_BETA:
        yield _stop(
            "kl_coefficient",
            f"the KL term has the coefficient {facts.kl_coefficient:g}: a nat per token costs as much as "
            f"{facts.kl_coefficient:g} standard deviations of the reward, so that the policy stays at the reference",
            'Set reference.coefficient to 1e-3 or less, or reference.mode = "none", as the released models do.',
        )


def end_token(facts: Facts, _: Named) -> Iterable[Finding]:
    """Answers that contain another control token where they should end, or end at no length."""
    cut, template = facts.learnable.answers.truncated, facts.template
    name, share = next(iter(template.other_ends.items()), ("", 0.0))
    if cut >= ENOUGH and share >= WRITES_ANOTHER_END:
        make = _stop if cut >= OFTEN_CUT else _warning
        yield make(
            "end_token",
            f"{percent(cut)} of the answers are truncated at T, and {percent(share)} of these contain {name}, which "
            f"ends nothing here: the end token is {template.end}",
            f"Add the id of {name} to eos_token_id in the model's generation_config.json (a list may hold several), or "
            "name it as eos_token in tokenizer_config.json.",
        )


def template(facts: Facts, named: Named) -> Iterable[Finding]:
    """Prompts in a format that the model was not trained with."""
    seen = facts.template
    if seen.foreign:
        yield _stop(
            "template",
            f"the chat template writes {', '.join(seen.foreign)}, for which this tokenizer has no tokens: it belongs "
            "to another model",
            "Use the original chat template of the model, or remove chat_template.",
        )
    if seen.begins > 1:
        yield _warning(
            "double_begin",
            f"a prompt begins with {seen.begins} begin-of-text tokens",
            "Remove bos_token from the chat template, or from data.train.N.template.",
        )
    if seen.opens is False:
        yield _warning(
            "generation_prompt",
            "the chat template does not open the model's turn: add_generation_prompt changes nothing",
            "Add the generation prompt to the chat template: {% if add_generation_prompt %}...{% endif %} at its end.",
        )
    other = seen.other_form
    # The effect of an unknown end token or of wrong reference answers is not a fault of the format.
    if other is None or seen.foreign or "end_token" in named or "shifted_references" in named:
        return
    if other.rise.low > 0 and other.rise.mean >= BETTER_FORM:
        make = _stop if other.after >= 2 * other.before else _warning
        yield make(
            "template",
            f"{percent(other.before)} of the answers are correct with the recipe's prompt, {percent(other.after)} "
            f"with {other.name}",
            f"{other.remedy[0].upper()}{other.remedy[1:]}.",
        )


_NAMES: dict[Cause, str] = {
    "truncated": "limit",
    "no_answer": "no_answer",
    "all_wrong": "too_hard",
    "all_right": "too_easy",
    "same_reward": "same_reward",
}


def signal(facts: Facts, named: Named) -> Iterable[Finding]:
    """Too few groups with an advantage, by the cause of the diagnosis, unless a fault above explains it.

    With a teacher every group teaches.
    """
    if facts.taught:
        yield from _limit(facts)
        return
    seen = facts.learnable
    found = diagnose(seen.answers)
    causes = {
        "constant_reward",
        "shifted_references",
        "label_noise",
        "temperature",
        "end_token",
        "template",
        "references_unread",
    }
    explained = causes & {*named}
    if facts.filtered and found.cause == "enough" and seen.answers.correct in (0, 1):
        yield _stop(
            "all_filtered",
            f"{percent(seen.answers.mixed)} of the groups have different rewards, but "
            f"{percent(seen.answers.correct)} of the answers are right, so that the difficulty filter drops every "
            "problem",
            "Set right_from of the reward to a score that some answers reach, or remove [data.difficulty_filter].",
        )
    if found.cause == "enough" or explained:
        yield from () if explained else _limit(facts)
        return
    # The offline filter drops problems that are never or always solved, if any others are left.
    scarce = seen.signal.mean < SCARCE if facts.filtered else True
    make = _stop if (scarce and seen.signal.high < ENOUGH) or _wants_room(facts) else _warning
    name, message, remedy = _NAMES[found.cause], found.message, found.remedy
    if found.rare and not _wants_room(facts):
        yield _warning("rare_reward", message, remedy)
        return
    longer = facts.longer
    if name == "limit" and longer is not None:
        message += f"; with T = {longer.max_tokens} {percent(longer.truncated)} are truncated"
        if longer.truncated > NO_LONGER_CUT * seen.answers.truncated:
            name = "never_ends"
        else:
            remedy = f"95 % of the complete ones then have at most {longer.length} tokens: set max_tokens of the stage."
    yield make(name, message, remedy)


def _wants_room(facts: Facts) -> bool:
    """Return whether most answers are truncated, and a larger T finds twice as many correct ones."""
    longer, seen = facts.longer, facts.learnable
    more = longer is not None and longer.correct > 0 and longer.correct >= 2 * seen.pass_1.mean
    return more and seen.answers.truncated >= MOSTLY_CUT


def _limit(facts: Facts) -> Iterable[Finding]:
    """Yield a T that truncates most answers, if a larger one would not, even though enough groups have an advantage."""
    cut, longer = facts.learnable.answers.truncated, facts.longer
    if longer is None or cut < OFTEN_CUT or longer.truncated > NO_LONGER_CUT * cut:
        return
    wants_room = _wants_room(facts)
    if wants_room or facts.later_tokens < longer.length:  # a short first stage is fine if a later one is long enough
        make = _stop if wants_room else _warning
        yield make(
            "limit",
            f"{percent(cut)} of the answers are truncated at T = {facts.learnable.answers.max_tokens}; with "
            f"{longer.max_tokens} {percent(longer.truncated)} are, and {percent(longer.correct)} correct instead of "
            f"{percent(facts.learnable.pass_1.mean)}",
            "A short first stage is part of the recipe (section 3.1.2 of the report) if a later stage is longer: "
            f"95 % of the complete answers have at most {longer.length} tokens. Raise max_tokens, or add such a stage.",
        )


def update_size(facts: Facts, named: Named) -> Iterable[Finding]:
    """A step that moves the policy too far from the samples, or not at all."""
    seen = facts.update
    # On prompts in a format that the model was not trained with, steps are larger than on its own.
    if seen is None or "template" in named:
        return
    rate = _key(facts, "learning_rate", "optimizer")
    made = f"one training step ({plural(seen.updates, 'update')} at the full rate)"
    if seen.failure:
        name = "step" if seen.finite else "learning_rate"
        remedy = "See the message." if seen.finite else f"Lower {rate}, to {seen.rate / 100:g} first."
        yield _stop(name, f"{made} fails: {seen.failure}", remedy)
    if seen.kl is None or not seen.finite:
        return
    largest = KL_WARMED_UP if seen.warmup else KL_TOO_LARGE
    if not seen.kl <= largest:
        after = f"; {percent(seen.correct[0])} correct before it, {percent(seen.correct[1])} after" * (
            len(seen.correct) > 1
        )
        # KL grows with the square of the rate.
        fitting = seen.rate * (largest / 10 / seen.kl) ** 0.5
        yield _stop(
            "learning_rate",
            f"{made} moves the policy by a KL of {seen.kl:.2g} nats per token (log-probs by {seen.change:.2g} on "
            f"average){after}",
            f"Lower {rate} from {seen.rate:g} to about {fitting:.1g} or less.",
        )
    elif seen.kl < KL_NOTHING:
        yield _warning(
            "learning_rate_low",
            f"{made} moves log-probs by {seen.change:.2g} nats on average: hardly at all",
            f"Raise {rate}; optimizer.max_grad_norm does not limit AdamW's first steps.",
        )


def too_little_memory(facts: Facts, _: Named) -> Iterable[Finding]:
    """More memory than available, planned or measured."""
    cost = facts.cost
    if cost is not None and max(cost.peak_gib, cost.planned_gib or 0.0) > cost.available_gib:
        yield _stop(
            "memory",
            f"the run needs {max(cost.peak_gib, cost.planned_gib or 0.0):.1f} GiB of {cost.available_gib:.1f}",
            "Lower model.micro_batch_tokens or rollout.memory_limit_mb, or set model.gradient_checkpointing.",
        )


def second_reading(facts: Facts, _: Named) -> Iterable[Finding]:
    """Answers that are correct by another extraction, but not by the recipe's."""
    more = facts.reward.right.get("lenient", 0.0)
    if more > facts.learnable.pass_1.mean + BETTER_FORM and more > 2 * facts.learnable.pass_1.mean:
        yield _warning(
            "box_alone",
            f"{percent(more)} of the answers are correct if an answer without a box counts, "
            f"{percent(facts.learnable.pass_1.mean)} by the recipe",
            'Set verifier.extract = "lenient", or ask for the box in data.train.N.template.',
        )


RULES: tuple[Callable[[Facts, Named], Iterable[Finding]], ...] = (
    reward_faults,
    near_random_answers,
    shifted_references,
    end_token,
    template,
    label_noise,
    entropy_bonus,
    kl_coefficient,
    each_reward,
    signal,
    second_reading,
    update_size,
    too_little_memory,
)
"""Causes before effects: a rule sees the findings of earlier ones."""
