"""``magicrl selfcheck``: lines, exit status, JSON and page for any results of the checks."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magicrl.commands import selfcheck
from magicrl.commands.main import app
from magicrl.config.errors import RecipeError
from magicrl.selfcheck import agreement, judging, resume
from magicrl.selfcheck.page import page_of
from magicrl.selfcheck.setup import CannotRun, Proof

GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C")
HOLDS = Proof(status="passed", figure="0 of 3 differ", against="a loop", details={"cases": 3})


def raises(error: Exception) -> Callable[[Any], Proof]:
    def check(setup: Any) -> Proof:
        raise error

    return check


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "selfcheck.json"
    status = app(["selfcheck", *words, "--output", str(output)], result_action="return_value")
    return status, json.loads(output.read_text())


def test_lines_json_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement, "check_agreement", lambda setup: HOLDS)
    monkeypatch.setattr(resume, "check_resume", raises(CannotRun("no processes here")))
    page = tmp_path / "proof.md"
    words = ("--only", "agreement", "--only", "resume", "--seed", "3", "--page", str(page))
    status, document = run(tmp_path, *words)
    assert status == 0, "what did not run has not failed"
    told = capsys.readouterr().out
    assert "passed  sampler and learner agree: 0 of 3 differ" in told
    assert "not run a killed run continues bit for bit: CannotRun: no processes here" in told
    assert "1 passed, 0 failed, 1 not run" in told
    first, second = document["checks"]
    assert first["command"] == "magicrl selfcheck --only agreement --seed 3"
    assert first["details"] == {"cases": 3}
    assert second["status"] == "not run"
    assert {"torch", "transformers"} <= document["environment"]["versions"].keys()
    text = page.read_text()
    assert text.splitlines()[2].startswith("1 of 2 promises hold")
    assert "This page is of a run that took 1 minutes" in text
    quick = page_of({**document, "quick": True})
    assert "This page is of a run with `--quick`, which has fewer cases and runs, that took" in quick
    assert "| a killed run continues bit for bit | not run |" in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize(
    ("check", "status", "code"),
    [
        (lambda setup: Proof(status="failed", figure="1 of 3 differs", against="a loop"), "failed", 1),
        (raises(RuntimeError("it broke")), "failed", 1),
        (raises(ModuleNotFoundError("no module", name="magicrl.selfcheck.nothing")), "failed", 1),
        (raises(ModuleNotFoundError("No module named 'peft'", name="peft")), "not run", 0),
    ],
)
def test_what_fails_is_shown_as_failed(
    check: Callable[[Any], Proof], status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "check_agreement", check)
    found, document = run(tmp_path, "--only", "agreement")
    assert (found, document["checks"][0]["status"]) == (code, status)


def test_a_peer_never_fails_a_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "check_agreement", lambda setup: HOLDS)
    monkeypatch.setattr(agreement, "of_torch", raises(RuntimeError("it broke")), raising=False)
    peers = (("torch", "agreement:of_torch"), ("no-such-package", "agreement:of_nobody"))
    monkeypatch.setitem(selfcheck.PEERS, "agreement", peers)
    found, document = run(tmp_path, "--only", "agreement", "--peers")
    assert found == 0
    assert [row["status"] for row in document["checks"]] == ["passed", "not run", "not run"]
    _, broken, missing = document["checks"]
    assert broken["peer"].startswith("torch 2.")
    assert broken["figure"] == "RuntimeError: it broke"
    assert missing["figure"] == "no-such-package is not installed"


def test_livecodebench_needs_a_clone_and_is_named_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "check_judging", lambda setup: HOLDS)
    monkeypatch.setattr(judging, "of_clone", lambda setup: HOLDS, raising=False)
    monkeypatch.setitem(selfcheck.PEERS, "judging", ((selfcheck.LIVECODEBENCH, "livecodebench_peer:judging"),))
    _, document = run(tmp_path, "--only", "judging", "--peers")
    assert document["checks"][1]["status"] == "not run"
    assert "give --livecodebench FOLDER" in document["checks"][1]["figure"]
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", clone], check=True)
    subprocess.run([*GIT, clone, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setitem(selfcheck.PEERS, "judging", ((selfcheck.LIVECODEBENCH, "judging:of_clone"),))
    _, document = run(tmp_path, "--only", "judging", "--peers", "--livecodebench", str(clone))
    assert re.fullmatch(r"LiveCodeBench [0-9a-f]{7,} of 20\d\d-\d\d-\d\d", document["checks"][1]["peer"])


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(RecipeError, match="--only los: no such check; known: loss, agreement"):
        app(["selfcheck", "--only", "los"], result_action="return_value")
