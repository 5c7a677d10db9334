"""A server with a tiny model, in a thread, and a client of it. Without the extra `serve` these tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker_server import Served

from magicrl.models.small_models import make_miniature

try:
    import tinker
except ImportError:
    collect_ignore = ["test_trainer.py", "test_server.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model that reads bytes."""
    sizes = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return str(make_miniature(sizes, tmp_path_factory.mktemp("models") / "tiny", max_context=128))


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this a client whose server was killed warns in the log of later tests that telemetry was not sent."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
def served(model: str, tmp_path: Path) -> Served:
    return Served(model, tmp_path / "checkpoints")


@pytest.fixture
def address(served: Served) -> Iterator[str]:
    with served.running() as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=address, api_key="tml-test") as client:
        yield client


@pytest.fixture
def another(model: str, tmp_path: Path) -> Callable[..., Served]:
    """Make a further server with the same checkpoints."""
    return lambda **options: Served(model, tmp_path / "checkpoints", **options)
