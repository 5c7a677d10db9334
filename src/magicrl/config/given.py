"""Python objects (dicts, functions, data frames) in place of names and files: references and texts for other modules.

A live object has no reference that another process could resolve. It gets a reference that is valid in this process
(`magicrl.registry.live`), so that other modules treat it like a name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

from magicrl.files import write_atomically
from magicrl_verifiers.records import Problem
from magicrl_verifiers.references import live, source_text

Recipe = str | os.PathLike[str] | Mapping[str, Any]
"""A shipped recipe's name, a file, or its settings as a dict. Paths in a dict are relative to the current folder."""
Settings = Mapping[str, Any] | Sequence[str]
"""Dotted keys and their values, ``{"optimizer.learning_rate": 1e-5}``, or texts ``"KEY=VALUE"`` as after ``--set``."""
RewardFunction = Callable[..., Any]
"""A function ``(problem, response) -> score``, its settings given by ``magicrl.reward``."""
Reward = str | RewardFunction | Sequence[RewardFunction] | Mapping[str | RewardFunction, float]
"""A reward's name (``exact``, ``maths``, ``code``, ``file.py:function``), a function, functions to be added, or several
rewards with their weights (``{"maths": 1.0, brief: 0.2}``, as text ``maths + 0.2 * file.py:brief``)."""
PathText = str | os.PathLike[str]
"""A path or a name."""


class Frame(Protocol):
    """A pandas data frame."""

    def to_dict(self, orient: Any = ...) -> Any: ...


Data = str | os.PathLike[str] | Iterable[Mapping[str, Any] | Problem] | Frame | Callable[[], Iterable[Any]]
"""A file, a folder or a hub name; records (dicts with a prompt and an answer), `Problem`s, a data frame; or a function
that returns such records."""


def given_recipe(recipe: Recipe) -> Path | Mapping[str, Any]:
    """Return the recipe as the loader accepts it. Raise ``ValueError`` for another type."""
    if isinstance(recipe, Mapping):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return Path(recipe)
    raise ValueError(
        f"recipe must be a shipped recipe's name, a file or a dict, got {recipe!r:.60} ({type(recipe).__name__})"
    )


def path_text(name: str, value: Any) -> str:
    """Return a path or a name as text; raise ``ValueError`` for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path or a name, got {value!r:.60} ({type(value).__name__})")
    return str(cast("os.PathLike[str]", value))


def reward_reference(reward: Reward) -> str:
    """Return the reward's name; functions get a name that exists in this process only.

    Raises:
        ValueError: no function, wrong settings, or a function that must be isolated.
    """
    if isinstance(reward, str):
        return reward
    if isinstance(reward, Mapping):
        weights = cast("Mapping[str | RewardFunction, float]", reward)
        if not weights or not all(isinstance(weight, int | float) for weight in weights.values()):
            raise ValueError(f"reward must give a number to each of its rewards, got {reward!r:.60}")
        return " + ".join(f"{weight:.12g} * {reward_reference(one)}" for one, weight in weights.items())
    functions = reward if isinstance(reward, list | tuple) else [reward]
    if not all(map(callable, functions)):
        raise ValueError(
            f"reward must be a name (maths, exact, code, file.py:function), a function or a list of functions, got "
            f"{reward!r:.60} ({type(reward).__name__})"
        )
    from magicrl_verifiers.table import verifier_spec

    if callable(reward):
        reference = live(reward)
    else:  # the digest covers the text of every function
        texts = [text for text in map(source_text, functions) if text is not None]
        name = "+".join(getattr(one, "__name__", type(one).__name__) for one in functions)
        reference = live(list(functions), name, "\n\n".join(texts) if len(texts) == len(functions) else None)
    verifier_spec(reference)
    return reference


def data_reference(name: str, data: Data) -> str:
    """Return the data's path or hub name; for live data, a reference that is valid in this process."""
    if isinstance(data, str | os.PathLike):
        return str(cast("os.PathLike[str]", data))
    if callable(data):
        return live(data)
    rows = _rows(name, data)
    if not rows:
        raise ValueError(f"{name} holds no records, give it some")
    digest = hashlib.sha256(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest()
    return live(lambda: rows, name, f"{len(rows)} records, SHA-256 {digest}")


def data_file(data: Data) -> str:
    """Return the data's path or hub name; records are written to a file in ``runs/data``."""
    if isinstance(data, str | os.PathLike):
        return str(cast("os.PathLike[str]", data))
    rows = [
        dict(row) if isinstance(row, Mapping) else asdict(row)
        for row in _rows("data", data() if callable(data) else data)
    ]
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
    path = Path("runs/data") / f"given-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return str(path)


def _rows(name: str, data: Any) -> list[Any]:
    """Return the records of a data frame, a table or another collection."""
    if hasattr(data, "to_pylist"):  # pyarrow
        return data.to_pylist()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return cast("list[Any]", _plain(data.to_dict("records")))
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise ValueError(
            f"{name} must be a path, a hub name, a list of records (dicts) or problems, a data frame or a function, "
            f"got {data!r:.60} ({type(cast(Any, data)).__name__})"
        )
    rows = list(cast("Iterable[Any]", data))
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping | Problem):
            raise ValueError(
                f"{name}[{place}] must be a record, e.g. {{'prompt': '1 + 1', 'answer': '2'}}, or a Problem, got "
                f"{row!r:.60} ({type(row).__name__})"
            )
    return [row if isinstance(row, Problem) else _plain(dict(row)) for row in rows]


def _plain(value: Any) -> Any:
    """Return the value with lists and numbers in place of numpy's, as which pandas reads the lists of parquet files."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in cast("dict[Any, Any]", value).items()}
    return [_plain(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value
