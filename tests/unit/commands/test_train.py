"""``magicrl train``: the dry run, and its estimate of the time."""

from __future__ import annotations

import errno
import importlib.util
import json
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoConfig, AutoTokenizer

from magicrl.commands.dry_run import shrink
from magicrl.commands.main import app, main
from magicrl.commands.plan import planned
from magicrl.commands.train import minutes_needed
from magicrl.commands.training import warn_of_toy_recipe, watched
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.config.paths import FOLDER, find_recipe
from magicrl.models.small_models import make_byte_tokenizer, make_miniature
from magicrl.planning.planner import Options
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl_verifiers.progress import duration

RECIPES = Path(__file__).resolve().parents[3] / "src" / "magicrl" / "recipes"
LARGE = sorted(path for folder in ("skywork", "deepseek") for path in (RECIPES / folder).glob("*.toml"))
ON_RAY = "or1-32b"  # takes a minute, and has every part of the other cluster recipes
ALONE = [path for path in LARGE if path.stem != ON_RAY]


def dry_run(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert app(["train", str(path), "--dry-run", *words], result_action="return_value") == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "path",
    [
        RECIPES / "smollm2.toml",
        # one large recipe in every test run, the others in `make test-slow`
        *(pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "or1-math-7b")) for path in ALONE),
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_of_one_device_builds(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a cluster's recipe without its last section, which is the cluster."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    alone, is_of_cluster, _ = path.read_text().partition("\n[cluster]")
    recipe = tmp_path / path.name if is_of_cluster else path
    if is_of_cluster:
        recipe.write_text(alone)
    told = dry_run(recipe, capsys, "--set", "rollout.engine=in_process")
    assert "it builds" in told
    assert "random weights" in told
    assert not list(folder.iterdir()), "nothing is kept"


@pytest.mark.slow
def test_a_recipe_of_a_cluster_builds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    (path,) = RECIPES.rglob(f"{ON_RAY}.toml")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # another cluster is not joined
    told = dry_run(path, capsys, "--set", "rollout.engine=in_process")
    assert "2 ranks and 2 replicas" in told
    assert "it builds" in told


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("teacher.model=no/such-model", "teacher: random weights, in place of no/such-model"),
        ("teacher.server=http://127.0.0.1:9/v1", "teacher: left out"),
    ],
)
def test_a_teacher_has_the_tokenizer_of_the_miniature(
    setting: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = dry_run(
        RECIPES / "quickstart.toml", capsys, "--set", "algorithm.reject_zero_advantage=false", "--set", setting
    )
    assert words in told
    assert "it builds" in told


def test_limits_that_fit_the_recipes_stages_fit_those_of_a_dry_run(tmp_path: Path) -> None:
    advantage = [
        "stages.0.max_tokens=32",
        "algorithm.overlong_buffer=20",
        'algorithm.advantage="pass_at_k"',
        "algorithm.advantage_k=4",
    ]
    shrunk, _ = shrink(load_train_recipe(RECIPES / "tiny.toml", advantage), tmp_path)
    assert shrunk.algorithm.overlong_buffer < shrunk.stages[0].max_tokens
    assert shrunk.algorithm.advantage_k <= shrunk.stages[0].group_size


def test_a_miniature_has_the_architecture(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    made = AutoConfig.from_pretrained(make_miniature(qwen, tmp_path / "model", max_context=64))
    assert made.model_type == "qwen2"
    assert made.num_attention_heads // made.num_key_value_heads == 2  # of 7: at most eight heads in all
    assert not made.tie_word_embeddings
    weights = json.loads((tmp_path / "model" / "config.json").read_text())
    assert weights["num_hidden_layers"] == 2


def test_a_dry_run_refuses_what_the_models_context_and_a_wrong_path_refuse(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"100000 leaves no room .* the start of .* \(\d+ tokens\)") as found:
        shrink(load_train_recipe(RECIPES / "tiny.toml", ["stages.1.max_tokens=100000"]), tmp_path)
    assert found.value.key == "stages.1.max_tokens"
    with pytest.raises(
        RecipeError, match=r"^start\.model: no folder \S*nowhere/model, and no model of that name"
    ) as found:
        shrink(load_train_recipe(RECIPES / "tiny.toml", [f"model={tmp_path}/nowhere/model"]), tmp_path)
    assert "Qwen" not in str(found.value)


def test_any_text_is_read(tmp_path: Path) -> None:
    text = "∑ x² + é\n"
    for tokenizer in (make_byte_tokenizer(64), _saved(tmp_path)):
        tokens = tokenizer(text)["input_ids"]
        assert len(tokens) == len(text.encode())
        assert tokenizer.decode(tokens) == text


def _saved(folder: Path) -> object:
    make_byte_tokenizer(64).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_full_disk_does_not_hide_why_a_run_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "report.html"))
    monkeypatch.setattr("magicrl.commands.training.write_run_page", full)
    observer = nullcontext(NullObserver())
    monkeypatch.setattr("magicrl.commands.training.TrackerMirror", Mock(return_value=observer))
    with pytest.raises(TrainingStopped, match="no checkpoint"), watched(Mock(folder=tmp_path), observer):
        raise TrainingStopped("no checkpoint")
    full.assert_called_once()


