"""The judging step in the frame: votes drop rows, nothing is asked for twice, an unreachable judge loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from json_server import free_port
from scripted import Server, said, serving, verdict

from magicrl.pipeline import judge_step
from magicrl.pipeline.frame import Context, Watcher
from magicrl.pipeline.judge_step import served
from magicrl.pipeline.pipeline_schema import JudgeStep


@pytest.fixture
def server() -> Generator[Server]:
    """Keeps what does not hold the word ``unclear``."""
    with serving(lambda body, number: verdict("unclear" not in json.dumps(body))) as one:
        yield one


@pytest.fixture
def pipeline(write_rows: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    rows = [{"problem": f"What is {place} + 1{', unclear' * (place == 1)}?", "answer": "5"} for place in range(3)]
    path = write_rows("r.jsonl", rows)

    def made(url: str, **settings: Any) -> dict[str, Any]:
        judge = {"base_url": url, "model": "judge", "votes": 4, "attempts": 1, "unreadable_attempts": 1}
        step = {"use": "judge", "flawed": False, "settings": {"judges": [judge], **settings}}
        return {"sources": [{"path": str(path)}], "steps": [step]}

    return made


def test_votes_drop_rows_and_are_not_asked_for_twice(
    server: Server, pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    run(pipeline(server.url))
    assert run.reasons("01-judge") == {"r/r-1": "judged flawed"}
    assert [entry.notes["judge"] for entry in run.kept("01-judge")] == [[4, 4], [4, 4]]
    assert "0 of 4 readable votes" in run.dropped("01-judge")[0]["detail"]
    assert len(server.asked) == 12
    run(pipeline(server.url, keep_votes=1))
    assert len(server.asked) == 12
    report = json.loads((run.output / "01-judge" / "work" / "judging.json").read_text())
    assert (report["problems"], report["kept"], report["threshold"]) == (3, 2, 1)


def test_another_temperature_asks_for_other_votes(
    server: Server, pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    tree = pipeline(server.url)
    run(tree)
    tree["steps"][0]["settings"]["judges"][0]["temperature"] = 0.5
    run(tree)
    assert len(server.asked) == 24


def test_half_of_the_votes_decide_and_the_reason_is_that_of_a_vote_against(
    pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    tree = pipeline("")
    tree["steps"][0]["settings"]["judges"][0] |= {"votes": 2, "concurrency": 1}
    answers = {0: verdict(False, "No data."), 1: said("I like trains.")}
    with serving(lambda body, number: answers[number % 2]) as server:
        tree["steps"][0]["settings"]["judges"][0]["base_url"] = server.url
        run(tree)
    assert [row["detail"] for row in run.dropped("01-judge")] == ["0 of 1 readable votes for it. No data."] * 3


def test_nonsense_is_nobodys_vote(pipeline: Callable[..., dict[str, Any]], run: Any) -> None:
    with serving(lambda body, number: said("I like trains.")) as server:
        run(pipeline(server.url))
    assert len(run.kept("01-judge")) == 3, "nobody judged them: undecided problems stay by default"
    assert run.kept("01-judge")[0].notes["judge"] == [0, 0]


def test_an_unreachable_judge_is_a_clear_error_and_the_run_goes_on_later(
    server: Server, pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9"):
        run(pipeline("http://127.0.0.1:9/v1"))
    run(pipeline(server.url))
    assert run.reasons("01-judge") == {"r/r-1": "judged flawed"}


SERVER = """
import http.server, subprocess, sys
left = "while [ ! -e go ]; do sleep 0.02; done; touch left"
print(subprocess.Popen(["sh", "-c", left], cwd=sys.argv[2]).pid, flush=True)
if sys.argv[1] == "0":
    print("no such model", flush=True)
    raise SystemExit(3)
class Guarded(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(401)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Guarded).serve_forever()
"""
"""A judge's server that wants a key and starts a process, which writes a file if it is still there after the step."""


def test_a_judges_server_runs_for_the_block_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[[Callable[[], bool]], None]
) -> None:
    monkeypatch.setattr(judge_step, "_LOOK_SECONDS", 0.02)
    (tmp_path / "server.py").write_text(SERVER)
    context = Context(output=tmp_path, workers=1, max_field_characters=1000, watcher=Watcher())

    def step(*words: str) -> JudgeStep:
        judge = {"base_url": f"http://127.0.0.1:{port}/v1", "model": "m"}
        settings = {"settings": {"judges": [judge]}, "serve": ["{python}", *words], "serve_seconds": 60}
        return JudgeStep.model_validate(settings)

    def check_that_nothing_is_left() -> None:
        child = Path("/proc") / log.read_text().split()[0] / "stat"
        (tmp_path / "go").touch()
        # it is gone, or has ended and nobody has asked for its status
        until(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")
        (tmp_path / "go").unlink()
        assert not (tmp_path / "left").exists()

    server, port, log = str(tmp_path / "server.py"), free_port(), tmp_path / "server.log"
    with served(step(server, str(port), str(tmp_path)), context, log):
        assert (Path("/proc") / log.read_text().split()[0]).exists()
    check_that_nothing_is_left()
    with (
        pytest.raises(ValueError, match=r"ended with status 3; its output is in .*server\.log"),
        served(step(server, "0", str(tmp_path)), context, log),
    ):
        pytest.fail("it never answered")
    assert "no such model" in log.read_text()
    check_that_nothing_is_left()
