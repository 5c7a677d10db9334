"""Shapes of dense decoder models: what parameters, cache and arithmetic need, read from a Hugging Face config."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from magicrl.config.loader import shipped_table
from magicrl.config.schema import TinyModelConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # architectures whose parameters are counted exactly
TINY_VOCABULARY = 32  # symbols of a generated task, about


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated feed-forward part."""

    name: str  # for people
    hidden: int  # width d
    intermediate: int  # width of the feed-forward part
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key/value heads
    head_dim: int  # width of a head
    vocabulary: int  # rows of the embedding
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False  # query, key and value projections have a bias (Qwen2)
    qk_norm: bool = False  # a norm over each query and key head (Qwen3)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)
        biases = (q + 2 * kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, embeddings included, a tied head once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but the embedding's look-up, the head included."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int, modules: Collection[str]) -> int:
        """Parameters of LoRA adapters of ``rank`` on these linear layers: ``rank * (inputs + outputs)`` each."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
        ends |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate)
        return self.layers * rank * sum(self.hidden + ends.get(name, 0) for name in modules)

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Bytes of keys and values that one token of context takes."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def attention_flops_per_token(self, context: float) -> float:
        """FLOPs of scores and weighted sums of one token that sees ``context`` tokens, forward."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Raises:
        ValueError: an architecture or a key that the planner does not know (mixtures of experts among them).
    """
    family = str(config.get("model_type", ""))
    if family not in FAMILIES or "num_experts" in config or "num_local_experts" in config:
        raise ValueError(
            f"{name}: the planner knows dense decoders of the types {', '.join(FAMILIES)}, not {family!r}; "
            "plan with a dense model of similar size"
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelShape(
            name=name,
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
            qk_norm=family == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{name}: its config has no {error.args[0]!r}") from None


def shape_of_tiny(config: TinyModelConfig) -> ModelShape:
    """The shape of a tiny reasoner made by an SFT recipe; its vocabulary, a few dozen symbols, is the task's."""
    return ModelShape(
        name="tiny",
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        head_dim=config.hidden_size // config.heads,
        vocabulary=TINY_VOCABULARY,
        tied=True,
    )


def known_models() -> dict[str, ModelShape]:
    """The models that the package knows by name."""
    tables = shipped_table("planning/models.toml", dict[str, dict[str, Any]])
    return {name: shape_from_config(table, name) for name, table in tables.items()}


def load_shape(name: str) -> ModelShape:
    """A model by folder, by ``config.json``, or by name; of a hub name (``owner/name``) the last part counts.

    ``SmolLM2-135M-Instruct`` is ``SmolLM2-135M``: a suffix after a known name does not change the shape.

    Raises:
        ValueError: neither a readable config nor a known name; the text says what to pass.
    """
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        try:
            loaded = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{config}: not a model's config: {error}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{config}: not a model's config: must be a JSON object")
        return shape_from_config(cast("dict[str, Any]", loaded), path.name if path.is_dir() else path.parent.name)
    short = name.rstrip("/").rsplit("/", 1)[-1]
    known = known_models()
    found = [key for key in known if short == key or short.startswith(f"{key}-")]
    if not found:
        near = difflib.get_close_matches(short, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"no model folder and no known model {name!r}; {hint}; or --model FOLDER with a config.json")
    return known[max(found, key=len)]
