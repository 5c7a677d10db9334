"""Checks before anything is computed or written, which also read the problems.

``magicrl train``, its ``--dry-run`` and the library's ``train`` call ``check_run``. ``check_sft`` checks a supervised
recipe, alone or as the start of a run. Results that are expensive to read are returned. Every set of problems is read
here: prompts are checked against their limit, and test problems are kept out of training.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from magicrl.algorithms.advantages import advantage_of, reads_parts
from magicrl.config.data_schema import DataConfig, SourceConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.model_schema import ModelConfig
from magicrl.config.schema import STAGE_SETTINGS, TrainConfig
from magicrl.config.section import Section
from magicrl.config.sft_schema import SftConfig, SftPhaseConfig
from magicrl.data.curricula import make_curriculum
from magicrl.data.sampler import PromptSampler
from magicrl.data.sources import held_out_keys, load_parts, load_problems, source_place_of
from magicrl.environments.base import environment_spec
from magicrl.models.adapters import adapter_shapes, check_adapters, fitted, read_adapters
from magicrl.models.compiled import check_compiled, check_compiler
from magicrl.models.cpu_kernels import bfloat16_speeds
from magicrl.models.exact import check_exact
from magicrl.models.loading import LoadedModel, load_policy, load_shell, resolve_device
from magicrl.models.model_files import find_model
from magicrl.models.prompts import PromptEncoder
from magicrl.models.routing import Routers
from magicrl.models.scorer import check_isolation
from magicrl.planning.memory import host_memory, learner_terms, memory_fault, run_terms
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.records import Problem
from magicrl.registry import BUILTINS, resolve
from magicrl.rollout.recording import read_rollouts
from magicrl.rollout.vllm_options import check_engine_args, vllm_missing
from magicrl.training.learner import muon_matrices
from magicrl.training.objective import LearnerSettings, Objective, entropy_controller, resolve_setting
from magicrl.training.recorder import check_folder
from magicrl.training.sft import (
    RECORD,
    demonstrated_keys,
    finished_model,
    start_policy,
    supervised_start,
    trial_batches,
)
from magicrl.training.teacher import check_teacher
from magicrl_verifiers.several import reward_names
from magicrl_verifiers.table import verifier_spec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Problems of a run.

    Attributes:
        train: Training problems, before any filter.
        validation: Validation problems, which drive stages; may be empty.
        test: Test sets by name.
        dropped_overlong: Number of training problems left out because their prompt is too long.
        dropped_in_test: Number of training problems left out because a validation or test set has the same prompt,
            including further copies of held-out problems.
        dropped_conflicting: Number of training problems left out because an earlier one with the same prompt has other
            reference answers.
    """

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    test: dict[str, tuple[Problem, ...]]
    dropped_overlong: int
    dropped_in_test: int = 0
    dropped_conflicting: int = 0

    def verifiers(self) -> set[str]:
        """Return the names of the verifiers that the problems need."""
        return {p.verifier for problems in (self.train, self.validation, *self.test.values()) for p in problems}

    def sets(self, data: DataConfig) -> Iterator[tuple[str, Sequence[Problem], Sequence[SourceConfig]]]:
        """Yield the key of each set in the recipe, its problems, and their sources."""
        yield "data.train", self.train, data.train
        yield "data.validation", self.validation, data.validation
        for name, problems in self.test.items():
            # Problems that ``data.holdout`` sets aside come from the training files.
            yield f"data.test.{name}", problems, (data.test[name],) if name in data.test else data.train

    def environments(self) -> dict[str, Problem]:
        """Return one problem per environment, by the environment's name."""
        sets = (self.train, self.validation, *self.test.values())
        return {p.environment: p for problems in sets for p in problems if p.environment is not None}


def _shown_to(model: Path) -> set[str]:
    """Return the keys of problems whose solutions `magicrl sft` showed a model, and those that it started from."""
    shown: set[str] = set()
    seen: set[Path] = set()
    while (record := model / RECORD).is_file() and record not in seen:
        seen.add(record)
        faults: list[Exception] = []
        try:
            found = json.loads(record.read_text(encoding="utf-8"))
            recipe = SftConfig.model_validate(found["recipe"])
            model = Path(found["started_from"] or record)  # without an origin no record is found there
            for phase in (each for each in recipe.phases if each.data is not None):
                try:
                    shown |= demonstrated_keys(recipe.model_copy(update={"phases": (_plain_phase(phase),)}))
                except (ValueError, OSError) as error:
                    faults.append(error)
        except (ValueError, LookupError, TypeError, OSError) as error:
            faults.append(error)
        if faults:
            _log.warning(
                "start.model: the data that %s names cannot be read (%s), so nothing shows whether the model was "
                "trained on test problems",
                *(record, faults[0]),
            )
    return shown


