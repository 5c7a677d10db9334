"""A run's report on the loopback: made anew when the run has written, re-read by the browser while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.run_page import report_page

HOST = "127.0.0.1"
SECONDS = 10
"""Between two looks of the browser while the run goes on."""
_WATCHED = ("run.json", "metrics.jsonl", "events.jsonl", "timeline.jsonl", "evaluations", "rollouts")


class LiveReport:
    """The page of a run folder, as it is now.

    Raises:
        RunFolderError: no run folder, or a corrupt one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._written: object = None
        self.running = True
        self.page = ""
        self.look()

    def look(self) -> str:
        """The page, made anew where a file of the run has changed."""
        with self._lock:
            paths = [path for name in _WATCHED if (path := self._folder / name).exists()]
            written = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
            if written != self._written:
                run = read_run(self._folder)
                self.page, self.running, self._written = report_page(run), run.status == "running", written
            return self.page


def report_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the run's page at ``/``, which the caller runs and closes; nobody but this machine reaches it.

    Args:
        folder: the run folder.
        port: 0 for a free one.

    Raises:
        RunFolderError: no run folder, or a corrupt one.
        ValueError: the port is taken.
    """
    report = LiveReport(folder)
    try:
        return ThreadingHTTPServer((HOST, port), _handler(report))
    except OSError as error:
        raise ValueError(
            f"port {port} of {HOST} cannot be opened: {error.strerror}; --port 0 takes a free one"
        ) from None


def _handler(report: LiveReport) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a foreign page may send a browser here under a name of its own (DNS rebinding)
            if (self.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._page()

        def _page(self) -> None:
            try:
                page = report.look().encode("utf-8", "replace")
            except RunFolderError:  # half written at this moment: what was there a moment ago
                page = report.page.encode("utf-8", "replace")
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            if report.running:
                self.send_header("Refresh", str(SECONDS))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no news."""

    return Handler
