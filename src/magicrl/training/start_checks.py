"""Everything that a run can be refused for, looked at before anything is computed or written, with its problems read.

``magicrl train``, its ``--dry-run`` and the library's ``train`` call ``check_run``. A supervised recipe has
``check_sft``, by itself or as the start of a run. What is costly to read is handed on. Every set of problems is read
here, prompts held to their limit, test problems kept out of training.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from magicrl.algorithms.advantages import advantage_of
from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import ModelConfig, SftConfig, SourceConfig, TrainConfig
from magicrl.data.sources import held_out_keys, load_parts, load_problems, place_of
from magicrl.environments.base import environment_spec
from magicrl.models.adapter_files import adapter_shapes, check_adapters, read_adapters
from magicrl.models.compiled import check_compiled, check_compiler
from magicrl.models.cpu_kernels import bfloat16_speed
from magicrl.models.exact import check_exact
from magicrl.models.loading import LoadedModel, load_policy, load_shell, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.models.routing import Routers
from magicrl.models.scorer import check_isolation
from magicrl.planning.memory import host_memory, learner_terms, memory_fault, run_terms
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.records import Problem
from magicrl.registry import resolve
from magicrl.rollout.recording import read_rollouts
from magicrl.rollout.vllm_engine import vllm_missing
from magicrl.training.demonstrations import demonstrated_keys, trial_batches
from magicrl.training.objective import LearnerSettings, Objective, entropy_controller, resolve_setting
from magicrl.training.recorder import check_folder
from magicrl.training.sft import made_model, start_policy, supervised_start

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The problems of a run.

    Attributes:
        train: training problems, before any filter.
        validation: drives stages; may be empty.
        test: test sets by name; drive claims.
        dropped_overlong: training problems left out because their prompt is too long.
        dropped_in_test: training problems left out because a validation or test set holds the same prompt, the
            held-out ones' further copies among them.
        dropped_conflicting: training problems left out because an earlier one of the same prompt has other reference
            answers.
    """

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    test: dict[str, tuple[Problem, ...]]
    dropped_overlong: int
    dropped_in_test: int = 0
    dropped_conflicting: int = 0

    def verifiers(self) -> set[str]:
        """Names of the verifiers that the problems call for."""
        return {p.verifier for problems in (self.train, self.validation, *self.test.values()) for p in problems}

    def environments(self) -> dict[str, Problem]:
        """A problem of each environment that answers, by its name."""
        sets = (self.train, self.validation, *self.test.values())
        return {p.environment: p for problems in sets for p in problems if p.environment is not None}


def load_data(config: TrainConfig, encoder: PromptEncoder) -> RunData:
    """Every set of the recipe, prompts checked against the limit, test problems kept out of training.

    Raises:
        RecipeError: a source is wrong, or the settings leave no training problem (with its key).
        ValueError: a source's content is wrong, or a prompt too long (unless they are dropped).
    """
    data = config.data

    def fitting(problems: list[Problem]) -> list[Problem]:
        return [p for p in problems if encoder.fits(p)] if data.overlong_prompts == "drop" else problems

    with under("data.train"):
        parts = load_parts(data.train)
    with under("data.validation"):
        validation = load_parts(data.validation, key="data.validation")
    test = {name: _load_test(name, source) for name, source in data.test.items()}
    # by prompt, not by id: the same problem may stand in two files under two names
    examined = {p.key for problems in (*validation, *test.values()) for p in problems}
    train, in_test = _without_test_problems([p for part in parts for p in part], examined)
    train, conflicting = _without_conflicts(train)
    # after conflicts are gone, so that a held-out prompt has one set of reference answers
    if data.holdout:
        train, held, copies = _hold_out(train, data.holdout)
        in_test += copies
        # of one file with the training problems: where these may lose long prompts, so may they
        test["holdout"] = fitting(held) or held
    # a test set that somebody made is measured whole: there a prompt that is too long is an error in any case
    for key, problems, sources in (
        ("data.validation", [p for part in validation for p in part], data.validation),
        *(
            (f"data.test.{name}", found, (data.test[name],) if name in data.test else data.train)
            for name, found in test.items()
        ),
    ):
        _check_prompts(encoder, data.max_prompt_tokens, key, problems, sources, "or leave it out")
    kept = fitting(train)
    if not kept:
        raise RecipeError(
            f"every training prompt is longer than {data.max_prompt_tokens} tokens; raise the limit",
            key="data.max_prompt_tokens",
        )
    shorten = "shorten it, or set data.overlong_prompts = 'drop'"
    _check_prompts(encoder, data.max_prompt_tokens, "data.train", kept, data.train, shorten)
    return RunData(
        train=tuple(kept),
        validation=tuple(p for part in validation for p in part),
        test={name: tuple(problems) for name, problems in test.items()},
        dropped_overlong=len(train) - len(kept),
        dropped_in_test=in_test,
        dropped_conflicting=conflicting,
    )


