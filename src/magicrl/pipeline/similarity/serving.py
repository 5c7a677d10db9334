"""Many requests to an OpenAI-compatible server at once, from synchronous code: answers as they arrive."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from magicrl.rollout.openai_http import ServerError, ServerSettings, ServerUsage, Transport

K = TypeVar("K", bound=Hashable)
Body = dict[str, Any]


class Requests(Generic[K]):
    """Requests to one path of one server.

    Args:
        settings: the server; ``concurrency`` bounds what is in flight.
        path: below the base URL, as ``/chat/completions``.
        per_minute: most requests sent a minute, evenly spaced; None: no limit. Tries again count as the first did not.

    Attributes:
        usage: retries so far; token counts are the caller's to add.
    """

    def __init__(self, settings: ServerSettings, path: str, *, per_minute: float | None = None) -> None:
        self.usage = ServerUsage()
        self._settings = settings
        self._path = path
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._transport = Transport(settings, self.usage)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="magicrl-requests", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    @property
    def transport(self) -> Transport:
        """For what else is asked of the server; it belongs to the event loop of ``call``."""
        return self._transport

    def one(self, body: Body) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            ServerError: it was refused, or could not be had within the attempts.
        """
        return asyncio.run_coroutine_threadsafe(self._send(body), self._loop).result()

    def all(self, bodies: Iterable[tuple[K, Body]]) -> Iterator[tuple[K, dict[str, Any] | ServerError]]:
        """Answers and errors under the keys of their requests, in the order in which they arrive.

        ``bodies`` is read as far as the concurrency wants it, so that it may be long.
        """
        results: queue.SimpleQueue[tuple[K, dict[str, Any] | ServerError]] = queue.SimpleQueue()
        waiting, flying = iter(bodies), 0
        while True:
            while flying < self._settings.concurrency:
                item = next(waiting, None)
                if item is None:
                    break
                flying += 1
                self._loop.call_soon_threadsafe(self._start, *item, results.put)
            if not flying:
                return
            yield results.get()
            flying -= 1

    def close(self) -> None:
        """Cancel what is under way and close the connections."""
        if self._loop.is_closed():
            return
        self._stopped = True
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # in the event loop's thread

    def _start(self, key: K, body: Body, put: Callable[[tuple[K, Any]], None]) -> None:
        task = self._loop.create_task(self._ask(key, body, put))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: K, body: Body, put: Callable[[tuple[K, Any]], None]) -> None:
        try:
            put((key, await self._send(body)))
        except ServerError as error:
            put((key, error))

    async def _send(self, body: Body) -> dict[str, Any]:
        if self._gap:
            now = time.monotonic()
            self._next = max(self._next, now) + self._gap
            await asyncio.sleep(self._next - self._gap - now)
        return await self._transport.send("POST", self._path, body, stopped=lambda: self._stopped)

    async def _finish(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close()
