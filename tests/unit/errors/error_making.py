"""Makers of bad input, which run the command on it and catch the message that a user sees."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub.constants
import torch
from safetensors.torch import load_file, save_file
from toy_start import toy_sft

from magicrl.commands.main import main
from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
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
    """Common starting point of the cases: a small model, and a finished run of the recipe on it."""

    start: Path
    finished: Path

    @classmethod
    def prepare(cls, root: Path) -> Desk:
        """Make both in ``root``, which takes some seconds."""
        (root / "sft.toml").write_text(SFT)
        start = run_sft(load_sft_recipe(root / "sft.toml"), root / "start")
        here = Path.cwd()
        os.chdir(root)
        try:
            Path("recipe.toml").write_text(RECIPE)
            write_problems(PROBLEMS)
            run_training(load_train_recipe(Path("recipe.toml")), Path("run"), NullObserver(), resume=False)
        finally:
            os.chdir(here)
        shutil.rmtree(root / "run" / "model")  # an interrupted run has only the last checkpoint
        return cls(start=start, finished=root / "run")

    def lay_out(self, *, resumes: bool) -> None:
        """Copy the recipe, the starting model, the problems, and if needed the run, into the current folder."""
        Path("recipe.toml").write_text(RECIPE)
        shutil.copytree(self.start, "start")
        write_problems(PROBLEMS)
        if resumes:
            shutil.copytree(self.finished, "run")


def write_problems(records: Iterable[object], name: str = "problems.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bad input: changes before the command runs, in this order, and the expected message.

    Attributes:
        title: The mistake, in a user's words.
        says: Required text of the message: the place and the remedy.
        status: Expected exit status.
        resumes: The case starts from a finished run in ``run``.
        arguments: The whole command line instead of ``magicrl train recipe.toml --output run`` and, if there is a run,
            ``--resume``.
        recipe: New texts in the recipe by the old ones.
        write: Files by name: their text, in Latin-1, or records, a line each.
        problems: Further records of the training set.
        edit: Keys of JSON files.
        cut: A file that is truncated to its first half.
        remove: A file that is missing.
        call: A function of this module.
        set: Words behind ``--set``.
    """

    title: str = ""
    says: Sequence[str] = ()
    status: int = 2
    resumes: bool = False
    arguments: Sequence[str] = ()
    recipe: Mapping[str, str] = field(default_factory=dict)
    write: Mapping[str, str | list[object]] = field(default_factory=dict)
    problems: Sequence[object] = ()
    edit: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    cut: str | None = None
    remove: str | None = None
    call: str | None = None
    set: Sequence[str] = ()

    def make(self) -> list[str]:
        """Prepare the current folder and return the command line."""
        for old, new in self.recipe.items():
            text = Path("recipe.toml").read_text()
            assert old in text
            Path("recipe.toml").write_text(text.replace(old, new, 1))
        for name, content in self.write.items():
            Path(name).parent.mkdir(exist_ok=True)
            if isinstance(content, str):
                Path(name).write_text(content, encoding="latin-1")
            else:
                write_problems(content, name)
        if self.problems:
            write_problems([*PROBLEMS, *self.problems])
        for name, changes in self.edit.items():
            Path(name).write_text(json.dumps(json.loads(Path(name).read_text()) | changes))
        if self.cut:
            whole = Path(self.cut).read_bytes()
            Path(self.cut).write_bytes(whole[: len(whole) // 2])
        if self.remove:
            Path(self.remove).unlink()
        if self.call:
            globals()[self.call]()
        words = self.arguments or ["train", "recipe.toml", "--output", "run", *["--resume"] * self.resumes]
        return [*words, *(word for setting in self.set for word in ("--set", setting))]


def sections() -> dict[str, list[Case]]:
    """Return the cases of ``error_cases.toml`` by the headings of the page."""
    with Path(__file__).with_name("error_cases.toml").open("rb") as file:
        return {heading: [Case(**row) for row in rows] for heading, rows in tomllib.load(file).items()}


def not_finite() -> None:
    path = Path("start/model.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})


def forget_a_word() -> None:
    """Replace the tokenizer by one without ``9``, though the problems contain it."""
    path = Path("start/tokenizer.json")
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["S77"] = vocabulary.pop("9")
    path.write_text(json.dumps(document))
    write_problems([*PROBLEMS, {"problem": "L 9 :", "answer": "9"}])


def forget_the_end_token() -> None:
    for name in ("config", "generation_config", "tokenizer_config"):
        path = Path(f"start/{name}.json")
        key = "eos_token" if name == "tokenizer_config" else "eos_token_id"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))


def download_without_weights() -> None:
    """Make a hub cache of an interrupted download: config and tokenizer are there, weights are not."""
    root = Path(os.environ["HF_HUB_CACHE"]) / "models--owner--name"
    snapshot = root / "snapshots" / ("0" * 40)
    shutil.copytree("start", snapshot)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0" * 40)
    (snapshot / "model.safetensors").unlink()


def cut_download() -> None:
    """Make the same with the first of the weights."""
    download_without_weights()
    (weights,) = Path(os.environ["HF_HUB_CACHE"]).rglob("snapshots/*")
    whole = Path("start/model.safetensors").read_bytes()
    (weights / "model.safetensors").write_bytes(whole[:4000])


def seen(case: Case, desk: Desk, folder: Path, printed: io.StringIO | None = None) -> tuple[int, str]:
    """Return exit status and standard error of the command on the case, run in the empty ``folder``."""
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
            words = case.make()
            with (
                patch.object(sys, "argv", ["magicrl", *words]),
                contextlib.redirect_stderr(errors),
                contextlib.redirect_stdout(io.StringIO() if printed is None else printed),
            ):
                try:
                    main()
                except SystemExit as end:
                    text = errors.getvalue().strip().replace(str(hub), "~/.cache/huggingface/hub")
                    return int(end.code or 0), text
        raise AssertionError("the command did not exit")
    finally:
        os.chdir(before)