def _plain_phase(phase: SftPhaseConfig) -> SftPhaseConfig:
    """Return a phase that reads files and nothing else: a record from the hub may name code, a data set or a device."""
    data = phase.data
    if data is None or data.path is None or not (Path(data.path).is_file() or Path(data.path).is_dir()):
        raise ValueError("only files are read")
    # The verifier decides which texts are solutions, and reading does not run it.
    names = ("path", "split", "count", "fields", "template", "verifier")
    kept = SourceConfig(**{name: getattr(data, name) for name in names})
    return phase.model_copy(update={"data": kept})


def load_data(config: TrainConfig, encoder: PromptEncoder) -> RunData:
    """Read every set of the recipe, check prompts against the limit, and keep test problems out of training.

    Raises:
        RecipeError: A source is wrong, or the settings leave no training problem (with its key).
        ValueError: The content of a source is wrong, or a prompt is too long (unless those are dropped).
    """
    data = config.data

    def fitting(problems: list[Problem]) -> list[Problem]:
        return [p for p in problems if encoder.fits(p)] if data.overlong_prompts == "drop" else problems

    with under("data.train"):
        parts = load_parts(data.train)
    with under("data.validation"):
        validation = load_parts(data.validation, key="data.validation")
    test: dict[str, list[Problem]] = {}
    for name, source in data.test.items():
        with under(f"data.test.{name}"):
            test[name] = load_problems(source, key=f"data.test.{name}")
    # Compared by prompt, not by id: two files may contain one problem under two ids.
    examined = {p.key for problems in (*validation, *test.values()) for p in problems}
    train, in_test = _without_test_problems([p for part in parts for p in part], examined)
    train, conflicting = _without_conflicts(train)
    # After conflicts are removed, so that a held-out prompt has one set of reference answers.
    if data.holdout:
        train, held, copies = _hold_out(train, data.holdout)
        in_test += copies
        # They come from the training files: if these may lose long prompts, so may they.
        test["holdout"] = fitting(held) or held
        if len(test["holdout"]) < len(held):
            missing = len(held) - len(test["holdout"])
            _log.warning("data.holdout: %d of %d problems are left out, their prompts are too long", missing, len(held))
    kept = fitting(train)
    if len(kept) < len(train):
        _log.warning(
            "data.train: %d of %d problems have prompts of more than data.max_prompt_tokens = %d tokens; "
            "they are left out of training",
            len(train) - len(kept),
            len(train),
            data.max_prompt_tokens,
        )
    found = RunData(
        train=tuple(kept),
        validation=tuple(p for part in validation for p in part),
        test={name: tuple(problems) for name, problems in test.items()},
        dropped_overlong=len(train) - len(kept),
        dropped_in_test=in_test,
        dropped_conflicting=conflicting,
    )
    trained, *others = found.sets(data)
    # An explicit test set is always complete: a prompt that is too long is an error in it.
    for one in others:
        _check_prompts(encoder, data.max_prompt_tokens, *one, "or leave it out")
    if not kept:
        raise RecipeError(
            f"every training prompt is longer than {data.max_prompt_tokens} tokens; raise the limit",
            key="data.max_prompt_tokens",
        )
    shorten = "shorten it, or set data.overlong_prompts = 'drop'"
    _check_prompts(encoder, data.max_prompt_tokens, *trained, shorten)
    return found


def _without_test_problems(train: Sequence[Problem], held: Collection[str]) -> tuple[list[Problem], int]:
    """Return the training problems whose key is not in ``held``, and the number of the others."""
    kept = [p for p in train if p.key not in held]
    dropped = len(train) - len(kept)
    if not kept:
        raise RecipeError(
            f"every one of its {len(train)} problems is in a validation or test set, so nothing is left to train "
            "on; use other problems, or let data.holdout set some aside",
            key="data.train",
        )
    if dropped:
        _log.warning(
            "data.train: %d of %d problems are in a validation or test set too; they are left out of training",
            dropped,
            len(train),
        )
    return kept, dropped


