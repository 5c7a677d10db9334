"""v1 tasksets of ``verifiers``, written with the package's interface: one turn, shared tools, and a game."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class Prices(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """Return the price of an item."""
        return {"apple": "3", "pear": "4"}.get(item, "not sold")


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        if "nonsense" in trace.last_reply:
            return float("nan")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_results(self, trace: Any) -> float:
        return float(len(trace.tool_messages))


class WordConfig(vf.TasksetConfig):
    tools: bool = False
    game: bool = False


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> Iterator[WordTask]:
        for item, price in (("apple", "3"), ("pear", "4")):
            prompt = None if self.config.game else f"What does a {item} cost?"
            yield WordTask(WordData(prompt=prompt, system_prompt="Be brief.", answer=price), self.config.task)

    @classmethod
    def toolsets(cls, config: WordConfig) -> list[Any]:
        return [Prices(vf.SharedToolsetConfig())] if config.tools else []


class WordEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class WordEnv(vf.Env[WordEnvConfig]):
    """One turn; for a task without a prompt, guesses until the price is right."""

    async def run(self, task: Any, agents: Any) -> None:
        if task.data.prompt is not None:
            await agents.player.run(task)
            return
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess the price.")
            while not segment.terminated and segment.last_reply != task.data.answer:
                if segment.last_reply == "raise":
                    raise OSError("the shop burnt down")
                if segment.last_reply == "hang":
                    await asyncio.sleep(3600)
                more = segment.last_reply < task.data.answer
                segment = await interaction.turn("More." if more else "Less.")


__all__ = ["WordEnv", "WordTaskset"]

if __name__ == "__main__":
    Prices.run()
