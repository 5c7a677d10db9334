"""Environments of OpenEnv with the package's own interface: a number to guess, and a shop with tools.

python openenv_servers.py numbers PORT
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    guess: int


class Said(Observation):
    text: str


class Numbers(Environment):
    """A number from 1 to 9, five guesses, a tenth for each wrong one that is legal and 1 for the right one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        self._number = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id)
        return Said(text="A number from 1 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Said:
        self._state.step_count += 1
        if action.guess == 98:
            time.sleep(30)
        if action.guess == 99:
            raise OSError("the number is lost")
        if action.guess == self._number:
            return Said(text="yes", reward=1.0, done=True)
        text = "more" if action.guess < self._number else "less"
        return Said(text=text, reward=0.1, done=self._state.step_count == 5)

    @property
    def state(self) -> State:
        return self._state


class Shop(MCPEnvironment):
    """The right price is paid for; the tools are ``price`` and ``pay``."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self._paid = 0

        @server.tool
        def price(item: str) -> str:
            """Return the price of an item."""
            return {"apple": "3"}.get(item, "not sold")

        @server.tool
        def pay(amount: int) -> str:
            """Pay so much."""
            self._paid = amount
            return "thanks"

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
        self._paid = 0
        return Said(text="Buy an apple.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Said:
        return Said(text="no such action")

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._judged(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _judged(self, observation: Observation) -> Observation:
        if self._paid:
            observation.done, observation.reward = True, float(self._paid == 3)
        return observation

    @property
    def state(self) -> State:
        return self._state


APPS = {
    "numbers": (Numbers, Guess, Said, 16),
    "narrow": (Numbers, Guess, Said, 1),
    "shop": (Shop, CallToolAction, CallToolObservation, 16),
}

if __name__ == "__main__":
    *parts, most = APPS[sys.argv[1]]
    uvicorn.run(
        create_app(*parts, max_concurrent_envs=most), host="127.0.0.1", port=int(sys.argv[2]), log_level="error"
    )
