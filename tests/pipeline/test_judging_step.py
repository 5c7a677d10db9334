"""The judging step in the frame: votes drop rows, nothing is asked for twice, an unreachable judge loses nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from magicrl.pipeline.judging.prompt import CRITERIA


class Server:
    """Keeps what does not hold the word ``unclear``; counts requests; answers nonsense where told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.nonsense = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"object": "list", "data": [{"id": "judge", "object": "model"}]})

            def do_POST(self) -> None:
                outer.asked += 1
                text = self.rfile.read(int(self.headers["content-length"])).decode()
                good = "unclear" not in text
                criteria = dict.fromkeys(CRITERIA, good)
                said = {"reasons": "because", **criteria, "verdict": "keep" if good else "drop"}
                content = "I like trains." if outer.nonsense else json.dumps(said)
                message = {"role": "assistant", "content": content}
                usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
                choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
                self._send({"id": "1", "object": "chat.completion", "choices": choices, "usage": usage})

            def _send(self, document: dict[str, Any]) -> None:
                data = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Generator[Server]:
    one = Server()
    thread = threading.Thread(target=one.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield one
    one.http.shutdown()
    thread.join()
    one.http.server_close()


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
    assert server.asked == 12
    run(pipeline(server.url, keep_votes=1))
    assert server.asked == 12
    report = json.loads((run.output / "01-judge" / "work" / "judging.json").read_text())
    assert (report["problems"], report["kept"], report["threshold"]) == (3, 2, 1)


def test_nonsense_is_nobodys_vote(server: Server, pipeline: Callable[..., dict[str, Any]], run: Any) -> None:
    server.nonsense = True
    run(pipeline(server.url))
    assert len(run.kept("01-judge")) == 3, "nobody judged them: undecided problems stay by default"
    assert run.kept("01-judge")[0].notes["judge"] == [0, 0]


def test_an_unreachable_judge_is_a_clear_error_and_the_run_goes_on_later(
    server: Server, pipeline: Callable[..., dict[str, Any]], run: Any
) -> None:
    with pytest.raises(
        (ValueError, RuntimeError, OSError), match=r"127\.0\.0\.1:9"
    ):  # the command explains these and exits with 1
        run(pipeline("http://127.0.0.1:9/v1"))
    run(pipeline(server.url))
    assert run.reasons("01-judge") == {"r/r-1": "judged flawed"}
