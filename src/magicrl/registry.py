"""Registry of plugins: losses, rewards, engines and other custom parts, all named by references.

A reference is a built-in name (``magic``), the name of an entry point in the group ``magicrl.KIND`` of an installed
package, ``module:attribute``, or ``file.py:attribute``. Built-ins are references in `BUILTINS`, so that they resolve in
the same way, and so that a recipe is checked without importing the parts it names.

Other processes receive the reference and resolve it themselves. The exception is `live`: an object that was passed in
Python and exists only in this process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from magicrl_verifiers import references
from magicrl_verifiers.several import reward_names, reward_terms
from magicrl_verifiers.table import VERIFIERS

LOSS_NAMES = "magic dapo dr_grpo grpo gspo ppo pg cispo scalerl sapo ce_gppo aspo dppo dppo_kl nll"
"""Built-in losses in the order of the documentation. Each is a row of `magicrl.algorithms.losses` in capitals."""

BUILTINS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "loss": {name: f"magicrl.algorithms.losses:{name.upper()}" for name in LOSS_NAMES.split()},
        "advantage": {
            "group": "magicrl.algorithms.advantages:group_relative",
            "rloo": "magicrl.algorithms.advantages:leave_one_out",
            "maxrl": "magicrl.algorithms.advantages:max_likelihood",
            "pass_at_k": "magicrl.algorithms.advantages:pass_at_k_gradient",
            "batch_std": "magicrl.algorithms.advantages:batch_deviation",
            "gdpo": "magicrl.algorithms.advantages:gdpo",
            "reinforce_pp": "magicrl.algorithms.advantages:reinforce_pp",
            "reinforce_pp_baseline": "magicrl.algorithms.advantages:reinforce_pp_baseline",
        },
        "reducer": {
            name: f"magicrl.algorithms.token_weights:{name}"
            for name in ("global_tokens", "response_mean", "prompt_mean", "sequence_sum", "constant")
        },
        "correction": {
            "none": "magicrl.algorithms.token_weights:NONE",
            "tis": "magicrl.algorithms.token_weights:TIS",
            "mis": "magicrl.algorithms.token_weights:MIS",
            "m2po": "magicrl.algorithms.token_weights:M2PO",
        },
        "controller": {
            "none": "magicrl.algorithms.entropy:no_control",
            "fixed": "magicrl.algorithms.entropy:fixed_control",
            "adaptive": "magicrl.algorithms.entropy:adaptive_control",
        },
        "reward": VERIFIERS,
        "family": {
            "calculator_problems": "magicrl.data.calculator_problems:make_calculator_problems",
            "guess_number": "magicrl.data.guess_number:make_guess_number",
            "reasoning_gym": "magicrl.data.gym_tasks:GymTask",
            "running_sum": "magicrl.data.running_sum:make_running_sum",
            "word_problems": "magicrl.data.word_problems:make_word_problems",
        },
        "sampler": {
            "uniform": "magicrl.data.sampler:PromptSampler",
            "difficulty": "magicrl.data.curricula:DifficultyPools",
            "short_first": "magicrl.data.curricula:ShortFirst",
        },
        "source": {
            "verifiers": "magicrl.environments.verifiers_adapter:tasks",
            "openenv": "magicrl.environments.openenv_adapter:seeds",
        },
        "environment": {
            "calculator": "magicrl.environments.calculator:Calculator",
            "guessing": "magicrl.environments.guessing:Guessing",
            "verifiers": "magicrl.environments.verifiers_adapter:VerifiersEnvironment",
            "openenv": "magicrl.environments.openenv_adapter:OpenEnvEnvironment",
        },
        "benchmark": {
            name: f"magicrl.evaluation.benchmarks:{name}"
            for name in [
                "aime24",
                "aime25",
                "amc23",
                "gsm8k",
                "math500",
                "olympiadbench",
                "svamp",
                "humaneval",
                "humaneval_plus",
                "livecodebench",
                "mbpp",
                "mbpp_plus",
                "mbpp_sanitized",
            ]
        },
        "engine": {
            "in_process": "magicrl.rollout.engines:make_in_process",
            "openai": "magicrl.rollout.engines:make_openai",
            "replay": "magicrl.rollout.engines:make_replay",
            "vllm": "magicrl.rollout.engines:make_vllm",
        },
        "tracker": {
            "tensorboard": "magicrl.reporting.trackers:TensorBoardTracker",
            "trackio": "magicrl.reporting.trackers:TrackioTracker",
            "mlflow": "magicrl.reporting.trackers:MlflowTracker",
            "wandb": "magicrl.reporting.trackers:WandbTracker",
        },
    }
)
"""Built-in names by kind, with the location of each."""


def names(kind: str) -> tuple[str, ...]:
    """Return the built-in names of a kind and those of installed packages, in alphabetical order."""
    return references.known_names(kind, BUILTINS[kind])


def check(kind: str, reference: str) -> str:
    """Return ``reference`` if it can be resolved, without running custom code.

    Raises:
        ValueError: The name is unknown (names the nearest known one), or the file or module does not exist.
    """
    for name, _ in reward_terms(reference) if kind == "reward" else ((reference, 1.0),):
        references.check_reference(kind, _collection(kind, name)[0], BUILTINS[kind])
    return reference


def resolve(kind: str, reference: str) -> Any:
    """Import and return the object that ``reference`` names.

    Raises:
        ValueError: See `check`; or the module fails to import (includes its error), or has no such attribute.
    """
    name, task = _collection(kind, reference)
    found = references.resolve_reference(kind, name, BUILTINS[kind])
    return functools.partial(found, task) if task else found


def check_call(named: str, function: Callable[..., Any], argument: str) -> None:
    """Raise ``ValueError`` if ``function``, called ``named`` in the message, cannot be called with one ``argument``."""
    try:
        inspect.signature(function).bind(argument)
    except TypeError as error:
        raise ValueError(f"{named} is called with one argument, {argument}: {error}") from None


def _collection(kind: str, reference: str) -> tuple[str, str]:
    """Split the family ``reasoning_gym/TASK`` in two; the second part of any other reference is empty."""
    name, _, task = reference.partition("/")
    return (name, task) if kind == "family" and name == "reasoning_gym" and task else (reference, "")


def is_builtin(kind: str, reference: str) -> bool:
    """Return whether ``reference`` is a built-in name; of several rewards, whether one is."""
    names = reward_names(reference) if kind == "reward" else [reference]
    return not BUILTINS[kind].keys().isdisjoint(names)
