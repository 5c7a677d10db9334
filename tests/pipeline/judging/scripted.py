"""A chat server whose answers a test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def said(text: str) -> Reply:
    return 200, {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


def verdict(keep: bool, reasons: str = "because") -> Reply:
    return said(json.dumps({"reasons": reasons, "clear_wording": keep, "verdict": "keep" if keep else "drop"}))


class Server:
    """``asked`` holds every body, in the order of arrival."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Reply]) -> Generator[Server]:
    """``answer(body, number of the request)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with server.lock:
                server.asked.append(body)
                server.keys.append(self.headers.get("authorization"))
                number = len(server.asked)
            status, content, *headers = answer(body, number)
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            try:
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **(headers[0] if headers else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
