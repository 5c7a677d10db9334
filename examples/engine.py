"""An engine of one's own: plain ``transformers.generate``, a group at a time.

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
        known = described_model(settings.model)
        self._model = AutoModelForCausalLM.from_pretrained(known.folder, dtype=settings.dtype).eval()
        self._model.to(resolve_device(settings.device))
        self._ends, self._words, self._max_context = known.end_tokens, known.valid_vocab, known.max_context
        self._tokenizer = known.tokenizer
        rows = self._model.get_output_embeddings().weight.shape[0]
        self._padding = list(range(self._words, rows)) or None
        self._version = 0 if settings.training is None else -1  # a run gives it the learner's weights first

    def load_weights(self, weights, version):
        self._model.load_state_dict(weights, strict=False)  # a tied head may be missing
        self._version = version

    @torch.inference_mode()
    def generate(self, request):
        tau, began = request.sampling.temperature, time.perf_counter()
        prompt = torch.tensor([request.prompt_tokens.tolist()] * len(request.indices), device=self._model.device)
        choice = {"do_sample": True, "temperature": tau, "top_k": 0, "top_p": 1.0} if tau else {"do_sample": False}
        with torch.random.fork_rng():  # equal seeds, equal tokens; the learner's random state stays as it is
            torch.manual_seed((request.sampling.seed * 1_000_003 + request.draw) % 2**63)
            made = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.sampling.max_tokens,
                eos_token_id=sorted(self._ends), pad_token_id=min(self._ends), output_logits=True,
                suppress_tokens=self._padding, return_dict_in_generate=True, **choice,
            )  # fmt: skip
        logprobs = (torch.stack(made.logits, dim=1)[..., : self._words].float() / (tau or 1.0)).log_softmax(-1)
        tokens = made.sequences[:, prompt.shape[1] :]
        chosen, entropies = logprobs.gather(-1, tokens[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)
        return [self._completion(*row, began) for row in zip(tokens.tolist(), chosen, entropies, strict=True)]

    def _completion(self, tokens, logprobs, entropies, began):
        length = next((n for n, token in enumerate(tokens, start=1) if token in self._ends), len(tokens))
        reason = FinishReason.STOP if tokens[length - 1] in self._ends else FinishReason.LENGTH
        return Completion(
            tokens=frozen_tokens(tokens[:length]),
            text=self._tokenizer.decode(tokens[:length], skip_special_tokens=True),
            sampler_logprobs=frozen_floats(logprobs[:length].tolist()),
            sampler_entropies=frozen_floats(entropies[:length].tolist()),
            finish_reason=reason,
            policy_version=self._version,
            seconds=time.perf_counter() - began,
        )


make = GenerateEngine
