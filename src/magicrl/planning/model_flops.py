"""Model FLOPs: the arithmetic that a step's sequences need, whatever was computed for them; what MFU is counted in.

As needed, not as computed: a prompt counts once for all its responses, also where each of them carried its own copy;
the output head at the positions that predict a response token; attention to the tokens before, the causal half.
Recomputation for the backward pass, padding and masked-out halves are work, but no model FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magicrl.planning.costs import forward_flops
from magicrl.planning.shapes import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceWork:
    """The tokens of one pass over prompts and their responses; passes add up.

    Attributes:
        tokens: that enter the layers: each prompt once, and of each response all but the last, which predicts nothing.
        predicted: response tokens, each predicted by the output head.
        seen: tokens that the entering ones attend to, themselves included, summed.
        prompts: tokens of the prompts.
    """

    tokens: int = 0
    predicted: int = 0
    seen: int = 0
    prompts: int = 0

    def __add__(self, other: SequenceWork) -> SequenceWork:
        return SequenceWork(
            tokens=self.tokens + other.tokens,
            predicted=self.predicted + other.predicted,
            seen=self.seen + other.seen,
            prompts=self.prompts + other.prompts,
        )


def sequence_work(groups: Iterable[tuple[int, Sequence[int]]]) -> SequenceWork:
    """The work of one pass over ``groups``: tokens of a prompt, and of each of its responses.

    Example: a prompt of 2 tokens with responses of 1 and 3. Entering: 2 + 0 + 2. Seen: 1 + 2 by the prompt, nothing by
    the first response, 3 + 4 by the second.
        >>> sequence_work([(2, [1, 3])])
        SequenceWork(tokens=4, predicted=4, seen=10, prompts=2)
    """
    tokens = predicted = seen = prompts = 0
    for prompt, responses in groups:
        prompts += prompt
        tokens += prompt
        seen += prompt * (prompt + 1) // 2
        for response in responses:
            entering = response - 1
            tokens += entering
            predicted += response
            seen += entering * prompt + entering * (entering + 1) // 2
    return SequenceWork(tokens=tokens, predicted=predicted, seen=seen, prompts=prompts)


def generation_flops(shape: ModelShape, work: SequenceWork) -> float:
    """2 N a token and attention, forward: of sampling these responses, or of their log-probs without gradient."""
    if not work.tokens:
        return 0.0
    return forward_flops(shape, work.tokens, work.seen / work.tokens, head_tokens=work.predicted)


def update_flops(shape: ModelShape, work: SequenceWork, *, adapters: int | None = None) -> float:
    """6 N a token and attention, forward and backward, recomputation not counted.

    Args:
        shape: of the model.
        work: of all mini-batches.
        adapters: parameters of LoRA adapters; the frozen weights' own gradient is then not needed: 4 N, 6 for these.
    """
    forward = generation_flops(shape, work)
    if adapters is None:
        return 3.0 * forward
    attention = work.seen * shape.attention_flops_per_token(1.0)
    return 2.0 * forward + attention + 6.0 * adapters * work.tokens
