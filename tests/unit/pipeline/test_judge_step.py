"""The judging step in the frame: votes drop rows, no vote is requested twice, an unreachable judge loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from scripted import Server, said, serving, verdict

from magicrl.pipeline.frame import Watcher


@pytest.fixture
def server() -> Generator[Server]:
    """Serve a judge that keeps texts without the word ``unclear``."""
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


def test_the_shown_bound_counts_all_attempts_and_flawed_problems_and_failed_votes_are_named(
    pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    class Notes(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []

    def answer(body: dict[str, Any], number: int) -> Any:
        refused = "unclear" in json.dumps(body)
        return (400, {"error": {"message": "maximum context length"}}) if refused else verdict(True)

    with serving(answer) as server:
        tree = pipeline(server.url)
        tree["steps"][0]["flawed"] = True
        tree["steps"][0]["settings"]["judges"][0] |= {"unreadable_attempts": 2, "max_tokens": 100, "concurrency": 1}
        run(tree, Notes())
    # 4 votes on 3 problems and on 6 flawed ones, and 2 requests of 100 tokens for each
    assert [note for note in notes if "judge judge: 36 votes to ask for" in note and "and 7200 out" in note]
    assert [note for note in notes if "4 votes failed" in note and "01-judge/work/prepared.key" in note]


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
        with pytest.raises(ValueError, match="the step '01-judge': all 3 rows were dropped: 3 judged flawed"):
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
    with pytest.raises(ValueError, match=r"no answer from http://127\.0\.0\.1:9/v1/models .*start the server"):
        run(pipeline("http://127.0.0.1:9/v1"))
    assert not run.output.exists(), "the judge is looked for before the first step"
    run(pipeline(server.url))
    assert run.reasons("01-judge") == {"r/r-1": "judged flawed"}


@pytest.mark.parametrize("setting", ["serve", "serve_gguf_package", "serve_seconds"])
def test_a_server_to_be_started_is_an_error_that_names_the_remedy(
    setting: str, pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    tree = pipeline("http://127.0.0.1:9/v1")
    tree["steps"][0][setting] = {"serve": ["vllm", "serve"], "serve_gguf_package": "m", "serve_seconds": 3}[setting]
    with pytest.raises(ValueError, match=rf"{setting}: magicrl no longer starts .* by hand, .*base_url = .*delete"):
        run(tree)
