"""Every command in a code block of the README and the pages runs in a user's folder; trainings as a dry run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from processes import magicrl_here

from magicrl.data.families import make_family, unique_problems
from magicrl.models.small_models import make_miniature
from magicrl.training.diagnosis import NOTHING_LEARNED

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/start/first-run.md",
    "docs/start/own-data.md",
    "docs/start/own-reward.md",
    "docs/start/reading-a-report.md",
    "docs/guides/custom-parts.md",
    "docs/guides/environments.md",
    "docs/guides/models.md",
)
MODEL = "path/to/hf-model"
START = "--set stages.0.max_steps=1 --set stages.1.max_steps=1 --set evaluation.samples=1 --set evaluation.pass_at=[1]"


def commands() -> list[str]:
    """Return the lines of code blocks that begin with ``magicrl`` or ``make``, without comments, each once."""
    texts = [re.sub(r" \\\n\s+", " ", (ROOT / page).read_text()) for page in PAGES]  # a line may continue
    lines = [line for text in texts for line in text.splitlines()]
    found = (re.fullmatch(r"(?:| {4,})(?:\.venv/bin/)?((?:magicrl|make) [^#`]*?)\s*(?:#.*)?", line) for line in lines)
    return list(dict.fromkeys(match[1].removesuffix(" --dry-run") for match in found if match))


def block(page: str, number: int = 0) -> str:
    """Return a Python block of a page."""
    return (ROOT / "docs" / page).read_text().split("```python\n")[1 + number].split("```")[0]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [word for name in shlex.split(command) for word in (sorted(globbed(name, folder)) or [name])]
    assert words[0] == "magicrl"
    end = words.index(">") if ">" in words else len(words)
    result = magicrl_here(*words[1:end], cwd=folder)
    if end < len(words):
        (folder / words[end + 1]).write_text(result.stdout)
    return result


def globbed(name: str, folder: Path) -> list[str]:
    """Return the expansion of a name with a star, as a shell does it."""
    return [str(path.relative_to(folder)) for path in folder.glob(name)] if "*" in name else []


def done(command: str, folder: Path) -> str:
    result = run(command, folder)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return " ".join(result.stdout.split())


def write_problems(folder: Path, count: int) -> None:
    problems = unique_problems(make_family("running_sum"), seed=5, split="train", count=count)
    rows = [{"question": p.prompt, "answer": p.references[0]} for p in problems]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with everything that the pages' commands name: model, problems, answers, programs, custom parts."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(ROOT / "examples" / "environment.py", folder)
    (folder / "my_loss.py").write_text(block("guides/custom-parts.md"))
    (folder / "my_reward.py").write_text(block("start/own-reward.md"))
    (folder / "trl_rewards.py").write_text(block("start/own-reward.md", 1))
    llama = {"model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_miniature(llama, folder / MODEL, max_context=1024)
    write_problems(folder, 2)
    rows = {
        "answers.jsonl": [{"reference": "1/2", "response": "It is \\boxed{0.5}."}],
        "programs.jsonl": [{"program": "print(int(input()) + 1)", "tests": {"inputs": ["1\n"], "outputs": ["2\n"]}}],
    }
    for name, records in rows.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_pages_have_commands() -> None:
    found = commands()
    assert {command.split()[1] for command in found} >= {"quickstart", "recipes", "train", "verify", "eval", "plan"}


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_are_there(command: str) -> None:
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c in commands() if re.match(r"magicrl (recipes|verify|plan|eval)", c)])
def test_short_commands_run(command: str, user: Path) -> None:
    if "environment.py" in command:  # the page evaluates a trained model on the example's problems
        shutil.copytree(user / MODEL, user / "runs" / "echo" / "model", dirs_exist_ok=True)
        rows = [{"prompt": f"Say {i} back", "digits": ["1", "2"]} for i in range(2)]
        (user / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = command.replace("problems.jsonl", "episodes.jsonl").replace("--max-observation-tokens 1", "")
    told = done(command, user)
    if "verify" in command:
        assert "1 judged, 1 correct" in told
    written = re.search(r"(?:--output|>) (\S+)", command)
    assert written is None or (user / written[1]).exists()


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("magicrl doctor")])
def test_the_doctor_looks_at_this_machine(command: str, user: Path) -> None:
    assert " Python: " in run(command, user).stdout  # with any findings


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("magicrl data build")])
def test_a_pipeline_says_at_once_what_it_lacks(command: str, user: Path) -> None:
    result = run(command, user)
    assert result.returncode == 2
    assert "make it: magicrl sft smollm2-sft" in result.stderr
    assert not (user / "runs" / "data").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if re.match("magicrl train .*(--|toml)", c)])
def test_trainings_build(command: str, user: Path) -> None:
    if "run.toml" in command:  # as `init` would write it
        done("magicrl recipes tiny > run.toml", user)
    teacher = re.search(r"teacher\.model=(\S+)", command)
    if teacher:
        shutil.copytree(user / MODEL, user / teacher[1], dirs_exist_ok=True)
    assert "it builds" in done(f"{command} --dry-run", user)
    if teacher:  # no run, which a later report of runs/* would say
        shutil.rmtree((user / teacher[1]).parent)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(f"magicrl init --model {MODEL}")])
def test_init_says_that_random_weights_cannot_learn(command: str, user: Path) -> None:
    (user / "run.toml").unlink(missing_ok=True)
    write_problems(user, 12)  # init requires ten or more
    result = run(command, user)
    write_problems(user, 2)
    assert result.returncode == 3, f"{result.stdout}{result.stderr}"


@pytest.mark.slow
def test_a_copied_recipe_trains(user: Path) -> None:
    done("magicrl recipes smollm2 > copy.toml", user)
    assert "it builds" in done("magicrl train copy.toml --dry-run", user)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("magicrl preflight")])
def test_preflights_give_a_verdict(command: str, user: Path) -> None:
    done("magicrl recipes tiny > run.toml", user)
    assert "Sound:" in done(command, user)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("magicrl explain")])
def test_a_step_is_explained(command: str, user: Path) -> None:
    """Run the page's command on the first step of a run of two steps."""
    words = command.split()
    result = run(f"magicrl train tiny {START} --set checkpoint.every=1 --output {words[2]}", user)
    assert result.returncode in (0, NOTHING_LEARNED), result.stderr
    told = done(" ".join([*words[:3], "--step", "1", *words[5:]]), user)
    assert "equal" in told


