"""The model of the slow loop: a Llama decoder in float64, one sequence at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Weights = dict[str, Tensor]


class Policy:
    """A Llama decoder with tied embeddings, written out: one sequence, no cache, no packing."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = (config.get("rope_parameters") or config)["rope_theta"]
        self.start: Weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
        self.symbols: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.words = {token: word for word, token in self.symbols.items()}
        self.end, self.pad = self.symbols["<end>"], self.symbols["<pad>"]

    def encode(self, text: str) -> list[int]:
        return [self.symbols[word] for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens if self.words[token] not in ("<pad>", "<end>"))

    def logits(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        """Return ``[len(tokens), V]`` logits of the next token."""
        embedding = weights["model.embed_tokens.weight"]
        # transformers gives the pad token's input embedding no gradient, though a response may contain it
        x = torch.nn.functional.embedding(torch.tensor(tokens), embedding, padding_idx=self.pad)
        count, width = x.shape
        size = width // self.heads
        angles = torch.outer(torch.arange(count).double(), self.theta ** (-torch.arange(0, size, 2).double() / size))
        cos, sin = torch.cat([angles, angles], 1).cos(), torch.cat([angles, angles], 1).sin()
        future = torch.triu(torch.ones(count, count, dtype=torch.bool), 1)

        def norm(values: Tensor, name: str) -> Tensor:
            return values / (values.pow(2).mean(1, keepdim=True) + self.eps).sqrt() * weights[name]

        def heads(values: Tensor) -> Tensor:
            return values.view(count, self.heads, size).transpose(0, 1)

        def turned(values: Tensor) -> Tensor:
            return values * cos + torch.cat([-values[..., size // 2 :], values[..., : size // 2]], -1) * sin

        for layer in range(self.layers):
            part = f"model.layers.{layer}."
            h = norm(x, part + "input_layernorm.weight")
            q, k, v = (heads(h @ weights[f"{part}self_attn.{n}_proj.weight"].T) for n in "qkv")
            scores = turned(q) @ turned(k).transpose(1, 2) / math.sqrt(size)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
            x = x + mixed.transpose(0, 1).reshape(count, width) @ weights[part + "self_attn.o_proj.weight"].T
            h = norm(x, part + "post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(h @ weights[part + "mlp.gate_proj.weight"].T)
            x = x + (gate * (h @ weights[part + "mlp.up_proj.weight"].T)) @ weights[part + "mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ embedding.T

    def distribution(self, weights: Weights, prompt: Sequence[int], tokens: Sequence[int], tau: float) -> Tensor:
        """Return ``[T, V]`` log-probabilities of every token at each position of the response."""
        logits = self.logits(weights, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        return (logits / tau).log_softmax(-1)

    def score(
        self, weights: Weights, prompt: Sequence[int], tokens: Sequence[int], tau: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``[T]`` log-probabilities of the response's tokens, and ``[T]`` entropies."""
        table = self.distribution(weights, prompt, tokens, tau)
        return table[torch.arange(len(tokens)), torch.tensor(tokens)], -(table.exp() * table).sum(-1)

    def greedy(self, weights: Weights, prompt: Sequence[int], limit: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < limit and self.end not in tokens:
            tokens.append(int(self.logits(weights, [*prompt, *tokens])[-1].argmax()))
        return tokens