def _without_conflicts(train: Sequence[Problem]) -> tuple[list[Problem], int]:
    """Return the training problems without those that repeat an earlier prompt with other reference answers, and their
    number.

    Rewarding different answers to one prompt teaches none of them. Copies with the same reference answers stay, as a
    weight.
    """
    first: dict[str, Problem] = {}
    kept = [p for p in train if _same_references(first.setdefault(p.key, p), p)]
    if len(kept) < len(train):
        other = next(p for p in train if not _same_references(first[p.key], p))
        _log.warning(
            "data.train: %d of %d problems have the prompt of an earlier one and other references (%r and %r, e.g.); "
            "the first one's reference answers count, the others are left out of training",
            len(train) - len(kept),
            len(train),
            first[other.key].id,
            other.id,
        )
    return kept, len(train) - len(kept)


def _same_references(one: Problem, other: Problem) -> bool:
    # Order and white space do not make reference answers different.
    return one is other or {" ".join(g.split()) for g in one.references} == {
        " ".join(g.split()) for g in other.references
    }


def _hold_out(train: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem], int]:
    """Return training problems without ``count`` of their prompts, one problem per held-out prompt, and the number of
    dropped copies.

    The prompt's key decides, so that the choice depends neither on the order of a file nor on its ids.
    """
    first: dict[str, Problem] = {}
    for problem in train:
        first.setdefault(problem.key, problem)
    if count >= len(first):
        raise RecipeError(
            f"{count} would leave no training problems of {len(first)} distinct prompts; lower it", key="data.holdout"
        )
    held = held_out_keys(train, count)
    kept = [p for p in train if p.key not in held]
    return kept, [p for key, p in first.items() if key in held], len(train) - len(kept) - count


def _check_prompts(
    encoder: PromptEncoder,
    limit: int,
    key: str,
    problems: Sequence[Problem],
    sources: Sequence[SourceConfig],
    remedy: str,
) -> None:
    """Raise ``ValueError`` for a prompt that is empty, too long, or unknown to the tokenizer."""
    for problem in problems:
        try:
            encoder.encode(problem)
        except ValueError as error:
            reason = str(error).removeprefix(f"problem {problem.id!r}: ")
            if not encoder.fits(problem):
                # Over all prompts that are too long, so that raising the limit once suffices.
                lengths = [encoder.length(p) for p in problems if not encoder.fits(p)]
                reason = (
                    f"its prompt has {encoder.length(problem)} tokens, more than data.max_prompt_tokens = "
                    f"{limit} ({len(lengths)} of {len(problems)} prompts are too long, the longest has "
                    f"{max(lengths)}); raise the limit, {remedy}"
                )
            raise ValueError(f"{_place(problem, sources, key)}: problem {problem.id!r}: {reason}") from None


def _place(problem: Problem, sources: Sequence[SourceConfig], key: str) -> str:
    """Return the file and line of a problem, or the setting ``key`` if no source is a file."""
    return next((found for source in sources if (found := source_place_of(problem.id, source))), key)


Ready: TypeAlias = tuple[RunData, LoadedModel | None]
"""Results of the checks that the run uses: problems, and ``start.model`` in float32 on the run's device. None where it
is trained first, or lives on other machines."""