def _load_test(name: str, source: SourceConfig) -> list[Problem]:
    with under(f"data.test.{name}"):
        return load_problems(source, key=f"data.test.{name}")


def _without_test_problems(train: Sequence[Problem], held: Collection[str]) -> tuple[list[Problem], int]:
    """The training problems whose key is not among ``held``, and how many others there were."""
    kept = [p for p in train if p.key not in held]
    dropped = len(train) - len(kept)
    if not kept:
        raise RecipeError(
            f"every one of its {len(train)} problems stands in a validation or test set, so nothing is left to train "
            "on; give other problems, or let data.holdout set some aside",
            key="data.train",
        )
    if dropped:
        _log.warning(
            "data.train: %d of %d problems stand in a validation or test set too; they are left out of training",
            dropped,
            len(train),
        )
    return kept, dropped


def _without_conflicts(train: Sequence[Problem]) -> tuple[list[Problem], int]:
    """The training problems without those that ask what an earlier one asks and want another answer, and how many.

    Rewarding both answers to one prompt would teach neither. Copies with the same reference answers stay: they weigh.
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
    # neither order nor white space makes other reference answers
    return one is other or {" ".join(g.split()) for g in one.references} == {
        " ".join(g.split()) for g in other.references
    }


def _hold_out(train: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem], int]:
    """Training problems without ``count`` of their prompts, one problem of each of those, and how many copies went.

    A prompt's key decides, so that the choice depends on neither the order of a file nor its ids.
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
    """Raise ``ValueError`` for a prompt that is empty, too long, or holds what the tokenizer does not know."""
    for problem in problems:
        try:
            encoder.encode(problem)
        except ValueError as error:
            reason = str(error).removeprefix(f"problem {problem.id!r}: ")
            if not encoder.fits(problem):
                # of all that are too long, so that the limit has to be raised once only
                lengths = [encoder.length(p) for p in problems if not encoder.fits(p)]
                reason = (
                    f"its prompt has {encoder.length(problem)} tokens, more than data.max_prompt_tokens = "
                    f"{limit} ({len(lengths)} of {len(problems)} prompts are too long, the longest has "
                    f"{max(lengths)}); raise the limit, {remedy}"
                )
            place = next((found for source in sources if (found := place_of(problem.id, source))), key)
            raise ValueError(f"{place}: problem {problem.id!r}: {reason}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What the checks have read, for the run to go on with.

    Attributes:
        data: the problems.
        policy: ``start.model`` in float32 on the run's device; None where it is made first, or lives on other machines.
    """

    data: RunData
    policy: LoadedModel | None


def check_run(config: TrainConfig, output: Path, *, resume: bool) -> Ready:
    """Refuse what can be refused: output folder, packages, device, start model, problems, lengths, memory.

    Raises:
        RecipeError: a setting or a combination of them is unusable (with its key).
        ValueError: a file or the machine is; the text says what to do.
    """
    # what is cheap to look at comes first
    check_folder(output, config, resume=resume)
    _check_packages(config)
    _check_brought(config)
    here = config.cluster is None
    with under("run.device"):
        device = resolve_device(config.run.device) if here else torch.device("cpu")
    # keys of what the start model is shown solutions of: no test may hold them
    shown: set[str] = set()
    if config.start.model is None:
        recipe, folder = supervised_start(config.start, output.parent / "models")
        with under("start.sft"):
            policy, base = check_sft(recipe, folder), str(folder)
            shown = demonstrated_keys(recipe)
    else:
        with under("start.model"):
            name = base = config.start.model
            # with a cluster the ranks read the weights: here the files' headers are enough
            policy = load_policy(name, device=device) if here else load_shell(name)
        if here:
            # the learner asks this as well, but only once the run has begun
            check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.model.share_prompts)
    if config.model.router_replay:
        try:
            Routers(policy.model)
        except ValueError as error:
            raise RecipeError(str(error), key="model.router_replay") from error
    _check_start_adapters(config.model, policy, base)
    if config.model.exact:
        try:
            check_exact(policy.model)
        except ValueError as error:
            raise RecipeError(str(error), key="model.exact") from error
    _check_compiled("model", config.model, policy, device if here else None)
    if here:
        _tell_slow_precision("model", config.model, device)
    # the problems in this model's tokens: their lengths decide about context and memory
    encoder = PromptEncoder(policy.tokenizer, config.data.max_prompt_tokens)
    data = load_data(config, encoder)
    if "judge" in data.verifiers():
        config.verifier.needed_judge()
    _check_demonstrated(shown, data, config)
    tests = (p for problems in data.test.values() for p in problems)
    longest = max(encoder.length(p) for p in (*data.train, *data.validation, *tests))
    observed = _check_environments(config, data, encoder)
    check_context(config, policy, longest, observed)
    # of what is only read later, that it can be read
    if config.reference.model is not None:
        with under("reference.model"):
            load_shell(config.reference.model)
    if config.rollout.replay is not None:
        with under("rollout.replay"):
            read_rollouts(Path(config.rollout.replay))
    shape = _shape(policy)
    # the memory of other machines is not this one's to look at
    if here and shape is not None:
        counted = with_needed_reference(config)
        _check_memory("model", config.model, device, lambda model: run_terms(counted, model, shape, longest + observed))
    return Ready(data=data, policy=policy if config.start.model is not None and here else None)


def _check_demonstrated(keys: Collection[str], data: RunData, config: TrainConfig) -> None:
    """A problem whose solution the start model was shown measures nothing."""
    for name, problems in (*data.test.items(), ("validation", data.validation)):
        shown = sum(p.key in keys for p in problems)
        if shown:
            remedy = f"set its holdout = {config.data.holdout}" if name == "holdout" else "take them out of its data"
            raise RecipeError(
                f"its worked solutions show {shown} of the {len(problems)} problems of the set {name!r}, which would "
                f"measure what was shown; {remedy}",
                key="start.sft",
            )


def check_sft(config: SftConfig, output: Path) -> LoadedModel:
    """Refuse what a supervised recipe can be refused for; the model that it starts from, or has made already.

    Args:
        config: the recipe.
        output: the model folder that it writes.

    Raises:
        RecipeError, ValueError: as ``check_run``.
    """
    made = made_model(config, output)
    if made is not None:
        # made already: only the model itself can still be unusable
        return load_policy(made)
    _check_peft("training", config.training)
    with under("run.device"):
        device = resolve_device(config.run.device)
    policy = start_policy(config, output)
    check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.training.share_prompts)
    _check_compiled("training", config.training, policy, device)
    _tell_slow_precision("training", config.training, device)
    batches = trial_batches(config, policy)
    shape = _shape(policy)
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
    """Import the problems' environments; the most tokens that their observations may add to a response."""
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
    """Raise ``RecipeError`` if a stage's T, the longest prompt and all that may be observed do not fit the context."""
    limits = {f"stages.{i}.max_tokens": stage.max_tokens for i, stage in enumerate(config.stages)}
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


def _check_brought(config: TrainConfig) -> None:
    """What the recipe brings to the algorithm is imported, and is what it should be; its engine's module is, too."""
    # with a cluster it is made on other nodes, when the learner's ranks are up
    resolve_setting("rollout.engine", partial(resolve, "engine"), config.rollout.engine)
    row = Objective(LearnerSettings.of(config)).row
    resolve_setting("algorithm.advantage", advantage_of, config.algorithm.advantage)
    entropy_controller(config.entropy)
    for index, stage in enumerate(config.stages):
        entropy_controller(config.in_stage(index).entropy)  # one of your own may refuse a target
        for name in ("clip_low", "clip_high"):
            if name in stage.own() and row.clip is None:
                raise RecipeError(
                    f"algorithm.loss = {config.algorithm.loss!r} does not clip; leave it out",
                    key=f"stages.{index}.{name}",
                )


def with_needed_reference(config: TrainConfig) -> TrainConfig:
    """The recipe as it costs: its reference monitored where only its loss row or correction asks for one.

    Raises:
        RecipeError: a name of the algorithm that cannot be resolved.
    """
    if config.reference.mode != "none" or "ref_logprobs" not in Objective(LearnerSettings.of(config)).needs:
        return config
    return config.model_copy(update={"reference": config.reference.model_copy(update={"mode": "monitor"})})


def _check_packages(config: TrainConfig) -> None:
    """Optional extras that the recipe asks for; trackers are the command's to make."""
    _check_peft("model", config.model)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise vllm_missing(ImportError(name="vllm"))


def _check_peft(section: str, model: ModelConfig) -> None:
    if model.lora is not None and importlib.util.find_spec("peft") is None:
        raise RecipeError("needs PEFT, which is not installed: pip install 'magicrl[lora]'", key=f"{section}.lora")


def _check_compiled(section: str, model: ModelConfig, policy: LoadedModel, device: torch.device | None) -> None:
    """What compiling needs of the model, and of this machine where it computes here; ranks look at their own."""
    if not model.compile:
        return
    try:
        check_compiled(policy.model.config)
        if device is not None:
            check_compiler(device)
    except ValueError as error:
        raise RecipeError(str(error), key=f"{section}.compile") from error


def _tell_slow_precision(section: str, model: ModelConfig, device: torch.device) -> None:
    if device.type == "cpu" and model.dtype == "bfloat16" and bfloat16_speed() < 1:
        _log.warning(
            '%s.dtype = "bfloat16": this CPU multiplies in it at %.2g times the speed of float32; where memory '
            'suffices, set %s.dtype = "float32"',
            *(section, bfloat16_speed(), section),
        )


def _check_start_adapters(model: ModelConfig, policy: LoadedModel, base: str) -> None:
    """Adapters to go on from, against the start model's layers."""
    if model.lora is None or model.lora.start is None:
        return
    with under("model.lora.start"):
        check_adapters(Path(model.lora.start), model.lora, base)
        shapes = adapter_shapes(policy.model, model.lora)
        read_adapters(Path(model.lora.start), shapes, base)


def _check_memory(
    section: str, model: ModelConfig, device: torch.device, terms: Callable[[ModelConfig], Mapping[str, float]]
) -> None:
    memory = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory()
    fault = memory_fault(section, model, terms, memory)
    if fault is not None:
        raise ValueError(fault)


def _shape(policy: LoadedModel) -> ModelShape | None:
    """The model's shape; None for an architecture whose memory the planner cannot count."""
    try:
        return shape_from_config(policy.model.config.to_dict(), policy.folder)
    except ValueError:
        return None