@pytest.mark.slow
def test_reports_are_written(user: Path) -> None:
    """Run every report command of the pages on runs of three variants and on two evaluations."""
    short = f"{START} --set data.difficulty_filter.samples=2"
    for name, setting in (
        ("adaptive", "run.seed=1"),
        ("none", "entropy.controller=none"),
        ("reuse", "algorithm.reuse=2"),
    ):
        result = run(f"magicrl train tiny {short} --set {setting} --output runs/{name}-0", user)
        assert result.returncode in (0, NOTHING_LEARNED), result.stderr  # two steps teach little
    done(f"magicrl eval --model {MODEL} --benchmark problems.jsonl --samples 1 --max-tokens 8 --output evaluated", user)
    for name in ("runs/eval/start", "runs/eval/trained"):
        shutil.copytree(user / "evaluated", user / name, dirs_exist_ok=True)
    for name in ("quickstart", "magic-1", "dr_grpo-1"):
        shutil.copytree(user / "runs" / "adaptive-0", user / "runs" / name, dirs_exist_ok=True)
    for command in [c for c in commands() if c.startswith("magicrl report") and "--serve" not in c]:
        shutil.rmtree(user / "runs" / "models", ignore_errors=True)
        page = user / (command.split("--output ")[1] if "--output" in command else "comparison.html")
        page.unlink(missing_ok=True)
        if "runs/* " in command:  # only runs are below the reader's folder
            shutil.rmtree(user / "runs" / "eval", ignore_errors=True)
        done(command, user)
        assert page.stat().st_size > 10_000, command
        for name in ("runs/eval/start", "runs/eval/trained"):
            shutil.copytree(user / "evaluated", user / name, dirs_exist_ok=True)


def test_every_command_is_run_here() -> None:
    known = r"make |magicrl (recipes|verify|plan|eval|doctor|data build|train|init|preflight|explain|report)"
    assert [command for command in commands() if not re.match(known, command)] == []