def check_run(config: TrainConfig, output: Path, *, resume: bool) -> Ready:
    """Check output folder, packages, device, initial model, problems, lengths and memory.

    Raises:
        RecipeError: A setting or a combination of settings is unusable (with its key).
        ValueError: A file or the machine is unusable. The text says what to do.
    """
    # Cheap checks come first.
    check_folder(output, config, resume=resume)
    _check_packages(config)
    _check_plugins(config)
    _warn_of_unused_settings(config)
    _warn_of_unused_limit("model", config.model)
    here = config.cluster is None
    with under("run.device"):
        device = resolve_device(config.run.device) if here else torch.device("cpu")
    # Keys of problems whose solutions the initial model was trained on. No test may contain them.
    shown: set[str] = set()
    if config.start.model is None:
        recipe, folder = supervised_start(config.start, output.parent / "models")
        with under("start.sft"):
            policy, base = check_sft(recipe, folder), str(folder)
            shown = demonstrated_keys(recipe)
    else:
        with under("start.model"):
            name = base = config.start.model
            # With a cluster the ranks read the weights, so the files' headers suffice here.
            policy = load_policy(name, device=device) if here else load_shell(name)
        if config.data.test or config.data.validation or config.data.holdout:
            shown = _shown_to(find_model(name))
        if here:
            # The learner checks this too, but only after the run has started.
            check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.model.share_prompts)
    _check_model(config, policy, base, device)
    # Context and memory depend on the problems' lengths in this model's tokens.
    encoder = PromptEncoder(policy.tokenizer, config.data.max_prompt_tokens)
    data = load_data(config, encoder)
    _check_problems(config, data, shown)
    tests = (p for problems in data.test.values() for p in problems)
    trained = max((encoder.length(p), p.id) for p in data.train)
    longest = max([trained[0], *(encoder.length(p) for p in (*data.validation, *tests))])
    observed = _check_environments(config, data, encoder)
    check_context(config, policy, longest, observed)
    teacher = check_teacher(config, policy, data.train, trained, observed)
    # Check that files that are read later can be read.
    if config.reference.model is not None:
        with under("reference.model"):
            load_shell(config.reference.model)
    if config.rollout.replay is not None:
        with under("rollout.replay"):
            read_rollouts(Path(config.rollout.replay))
    shape = known_shape(policy)
    # The memory of other machines cannot be checked here.
    if here and shape is not None:
        counted = with_needed_reference(config)
        _check_memory(
            "model",
            config.model,
            device,
            lambda model: run_terms(counted, model, shape, longest + observed) | {"teacher": teacher},
        )
    return data, policy if config.start.model is not None and here else None


def _check_model(config: TrainConfig, policy: LoadedModel, base: str, device: torch.device) -> None:
    """Raise ``RecipeError`` if a setting does not fit the initial model, made from ``base``."""
    for wanted, key, check in (
        (config.model.router_replay, "model.router_replay", lambda: Routers(policy.model)),
        (
            config.optimizer.kind == "muon",
            "optimizer.kind",
            lambda: muon_matrices(dict(policy.model.named_parameters())),
        ),
        (config.model.exact, "model.exact", lambda: check_exact(policy.model)),
    ):
        try:
            if wanted:
                check()
        except ValueError as error:
            raise RecipeError(str(error), key=key) from error
    lora = None if config.model.lora is None else fitted(config.model.lora, policy.model)
    if lora is not None and config.model.lora is not None and lora != config.model.lora:
        missing = ", ".join(name for name in config.model.lora.target_modules if name not in lora.target_modules)
        adapted = ", ".join(lora.target_modules)
        _log.warning("model.lora.target_modules: this model lacks %s. Only %s get adapters", missing, adapted)
    if lora is not None and lora.start is not None:
        with under("model.lora.start"):
            check_adapters(Path(lora.start), lora, base)
            read_adapters(Path(lora.start), adapter_shapes(policy.model, lora), base)
        reference = with_needed_reference(config).reference
        if reference.mode != "none" and reference.model is None:
            raise RecipeError(
                f"the default would be {base} without the adapters of model.lora.start, from which training begins; "
                "name that model, or one into which the adapters are merged",
                key="reference.model",
            )
    here = config.cluster is None
    _check_compiled("model", config.model, policy, device if here else None)
    if here:
        _warn_of_slow_precision("model", config.model, policy, device)


def _check_problems(config: TrainConfig, data: RunData, shown: set[str]) -> None:
    """Raise an error if problems lack what their verifier needs, were demonstrated (``shown``) or fill no batch."""
    if any("judge" in reward_names(name) for name in data.verifiers()):
        config.verifier.needed_judge()
    for one in data.sets(config.data):
        check_references(*one)
    _check_demonstrated(shown, data, config)
    try:
        curriculum = make_curriculum(config.data.sampler, data.train, config.run.seed, config.data.sampler_options)
        PromptSampler(data.train, config.run.seed, curriculum).next(config.stages[0].rollout_batch)
    except ValueError as error:
        raise RecipeError(str(error), key="data.sampler") from error


