"""The supervised recipe of a starting model that is made in seconds and answers some problems of its family."""

from __future__ import annotations


def toy_sft(
    *,
    name: str = "toy-start",
    steps: int = 60,
    batch_size: int = 32,
    hidden: int = 32,
    options: str = "",
    more: str = "",
) -> str:
    """Return the recipe. ``options`` are further ones of the family, ``more`` further sections."""
    return f"""[run]
name = "{name}"
threads = 1

[model.tiny]
hidden_size = {hidden}
heads = 2
layers = 1
intermediate_size = {2 * hidden}
max_context = 64

[training]
dtype = "float32"

{more}[[phases]]
family = "running_sum"
options = {{ variant = "stages", {options}max_tokens = 32 }}
steps = {steps}
batch_size = {batch_size}
learning_rate = 5e-3
"""
