"""The model that a client trains: gradients that add up between two steps, AdamW, and checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from magicrl.config.model_schema import AdamWConfig, DType, LoraConfig, ModelConfig
from magicrl.config.section import Section, first_mistake
from magicrl.files import named_errors
from magicrl.models.loading import load_policy
from magicrl.models.model_files import find_model, weights_fingerprint
from magicrl.models.scorer import sample_to_score
from magicrl.records import FloatArray, TrainSample
from magicrl.serving.losses import LOSSES, complete_config
from magicrl.serving.messages import Datum, LossRequest, loss_response
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings

_Section = TypeVar("_Section", bound=Section)
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# The API's defaults.
_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
_HEADER = "magicrl"  # entry of a checkpoint's metadata: JSON with the model, its adapters and the learner's counters


def lora_of(given: Mapping[str, Any] | None) -> LoraConfig | None:
    """Return the adapters that a client's ``lora_config`` describes. None means that all weights are trained.

    Raises:
        ValueError: No layer would be adapted, or the rank is not a positive integer.
    """
    if given is None:
        return None
    modules = (_ATTENTION if given.get("train_attn", True) else ()) + (_MLP if given.get("train_mlp", True) else ())
    if not modules:
        raise ValueError("lora_config trains neither train_attn nor train_mlp; the unembedding cannot be adapted here")
    return _filled(LoraConfig, "lora_config", rank=given["rank"], alpha=32, target_modules=modules)


def _filled(section: type[_Section], name: str, **settings: Any) -> _Section:
    """Return the section, or raise ``ValueError`` with ``name`` and the first wrong setting, on one line."""
    try:
        return section(**settings)
    except ValidationError as error:
        setting, value, message = first_mistake(error)
        raise ValueError(f"{name}: {setting} is {value!r}. {message}") from None


class ServedTrainer:
    """A model with its optimizer.

    Args:
        folder: Model folder or hub name.
        lora: Adapters to train. None trains all weights.
        dtype: Precision of the forward and backward passes.
        device: Device of the model.

    Attributes:
        lora: As given.
        unsaved: Whether a step was made since the last ``save``.
    """

    def __init__(self, folder: str, lora: LoraConfig | None, *, dtype: DType, device: torch.device) -> None:
        policy = load_policy(folder, device=device)
        self._folder = folder
        # A checkpoint of adapters has no other weights. The folder of the model may hold others later.
        self._base = None if lora is None else weights_fingerprint(find_model(folder))
        self._vocab, self._context = policy.valid_vocab, policy.max_context
        # Only a datum's first token would count as its prompt, so there is nothing to share.
        model = ModelConfig(dtype=dtype, lora=lora, share_prompts=False)
        self._learner = LocalLearner(
            policy.model, LearnerSettings(model=model), tokenizer=policy.tokenizer, valid_vocab=policy.valid_vocab
        )
        self.lora = lora
        self.unsaved = False
        self._gradient = False
        self._failure: str | None = None

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._learner.version

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights for a sampler, LoRA merged."""
        # Merged weights are new tensors, and the others are frozen.
        return {name: value.clone() if self.lora is None else value for name, value in self._learner.weights().items()}

    def forward_backward(self, request: LossRequest) -> bytes:
        """Add the gradient of the summed loss of ``request`` to that since the last step, and return the response.

        Raises:
            ValueError: A datum does not fit the loss or the model, or the loss is not finite. The gradient since the
                last step is dropped, and the next step is refused.
        """
        try:
            total, logprobs = self._accumulate(request)
        except BaseException as error:
            if request.backward:
                self._failure = self._failure or str(error)
            raise
        self._gradient |= request.backward
        return loss_response(logprobs, {"loss:sum": total})

    def _accumulate(self, request: LossRequest) -> tuple[float, list[FloatArray]]:
        if request.wrong:
            raise ValueError(request.wrong)
        loss, config = request.loss, complete_config(request.loss, request.config)
        samples = [self._sample(index, datum, loss) for index, datum in enumerate(request.data)]
        if not samples:
            raise ValueError("the request holds no data")
        found: dict[int, FloatArray] = {}
        total = 0.0
        scorer = self._learner.scorer
        for members, packed in scorer.micro_batches(samples):
            chosen = [inputs for _, inputs in (request.data[index] for index in members)]
            inputs = {name: torch.from_numpy(np.concatenate([i[name] for i in chosen])) for name in chosen[0]}
            inputs = {name: values.to(scorer.device) for name, values in inputs.items()}
            # The targets are the client's: they need not be the next input tokens.
            batch = replace(packed, targets=inputs.pop("target_tokens").long())
            with torch.set_grad_enabled(request.backward):
                logprobs, _ = scorer.forward(batch, 1.0)
                values = LOSSES[loss].values(logprobs, inputs, config).double().sum()
            if not bool(values.isfinite()):
                raise ValueError(
                    f"the {loss} loss is {float(values.detach())}; check the logprobs, advantages and weights"
                )
            if request.backward:
                values.backward()
            total += float(values.detach())
            parts = logprobs.detach().float().cpu().split(batch.response_lengths)
            found.update(zip(members, (part.numpy() for part in parts), strict=True))
        return total, [found[index] for index in range(len(samples))]

    def _sample(self, index: int, datum: Datum, loss: str) -> TrainSample:
        """Return a datum as a sample whose response is all tokens but the first, so that every position is scored."""
        given, inputs = datum
        wanted = {"target_tokens", *LOSSES[loss].inputs}
        if set(inputs) != wanted:
            raise ValueError(f"datum {index} has loss_fn_inputs {sorted(inputs)}, and {loss!r} reads {sorted(wanted)}")
        if not 0 < len(given) <= self._context:
            raise ValueError(f"datum {index} has {len(given)} tokens; the model takes 1 to {self._context}")
        for name, tokens in (("model_input", given), ("target_tokens", inputs["target_tokens"])):
            if tokens.min() < 0 or tokens.max() >= self._vocab:
                raise ValueError(
                    f"datum {index}: {name} has tokens {tokens.min()} to {tokens.max()}, and the model has "
                    f"{self._vocab}; use the tokenizer of {self._folder}"
                )
        # The last one is only a target, and the client's targets replace all of them.
        return sample_to_score(given[:1], [*given[1:], 0], index)

    def step(self, params: Mapping[str, float]) -> dict[str, float]:
        """Make one AdamW step with the gradients since the last one, and return metrics.

        Args:
            params: The API's ``AdamParams``. A ``grad_clip_norm`` of 0 does not clip.

        Raises:
            ValueError: There is no complete, finite gradient, so that the weights are unchanged; or the new weights are
                not finite.
        """
        optimizer, failure = self._learner.optimizer, self._failure
        gradient, self._gradient, self._failure = self._gradient, False, None
        try:
            if failure is not None:
                raise ValueError(f"no step, since a forward_backward before it failed: {failure}")
            if not gradient:
                raise ValueError("no step, since there was no forward_backward after the last one")
            if wrong := [name for name, value in params.items() if not isinstance(value, int | float)]:
                raise ValueError(f"no step: {wrong[0]} is {params[wrong[0]]!r}; send a finite number")  # a NaN is null
            norm, rate = optimizer.gradient_norm(), params["learning_rate"]
            if not (math.isfinite(norm) and 0 <= rate < math.inf):
                raise ValueError(f"no step: the gradient norm is {norm}, the learning rate {rate}")
            limit = params.get("grad_clip_norm", 0.0)
            settings = {name: params.get(name, default) for name, default in _ADAM.items()}
            settings["max_grad_norm"] = limit if limit > 0 else math.inf
            optimizer.configure(_filled(AdamWConfig, "no step", **settings))
            optimizer.step(rate, norm)
        finally:
            optimizer.forget()
        self.unsaved = True
        if not optimizer.weights_are_finite():
            raise ValueError(f"step {self.steps} gave weights that are not finite; load the last checkpoint")
        return {"grad_norm": norm}

    def save(self, path: Path) -> None:
        """Write weights, moments and counters to ``path``, completely or not at all."""
        state = dict(self._learner.state())
        header = {"model": self._folder, "meta": state.pop("meta")}
        header["lora"] = None if self.lora is None else self.lora.model_dump(mode="json")
        header["base_weights"] = self._base
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_name(f".{path.name}.writing")
        tensors = {name: value.cpu().contiguous() for name, value in state.items()}
        with named_errors(path):
            save_file(tensors, writing, {_HEADER: json.dumps(header)})
            with writing.open("rb") as file:
                os.fsync(file.fileno())
        writing.replace(path)
        self.unsaved = False

    def restore(self, path: Path, *, optimizer: bool) -> None:
        """Restore what ``save`` wrote: bit for bit, or only the weights. Gradients are dropped.

        Raises:
            ValueError: It belongs to another model, or to other adapters.
        """
        header = read_header(path)
        if self._base and header.get("base_weights") not in (None, self._base):
            raise ValueError(
                f"{path} holds adapters of {header['model']} with other weights than it has now; serve the model that "
                "they were trained on"
            )
        with safe_open(path, framework="pt") as file:
            state: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = header["meta"]
        if not optimizer:
            state = {name: value for name, value in state.items() if name.startswith("weights/")}
            meta = {**meta, "optimizer_steps": 0}
        self._learner.restore({**state, "meta": meta})
        self._gradient, self._failure, self.unsaved = False, None, False

    def save_model(self, folder: Path) -> None:
        """Write a model folder, with the adapters merged, and also in a separate folder."""
        self._learner.save_hf(folder)


def read_header(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself: ``model``, ``base_weights``, ``lora`` and ``meta``.

    Raises:
        ValueError: The file is no checkpoint, or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()[_HEADER])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of magicrl serve, or damaged: {error}") from None
