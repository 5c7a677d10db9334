"""Log-probabilities and entropies of given responses under a model, for the learner and the reference model.

Packed sequences are kept apart in attention and in gated delta nets. Any other layer that carries a state from token to
token (recurrent and convolutional layers of hybrid models) would carry it into the next sequence without an error.
`check_isolation` tests a loaded model for this, `check_attention` for attention that magicrl does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from magicrl.config.model_schema import ModelConfig
from magicrl.models.compiled import check_compiled, check_compiler, compile_layers
from magicrl.models.exact import FilledContext, filled_rows, use_exact
from magicrl.models.head import Float32Head, HeadOptions, logprobs_and_entropies
from magicrl.models.memory_efficient import use_memory_efficient_layers
from magicrl.models.packing import (
    ATTENTION_NAME,
    PAYS_FROM,
    AttentionContext,
    PackedBatch,
    PackedContext,
    families,
    packed_with_shared_prompts,
    plan_micro_batches,
    register_attention,
    shared_layout,
)
from magicrl.models.recurrent import decoder_of, keep_sequences_apart
from magicrl.models.routing import Routers
from magicrl.records import FloatArray, TrainSample, frozen_floats, frozen_tokens

Hidden = Callable[[PackedBatch], Tensor]
"""Function that returns the last hidden states ``[N, d]`` of a micro-batch."""

_PROMPT, _RESPONSE, _WORDS = 3, 5, 4096
# Largest changes by the text of another sequence (groups of other sizes in a mixture round differently) and by another
# layout of the row, as shares of the norm of the hidden states: in float32 and in narrower precisions.
_TEXT, _LAYOUT = (1e-5, 1e-3), (1e-3, 5e-2)


@torch.no_grad()
def check_isolation(
    model: PreTrainedModel, *, valid_vocab: int | None = None, hidden: Hidden | None = None, shared: bool = True
) -> None:
    """Compare a response packed after another one with the same after another text, and on its own.

    Args:
        model: The causal LM.
        valid_vocab: Number of valid tokens. None means all rows of the embedding.
        hidden: Function that computes hidden states. None means the model's decoder.
        shared: Also test rows with one prompt and several responses.

    Raises:
        ValueError: They differ. The message names the architecture.
    """
    compute = hidden or partial(_decoder_hidden, model)
    words = min(_WORDS, valid_vocab or int(cast(Any, model.get_input_embeddings()).weight.shape[0]))
    for pack in (PackedBatch.of, packed_with_shared_prompts) if shared else (PackedBatch.of,):
        rng = np.random.default_rng(0)
        prompt, tokens, further = (rng.integers(0, words, size) for size in (_PROMPT, _RESPONSE, _RESPONSE))
        first, second = sample_to_score(prompt, tokens, 0), sample_to_score(prompt, further, 1)
        other = sample_to_score(prompt, (tokens + max(1, words // 2)) % words, 0)  # none of its tokens is the first's
        states = [compute(pack(given, model.device)) for given in ((first, second), (other, second), (second,))]
        after, after_other, separate = (state[-_RESPONSE + 1 :].double() for state in states)
        # Index into the pairs of bounds, by the precision of the computation: sharded weights are float32 and gathered
        # in bfloat16, whose rounding moves hidden states by more.
        low = states[0].dtype not in (torch.float32, torch.float64)
        # Another preceding text may change only rounding. Without one, the layout of the products differs too.
        leak, moved = (_distance(x, y) for x, y in ((after_other, after), (after, separate)))
        if leak > _TEXT[low] or moved > _LAYOUT[low]:
            raise ValueError(
                f"{type(model).__name__} (model type {model.config.model_type!r}) mixes sequences that share a row: a "
                f"response's hidden states change by {max(leak, moved):.1g} with the text before it. Its layers carry "
                "more than attention from token to token, which magicrl keeps apart only in gated delta nets; "
                "use a model of docs/guides/models.md"
            )


@torch.no_grad()
def check_attention(model: PreTrainedModel, hidden: Hidden | None = None) -> None:
    """Compare magicrl's attention with transformers' eager attention on a few tokens.

    Raises:
        ValueError: They differ, so the architecture passes options that magicrl ignores. The message names it.
    """
    compute = hidden or partial(_decoder_hidden, model)
    tokens = np.arange(_RESPONSE)
    batch = PackedBatch.of([sample_to_score(tokens, tokens, 0)], model.device)
    ours = compute(batch)
    model.set_attn_implementation("eager")
    try:
        theirs = compute(batch)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    # The median over tokens: in bfloat16, rounding sends a few tokens of a mixture to other experts, which changes them
    # a lot.
    pairs = zip(ours.double(), theirs.double(), strict=True)
    moved = median(_distance(own, expected) for own, expected in pairs)
    # The precision of the computation: sharded weights are float32 and gathered in bfloat16.
    if moved > _LAYOUT[ours.dtype not in (torch.float32, torch.float64)]:
        raise ValueError(
            f"the attention of {type(model).__name__} (model type {model.config.model_type!r}) does more than "
            f"magicrl's: hidden states differ by {moved:.1g} from transformers' own; "
            "use a model of docs/guides/models.md"
        )


def _decoder_hidden(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    decoder = cast(Callable[..., Any], decoder_of(model))
    output = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_context=batch.attention,
    )
    return cast(Tensor, output.last_hidden_state)[0]


def sample_to_score(
    prompt: Sequence[int] | NDArray[Any], tokens: Sequence[int] | NDArray[Any], index: int = 0
) -> TrainSample:
    """Return a response of which only the log-probs are wanted: no advantage, and sampled with log-probs of 0."""
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens(tokens),
        advantage=0.0,
        group_index=0,
        sample_index=index,
        sampler_logprobs=frozen_floats(np.zeros(len(tokens))),
        policy_version=0,
    )


def _distance(found: Tensor, expected: Tensor) -> float:
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else 0.0


_PROBED_WORDS = 64
_TRIED_TOKENS = 2048  # most tokens of the pass for which graphs are made, similar to those of training


class PolicyScorer:
    """A causal LM on packed micro-batches, with the fused head instead of its own.

    The model is switched to magicrl's attention and to evaluation mode (no dropout, because rho compares two log-probs
    of one distribution). Parameters keep their dtype and device.

    Args:
        model: Any HF causal LM with a decoder and a linear output head.
        settings: The recipe's ``[model]``. ``dtype`` and ``lora`` are not read: the model has them already.
        valid_vocab: Rows of the head with a word. None means all.
        frozen: The model is not trained. It has no backward pass to save memory for, and its own routers choose the
            experts, because the sampler's choice belongs to the policy's weights.

    Raises:
        ValueError: The model's logits are not finite, or not its head applied to its last hidden state (up to a
            constant factor and a soft cap in its config); its layers mix packed sequences; it has no routers to replay;
            or it cannot be exact or compiled here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: ModelConfig | None = None,
        *,
        valid_vocab: int | None = None,
        frozen: bool = False,
    ) -> None:
        self._settings = settings = settings or ModelConfig()
        register_attention()
        if settings.exact:
            use_exact(model)
        model.set_attn_implementation(ATTENTION_NAME)
        model.eval()
        keep_sequences_apart(model)
        if settings.head_dtype == "float32":
            Float32Head.put_into(model)
        self.model = model
        if not settings.compile:  # a compiler decides itself what is saved
            self._use_memory_efficient_layers()
        self._backbone = decoder_of(model)
        config: Any = model.config.get_text_config()
        self._options = HeadOptions(
            valid_vocab=valid_vocab,
            chunk_tokens=settings.head_chunk_tokens,
            # The constant factors and the soft cap of the logits.
            scale=float(getattr(config, "logit_scale", None) or 1)
            / float(getattr(config, "logits_scaling", None) or 1),
            softcap=getattr(config, "final_logit_softcapping", None),
            float32=Float32Head.serves(model),
            exact=settings.exact,
            entropy_clamp=settings.entropy_clamp,
        )
        above = 0 if settings.gradient_checkpointing else settings.checkpoint_above_tokens
        self._checkpoint_above = None if frozen else above
        self._layers = [] if self._checkpoint_above is None else _checkpointed_layers(model)
        self._routers = Routers(model) if settings.router_replay and not frozen else None
        self._check_model()
        if settings.compile:
            self._compile()

    def _compile(self) -> None:
        """Compile the decoder layers, and compare them with the model's own."""
        # All graphs are made here, because the sizes of the first pass select the code of a graph, and a resumed run
        # must have the same code.
        check_compiler(self.device)
        check_compiled(self.model.config)
        before = self._tried()
        compile_layers(self.model)
        try:
            after = self._tried()
        except TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"torch cannot compile this model ({reason}); leave out model.compile") from error
        moved = max(_distance(own.double(), expected.double()) for own, expected in zip(after, before, strict=True))
        if not moved <= _LAYOUT[before[0].dtype not in (torch.float32, torch.float64)]:
            raise ValueError(
                f"compiled layers of {type(self.model).__name__} differ from its own by {moved:.1g}; leave out "
                "model.compile, and please report this with torch's version"
            )

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def micro_batches(self, samples: Sequence[TrainSample]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Yield micro-batches of at most ``micro_batch_tokens`` tokens: indices into ``samples``, and those samples
        packed.

        With shared prompts the responses of a prompt stay together if they fit, and the prompt counts once.
        """
        plan, shared = self.plan(samples)
        for members in plan:
            yield members, self.pack([samples[i] for i in members], shared=shared)

    def plan(self, samples: Sequence[TrainSample]) -> tuple[list[list[int]], bool]:
        """Return the samples of each micro-batch, as indices, and whether they share prompts. Nothing is packed yet."""
        unrecorded = self._routers is not None and next((s for s in samples if s.experts is None), None)
        if unrecorded:
            raise ValueError(
                f"sample {unrecorded.sample_index} of group {unrecorded.group_index} has no record of the "
                "sampler's experts; leave out model.router_replay, or use an engine that records them"
            )
        budget = self._settings.micro_batch_tokens
        # Decided once, so that all micro-batches of a batch have one layout.
        if not self._settings.share_prompts or not samples or shared_layout(samples)[0].saved < PAYS_FROM:
            return plan_micro_batches([len(sample) for sample in samples], budget), False
        # Families are planned instead of samples, and the prompt counts once in each.
        parts = families(samples, budget)
        tokens = [len(samples[part[0]].prompt_tokens) + sum(len(samples[i].tokens) for i in part) for part in parts]
        return [[i for part in plan for i in parts[part]] for plan in plan_micro_batches(tokens, budget)], True

    def pack(self, samples: Sequence[TrainSample], *, shared: bool) -> PackedBatch:
        """Pack one micro-batch of these samples on the model's device."""
        return packed_with_shared_prompts(samples, self.device) if shared else PackedBatch.of(samples, self.device)

    @property
    def head(self) -> torch.nn.Linear:
        """The model's output head. Its weight may be the input embedding's."""
        return cast(torch.nn.Linear, self.model.get_output_embeddings())

    def forward(
        self, batch: PackedBatch, temperature: float, *, head_gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the batch's response tokens, ``[R]`` each, with gradient where enabled.

        The head's backward pass adds its weight's gradient to ``head_gradient``, if given, instead of returning it to
        autograd.
        """
        if self._routers is not None:
            # They stay until the next pass, because layers that are recomputed for the backward pass choose again.
            self._routers.given = batch.experts
        hidden = self._hidden(batch.input_ids, batch.position_ids, batch.attention)
        # The head, a fifth of the compute of a small model, only sees response positions.
        return self._head(hidden.index_select(0, batch.predict_index), batch.targets, temperature, head_gradient)

    def score(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample in the given order, without
        gradient.
        """
        found: dict[int, tuple[FloatArray, FloatArray]] = {}
        for part, batch in self.micro_batches(samples):
            with torch.no_grad():
                arrays = self.forward(batch, temperature)
            split = zip(*(array.float().cpu().split(batch.response_lengths) for array in arrays), strict=True)
            scored = [(frozen_floats(p.numpy()), frozen_floats(h.numpy())) for p, h in split]
            found.update(zip(part, scored[: len(part)], strict=True))  # an empty part is a pass for other ranks
        ordered = [found[i] for i in range(len(samples))]
        return [pair[0] for pair in ordered], [pair[1] for pair in ordered]

    def _use_memory_efficient_layers(self) -> None:
        use_memory_efficient_layers(self.model)

    def _tried(self) -> list[Tensor]:
        """Return hidden states of two sequences and, for a trained model, a gradient of the first layer's input."""
        embedding = cast(Any, self.model.get_input_embeddings())
        tokens = max(4, min(self._settings.micro_batch_tokens, _TRIED_TOKENS))
        words = self._options.valid_vocab or int(embedding.weight.shape[0])
        ids = torch.arange(tokens, device=self.device)[None] % min(_WORDS, words)
        lengths = [tokens // 2, tokens - tokens // 2]
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])[None]

        def embedded() -> Tensor:
            return cast(Tensor, embedding(ids)).detach()

        def hidden(given: Tensor) -> Tensor:
            self._set_checkpointing(tokens)
            return self._decoded(
                inputs_embeds=given, position_ids=positions, context=PackedContext(lengths, self.device)
            )

        with torch.no_grad():
            found = [self._within(lambda: hidden(embedded()))]
            given = self._within(embedded)
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            with torch.enable_grad():
                given.requires_grad_()
                out = self._within(lambda: hidden(given))
                ramp = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
                found += torch.autograd.grad(out, given, ramp)
        return found

    def _within(self, work: Callable[[], Tensor]) -> Tensor:
        """Return ``work()``. A subclass prepares the model for it."""
        return work()

    def _set_checkpointing(self, tokens: int) -> None:
        checkpoint = self._checkpoint_above is not None and tokens > self._checkpoint_above
        for layer in self._layers:
            layer.training = checkpoint  # only this layer's flag: its dropout modules stay in evaluation mode

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """Return the last hidden states, ``[N, d]``."""
        tokens = input_ids.shape[1]
        self._set_checkpointing(tokens)
        if self._settings.exact:
            step = cast(int, self.model.exact_rows)
            input_ids, position_ids = (filled_rows(x[0], step)[None] for x in (input_ids, position_ids))
            context = FilledContext(context, tokens)
        return self._decoded(input_ids=input_ids, position_ids=position_ids, context=context)[:tokens]

    def _decoded(self, *, context: AttentionContext, **given: Tensor) -> Tensor:
        output = self._backbone(**given, use_cache=False, attention_context=context)
        return cast(Tensor, output.last_hidden_state)[0]

    def _head(
        self, hidden: Tensor, targets: Tensor, temperature: float, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        head, options = self.head, replace(self._options, temperature=temperature)
        return logprobs_and_entropies(hidden, head.weight, targets, options, head.bias, weight_gradient=gradient)

    def _check_model(self) -> None:
        def hidden(batch: PackedBatch) -> Tensor:
            return self._hidden(batch.input_ids, batch.position_ids, batch.attention)

        self._check_head()
        check_isolation(
            self.model, valid_vocab=self._options.valid_vocab, hidden=hidden, shared=self._settings.share_prompts
        )
        check_attention(self.model, hidden)
        if self._routers is not None:
            self._routers.chosen()  # raises if a router recorded no choice in these passes

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare the log-probs with those of the model's own logits, to detect a head that is more than a product."""
        vocab = self._options.valid_vocab or cast(int, self.model.config.get_text_config().vocab_size)
        # A few words are enough, because each log-prob includes the sum over all of them.
        words = torch.arange(min(vocab, _PROBED_WORDS), device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        context = PackedContext([2], self.device)
        hidden = self._hidden(words[:2].expand(1, 2), positions, context)[-1:]
        ours, _ = self._head(hidden.expand(len(words), -1), words, 1.0)
        output = self.model(
            input_ids=words[:2].expand(1, 2), position_ids=positions, use_cache=False, attention_context=context
        )
        theirs = output.logits[0, -1, :vocab].to(ours.dtype).log_softmax(0)[: len(words)]
        if not bool(theirs.isfinite().all()):
            raise ValueError(
                f"the weights of this {type(self.model).__name__} give logits that are not finite"
                + (
                    ' in float16, which ends at 65504: this model needs model.dtype = "bfloat16"'
                    if hidden.dtype == torch.float16
                    else ""
                )
            )
        # Relative to the differences between words, which a wrong head changes at any level of the log-probs.
        spread = float((theirs - theirs.mean()).norm())
        if float((ours - theirs).norm()) > 0.05 * spread + 1e-6 * float(theirs.norm()):
            raise ValueError(
                f"the logits of {type(self.model).__name__} are not its output head applied to its last hidden state; "
                "magicrl cannot train this architecture"
            )


def _checkpointed_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Enable gradient checkpointing, which transformers applies only to layers in training mode, and return these
    layers.
    """
    kwargs = {"use_reentrant": False, "context_fn": _keep_attention}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    layers: list[torch.nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no gradient checkpointing; set model.gradient_checkpointing=false and leave "
            "out model.checkpoint_above_tokens"
        )
    return layers


def _keep_attention() -> Any:
    """Return checkpoint contexts that save the output of attention: it costs the square of the length, and is as
    small as its input.
    """
    kinds = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    # torch selects one of these kernels by shape and device.
    operators = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default for kind in kinds]
    operators += [torch.ops.torch_attn._varlen_attn.default, torch.ops.magicrl.attend_row.default]
    return create_selective_checkpoint_contexts(operators)