def check_references(key: str, problems: Sequence[Problem], sources: Sequence[SourceConfig]) -> None:
    """Raise ``ValueError`` for the first problem that lacks what its verifier or reward needs: an answer, a column.

    An environment rewards its own problems, which need no reference answer.
    """
    for problem in (problem for problem in problems if problem.environment is None):
        try:
            verifier_spec(problem.verifier).check_references(problem)
        except ValueError as error:
            raise ValueError(f"{_place(problem, sources, key)}: {error}") from None


def _check_demonstrated(keys: Collection[str], data: RunData, config: TrainConfig) -> None:
    """Refuse evaluation problems whose solutions the initial model was trained on: they measure nothing."""
    for name, problems in (*data.test.items(), ("validation", data.validation)):
        shown = sum(p.key in keys for p in problems)
        if shown:
            remedy = f"set its holdout = {config.data.holdout}" if name == "holdout" else "take them out of its data"
            raise RecipeError(
                f"its worked solutions show {shown} of the {len(problems)} problems of the set {name!r}, which would "
                f"measure memorisation; {remedy}",
                key="start.sft" if config.start.model is None else "start.model",
            )


def check_sft(config: SftConfig, output: Path) -> LoadedModel:
    """Check a supervised recipe and return the model that it starts from, or has trained already.

    Args:
        config: The recipe.
        output: Model folder that it writes.

    Raises:
        RecipeError, ValueError: As ``check_run``.
    """
    made = finished_model(config, output)
    if made is not None:
        # The model exists already: only the model itself can be unusable.
        return load_policy(made)
    check_peft("training", config.training)
    _warn_of_unused_limit("training", config.training)
    with under("run.device"):
        device = resolve_device(config.run.device)
    policy = start_policy(config, output)
    check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.training.share_prompts)
    _check_compiled("training", config.training, policy, device)
    _warn_of_slow_precision("training", config.training, policy, device)
    batches = trial_batches(config, policy)
    shape = known_shape(policy)
    if shape is not None:
        tokens = max(sum(len(sample) for sample in batch) for batch in batches)
        longest = max(len(sample) for batch in batches for sample in batch)
        _check_memory(
            "training",
            config.training,
            device,
            lambda model: learner_terms(model, shape, batch_tokens=tokens, longest=longest),
        )
    return policy


def _check_environments(config: TrainConfig, data: RunData, encoder: PromptEncoder) -> int:
    """Import the problems' environments. Returns the most tokens that observations may add to a response."""
    limits = config.environment
    sets = {"data.train": config.data.train, "data.validation": config.data.validation}
    keys = {source.environment: f"{key}.{i}" for key, given in sets.items() for i, source in enumerate(given)}
    keys |= {source.environment: f"data.test.{name}" for name, source in config.data.test.items()}
    for name, problem in data.environments().items():
        try:
            environment_spec(name)
        except ValueError as error:
            raise RecipeError(str(error), key=f"{keys[name]}.environment" if name in keys else "data.train") from error
        try:
            encoder.observation(problem, "", limits.max_observation_tokens)
        except ValueError as error:
            raise RecipeError(str(error), key="environment.max_observation_tokens") from error
    return limits.most_observed if data.environments() else 0


def check_context(config: TrainConfig, policy: LoadedModel, longest_prompt: int, observed: int = 0) -> None:
    """Raise ``RecipeError`` if a limit of responses, the longest prompt and all observations exceed the context."""
    limits = {f"stages.{i}.max_tokens": stage.max_tokens for i, stage in enumerate(config.stages)}
    if config.data.difficulty_filter is not None and config.data.difficulty_filter.max_tokens:
        limits["data.difficulty_filter.max_tokens"] = config.data.difficulty_filter.max_tokens
    if config.evaluation.max_tokens:
        limits["evaluation.max_tokens"] = config.evaluation.max_tokens
    for key, max_tokens in limits.items():
        if longest_prompt + max_tokens + observed > policy.max_context:
            room = policy.max_context - longest_prompt - observed
            remedy = f"lower it to at most {room}" if room > 0 else "use shorter prompts or another model"
            further = ""
            if observed:
                remedy += ", or lower environment.max_turns or environment.max_observation_tokens"
                further = f" with observations of {observed} tokens in all"
            raise RecipeError(
                f"{max_tokens} and the longest prompt ({longest_prompt} tokens){further} exceed the context of "
                f"{policy.folder} ({policy.max_context} tokens); {remedy}",
                key=key,
            )


