"""Shared fixtures. All tests compute with one torch thread, so that results do not depend on the number of cores."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell that starts the suite in the background makes it ignore Ctrl-C, and every child process would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no deadline", deadline=None)  # the time of an example depends on the load of the machine
settings.load_profile("no deadline")

SHARED = Path(__file__).resolve().parents[1] / "shared"
sys.path.insert(0, str(Path(__file__).resolve().parent / "tests" / "helpers"))


RAY = re.compile(r"tests/unit/distributed/(test_\w+|learner/test_ranks_in_ray)\.py|tests/unit/commands/test_train\.py")
LONGEST = (
    "ray",
    "tests/e2e/loop/test_slow_runs.py",
    "tests/e2e/acceptance/test_first_hour.py",
    "tests/unit/models/test_compiled.py",
    "tests/unit/training/test_preflight.py",
    "tests/unit/distributed/learner/test_learner_ranks.py",
    "tests/unit/distributed/learner/test_losses_of_ranks.py",
)
"""Slow tests by duration, longest first: they start first, so that none runs on while the other worker is idle."""


@pytest.hookimpl(optionalhook=True)  # the GPU machine has no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, give a worker a whole file, or all tests that start Ray: one cluster at a time."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "ray" if RAY.fullmatch(file) else file

        def _assign_work_unit(self, node: Any) -> None:
            for scope in reversed(LONGEST):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture
def shared_data() -> Path:
    """Return the folder ``../shared/data``; skip tests that need it where it is missing."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders with models whose vocabulary covers small sums: one architecture, different random weights."""
    from magicrl.config.model_schema import TinyModelConfig
    from magicrl.models.loading import save_policy
    from magicrl.models.small_models import make_tiny

    root = tmp_path_factory.mktemp("models")
    config = TinyModelConfig(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_context=96)
    words = ("what", "is", "0", "1", "2", "3", "4", "+", "?")
    for seed in (0, 1):
        save_policy(*make_tiny(config, words, seed), root / str(seed))
    return root / "0", root / "1"


PATIENCE = 600.0
"""Time limit in seconds for waiting on another process. It is a limit, not a measurement."""


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Return a function ``until(condition)`` that waits for a condition on another process."""
    return _until


@contextmanager
def _room_for(size: int) -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def room_for() -> Callable[[int], AbstractContextManager[None]]:
    """Return a context manager in which no file may grow beyond ``size`` bytes, which simulates a full disk.

    Mounting a small disk would need rights. Python ignores the signal, so the write fails with an error.
    """
    return _room_for
