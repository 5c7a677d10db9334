"""Makes bad input, runs the command on it, and catches what a user sees."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub.constants
import torch
from safetensors.torch import load_file, save_file
from toy_start import toy_sft

from magicrl.cli.main import main
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train
from magicrl.training.sft import run_sft

RECIPE = """[run]
name = "toy"
threads = 1

[start]
model = "start"

[model]
dtype = "float32"

[[data.train]]
path = "problems.jsonl"
verifier = "exact"

[rollout]
max_rows = 32
memory_limit_mb = 64

[optimizer]
learning_rate = 1e-3

[[stages]]
max_tokens = 8
rollout_batch = 4
group_size = 4
max_steps = 2
transition = { rule = "fixed" }

[checkpoint]
every = 1
"""
SFT = toy_sft(name="start", steps=20, batch_size=16)
PROBLEMS = [
    {"problem": "L 5 2 3 0 1 0 0 0 0 :", "answer": "1"},
    {"problem": "L 8 1 0 8 0 5 1 0 0 :", "answer": "3"},
    {"problem": "L 1 0 6 5 0 0 0 0 0 :", "answer": "2"},
]


@dataclass(frozen=True)
class Desk:
    """What the cases start from: a small model, and a finished run of the recipe on it."""

    start: Path
    finished: Path

    @classmethod
    def prepare(cls, root: Path) -> Desk:
        """Make both in ``root``: some seconds."""
        (root / "sft.toml").write_text(SFT)
        start = run_sft(load_sft_recipe(root / "sft.toml"), root / "start").folder
        here = Path.cwd()
        os.chdir(root)
        try:
            Path("recipe.toml").write_text(RECIPE)
            write_problems(PROBLEMS)
            train(load_train_recipe(Path("recipe.toml")), Path("run"), NullObserver(), resume=False)
        finally:
            os.chdir(here)
        shutil.rmtree(root / "run" / "model")  # an interrupted run: the last checkpoint is all there is
        return cls(start=start, finished=root / "run")

    def lay_out(self, *, resumes: bool) -> None:
        """The recipe, the start model, the problems, and the run where it is resumed, in the present folder."""
        Path("recipe.toml").write_text(RECIPE)
        shutil.copytree(self.start, "start")
        write_problems(PROBLEMS)
        if resumes:
            shutil.copytree(self.finished, "run")


def write_problems(records: Iterable[object], name: str = "problems.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


Make = Callable[[], list[str] | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bad input.

    Attributes:
        name: anchor on the page.
        title: what went wrong, in a user's words.
        make: prepares the present folder and returns further arguments of ``magicrl train recipe.toml``.
        status: the exit status.
        says: what the message must hold, whatever else it says: the place and the remedy.
        arguments: the whole command line instead.
        resumes: starts from a finished run in ``run``.
    """

    name: str
    title: str
    make: Make
    status: int
    says: tuple[str, ...]
    arguments: tuple[str, ...] = ("train", "recipe.toml", "--output", "run")
    resumes: bool = False


def settings(*overrides: str) -> Make:
    return lambda: [word for override in overrides for word in ("--set", override)]


def recipe(old: str, new: str) -> Make:
    def make() -> None:
        path = Path("recipe.toml")
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return make


def problems(*records: object) -> Make:
    return lambda: write_problems([*PROBLEMS, *records])


def content(name: str, text: str | bytes) -> Make:
    def make() -> None:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def cut(name: str) -> Make:
    """A file of which only the first half arrived."""

    def make() -> None:
        path = Path(name)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])

    return make


def remove(*names: str) -> Make:
    def make() -> None:
        for name in names:
            Path(name).unlink()

    return make


def edit(name: str, **changes: Any) -> Make:
    def make() -> None:
        path = Path(name)
        document = json.loads(path.read_text())
        document.update(changes)
        path.write_text(json.dumps(document))

    return make


def several(*makes: Make) -> Make:
    def make() -> list[str]:
        return [word for one in makes for word in one() or ()]

    return make


def not_finite() -> None:
    path = Path("start/model.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})


def narrower_model() -> None:
    """Another start model: half the intermediate size."""
    edit("start/config.json", intermediate_size=32)()
    path = Path("start/model.safetensors")
    weights = load_file(path)
    for name, weight in weights.items():
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = weight[:32].clone()
        elif "down_proj" in name:
            weights[name] = weight[:, :32].clone()
    save_file(weights, path, metadata={"format": "pt"})


def forget_a_word() -> None:
    """A tokenizer that does not know ``9``, though the problems hold it."""
    path = Path("start/tokenizer.json")
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["S77"] = vocabulary.pop("9")
    path.write_text(json.dumps(document))
    write_problems([*PROBLEMS, {"problem": "L 9 :", "answer": "9"}])


def last_checkpoint(name: str) -> str:
    return str(sorted(Path("run/checkpoints").glob("step-*"))[-1] / name)


def at_checkpoint(name: str, make: Callable[[str], Make]) -> Make:
    return lambda: make(last_checkpoint(name))()


def foreign_checkpoint() -> None:
    folder = Path("run/checkpoints/step-000099")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def hub_cache(*, weights: bool) -> Make:
    """A hub cache in which a download was interrupted: config and tokenizer are there, weights are not (whole)."""

    def make() -> list[str]:
        root = Path(os.environ["HF_HUB_CACHE"]) / "models--owner--name"
        snapshot = root / "snapshots" / ("0" * 40)
        shutil.copytree("start", snapshot)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("0" * 40)
        model = snapshot / "model.safetensors"
        if weights:
            model.write_bytes(model.read_bytes()[:4000])
        else:
            model.unlink()
        return ["--set", "model=owner/name"]

    return make


def seen(case: Case, desk: Desk, folder: Path) -> tuple[int, str]:
    """Exit status and standard error of the command on the case, run in the empty ``folder``."""
    before, errors = Path.cwd(), io.StringIO()
    hub = folder.parent / f"{folder.name}-hub"
    os.chdir(folder)
    try:
        with (
            patch.object(huggingface_hub.constants, "HF_HUB_CACHE", str(hub)),
            patch.dict(os.environ, {"HF_HUB_CACHE": str(hub), "COLUMNS": "200"}),
            patch.object(torch.cuda, "is_available", lambda: False),
        ):
            desk.lay_out(resumes=case.resumes)
            further = case.make() or []
            with (
                patch.object(sys, "argv", ["magicrl", *case.arguments, *further]),
                contextlib.redirect_stderr(errors),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                try:
                    main()
                except SystemExit as end:
                    text = errors.getvalue().strip().replace(str(hub), "~/.cache/huggingface/hub")
                    return int(end.code or 0), text
        raise AssertionError("the command did not exit")
    finally:
        os.chdir(before)