def test_a_toy_recipe_with_another_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    recipe, large = find_recipe(Path("tiny")), 135_000_000
    warn_of_toy_recipe(recipe, ["model=./mine"], large)
    (record,) = caplog.records
    assert "250 times the 2e-05 that magicrl init proposes for 135 million parameters" in record.getMessage()
    assert "magicrl init --model MODEL --data DATA" in record.getMessage()
    caplog.clear()
    warn_of_toy_recipe(recipe, ["model=./mine", "optimizer.learning_rate=1e-5"], large)  # the user chose it
    warn_of_toy_recipe(recipe, ["data=mine.jsonl"], large)  # the user's model
    warn_of_toy_recipe(find_recipe(Path("smollm2")), ["model=./mine"], large)  # not a toy
    assert not caplog.records


def test_a_dry_run_names_a_missing_package_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name in ("peft", "vllm") else found(name))
    with pytest.raises(RecipeError, match=r"model\.lora: .*needs PEFT.*pip install 'magicrl\[lora\]'"):
        dry_run(RECIPES / "smollm2.toml", capsys, "--set", "model.lora.rank=8")
    assert "dry run:" not in capsys.readouterr().out


def said(recipe: Path, *overrides: str) -> str:
    path = find_recipe(recipe)
    return minutes_needed(load_train_recipe(path, ["run.device=cpu", *overrides]), path, overrides)


@pytest.mark.parametrize("overrides", [(), ("run.seed=4",), ("logging.samples=1",)])
def test_a_shipped_recipe_as_it_is_takes_what_was_measured(overrides: tuple[str, ...]) -> None:
    assert said(Path("smollm2"), *overrides) == "about 50 minutes on two CPU cores; "


def test_anything_else_is_planned_for_its_model_and_steps(tmp_path: Path) -> None:
    copied = tmp_path / "mine.toml"
    copied.write_text(
        (FOLDER / "smollm2.toml").read_text().replace('sft = "smollm2-sft.toml"', 'model = "SmolLM2-135M"')
    )
    short = said(Path("smollm2"), "model=SmolLM2-135M", "data=problems.jsonl", "stages.1.max_steps=1")
    _, plan = planned(copied, [], None, "cpu-2core", Options(gpus=1))
    assert said(copied).startswith(f"about {duration(3600 * plan.hours)} for at most ")
    for words, steps in ((said(copied), 50), (short, 21)):
        assert f"for at most {steps} training steps as planned on two CPU cores" in words
        assert "50 minutes" not in words
    assert said(Path("smollm2"), "model=nobody/knows-me") == "", "no shape, no plan"


def test_what_init_has_measured_is_scaled_by_what_the_overrides_change(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    text = (FOLDER / "smollm2.toml").read_text().replace('sft = "smollm2-sft.toml"', 'model = "SmolLM2-135M"')
    recipe.write_text(f"# Written by magicrl init for 50 minutes on this machine.\n{text}")
    assert said(recipe) == "about 50 min 0 s if the recipe is as init wrote it; "
    assert said(recipe, "run.seed=4") == "about 50 min 0 s from what init measured; "
    assert said(recipe, "rollout.max_rows=64", "stages.0.max_steps=1", "stages.1.max_steps=1") != said(
        recipe, "run.seed=4"
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            "train run.toml --output",
            "interrupted; finished work is kept. To continue:\nmagicrl {} 'runs/my run' --resume\n",
        ),
        (
            "train run.toml --resume --output",
            "interrupted; finished work is kept. To continue:\nmagicrl {} 'runs/my run'\n",
        ),
        ("train run.toml --dry-run --output", "interrupted\n"),
        ("preflight run.toml --page", "interrupted\n"),
    ],
)
def test_ctrl_c_prints_the_command_that_continues(
    words: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: str) -> None:
        raise KeyboardInterrupt

    def app_of(**_: bool) -> Callable[..., None]:
        return interrupted

    monkeypatch.setattr("magicrl.commands.main.make_app", app_of)
    monkeypatch.setattr("sys.argv", ["magicrl", *words.split(), "runs/my run"])
    second: list[signal.Handlers] = []
    monkeypatch.setattr("signal.signal", lambda _, handler: second.append(handler))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert second == [signal.SIG_IGN, signal.SIG_DFL], "a second Ctrl-C shows no traceback, and ends a slow exit"
    assert capsys.readouterr().err == shown.format(words)


def test_output_that_nobody_reads_and_a_deleted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unread() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 -- as rich does

    def in_no_folder() -> None:
        Path.cwd()

    def ended(command: Callable[[], None]) -> str:
        def app_of(**_: bool) -> Callable[..., None]:
            return lambda **_: command()

        monkeypatch.setattr("magicrl.commands.main.make_app", app_of)
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().err

    monkeypatch.setattr("sys.argv", ["magicrl", "train", "tiny"])
    assert ended(unread) == (
        "stopped, since the program that reads the output has ended; finished work is kept. To continue:\n"
        "magicrl train tiny --resume\n"
    )
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the current folder no longer exists: change to one" in ended(in_no_folder)
