"""A run whose reward is a served judge: its records, its behaviour in an outage, and no question paid for twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from json_server import Asked, Reply, json_server

from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe
from magicrl.training.protocols import TrainingStopped
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from magicrl_verifiers import served as openai_http

SECRET = "sk-never-shown-0123456789"


class Server:
    """A judge that likes even digits, until it is down."""

    def __init__(self) -> None:
        self.asked = 0
        self.up_for: int | None = None  # number of questions that it still answers
        self.lock = threading.Lock()

    def answer(self, asked: Asked) -> Reply:
        with self.lock:
            if self.up_for is not None:
                self.up_for -= 1
                if self.up_for < 0:
                    return Reply(body={"error": "down"}, status=503)
            self.asked += 1
        text = asked.body["messages"][0]["content"]
        said = text.partition("<response-")[2].partition(">\n")[2].partition("\n</response-")[0]
        digits = [int(digit) for digit in said if digit.isdigit()]
        score = sum(digit % 2 == 0 for digit in digits) / max(1, len(digits))
        usage = {"prompt_tokens": 50, "completion_tokens": 5}
        return Reply(body={"choices": [{"message": {"content": f"Score: {score:.3f}"}}], "usage": usage})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def judged(toy_recipe: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """Return overrides that turn the toy recipe into a judged one."""
    monkeypatch.setattr(openai_http, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(openai_http, "_LONGEST_WAIT", 0.002)
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    file = 'path = "problems.jsonl"\nverifier = "judge"'
    toy_recipe.write_text(toy_recipe.read_text().replace('family = "running_sum"\ncount = 60', file))
    rows = [{"problem": f"L {n % 10} 4 {n // 10} 2 1 7 3 9 5 :", "answer": "3"} for n in range(30)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with json_server(server.answer) as url:
        yield [
            "data.validation=[]", "data.test={}", "evaluation.every=0", "stages.0.max_steps=2", "stages.1.max_steps=2",
            "checkpoint.every=1", "checkpoint.keep_last=9", f"verifier.judge.base_url={url}", "verifier.judge.model=m",
            "verifier.judge.key_variable=JUDGE_KEY", f"verifier.judge.cache={tmp_path}/judge",
            "verifier.judge.attempts=2",
        ]  # fmt: skip


def run(recipe: Path, output: Path, overrides: list[str], *, resume: bool = False) -> list[dict[str, Any]]:
    run_training(load_train_recipe(recipe, overrides), output, NullObserver(), resume=resume)
    return lines(output)


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["values"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def what_is_learned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if k.startswith(("learner/", "train/", "groups/", "length/"))} for row in rows
    ]


def test_a_judged_run_counts_what_it_asked_and_asks_nothing_twice(
    toy_recipe: Path, tmp_path: Path, server: Server, judged: list[str]
) -> None:
    rows = run(toy_recipe, tmp_path / "run", judged)
    assert all(0 < row["judge/asked"] + row["judge/cached"] <= 32 for row in rows)
    assert sum(row["judge/asked"] for row in rows) == server.asked - 1, "and the probe before the run"
    assert 0 < rows[0]["train/reward/mean"] < 1
    assert any(row["learner/sgd_steps"] for row in rows)
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["judge"]["judge/asked"] == server.asked
    assert document["judge"]["judge/prompt_tokens"] == 50 * server.asked
    before = server.asked
    again = run(toy_recipe, tmp_path / "again", judged)
    assert server.asked == before + 1, "the probe alone"
    assert what_is_learned(again) == what_is_learned(rows)
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


def test_a_long_outage_stops_the_run_and_it_goes_on(
    toy_recipe: Path, tmp_path: Path, server: Server, judged: list[str]
) -> None:
    few = [*judged, "verifier.stop_after_unjudged_steps=2", "stages.0.max_steps=4"]
    server.up_for = 12
    with pytest.raises(TrainingStopped, match=r"no response of 2 steps .*status 503.*continue with --resume"):
        run(toy_recipe, tmp_path / "run", few)
    stopped = lines(tmp_path / "run")
    assert stopped[-1]["train/not_judged/ratio"] == stopped[-2]["train/not_judged/ratio"] == 1
    assert stopped[-1]["train/accuracy/mean"] is None, "nothing was a 0"
    assert stopped[-1]["judge/failed"] > 0
    # still down: the error comes before anything is computed
    with pytest.raises(ValueError, match=r"\[verifier.judge\] does not work"):
        run(toy_recipe, tmp_path / "run", few, resume=True)
    server.up_for = None
    # the server's address may change between attempts
    rows = run(toy_recipe, tmp_path / "run", [*few, "verifier.judge.attempts=3"], resume=True)
    assert len(rows) == 6
    assert rows[-1]["train/not_judged/ratio"] == 0
    document = json.loads((tmp_path / "run" / "run.json").read_text())
    assert document["judge"]["judge/asked"] == server.asked, "both attempts"


def test_a_judged_problem_needs_a_judge(toy_recipe: Path, tmp_path: Path, judged: list[str]) -> None:
    plain = [one for one in judged if not one.startswith("verifier.judge")]
    with pytest.raises(RecipeError, match=r"table \[verifier.judge\]") as error:
        run(toy_recipe, tmp_path / "run", plain)
    assert error.value.key == "verifier.judge"
    assert not (tmp_path / "run").exists()
