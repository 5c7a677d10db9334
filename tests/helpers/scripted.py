"""A chat server with scripted answers: a judge of problems."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import json_server
from json_server import Asked

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def said(text: str) -> Reply:
    return 200, {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


def verdict(keep: bool, reasons: str = "because") -> Reply:
    return said(json.dumps({"reasons": reasons, "clear_wording": keep, "verdict": "keep" if keep else "drop"}))


class Server:
    """A running server. ``asked`` holds the body of every POST, in the order of arrival."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Reply]) -> Generator[Server]:
    """Serve ``answer(body, number of the request)``."""
    server = Server()

    def reply(asked: Asked) -> json_server.Reply:
        if asked.body is None:
            return json_server.Reply(body={"data": []})
        with server.lock:
            server.asked.append(asked.body)
            server.keys.append(asked.headers.get("authorization"))
            number = len(server.asked)
        status, content, *headers = answer(asked.body, number)
        return json_server.Reply(status=status, body=content, headers=headers[0] if headers else {})

    with json_server.json_server(reply) as server.url:
        yield server
