"""A custom engine: plain ``transformers.generate``, one group at a time.

In a recipe: ``rollout.engine = "examples/engine.py:make"``; ``magicrl eval --engine examples/engine.py:make ...``.
"""

import time

import torch
from transformers import AutoModelForCausalLM

from magicrl.models.loading import described_model, resolve_device
from magicrl.records import Completion, FinishReason, frozen_floats, frozen_tokens
from magicrl.rollout.protocol import Capabilities, RolloutEngine


class GenerateEngine(RolloutEngine):
    capabilities = Capabilities(entropies=True)

    def __init__(self, settings):
        self._known = known = described_model(settings.model)
        self._model = AutoModelForCausalLM.from_pretrained(known.folder, dtype=settings.dtype).eval()
        self._model.to(resolve_device(settings.device))
        self._max_context = known.max_context
        self._padding = list(range(known.valid_vocab, len(self._model.get_output_embeddings().weight))) or None
        self._version = 0 if settings.training is None else -1  # in training the learner's weights arrive first

    def load_weights(self, weights, version):
        self._model.load_state_dict(weights, strict=False)  # a head tied to the embeddings may be missing
        self._version = version

    @torch.inference_mode()
    def generate(self, request):
        tau, began = request.sampling.temperature, time.perf_counter()
        ends, words = sorted(self._known.end_tokens), self._known.valid_vocab
        prompt = torch.tensor([request.prompt_tokens.tolist()] * len(request.indices), device=self._model.device)
        with torch.random.fork_rng():  # equal seeds give equal tokens; the learner's random state is kept
            torch.manual_seed((request.sampling.seed * 1_000_003 + request.draw) % 2**63)
            made = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.sampling.max_tokens,
                eos_token_id=ends, pad_token_id=ends[0], suppress_tokens=self._padding, output_logits=True,
                return_dict_in_generate=True, do_sample=tau > 0, temperature=tau or 1.0, top_k=0, top_p=1.0,
            )  # fmt: skip
        logprobs = (torch.stack(made.logits, dim=1)[..., :words].float() / (tau or 1.0)).log_softmax(-1)
        tokens = made.sequences[:, prompt.shape[1] :]
        chosen, entropies = logprobs.gather(-1, tokens[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)
        found, seconds = [], time.perf_counter() - began
        for row, p, h in zip(tokens.tolist(), chosen, entropies, strict=True):
            length = next((n for n, token in enumerate(row, start=1) if token in ends), len(row))
            reason = FinishReason.STOP if row[length - 1] in ends else FinishReason.LENGTH
            text = self._known.tokenizer.decode(row[:length], skip_special_tokens=True)
            found.append(Completion(
                tokens=frozen_tokens(row[:length]), text=text, finish_reason=reason, policy_version=self._version,
                sampler_logprobs=frozen_floats(p[:length].cpu()), sampler_entropies=frozen_floats(h[:length].cpu()),
                seconds=seconds,
            ))  # fmt: skip
        return found


make = GenerateEngine
