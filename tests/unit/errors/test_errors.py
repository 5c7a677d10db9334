"""Bad input gives one message that names the place and the remedy, and the page quotes it. No secret is written."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from error_making import PROBLEMS, RECIPE, Case, Desk, sections, seen

from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.training.diagnosis import NOTHING_LEARNED
from magicrl.training.recorder import RunFolder
from tools.errors_page import PAGE, STATED, entry

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked")

CASES = [case for cases in sections().values() for case in cases]
FINISHED = (0, NOTHING_LEARNED)
SECRETS = {
    "WANDB_API_KEY": "wandb-0123456789abcdef",
    "HF_TOKEN": "hf_FakeFakeFakeFake",
    "OPENAI_API_KEY": "sk-not-a-real-key",
    "AWS_SECRET_ACCESS_KEY": "aws/secret/access",
    "DATABASE_PASSWORD": "correct-horse-battery",
}


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk.prepare(tmp_path_factory.mktemp("desk"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_message_names_place_and_remedy_and_is_on_the_page(case: Case, desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    status, text = seen(case, desk, folder)
    assert status == case.status
    assert text.startswith("magicrl: ")
    assert "Traceback" not in text
    for words in case.says:
        assert words in text
    assert entry(case, status, text) in PAGE.read_text(), "write the page anew: python -m tools.errors_page"


def test_the_page_lists_no_other_errors() -> None:
    titles = [line.removeprefix("### ") for line in PAGE.read_text().splitlines() if line.startswith("### ")]
    assert titles == [case.title for case in CASES]
    assert STATED in PAGE.read_text()


def quiet(case: Case, desk: Desk, folder: Path) -> dict[str, object]:
    """Return ``run.json`` of a case that is no error."""
    folder.mkdir()
    status, text = seen(case, desk, folder)
    assert status in FINISHED, text
    return json.loads((folder / "run" / "run.json").read_text())


def test_overlong_prompts_are_dropped_and_counted_where_asked(desk: Desk, tmp_path: Path) -> None:
    long = {"problem": "L 5 2 3 0 1 0 0 0 0 0 0 :", "answer": "1"}
    dropped = Case(problems=[long], set=["data.max_prompt_tokens=11", "data.overlong_prompts=drop"])
    facts = quiet(dropped, desk, tmp_path / "drop")
    assert facts["dropped_overlong"] == 1
    assert facts["data"]["train"]["problems"] == 3  # type: ignore[index]
    assert facts["prompt_format"] == "plain text"


def test_test_problems_are_left_out_of_training_and_counted(desk: Desk, tmp_path: Path) -> None:
    # other spacing and another template do not make another problem
    held = Case(
        write={"test.jsonl": [{"problem": "L 8  1 0 8 0 5 1 0 0 :", "answer": "3"}]},
        recipe={
            "[rollout]": '[data.test.exam]\npath = "test.jsonl"\nverifier = "exact"\n\n[rollout]',
            'verifier = "exact"': 'verifier = "exact"\ntemplate = "L {prompt}"',
        },
    )
    facts = quiet(held, desk, tmp_path / "held")
    assert facts["dropped_in_test"] == 1
    assert facts["data"]["train"]["problems"] == 2  # type: ignore[index]


def test_weights_that_are_not_finite_reach_no_checkpoint(desk: Desk, tmp_path: Path) -> None:
    # the first update leaves weights of 1e28 and a finite gradient, the second overflows
    folder = tmp_path / "here"
    folder.mkdir()
    absurd = ("optimizer.learning_rate=1e30", "algorithm.reject_zero_advantage=false", "stages.0.max_steps=9")
    status, text = seen(Case(set=absurd), desk, folder)
    assert status == 1
    assert "update 2 gave weights that are not finite" in text
    assert "a lower optimizer.learning_rate, or with another start model if its weights are very large" in text
    facts = json.loads((folder / "run" / "run.json").read_text())
    assert facts["status"] == "failed"
    assert (folder / "run" / "report.html").exists(), "its curves show why"
    found = sorted((folder / "run" / "checkpoints").glob("step-*/tensors.safetensors"))
    assert found
    for path in found:
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


def test_keys_of_the_environment_are_written_nowhere(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = tmp_path / "here", io.StringIO()
    folder.mkdir()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    status, text = seen(Case(), desk, folder, printed)
    assert status in FINISHED, text
    assert printed.getvalue()
    written = [path for path in folder.rglob("*") if path.is_file() and "start" not in path.parts]
    assert {"run.json", "metrics.jsonl", "config.toml", "model.safetensors"} <= {path.name for path in written}
    for value in SECRETS.values():
        assert value not in printed.getvalue() + text
        for path in written:
            assert value.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    "setting",
    [
        "model=https://ann:hunter2@host/model",
        "model=https://hunter2@host/model",
        'data.train=[{path="https://ann:hunter2@host/x.jsonl"}]',
        'data.train=[{hub="hf://ann:hunter2@host"}]',
        "rollout.replay=s3://ann:hunter2@bucket",
        "model=./hunter2-in-a-variable",
    ],
)
def test_credentials_in_settings_are_masked_in_messages_and_records(setting: str, desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    engine = ("rollout.engine=replay",) if "replay" in setting else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_TOKEN", "hunter2-in-a-variable")
        status, text = seen(Case(set=[*engine, setting]), desk, folder)
        assert status in (1, 2)
        assert "hunter2" not in text
        assert "***" in text
        for path in (folder / "run").rglob("*"):
            assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


def test_a_traceback_comes_before_the_message_and_holds_no_credentials(desk: Desk, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGICRL_TRACEBACK", "1")
        status, text = seen(Case(set=["model=https://ann:hunter2@host/model"]), desk, tmp_path)
    assert status in (1, 2)
    assert text.startswith("Traceback (most recent call last)")
    assert "\nmagicrl: " in text
    assert "hunter2" not in text


def test_the_resolved_recipe_holds_no_credentials(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    written = to_toml(load_train_recipe(path, ["model=https://ann:p@ss@host/m"]))
    assert 'model = "https://***@host/m"' in written


def test_foreign_lines_and_damaged_tests_of_a_resumed_run(desk: Desk, tmp_path: Path) -> None:
    shutil.copytree(desk.finished.parent, tmp_path, dirs_exist_ok=True)
    folder = RunFolder(tmp_path / "run", load_train_recipe(tmp_path / "recipe.toml"), resume=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    foreign = [b"hello", b"[1]", b'{"step": "x"}', b'{"step": 1}', b"\xff\xfe"]
    metrics.write_bytes(b"\n".join([*foreign, *(line.encode() for line in lines), b""]))
    assert folder.rewind(2) == []
    assert metrics.read_text().splitlines() == lines
    (tmp_path / "run" / "evaluations" / "before-exam.json").write_text('{"set": ')
    with pytest.raises(ValueError, match=r"before-exam\.json is damaged .*delete it to run that evaluation again"):
        folder.read_evaluation("before-exam")


def test_the_remedy_that_switches_a_table_off_works(desk: Desk, tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.mkdir()
    _, text = seen(Case(set=["data.difficulty_filter=off"]), desk, wrong)
    remedy = re.search(r"--set (\S+=none) switches it off", text)
    assert remedy is not None
    assert quiet(Case(set=[remedy[1]]), desk, right)["status"] == "finished"


def test_the_remedy_with_a_placeholder_works_with_the_columns_name(desk: Desk, tmp_path: Path) -> None:
    rows = [
        {"nr": n, "aufgabe": row["problem"], "loesung": row["answer"], "quelle": f"book {n}"}
        for n, row in enumerate(PROBLEMS)
    ]
    wrong = Case(write={"problems.jsonl": rows})
    (tmp_path / "wrong").mkdir()
    _, text = seen(wrong, desk, tmp_path / "wrong")
    sets = [word.replace("COLUMN,", "loesung") for word in re.findall(r"--set (\S+)", text)]
    assert sets == ["data.train.0.fields.prompt=aufgabe", "data.train.0.fields.answer=loesung"]
    assert quiet(replace(wrong, set=sets), desk, tmp_path / "right")["status"] == "finished"


@pytest.mark.parametrize(
    "words",
    [
        "report nothere",
        "report nothere --serve",
        "watch nothere",
        "explain nothere",
        "explain nothere --step 2",
        "runs nothere",
        "push nothere me/name",
        "eval --model nothere --benchmark problems.jsonl --output out",
        "eval --model start --benchmark nothere.jsonl --output out",
        "eval --compare nothere also-not",
        "init --model start --data nothere.jsonl",
        "init --model start --data problems.jsonl --prompt nocol",
        "init --model start --data problems.jsonl --reward recipe.toml:score",
        "init --model nothere --data problems.jsonl",
        "train nothere.toml",
        "train recipe.toml --reward rewards.py:missing",
        "train recipe.toml --reward nothere.py:score",
        "train recipe.toml --data nothere.jsonl",
        "train recipe.toml --dry-run --data nothere.jsonl",
        "preflight recipe.toml --set model=nothere",
        "plan recipe.toml --gpu cpu-2core --set model=nothere",
        "plan recipe.toml --gpu cpu-2core --hours 0",
        "sft nothere.toml",
        "recipes nothere",
        "verify math --input nothere.jsonl --output out.jsonl",
        "verify reward rewards.py:missing --input problems.jsonl --output out.jsonl",
        "data import --input nothere.jsonl --output out",
        "selfcheck --only nothere",
    ],
)
def test_input_that_cannot_be_used_has_exit_status_2(words: str, desk: Desk, tmp_path: Path) -> None:
    files: dict[str, str | list[object]] = {"rewards.py": "def score(problem, response):\n    return 1.0\n"}
    status, text = seen(Case(arguments=words.split(), write=files), desk, tmp_path)
    assert (status, text.splitlines()[0][:9] if text else "") == (2, "magicrl: "), text


COMMANDS = {
    "train": ["train", "recipe.toml", "--output", "run"],
    "preflight": ["preflight", "recipe.toml"],
    "init": ["init", "--model", "start", "--data", "problems.jsonl", "--output", "new.toml"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eos_token": None}, "the tokenizer start has no end token; set eos_token in its tokenizer_config.json"),
        ({"eos_token": "<|other|>"}, "do not belong together"),
        (
            {"chat_template": "{% for m in messages %}{{ m.content }} <|im_end|> {% endfor %}"},
            "no token of this tokenizer",
        ),
    ],
)
def test_init_preflight_and_train_refuse_the_same_tokenizers(
    change: dict[str, object], says: str, command: str, desk: Desk, tmp_path: Path
) -> None:
    many = [{"problem": f"L {a} {b} 3 0 1 0 0 0 0 :", "answer": "1"} for a in range(4) for b in range(4)]
    case = Case(arguments=COMMANDS[command], edit={"start/tokenizer_config.json": change}, problems=many)
    status, text = seen(case, desk, tmp_path)
    assert status == 2
    assert says in text
    assert not (tmp_path / "new.toml").exists()
