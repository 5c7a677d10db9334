"""Record types between a sampled response and its loss: exactly those listed in docs/reference/architecture.md."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from magicrl.config.loader import load_train_recipe
from magicrl.records import Completion
from magicrl.training import session, step
from magicrl.training.recorder import NullObserver

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "architecture.md"
PACKAGES = ("records", "algorithms", "models", "rollout", "training")


def record_types() -> Iterator[type]:
    """Yield every dataclass and named tuple of the packages through which a response passes."""
    for package in PACKAGES:
        names = [f"magicrl.{package}"]
        found = importlib.import_module(names[0])
        names += [f"{names[0]}.{module.name}" for module in pkgutil.iter_modules(getattr(found, "__path__", []))]
        # head_triton needs Triton, which a CPU installation lacks; neither module holds records of a response
        for module in map(importlib.import_module, [n for n in names if ".vllm" not in n and "triton" not in n]):
            for kind in vars(module).values():
                own = isinstance(kind, type) and kind.__module__ == module.__name__
                if own and (dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))):
                    yield cast("type", kind)


def parts(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (tuple, list, dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from parts(one)


def test_a_response_meets_few_record_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first step of ``tiny``. A record counts if it holds a response, its tokens, or a record that counts."""
    kept: list[Any] = []  # keeps objects alive, so that no two have one id
    known: set[int] = set()
    seen: set[str] = set()

    def noted(kind: type, method: Callable[..., Any], result: bool) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            record = found if result else args[0]
            names = getattr(kind, "_fields", None) or [field.name for field in dataclasses.fields(kind)]
            values = [getattr(record, name) for name in names]
            if kind is Completion or any(id(one) in known for value in values for one in parts(value)):
                seen.add(kind.__name__)
                kept.append(record)
                known.add(id(record))
                if kind is Completion:
                    known.add(id(record.tokens))
            return found

        return made

    for kind in {*record_types()}:
        if dataclasses.is_dataclass(kind):
            monkeypatch.setattr(kind, "__init__", noted(kind, kind.__init__, False))
        else:
            monkeypatch.setattr(kind, "__new__", noted(kind, kind.__new__, True))

    class Over(Exception):
        pass

    first = step.Trainer.step

    def one_step(self: step.Trainer, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        raise Over

    monkeypatch.setattr(step.Trainer, "step", one_step)
    with pytest.raises(Over):
        session.run_training(load_train_recipe(Path("tiny")), tmp_path / "run", NullObserver(), resume=False)
    (listed,) = re.findall(r"^Record types that hold a response: (.+?)\. ", PAGE.read_text("utf-8"), re.M | re.S)
    assert seen == set(re.findall(r"`(\w+)`", listed))
    assert len(seen) <= 11
