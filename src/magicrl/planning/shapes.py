"""Shapes of decoder models, dense or mixtures of experts, from a Hugging Face config: parameters, cache, arithmetic."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from magicrl.config.loader import shipped_table
from magicrl.config.model_schema import TinyModelConfig
from magicrl_verifiers.references import did_you_mean

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # architectures whose parameters are counted exactly
MIXTURES = ("mixtral", "qwen3_moe")  # the same, every layer with experts
COLUMNS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_experts_per_tok",
)  # fmt: skip
"""Keys of a config.json in a line of ``models.toml``; the last two only for mixtures."""
TINY_VOCABULARY = 32  # approximate number of symbols of a generated task


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated feed-forward part, or several (experts) per layer."""

    name: str  # for people
    hidden: int  # width d
    intermediate: int  # width of the feed-forward part, or of one expert
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key/value heads
    head_dim: int  # width of a head
    vocabulary: int  # rows of the embedding
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False  # query, key and value projections have a bias (Qwen2)
    qk_norm: bool = False  # a norm over each query and key head (Qwen3)
    experts: int = 0  # experts per layer, with a router; 0: one feed-forward part
    chosen: int = 1  # experts per token
    context: int | None = None  # most tokens of prompt and response together; None: unknown

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)
        biases = (q + 2 * kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        router = self.experts * self.hidden
        return attention + biases + max(1, self.experts) * self.expert_parameters + router + 2 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of one feed-forward part."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters with embeddings; a tied head counts once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def multiplied_parameters(self) -> int:
        """Parameters that a token is multiplied with: all but the embedding and the experts of other tokens."""
        return self.read_parameters - self.layers * max(0, self.experts - self.chosen) * self.expert_parameters

    @property
    def read_parameters(self) -> int:
        """Parameters that a decode step reads: all but the embedding. A batch uses every expert."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def adapter_parameters(self, rank: int, modules: Collection[str]) -> int:
        """Return the parameters of LoRA adapters on these linear layers: ``rank * (inputs + outputs)`` each.

        Experts are one tensor per layer instead of linear layers, and have no adapters.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q}
        if not self.experts:
            ends |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate)
        return self.layers * rank * sum(self.hidden + ends[name] for name in modules if name in ends)

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        """Return the bytes of keys and values of one token of context."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    def attention_flops_per_token(self, context: float) -> float:
        """Return the forward FLOPs of scores and weighted sums of one token that attends to ``context`` tokens."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a Hugging Face ``config.json``.

    Raises:
        ValueError: an unknown architecture, a missing key, or a mixture with some dense layers.
    """
    family = str(config.get("model_type", ""))
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if family not in FAMILIES + MIXTURES or (experts > 0) != (family in MIXTURES):
        raise ValueError(
            f"{name}: the planner knows the types {', '.join(FAMILIES + MIXTURES)}, not {family!r}; plan with a known "
            "model of similar size"
        )
    if int(config.get("decoder_sparse_step") or 1) > 1 or config.get("mlp_only_layers"):
        raise ValueError(f"{name}: the planner knows mixtures with experts in every layer; this one has dense layers")
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "head_dim")
    for key in sizes:
        if int(config.get(key) or 1) < 1:
            raise ValueError(f"{name}: its config has {key} = {config[key]}; correct it, it must be positive")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or (hidden % heads and not config.get("head_dim")):
            raise ValueError(
                f"{name}: its config has hidden_size {hidden}, {heads} attention heads and {kv_heads} key/value heads, "
                "which do not divide; correct it"
            )
        return ModelShape(
            name=name,
            hidden=hidden,
            intermediate=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", family == "qwen2")),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=experts,
            chosen=int(config["num_experts_per_tok"]) if experts else 1,
            context=config.get("max_position_embeddings"),
        )
    except KeyError as error:
        raise ValueError(f"{name}: its config has no {error.args[0]!r}") from None


def shape_of_tiny(config: TinyModelConfig) -> ModelShape:
    """Return the shape of a tiny reasoner made by an SFT recipe. Its vocabulary has a few dozen symbols."""
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
        context=config.max_context,
    )


def known_models() -> dict[str, ModelShape]:
    """Return the models that the package knows, by name."""
    rows = shipped_table("planning/models.toml", dict[str, list[Any]])
    return {name: shape_from_config(dict(zip(COLUMNS, row, strict=False)), name) for name, row in rows.items()}


def load_shape(name: str) -> ModelShape:
    """Load a model's shape by folder, ``config.json`` or name.

    Of a hub name (``owner/name``) the last part counts. A suffix after a known name does not change the shape:
    ``SmolLM2-135M-Instruct`` is ``SmolLM2-135M``.

    Raises:
        ValueError: neither a readable config nor a known name. The text says what to pass.
    """
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not config.is_file():
        raise ValueError(f"{path}: this folder has no config.json; name a model's folder")
    if config.suffix == ".json" and config.is_file():
        try:
            loaded = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{config}: not a model's config: {error}") from None
        if not isinstance(loaded, dict):
            raise ValueError(f"{config}: not a model's config: must be a JSON object")
        return shape_from_config(cast("dict[str, Any]", loaded), config.resolve().parent.name)
    short = name.rstrip("/").rsplit("/", 1)[-1]
    known = known_models()
    found = [key for key in known if short == key or short.startswith(f"{key}-")]
    if not found:
        raise ValueError(
            f"no model folder and no known model {name!r}{did_you_mean(short, known)} Known: {', '.join(known)}; "
            "or --model FOLDER with a config.json"
        )
    return known[max(found, key=len)]
