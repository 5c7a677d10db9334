"""Shared by all tests: one torch thread, so that results do not depend on the machine's cores."""

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
# a shell that starts the suite in its background lets it ignore Ctrl-C, and every process of a test would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no deadline", deadline=None)  # how long an example takes says how busy the machine is
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
"""Pieces of ``make test-slow`` that take minutes, the longest first: they begin first, so that none is left over."""


@pytest.hookimpl(optionalhook=True)  # a lent GPU's machine has no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope`` a worker takes a whole file, or all that starts Ray: one cluster at a time."""
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
    """The folder of real data beside the checkout; tests that need it are skipped where it is absent."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders with models that know the words of small sums: one architecture and different random weights."""
    from magicrl.config.schema import TinyModelConfig
    from magicrl.models.loading import save_policy
    from magicrl.models.small_models import make_tiny

    root = tmp_path_factory.mktemp("models")
    config = TinyModelConfig(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_context=96)
    words = ("what", "is", "0", "1", "2", "3", "4", "+", "?")
    for seed in (0, 1):
        save_policy(*make_tiny(config, words, seed), root / str(seed))
    return root / "0", root / "1"


PATIENCE = 600.0
"""Seconds after which what a test waits for is taken never to come: a limit, not a measurement."""


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """``until(condition)`` returns once the condition holds: for what another process does and tells nobody of."""
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
    """Within ``room_for(size)`` no file may grow beyond that many bytes: a full disk, without the right to mount one.

    Python ignores the signal, so that the write fails.
    """
    return _room_for