def _check_plugins(config: TrainConfig) -> None:
    """Resolve the plugins of the algorithm, and import the module of the engine."""
    # With a cluster the engine is created on other nodes, once the learner's ranks run.
    resolve_setting("rollout.engine", partial(resolve, "engine"), config.rollout.engine)
    row = Objective(LearnerSettings.of(config)).row
    if row.statistics is not None and config.teacher is not None:
        raise RecipeError(
            f"{config.algorithm.loss!r} has statistics of the mini-batch, which do not see what a teacher adds to the "
            "advantage of each token; use a row without statistics, or leave [teacher] out",
            key="algorithm.loss",
        )
    advantage = resolve_setting("algorithm.advantage", advantage_of, config.algorithm.advantage)
    # The rules of a built-in advantage hold for every name that resolves to it, and gdpo's for those like it.
    same = [name for name in BUILTINS["advantage"] if advantage_of(name) is advantage]
    for name in same or (["gdpo"] if reads_parts(advantage) else []):
        try:
            config.check_advantage(name)
        except ValueError as error:
            raise RecipeError(
                f"{config.algorithm.advantage!r} is {name}: {error}", key="algorithm.advantage"
            ) from error
    controller = entropy_controller(config.entropy)
    names = ("clip_low", "clip_high")
    clips = [f"algorithm.{name}" for name in names if getattr(config.algorithm, name) is not None]
    for index, stage in enumerate(config.stages):
        # A custom one may refuse a target.
        if entropy_controller(config.in_stage(index).entropy) is controller:
            raise RecipeError(
                f"{config.entropy.controller!r} returns the same object for every call, whose state would reach the "
                "next stage or run; make a new controller in each call",
                key="entropy.controller",
            )
        clips += [f"stages.{index}.{name}" for name in names if name in stage.own()]
    if row.clip is None and clips:
        raise RecipeError(f"algorithm.loss = {config.algorithm.loss!r} has no clip to set; leave it out", key=clips[0])


def _warn_of_unused_settings(config: TrainConfig) -> None:
    """Warn of settings that the recipe states and that have no effect with the others."""
    evaluation, control = config.evaluation, config.entropy.controller
    validated = bool(evaluation.every and config.data.validation)
    stated = _stated(config.entropy, "preset", "target", "step", "maximum")
    if stated and control in ("none", "fixed"):
        _log.warning('%s: no effect with entropy.controller = "%s"', ", ".join(f"entropy.{x}" for x in stated), control)
    for name, chooser, readers in _READ_WITH:
        chosen = getattr(config.algorithm, chooser)
        known = BUILTINS.get(chooser, ("none",))  # custom functions get every setting
        if _stated(config.algorithm, name) and chosen in known and chosen not in readers:
            _log.warning('algorithm.%s: no effect with algorithm.%s = "%s"', name, chooser, chosen)
    for name, (table, key) in STAGE_SETTINGS.items():
        # reference.mode = "loss" cannot be stated without a coefficient
        replaced = table != "reference" and all(name in stage.own() for stage in config.stages)
        if replaced and _stated(getattr(config, table), key):
            _log.warning("%s.%s: no effect, since every stage has its own %s", table, key, name)
    if evaluation.every and not validated:
        _log.warning("evaluation.every = %d: no effect without data.validation", evaluation.every)
    if config.data.validation and not validated:
        _log.warning("data.validation: no effect without evaluation.every")
    if config.rollout.weight_lag and config.rollout.engine == "replay":
        _log.warning('rollout.weight_lag: no effect with rollout.engine = "replay", whose rollouts are recorded')
    for name in _stated(evaluation, "pass_at", "start_pass_at"):
        if 1.0 not in evaluation.temperatures:
            _log.warning("evaluation.%s: no effect without 1.0 in evaluation.temperatures", name)
    for number, stage in enumerate(config.stages):
        looks, window = stage.max_steps // (evaluation.every if validated else 1), stage.transition.window
        if _stated(stage.transition, "rule", "window") and stage.transition.rule == "converged" and looks < window:
            _log.warning(
                "stages.%d.transition: no effect, since the rule looks after %d measurements and the stage has at most "
                "%d%s",
                number,
                window,
                looks,
                ". Lower evaluation.every" if validated and evaluation.every > 1 else "",
            )
    adapts = any(stage.transition.rule == "converged" for stage in config.stages)
    if adapts and not validated and config.data.sampler in ("difficulty", "short_first"):
        _log.warning(
            'data.sampler = "%s" makes the problems harder as training succeeds, so that training accuracy may stay '
            'flat while the policy improves, and a stage then ends as "converged". Set data.validation and '
            'evaluation.every, or stages.transition.rule = "fixed"',
            config.data.sampler,
        )


