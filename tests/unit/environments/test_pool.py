"""Episodes in worker processes: they stay with their worker, failures are not judged and reported once."""

from __future__ import annotations

import logging
import os
import re
import signal
import textwrap
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from builders import problem

from magicrl.config.schema import EnvironmentConfig
from magicrl.environments.base import Step, environment_spec
from magicrl.environments.pool import HANGS, LATER_HANGS, EnvironmentPool
from magicrl.records import Outcome, Verdict
from magicrl_verifiers.workers import WorkerRefusal

CODE = """
    import os, random, subprocess, time
    import numpy
    from magicrl.environments.base import Step

    class Counter:
        time_limit = 0.5
        right_from = 0.5

        def reset(self, problem):
            self.start, self.turns = len(problem.prompt), []

        def step(self, text):
            self.turns.append(text)
            total = self.start + sum(map(len, self.turns))
            if text == "hang":
                while True: pass
            if text == "crash":
                os.abort()
            if text == "raise":
                raise RuntimeError("no such move")
            if text == "exit":
                raise SystemExit(0)
            if text == "text":
                return "an observation"
            if text == "nan":
                return Step(done=True, reward=float("nan"))
            if text == "reward":
                return Step(reward=1.0)
            if text == "long":
                return Step(observation="x" * 10**9)
            if text == "half":
                return Step(observation="\\udce4.txt")
            if text == "read":
                return Step(observation=subprocess.run(["cat"], stdout=subprocess.PIPE).stdout.decode() + "end")
            if text == "number":
                return Step(observation=7)
            if text == "numpy":
                return Step(done=numpy.bool_(True), reward=1.0)
            if text == "metric":
                return Step(done=True, reward=1.0, metrics={"distance": float("inf")})
            if text == "end":
                return Step(done=True, reward=total / 10, metrics={"turns": len(self.turns)})
            return Step(observation=f"{total} {os.getpid() if text == 'pid' else ''}")

    class Unsure(Counter):
        right_from = float("nan")

    class Wordy(Counter):
        time_limit = "5"

    class Awaited(Counter):
        async def step(self, text): ...

    class Living:
        number = 0

        def __init__(self):
            Living.number += 1

        def __del__(self):
            Living.number -= 1
            open(__file__ + ".ended", "w").close()

        def reset(self, problem): pass

        def step(self, text):
            if text == "raise":
                raise RuntimeError("no such move")
            return Step(observation=f"{Living.number} {os.getpid()}")

    class Needs:
        def __init__(self, size): pass
        reset = step = __init__

    class Half:
        def reset(self, problem): pass
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "counters.py"
    path.write_text(textwrap.dedent(CODE))
    return path


@pytest.fixture
def pool() -> Generator[EnvironmentPool]:
    with EnvironmentPool(EnvironmentConfig(workers=1, memory_limit_mb=512)) as made:
        yield made


def test_what_fails_is_not_judged_and_the_others_go_on(
    pool: EnvironmentPool, code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{code}:Counter"
    good, other = (pool.begin(problem(f"g{n}", "prompt" * n, environment=name)) for n in (1, 2))
    assert pool.steps([(good, "abc"), (other, "a")]) == [Step(observation="9 "), Step(observation="13 ")]
    bad = {
        "hang": r"timeout: a call used up 0\.5 s of CPU time",
        "crash": "crash: a call ended its worker",
        "raise": r"RuntimeError: no such move \(counters\.py, line \d+\)",
        "exit": r"SystemExit: 0 \(counters\.py, line \d+\)",
        "text": r"TypeError: step must return a magicrl\.environments\.base\.Step, got str",
        "nan": "ValueError: reward must be finite, got nan",
        "reward": "ValueError: a reward goes with the last step",
        "long": "(ValueError: an observation of 1000000000 characters; give at most 65536|MemoryError)",
        "half": "ValueError: an observation that holds half a character",
        "number": "TypeError: observation of a step must be str, got int",
        "metric": "ValueError: metric distance must be finite, got inf",
    }
    for text, words in bad.items():
        plays = [pool.begin(problem("bad", environment=name)) for _ in range(2 if text == "raise" else 1)]
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            found = pool.steps([(plays[0], text), (good, "b"), *((play, text) for play in plays[1:])])
        for verdict in (found[0], *found[2:]):
            assert isinstance(verdict, Verdict)
            assert (verdict.outcome, verdict.status) == (Outcome.NOT_JUDGED, "environment_failed")
        # a lost worker has been replaced, and the new one replayed this episode's turns
        assert isinstance(found[1], Step), found[1]
        told = [record.getMessage() for record in caplog.records]
        kinds = [line for line in told if "(not judged; further ones are only counted)" in line]
        assert len(kinds) <= 1

        assert re.search(words, str(found[0].reason)), (text, found[0])  # type: ignore[union-attr]
    last = pool.steps([(other, "end"), (good, "end")])
    assert last == [
        Step(done=True, reward=1.6, metrics={"turns": 2.0}),
        Step(done=True, reward=(6 + 3 + len(bad) + 3) / 10, metrics={"turns": 2.0 + len(bad)}),
    ]


def test_a_program_that_reads_standard_input_finds_its_end(pool: EnvironmentPool, code: Path) -> None:
    play = pool.begin(problem("p", environment=f"{code}:Counter"))
    assert pool.steps([(play, "read")]) == [Step(observation="end")]


def test_an_environment_that_hangs_in_every_episode_stops_the_run(pool: EnvironmentPool, code: Path) -> None:
    name = f"{code}:Counter"
    plays = [pool.begin(problem(f"p{n}", environment=name)) for n in range(LATER_HANGS + 6)]
    for play in plays[: HANGS - 1]:
        (found,) = pool.steps([(play, "hang")])
        assert isinstance(found, Verdict)
    pool.steps([(plays[-1], "end")])  # from here on, responses may be to blame
    for play in plays[: LATER_HANGS - 1]:
        (found,) = pool.steps([(play, "hang")])
        assert isinstance(found, Verdict)
    words = rf"environment '.*:Counter': {LATER_HANGS} episodes in a row .* problem 'p7' \(a call used up 0\.5 s of CPU"
    with pytest.raises(RuntimeError, match=words):
        pool.steps([(plays[7], "hang")])


def test_an_episode_that_ended_before_its_first_turn_forgets_no_hang(pool: EnvironmentPool, code: Path) -> None:
    plays = [pool.begin(problem("p", environment=f"{code}:Counter")) for _ in range(2 * HANGS)]
    for hanging, truncated in zip(plays[1:HANGS], plays[HANGS + 1 :], strict=True):
        pool.steps([(hanging, "hang")])
        pool.end(truncated)
    with pytest.raises(RuntimeError, match=f"{HANGS} episodes in a row"):
        pool.steps([(plays[0], "hang")])


@pytest.mark.parametrize("way", ["end", "raise"])
def test_hangs_in_a_row_begin_again_after_an_episode_that_ended(pool: EnvironmentPool, code: Path, way: str) -> None:
    hanging, other = (pool.begin(problem("p", environment=f"{code}:Counter")) for _ in range(2))
    for n in range(HANGS + 1):
        pool.steps([(hanging, "hang"), (other, way if n == 1 else "a")])


def test_the_first_hangs_are_enough_to_stop_a_run(pool: EnvironmentPool, code: Path) -> None:
    plays = [pool.begin(problem("p", environment=f"{code}:Counter")) for _ in range(HANGS + 3)]
    with pytest.raises(RuntimeError, match=rf"{HANGS} episodes .* time_limit of its class from 0\.5 CPU seconds"):
        pool.steps([(play, "hang") for play in plays])


def test_a_worker_forgets_episodes_that_are_over(pool: EnvironmentPool, code: Path) -> None:
    stopped, raising, other = (pool.begin(problem("p", environment=f"{code}:Living")) for _ in range(3))
    (found,) = pool.steps([(stopped, "a")])
    assert isinstance(found, Step)
    alone = found.observation
    pool.end(stopped)
    ended = Path(f"{code}.ended")
    end = time.monotonic() + 10
    while not ended.exists():  # without another turn: it may hold a session of a server
        assert time.monotonic() < end
        time.sleep(0.01)
    pool.steps([(raising, "raise")])
    assert pool.steps([(other, "a")]) == [Step(observation=alone)], "one lives, in the same worker"


def test_episodes_are_spread_over_the_workers(code: Path) -> None:
    with EnvironmentPool(EnvironmentConfig(workers=2, memory_limit_mb=512)) as pool:
        plays = [pool.begin(problem("p", environment=f"{code}:Living")) for _ in range(2)]
        pool.steps([(play, "a") for play in plays])
        assert len(pool.worker_pids) == 2


def test_which_reward_is_right_is_the_environments_own(code: Path) -> None:
    spec = environment_spec(f"{code}:Counter")
    verdicts = [spec.verdict(Step(done=True, reward=reward)) for reward in (0.4, 0.5)]
    assert [(one.correct, one.score) for one in verdicts if one is not None] == [(False, 0.4), (True, 0.5)]
    assert spec.verdict(Step(done=True)) is None, "without a reward the problem's verifier judges"


def test_the_end_of_an_episode_may_be_numpys(pool: EnvironmentPool, code: Path) -> None:
    play = pool.begin(problem("p", environment=f"{code}:Counter"))
    assert pool.steps([(play, "numpy")]) == [Step(done=True, reward=1.0)]


def test_a_worker_that_is_killed_is_replaced(pool: EnvironmentPool, code: Path) -> None:
    play = pool.begin(problem("p", "12", environment=f"{code}:Counter"))
    pool.steps([(play, "a")])
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    assert pool.steps([(play, "a")]) == [Step(observation="4 ")]


def test_what_is_not_repeatable_is_not_judged(pool: EnvironmentPool, code: Path) -> None:
    play = pool.begin(problem("p", environment=f"{code}:Counter"))
    pool.steps([(play, "pid")])
    os.kill(pool.worker_pids[0], signal.SIGKILL)
    (found,) = pool.steps([(play, "a")])
    assert isinstance(found, Verdict)
    assert "not repeatable" in found.reason


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Needs", "is called without arguments for every episode: missing a required argument: 'size'"),
        ("Half", "has no step"),
        ("os", "is no class or function but module"),
        ("Count", "did you mean 'Counter'"),
        ("Unsure", "right_from must be a number, got nan"),
        ("Wordy", "time_limit must be a number, got '5'"),
        ("Awaited", "step must not be async"),
    ],
)
def test_what_is_no_environment(code: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        environment_spec(f"{code}:{name}")


def test_what_cannot_be_made_in_a_worker_is_told(
    pool: EnvironmentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here_only.py"
    path.write_text("class Game:\n    def reset(self, problem): ...\n    def step(self, text): ...\n")
    play = pool.begin(problem("p", environment=f"{path}:Game"))
    path.unlink()
    with pytest.raises(WorkerRefusal, match="there is no file"):
        pool.steps([(play, "a")])
