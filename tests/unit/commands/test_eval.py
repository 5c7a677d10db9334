"""``magicrl eval``: options, display, tables, and the page of an evaluation."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from builders import completion
from json_server import Asked, Reply, json_server
from rich.console import Console

import magicrl
from magicrl.commands.eval import evaluate
from magicrl.commands.evaluation_display import EvalDisplay, _best, show_comparison
from magicrl.commands.main import app
from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import TinyModelConfig
from magicrl.evaluation.benchmarks import known_benchmarks, parse_asked
from magicrl.evaluation.options import JobCost, arguments
from magicrl.evaluation.presets import PRESETS
from magicrl.evaluation.samples import SampleRow, sample_row
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny
from magicrl.records import Outcome, Verdict


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    made, tokenizer = make_tiny(TinyModelConfig(hidden_size=32, layers=1, max_context=256), ["1", "2", "+", "?"], 0)
    return save_policy(made, tokenizer, folder)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "ones.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "problem": "1 + 1 ?", "answer": "2"}) + "\n" for i in range(60)))
    return path


def words(model: Path, problems: Path, output: Path, *more: str, samples: int = 2) -> list[str]:
    asked = ["--benchmark", str(problems), "--samples", str(samples), "--max-tokens", "200", "--verifier", "exact"]
    rest = ["--template", "{prompt}", "--threads", "1", "--workers", "1", "--output", str(output), *more]
    return ["eval", "--model", str(model), *asked, *rest]


def call(words: Sequence[str]) -> int:
    return app(words, result_action="return_value")


def test_an_evaluation_prints_cost_scores_and_place(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(words(model, problems, tmp_path / "a", "--limit", "5")) == 0
    said = capsys.readouterr().out
    assert "ones: 5 problems x 2 samples, 10 in this call; at most 2,000 tokens to generate" in said
    assert "95 % interval" in said
    assert "@2 " in said
    assert "results.json" in said
    assert call(words(model, problems, tmp_path / "a", "--limit", "5", "--inspect-logs", str(tmp_path / "a_logs"))) == 0
    assert (tmp_path / "a_logs" / "ones.eval").exists()
    assert "10 of them exist already; at most 0 tokens" in capsys.readouterr().out
    assert call(words(model, problems, tmp_path / "b", "--limit", "5", "--seed", "1")) == 0
    logs = ["--inspect-logs", str(tmp_path / "logs")]
    assert call(["eval", "--merge", "--output", str(tmp_path / "b"), "--pass-at", "1", *logs]) == 0
    assert f"Inspect log: {tmp_path}" in capsys.readouterr().out.replace("\n", "")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["ones.eval"]
    assert list(json.loads((tmp_path / "b/results.json").read_text())["benchmarks"]["ones"]["pass_at"]) == ["1"]
    capsys.readouterr()
    assert call(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    compared = capsys.readouterr().out
    assert "change" in compared
    assert "settings differ" not in compared, "another seed is chance, not another setting"


def test_prompts_of_another_form_than_in_training_are_named_with_the_option_for_those(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, template = tmp_path / "trained", "Tom's sum: {prompt}\n\nA \\boxed{}!"
    shutil.copytree(model, trained)
    source = '[[data.train]]\npath = "ones.jsonl"\n'

    def printed(*more: str) -> str:
        asked = ["--benchmark", str(problems), "--output", str(tmp_path / "a"), "--limit", "1", *more]
        with pytest.raises(ValueError, match="the tokenizer does not know"):
            call(["eval", "--model", str(trained), *asked])
        return capsys.readouterr().out.replace("\n", " ")

    (trained / "config.toml").write_text(f"{source}template = {json.dumps(template)}\n")
    note = printed()
    assert "note: ones: the model was trained on other prompts than '{prompt}\\n\\nPlease reason" in note
    command = f"printf %s {note.partition('add --template ')[2]}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout == template
    assert "note:" not in printed("--template", template)
    (trained / "config.toml").write_text(source)
    assert "add --template '{prompt}'" in printed()


def test_a_served_judge_judges_an_evaluation(
    model: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-none")

    def half(asked: Asked) -> Reply:
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return Reply(body={"choices": [{"message": {"content": "Score: 0.5"}}], "usage": usage})

    asked = [
        "eval",
        "--model",
        str(model),
        "--benchmark",
        str(problems),
        "--limit",
        "3",
        "--max-tokens",
        "20",
        "--template",
        "{prompt}",
    ]
    rest = ["--threads", "1", "--workers", "1", "--output", str(tmp_path / "a")]
    for reward in ("judge", "maths + 0.2 * judge"):
        with pytest.raises(RecipeError, match=r"--judge: the reward 'judge' needs a served model"):
            call([*asked, *rest, "--verifier", reward])
    with json_server(half) as url:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(
            '[start]\nmodel = "m"\n[[data.train]]\nfamily = "running_sum"\ncount = 1\n'
            "[[stages]]\nmax_tokens = 8\nrollout_batch = 2\ngroup_size = 2\nmax_steps = 1\n"
            f'[verifier.judge]\nbase_url = "{url}"\nmodel = "grader"\nkey_variable = "JUDGE_KEY"\n'
            f'cache = "{tmp_path / "cache"}"\n'
        )
        assert call([*asked, *rest, "--judge", str(recipe)]) == 0
        more: dict[str, Any] = {"limit": 3, "max_tokens": 20, "template": "{prompt}", "threads": 1, "workers": 1}
        same = magicrl.evaluate(model, problems, output=tmp_path / "b", judge=recipe, progress=False, **more)
    found = json.loads((tmp_path / "a/results.json").read_text())["benchmarks"]["ones"]
    assert same.scores.loc["ones", "reward"] == found["reward"]["mean"]
    assert 0 < found["reward"]["mean"] <= 0.5, "responses that were cut or empty are not asked about"
    assert found["accuracy"]["mean"] == 0
    job = json.loads(next((tmp_path / "a").glob("ones/job.json")).read_text())
    assert job["decides"]["judging"]["judge"]["model"] == "grader"
    assert "base_url" not in job["decides"]["judging"]["judge"], "a server may come back at another address"


def test_fresh_limits_and_prices_are_said_before_and_after(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--limit", "4", "--fresh-limits", "50,20", "--price-in", "1000", "--price-out", "2000")
    assert call(words(model, problems, tmp_path / "a", *more)) == 0
    said = capsys.readouterr().out
    assert "ones: 4 problems x 2 samples, 8 in this call; at most 1,600 tokens to generate, 3.23 at the prices" in said
    assert "ones at 20: 4 problems x 2 samples, 8 in this call; at most 160 tokens to generate" in said
    assert [line.split()[:2] for line in said.splitlines() if line.startswith(" ones ")][1:] == [
        ["ones", "20"],
        ["ones", "50"],
    ]
    assert "used: 96 tokens in, " in said
    assert "at the prices given" in said.splitlines()[-2]
    document = json.loads((tmp_path / "a/results.json").read_text())
    assert document["usage"]["price"]["total"] == pytest.approx(0.096 + document["usage"]["response_tokens"] / 500)
    copy = shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert call(["eval", "--compare", str(tmp_path / "a"), str(copy), "--output", str(tmp_path / "c")]) == 0
    assert "comparison.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "c/comparison.json").read_text())["curves"]["ones"]["models"][0]["fresh"]


def test_the_catalogue_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["eval", "--list"]) == 0
    said = capsys.readouterr().out
    assert "aime24" in said
    assert "livecodebench" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--shard", "4/4"], "--shard 4/4: give I/N with I from 0 to N-1"),
        (["--pass-at", "1;2"], "--pass-at 1;2: give whole numbers"),
        (["--fresh-limits", "1k"], "--fresh-limits 1k: give whole numbers"),
        (["--price-out", "2"], "give both --price-in and --price-out"),
        (["--price-in", "1", "--price-out", "-2"], "--price-out -2.0: give what a million tokens cost"),
        (["--window", "2024"], "--window 2024: give FIRST..LAST"),
        (["--field", "prompt"], "--field prompt: give prompt=COLUMN"),
        (["--engine", "warp"], "--engine: unknown engine 'warp'"),
        (["--benchmark", "gsm9k"], "did you mean 'gsm8k'?"),
        (["--inspect-logs", "logs", "--compare", "a", "b"], "--inspect-logs needs --model"),
        (["--inspect-logs", "logs", "--run", "a"], "--inspect-logs needs --model"),
        (["--compare", "a", "b"], "--model has no effect with --compare; leave one of the two out"),
        (["--merge"], "--model has no effect with --merge; leave one of the two out"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--follow"], "--follow needs --run RUN"),
    ],
)
def test_a_wrong_option_is_refused_before_a_model_is_loaded(more: list[str], message: str, tmp_path: Path) -> None:
    base = ["eval", "--model", "nowhere", "--output", str(tmp_path / "out")]
    given = base if "--benchmark" in more else [*base, "--benchmark", "gsm8k"]
    with pytest.raises(RecipeError) as refused:
        call([*given, *more])
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_shard_gives_no_results_of_an_earlier_call(
    model: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"limit": 3, "max_tokens": 200, "template": "{prompt}", "threads": 1, "workers": 1}
    more |= {"output": tmp_path / "a", "reward": "exact", "progress": False}
    assert magicrl.evaluate(model, problems, samples=1, **more).scores.loc["ones", "samples"] == 1
    with pytest.raises(ValueError, match=r"shard=0/2 of .*a is done, and samples of other shards are missing"):
        magicrl.evaluate(model, problems, samples=2, shard="0/2", **more)
    logs = ["--limit", "3", "--shard", "0/2", "--inspect-logs", str(tmp_path / "logs")]
    assert call(words(model, problems, tmp_path / "a", *logs)) == 0
    assert "1 of 6 samples are missing" in capsys.readouterr().out.replace("\n", " ")
    assert not (tmp_path / "logs").exists(), "those would be logs of one sample"
    assert magicrl.evaluate(model, problems, samples=2, shard="1/2", **more).scores.loc["ones", "samples"] == 2


def test_words_of_options() -> None:
    options = arguments(preset="released-code", temperature=0.9, shard="1/4", pass_at="1, 4", fresh_limits=(8, 4, 8))
    assert (options.sampling.temperature, options.sampling.max_tokens) == (0.9, 32768)
    assert (options.part, options.counts("pass_at"), options.fresh) == ((1, 4), (1, 4), [4, 8])
    assert arguments(window="2024-08-01..").days == (date(2024, 8, 1), None)
    assert _best({"8": {"mean": 0.5}, "16": {"mean": 0.75}}) == "@16 75.0"


@pytest.mark.parametrize("option", ["--seed", "--temperature", "--top-k"])
def test_a_zero_is_an_option_without_effect(option: str) -> None:
    with pytest.raises(RecipeError, match=f"{option} has no effect with --compare; leave one of the two out"):
        call(["eval", "--compare", "a", "b", option, "0"])


def sample(right: bool | None) -> SampleRow:
    outcome = Outcome.NOT_JUDGED if right is None else Outcome.CORRECT if right else Outcome.WRONG
    verdict = Verdict(outcome=outcome, status="")
    return sample_row("p", 0, completion(range(50)), verdict)


def test_without_a_terminal_lines_come_now_and_then_and_at_the_end() -> None:
    clock = [0.0]
    out = io.StringIO()
    with EvalDisplay(Console(file=out, width=100), clock=lambda: clock[0]) as display:
        display.cost([JobCost(name="set", problems=3, samples=2, missing=4, wanted=6, max_tokens=100)])
        for done in range(3, 7):
            clock[0] += 6.0
            display.sample("set", sample(done % 2 == 0))
            display.progress("set", done, 6)
        for right in (True, None):
            display.sample("other", sample(right))
        display.progress("other", 2, 2)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("6 in this call; 2 of them exist already; at most 400 tokens to generate")
    assert lines[1] == "set: 4 of 6 samples, 50.0 % right in this call, 17 tokens/s"
    assert lines[2] == "set: 6 of 6 samples, 50.0 % right in this call, 11 tokens/s"
    assert lines[3] == "other: 2 of 2 samples, 100.0 % right in this call", "of those that were judged"


def test_a_comparison_fits_80_columns_with_every_number_whole() -> None:
    out = io.StringIO()
    row = {
        "comparable": True,
        "settings_differ": ["samples: was 4, is now 2"],
        "problems": 1319,
        "before": 1.0,
        "after": 0.0,
        "difference": {"mean": -1.0, "low": -1.0, "high": -0.999},
        "p_corrected": 1e-5,
        "better": 0,
        "worse": 1319,
        "efficiency": {"mean_tokens": 10.0, "before": None, "after": 0.5},
    }
    other = {"comparable": False, "why": "other problems: count: was 10, is now 5"}
    document = {"benchmarks": {"a-rather-long-name": row, "b": other}, "only_in_one": ["c"]}
    show_comparison(document, Console(file=out, width=80))
    said = out.getvalue()
    assert "…" not in said
    columns = ("1319", "100.0", "0.0", "−100.0", "−100.0 to −99.9", "<0.001", "0/1319")
    assert re.search(r"\s+".join(columns), said), "problems, before, after, change, interval, p, better and worse"
    assert "b: not comparable, other problems: count: was 10, is now 5" in said
    assert "c: in one of the two only" in said


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_samples(
    model: Path, problems: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def command(output: Path) -> list[str]:
        more = ("--max-rows", "4", "--fresh-limits", "20")
        return [sys.executable, "-m", "magicrl", *words(model, problems, output, *more, samples=6)]

    killed = tmp_path / "killed"
    samples = killed / "ones" / "samples-0-of-1.jsonl"
    process = subprocess.Popen(command(killed), env=environment, stdout=subprocess.DEVNULL)
    until(lambda: process.poll() is not None or (samples.exists() and samples.stat().st_size > 8_000))
    assert process.poll() is None, "it ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = samples.read_bytes()
    assert not (killed / "results.json").exists()
    for output in (killed, tmp_path / "whole"):
        subprocess.run(command(output), env=environment, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    assert samples.read_bytes().startswith(before[: before.rfind(b"\n") + 1]), "what was there was not touched"
    written = [json.loads((output / "results.json").read_text()) for output in (killed, tmp_path / "whole")]
    scored = [document["benchmarks"]["ones"] for document in written]
    assert scored[0]["scored_sha256"] == scored[1]["scored_sha256"]
    assert scored[0]["per_problem"] == scored[1]["per_problem"]
    assert scored[0]["scaling"] == scored[1]["scaling"]
    used = [result["usage"] for result in scored]
    assert [u["calls"] for u in used] == [3, 2], "the killed call's account is there too"
    assert used[0]["response_tokens"] == used[1]["response_tokens"]


ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guides" / "evaluation.md"
COMMANDS = [line for line in PAGE.read_text().splitlines() if line.startswith("magicrl eval")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_understood(command: str) -> None:
    _, bound, ignored = app.parse_args(shlex.split(command)[1:], print_error=False, exit_on_error=False)
    assert not ignored
    known = inspect.signature(evaluate).parameters
    given = arguments(**{name: value for name, value in bound.arguments.items() if name in known})
    assert given.verifier == (given.reward or (given.judge and "judge"))
    assert (given.judge_settings is None) == (given.judge is None)
    for text in given.benchmarks or ():
        asked = parse_asked(text)
        assert asked.place is not None or asked.known is not None


def test_the_window_on_the_page_is_the_catalogue_s() -> None:
    first, last = known_benchmarks()["livecodebench"].window or (None, None)
    assert f"{first} to {last}" in PAGE.read_text()


def test_every_preset_stands_on_the_page_with_its_temperature() -> None:
    for preset in PRESETS.values():
        assert re.search(rf"^\| `{preset.name}` \| {preset.temperature:g} \|", PAGE.read_text(), re.MULTILINE)
        assert preset.max_tokens == 32768


def test_the_example_quotes_the_committed_figures() -> None:
    figures = json.loads((ROOT / "benchmarks/results/eval-smollm2.json").read_text())
    titles = {"gsm8k": "GSM8K", "svamp": "SVAMP", "math500": "MATH-500", "humaneval": "HumanEval", "mbpp": "MBPP"}

    def points(value: float) -> str:
        return f"{100 * value:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")

    for name, title in titles.items():
        scores = [figures["scores"][model].get(name) for model in ("instruct", "start", "trained")]
        pairs = [figures["comparisons"][pair].get(name) for pair in ("start to trained", "instruct to trained")]
        cells = [
            "not run"
            if score is None
            else "{:.1f} ({:.1f} to {:.1f})".format(*(100 * score["accuracy"][key] for key in ("mean", "low", "high")))
            for score in scores
        ]
        cells += [
            "not run"
            if pair is None
            else "{} ({} to {}), p {:.2g}".format(*map(points, pair["difference"].values()), pair["p_value"])
            for pair in pairs
        ]
        assert f"| {title} | {' | '.join(cells)} |" in PAGE.read_text()
