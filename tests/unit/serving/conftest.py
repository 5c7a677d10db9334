"""A server with a tiny model, in a thread, and a client of it. Without the extra `serve` these tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tinker_server import Served
from transformers import AutoModelForCausalLM, LlamaConfig

from magicrl.models.loading import save_policy
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.small_models import make_byte_tokenizer

try:
    import tinker
except ImportError:
    collect_ignore = ["test_trainer.py", "test_server.py", "test_messages.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model that reads bytes."""
    register_attention()
    tokenizer = make_byte_tokenizer(128)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return str(save_policy(made.eval(), tokenizer, tmp_path_factory.mktemp("models") / "tiny"))


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
