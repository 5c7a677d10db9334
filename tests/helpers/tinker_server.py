"""The server of ``magicrl serve`` in a thread of a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Served:
    """A running server: its address, its messages to its user, and its application's object."""

    def __init__(self, model: str, checkpoints: Path, **options: Any) -> None:
        from magicrl.serving.server import TinkerServer

        self.messages: list[str] = []
        self.server = TinkerServer(
            model, name="org/tiny", checkpoints=checkpoints, report=self.messages.append, **options
        )

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve at a free port; the address."""
        from aiohttp import web

        ready, stop = threading.Event(), asyncio.Event()
        found: dict[str, Any] = {}

        async def serve() -> None:
            runner = web.AppRunner(self.server.app())
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            found["port"], found["loop"] = runner.addresses[0][1], asyncio.get_running_loop()
            ready.set()
            await stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            yield f"http://127.0.0.1:{found['port']}"
        finally:
            found["loop"].call_soon_threadsafe(stop.set)
            thread.join(30)