def _warn_of_unused_limit(section: str, model: ModelConfig) -> None:
    if model.gradient_checkpointing and model.checkpoint_above_tokens is not None:
        _log.warning("%s.checkpoint_above_tokens: no effect with %s.gradient_checkpointing", section, section)


def _stated(table: Section, *names: str) -> list[str]:
    """Return the settings among ``names`` that are neither the default, which `config.toml` states too, nor empty."""
    default = {name: field.get_default(call_default_factory=True) for name, field in type(table).model_fields.items()}
    return [name for name in names if getattr(table, name) not in (None, [], (), default[name])]


_READ_WITH = (
    ("advantage_k", "advantage", ("pass_at_k",)),
    ("correction_cap", "correction", ("tis", "mis")),
    ("second_moment", "correction", ("m2po",)),
    ("refill_rounds", "refill", ("until_full",)),
)
"""Settings of [algorithm] that only some values of another one read."""


def with_needed_reference(config: TrainConfig) -> TrainConfig:
    """Return the recipe with a monitored reference model if only its loss row or correction needs one.

    Raises:
        RecipeError: A name of the algorithm cannot be resolved.
    """
    if config.reference.mode != "none" or "ref_logprobs" not in Objective(LearnerSettings.of(config)).needs:
        return config
    return config.model_copy(update={"reference": config.reference.model_copy(update={"mode": "monitor"})})


def _check_packages(config: TrainConfig) -> None:
    """Check the optional packages that the recipe needs, except trackers."""
    check_peft("model", config.model)
    if config.rollout.engine == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise vllm_missing(ImportError(name="vllm"))
        check_engine_args(config.rollout.vllm)


def check_peft(section: str, model: ModelConfig) -> None:
    """Raise ``RecipeError`` if the model of this section has LoRA, and PEFT is not installed."""
    if model.lora is not None and importlib.util.find_spec("peft") is None:
        raise RecipeError("needs PEFT, which is not installed: pip install 'magicrl[lora]'", key=f"{section}.lora")


def _check_compiled(section: str, model: ModelConfig, policy: LoadedModel, device: torch.device | None) -> None:
    """Check the model, and this machine if it computes here, for compilation. Ranks check their own machine."""
    if not model.compile:
        return
    try:
        check_compiled(policy.model.config)
        if device is not None:
            check_compiler(device)
    except ValueError as error:
        raise RecipeError(str(error), key=f"{section}.compile") from error


def _warn_of_slow_precision(section: str, model: ModelConfig, policy: LoadedModel, device: torch.device) -> None:
    """Warn if this CPU is slower in bfloat16 than in float32, with few rows and with many."""
    if device.type != "cpu" or model.dtype != "bfloat16":
        return
    shape = known_shape(policy)
    speeds = bfloat16_speeds(shape.hidden, shape.intermediate) if shape is not None else bfloat16_speeds()
    if max(speeds) < 1:
        _log.warning(
            '%s.dtype = "bfloat16": this CPU multiplies in it at %.2g (64 rows) and %.2g (1,024 rows) times the speed '
            'of float32; where memory suffices, set %s.dtype = "float32"',
            *(section, *speeds, section),
        )


def _check_memory(
    section: str, model: ModelConfig, device: torch.device, terms: Callable[[ModelConfig], Mapping[str, float]]
) -> None:
    memory = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory()
    fault = memory_fault(section, model, terms, memory)
    if fault is not None:
        raise ValueError(fault)


def known_shape(policy: LoadedModel) -> ModelShape | None:
    """Return the model's shape; None for an architecture whose memory the planner cannot count."""
    try:
        return shape_from_config(policy.model.config.to_dict(), policy.folder)
    except ValueError:
        return None
