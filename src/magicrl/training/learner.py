"""The learner of one process: Eq. 3.1 (or another row of the loss table) from a mini-batch to new weights.

``objective.py`` computes the loss. This module holds the weights, AdamW on their float32 masters, the loss scale of
float16, and the frozen reference model. LoRA adapters are in ``adapters.py``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from magicrl.algorithms.loss_terms import LossMetrics
from magicrl.config.model_schema import AdamWConfig, ModelConfig, OptimizerConfig
from magicrl.models import cpu_kernels
from magicrl.models.adapters import ADAPTER, LoraAdapters
from magicrl.models.cpu_kernels import LANES, adamw, add_widened, serves, serves_both
from magicrl.models.loading import device_name, peak_mb, resolve_dtype, save_policy, warn_of_slow_products
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.training.objective import LearnerSettings, Objective
from magicrl.training.protocols import Controls, NotFiniteError


class LocalLearner:
    """A model, its float32 master weights and AdamW. Implements ``Learner``.

    Args:
        model: Initial model in float32 (float64 is kept, for tests). The learner owns it from here on and converts it
            to the compute precision ``model.dtype``.
        learning: Recipe sections about learning. The learning rate of each update comes with its ``Controls``.
        tokenizer: Tokenizer that ``save_hf`` writes next to the weights.
        valid_vocab: Number of rows of the output head that are tokens. None means all.

    Attributes:
        objective: The loss.
        optimizer: Master weights and moments, for a caller that computes the gradients itself.
        scorer: Splits samples into micro-batches and computes their log-probs.

    Raises:
        ValueError: The loss is unknown, the model cannot be trained, or LoRA is set without PEFT.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning: LearnerSettings | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        valid_vocab: int | None = None,
    ) -> None:
        learning = learning or LearnerSettings()
        self.objective = Objective(learning)
        settings = learning.model
        self._tokenizer = tokenizer
        # All parameters. With LoRA, `LoraAdapters` freezes the model's own again.
        model.requires_grad_(True)
        self._lora = None if settings.lora is None else LoraAdapters(model, settings.lora)
        self._model = model if self._lora is None else self._lora.model
        # Only tests use float64: they compare with a slow reference to the last digits.
        compute = torch.float64 if model.dtype == torch.float64 else resolve_dtype(settings.dtype)
        warn_of_slow_products(compute, model.device)
        # `named_parameters` lists a tied tensor once, under its first name.
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        # The masters copy the loaded values, so this precedes the rounding below.
        self.optimizer = MasterOptimizer(trained, learning.optimizer, compute)
        for parameter in self._model.parameters():
            # Only parameters: buffers such as the rotary frequencies stay precise.
            parameter.data = parameter.data.to(compute)
        self.scorer = PolicyScorer(self._model, settings, valid_vocab=valid_vocab)

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self.optimizer.steps

    @property
    def devices(self) -> tuple[str, ...]:
        """Device that it computes on; see ``OnDevices``."""
        return (device_name(self.scorer.device),)

    def peak_mb(self) -> float:
        """Return the peak memory of this process so far in MiB, including an engine in it."""
        return peak_mb(self.scorer.device)

    def update(self, batch: TrainBatch, controls: Controls) -> dict[str, float]:
        """Make one update from the mini-batch; see ``Learner.update``.

        Raises:
            NotFiniteError: The loss or gradient norm is not finite (weights and moments are unchanged), or the new
                weights are not, and the learner cannot be used any more.
            ValueError: The batch has no loss tokens, or only some samples carry a kind of log-probs.
        """
        # From the whole mini-batch: T_k and the group sizes do not depend on micro-batches (D3).
        weights, statistics = self.objective.sample_weights(batch), self.objective.statistics(batch)

        def accumulate(chosen: Sequence[int], scale: float) -> LossMetrics:
            samples = [batch.samples[i] for i in chosen]
            return self.accumulate(samples, weights[list(chosen)], controls, statistics, loss_scale=scale)

        values, failure, culprit = self.optimizer.update(
            accumulate, len(batch.samples), controls.learning_rate, self.objective.advice
        )
        if failure is not None:
            raise NotFiniteError.of(failure, batch.samples, culprit)
        return values

    def accumulate(
        self,
        samples: Sequence[TrainSample],
        weights: Tensor,
        controls: Controls,
        statistics: Mapping[str, Any] = MappingProxyType({}),
        *,
        loss_scale: float = 1.0,
    ) -> LossMetrics:
        """Add these samples' share of the mini-batch's gradient to ``gradients()``, one micro-batch at a time.

        Args:
            samples: All samples of a mini-batch, or one worker's share of them.
            weights: ``[samples]``, these samples' entries of the whole mini-batch's ``Objective.sample_weights``.
            controls: Settings of this update.
            statistics: Statistics of the whole mini-batch.
            loss_scale: Factor that scales the gradients, for float16.

        Returns:
            Sums over these samples. Those of other shares add to them.
        """
        jobs = (
            ([samples[i] for i in members], weights[members], packed)
            for members, packed in self.scorer.micro_batches(samples)
        )
        head = self.scorer.head.weight
        return self.objective.accumulate(
            self.scorer,
            jobs,
            controls,
            statistics=statistics,
            head_gradient=lambda: self.optimizer.gradient_of(head),
            loss_scale=loss_scale,
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients since the last update by parameter name, in the masters' precision."""
        return self.optimizer.gradients()

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token, ``[T]`` per sample, without gradient."""
        return self.scorer.score(samples, temperature)

    def weights(self) -> Mapping[str, Any]:
        """Return the weights by HF parameter name in the compute precision, LoRA merged. A tied weight once."""
        if self._lora is not None:
            return self._lora.merged_weights()
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def adapters(self) -> Mapping[str, Any]:
        """Return only the LoRA adapters, by PEFT's names; see `magicrl.models.adapters`."""
        assert self._lora is not None, "without LoRA there are no adapters"
        return self._lora.tensors()

    def state(self) -> Mapping[str, Any]:
        """Return masters, moments and counters; see ``MasterOptimizer.state``. With LoRA only those of the adapters."""
        return self.optimizer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. Training continues bit for bit."""
        self.optimizer.restore(state)

    def save_hf(
        self,
        folder: Path,
        *,
        extra_files: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a model folder in the compute precision, LoRA merged; see ``save_policy``.

        The adapters alone are in its folder ``adapter``, in PEFT's format.

        Raises:
            ValueError: The learner was created without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("save_hf needs the tokenizer; pass it to LocalLearner(tokenizer=...)")
        model = self._model if self._lora is None else self._lora.merged_model()
        adapters = {} if self._lora is None else {ADAPTER: self._lora.write}
        save_policy(
            model, self._tokenizer, folder, extra_files=extra_files, generation=generation, extra_folders=adapters
        )


class ReferenceModel:
    """Frozen reference model pi_ref of the k3 term (recipe, section 2).

    Args:
        model: Model in the precision it computes in. The reference owns it from here on.
        valid_vocab: Number of rows of the head that are tokens. None means all.
        model_config: Micro-batch and head-chunk sizes.
    """

    def __init__(
        self, model: PreTrainedModel, *, valid_vocab: int | None = None, model_config: ModelConfig | None = None
    ) -> None:
        model.requires_grad_(False)
        self._scorer = PolicyScorer(model, model_config, valid_vocab=valid_vocab, frozen=True)

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Return log-probs and entropies of every response token at tau, ``[T]`` per sample."""
        return self._scorer.score(samples, temperature)


# Torch's names of AdamW's two moments, and of Muon's one.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MUON = ("momentum_buffer",)
# Values per buffer: 4 MiB in float32.
_WIDEN_CHUNK = 1 << 20
# Values per partial sum in float32. The partial sums are added in float64.
_NORM_CHUNK = 1 << 12


class MasterOptimizer:
    """Float32 masters, AdamW and gradient clipping for a model that computes in ``compute_dtype``.

    In bfloat16 a weight of 1 cannot change by less than 1/256, so updates of 1e-6 would be lost, and so would small
    gradients added to large ones. Weights, gradients and moments are therefore kept in float32, and the model holds a
    rounded copy. Where the model computes in the masters' precision, the two are the same tensors. The loss of a
    float16 model is scaled (`LossScale`).

    Args:
        parameters: Trained parameters by name, each tied one once, in float32 (or float64, for tests). They are
            converted to ``compute_dtype`` here.
        config: AdamW settings. The learning rate is passed with each step.
        compute_dtype: Precision of the model.

    Attributes:
        loss_scale: Factor that scales the loss in `collect`.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: AdamWConfig, compute_dtype: torch.dtype
    ) -> None:
        assert parameters, "nothing to train"
        self._config = config
        self.loss_scale = LossScale(dynamic=compute_dtype == torch.float16)
        self._compute = dict(parameters)
        self._masters: dict[str, Tensor] = {}
        self._shared = compute_dtype in (torch.float32, torch.float64)
        for name, parameter in self._compute.items():
            if self._shared:
                parameter.data = parameter.data.to(compute_dtype)
                self._masters[name] = parameter
                continue
            master = parameter.detach().to(torch.float32, copy=True).requires_grad_()
            master.grad = torch.zeros_like(master)
            self._masters[name] = master
            parameter.data = parameter.data.to(compute_dtype)
            if serves(parameter):
                parameter.gradient_sum = master.grad  # pyright: ignore[reportAttributeAccessIssue]
            # Added at once, so that at most one layer's gradients exist twice.
            parameter.register_post_accumulate_grad_hook(partial(_add_to_master, master))
        muon = config if isinstance(config, OptimizerConfig) and config.kind == "muon" else None
        matrices = set[str]() if muon is None else muon_matrices(parameters)
        self._moments = {name: _MUON if name in matrices else _MOMENTS for name in self._masters}
        # Each step sets its own learning rate.
        self._adam = torch.optim.AdamW(
            # A group, because it may be empty: adapters are matrices.
            [{"params": [master for name, master in self._masters.items() if name not in matrices]}],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._optimizers: list[torch.optim.Optimizer] = [self._adam]
        if muon is not None:
            self._optimizers.append(
                torch.optim.Muon(
                    [self._masters[name] for name in self._masters if name in matrices],
                    momentum=muon.momentum,
                    weight_decay=muon.weight_decay,
                    # Updates as large as AdamW's, so that its learning rates and decay fit (arXiv 2502.16982).
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self._by_kernel = muon is None and serves(*self._compute.values())
        self._finite = True  # after the last step by kernels
        self.steps = 0

    def configure(self, config: AdamWConfig) -> None:
        """Use these settings of AdamW from the next step on. The moments stay."""
        self._config = config
        for group in self._adam.param_groups:
            group |= {"betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": config.weight_decay}

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return the buffer that a backward pass may add ``parameter``'s gradient to. None if it is not trained."""
        # A tied head shares its weight with the embedding: both backward passes add to one gradient.
        for name, trained in self._compute.items():
            if trained is parameter:
                master = self._masters[name]
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                return master.grad
        return None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of all backward passes since the last step by parameter name, zeros where there was
        none."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def update(
        self,
        accumulate: Callable[[Sequence[int], float], LossMetrics],
        count: int,
        learning_rate: float,
        advice: Callable[[LossMetrics], str],
    ) -> tuple[dict[str, float], str | None, int | None]:
        """Make one AdamW step from a mini-batch of ``count`` samples.

        Args:
            accumulate: Adds the gradients of the samples with these indices to the masters', times a loss scale.
            count: Number of samples. Ranks pass that of the whole mini-batch.
            learning_rate: Learning rate of the step.
            advice: Returns what to do about a loss or gradient that is not finite, from its metrics.

        Returns:
            The metrics. Why the weights are unchanged or unusable, None if they are updated. The first sample whose own
            loss or gradient is not finite, None if no such sample causes the failure.
        """
        metrics, norm = self.collect(lambda scale: accumulate(range(count), scale))
        values = metrics.values()
        # Checked before AdamW's step: a NaN in its moments would stay there.
        for name, value in (("loss", values["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                culprit = None
                for index in range(count):
                    self.forget()
                    # One sample at a time, with its weight in the mini-batch: a sum does not show which has the NaN.
                    own = accumulate([index], 1.0)
                    if not (math.isfinite(own.values()["loss"]) and math.isfinite(self.gradient_norm())):
                        culprit, metrics = index, own
                        break
                self.forget()  # The gradients are unusable, even if the caller catches the error.
                return (
                    {},
                    f"the {name} of update {self.steps + 1} is {value}; weights and optimizer are unchanged. "
                    + advice(metrics),
                    culprit,
                )
        self.step(learning_rate, norm)
        failure = None
        # A finite gradient can still overflow a weight. The step cannot be undone, so the run stops.
        if not self.weights_are_finite():
            failure = (
                f"update {self.steps} gave weights that are not finite, with a learning rate of {learning_rate:g}; "
                "this step is in no checkpoint. Start a new run with a lower optimizer.learning_rate, or with another "
                "start model if its weights are very large"
            )
        further = {"grad_norm": norm, "learning_rate": learning_rate, **self.loss_scale.metrics()}
        return {**values, **further}, failure, None

    def collect(self, accumulate: Callable[[float], LossMetrics]) -> tuple[LossMetrics, float]:
        """Return a mini-batch's metrics and its gradient norm, with the gradients in the masters.

        ``accumulate`` adds up the gradients times the loss scale it receives. It is called again with a smaller scale
        where they overflow.
        """
        before = self.loss_scale.state()
        while True:
            metrics, scale = accumulate(self.loss_scale.value), self.loss_scale.value
            if scale != 1.0:
                for gradient in self.gradients().values():
                    gradient.mul_(1 / scale)  # A power of two, so nothing is rounded.
            norm = self.gradient_norm()
            if math.isfinite(norm):
                return metrics, norm
            # A smaller scale does not help a loss that is not finite.
            if not math.isfinite(metrics.values()["loss"]) or not self.loss_scale.lower():
                self.loss_scale.restore(before)
                return metrics, norm
            self.forget()

    def gradient_norm(self) -> float:
        """Return the global L2 norm of the gradients."""
        return math.sqrt(sum(float(square_sum(gradient)) for gradient in self.gradients().values()))

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_norm: float) -> None:
        """Clip the gradients to ``max_grad_norm``, make one step of each optimizer, refresh the model's copy."""
        gradients = self.gradients().values()
        factor = min(1.0, self._config.max_grad_norm / gradient_norm) if gradient_norm else 1.0
        if self._by_kernel:
            with torch.profiler.record_function("magicrl::adamw"):
                self._step_by_kernel(learning_rate, factor)
        else:
            if factor < 1.0:
                for gradient in gradients:
                    gradient.mul_(factor)
            # Both multiply their decay by the learning rate, so warm-up scales it too.
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            self.forget()
            self._refresh()
        self.steps += 1
        self.loss_scale.passed()

    def _step_by_kernel(self, learning_rate: float, factor: float) -> None:
        """Make AdamW's step in one pass over the weights, with torch's state."""
        config = self._config
        self._finite = True
        for name, master in self._masters.items():
            state = self._adam.state[master]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {moment: torch.zeros_like(master) for moment in _MOMENTS}
            state["step"] += 1
            assert master.grad is not None
            self._finite &= adamw(
                master.detach(),
                self._compute[name].detach(),
                master.grad,
                (state["exp_avg"], state["exp_avg_sq"]),
                step=int(state["step"]),
                learning_rate=learning_rate,
                betas=(config.beta1, config.beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                factor=factor,
            )

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """Return whether every master is finite after a step."""
        if self._by_kernel:
            return self._finite
        # Sums suffice, with one synchronisation of the device.
        return bool(torch.stack([master.sum() for master in self._masters.values()]).isfinite().all())

    def forget(self) -> None:
        """Drop the gradients."""
        for name, master in self._masters.items():
            if master is self._compute[name]:
                master.grad = None
            # A separate master keeps its buffer, since the hooks add to it.
            elif master.grad is not None:
                master.grad.zero_()
                self._compute[name].grad = None

    def state(self) -> dict[str, Any]:
        """Return ``weights/<name>``, ``exp_avg/<name>``, ``exp_avg_sq/<name>`` (from the first step on) and ``meta``.

        A matrix of Muon has ``momentum_buffer/<name>`` instead.

        The tensors are not copies: they change with the next step.
        """
        tensors = {f"weights/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for optimizer in self._optimizers:
                if master in optimizer.state:
                    tensors |= {f"{moment}/{name}": optimizer.state[master][moment] for moment in self._moments[name]}
        return {**tensors, "meta": self.meta()}

    def meta(self) -> dict[str, Any]:
        """Return the scalars of ``state``: ``optimizer_steps``, and with float16 the loss scale."""
        return {"optimizer_steps": self.steps, **self.loss_scale.state()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned.

        Raises:
            ValueError: The state holds other parameters than this model. The first differences are named.
        """
        steps = int(state["meta"]["optimizer_steps"])
        expected = {f"weights/{name}": master.shape for name, master in self._masters.items()}
        # AdamW has no moments before its first step.
        if steps:
            expected |= {
                f"{m}/{name}": master.shape for name, master in self._masters.items() for m in self._moments[name]
            }
        given = {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}
        check_state_shapes("the checkpoint", given, expected)
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for name, master in self._masters.items():
            master.copy_(state[f"weights/{name}"])
            if steps:
                # On the master's device and in its precision, wherever the state was read.
                moments: dict[str, Any] = {
                    moment: torch.empty_like(master).copy_(state[f"{moment}/{name}"]) for moment in self._moments[name]
                }
                if self._moments[name] is _MUON:
                    self._optimizers[-1].state[master] = moments
                else:
                    self._adam.state[master] = {"step": torch.tensor(float(steps), device=master.device), **moments}
        self.steps = steps
        self.loss_scale.restore(state["meta"])
        self.forget()
        self._refresh()

    def _refresh(self) -> None:
        if not self._shared:
            for name, parameter in self._compute.items():
                # Rounded from the master each time, so that rounding errors do not add up.
                parameter.data.copy_(self._masters[name])


def muon_matrices(parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that Muon updates: matrices, without embeddings and head.

    Raises:
        ValueError: There is no such matrix.
    """
    outer = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out"}
    found = {name for name, value in parameters.items() if value.ndim == 2 and not outer & set(name.split("."))}
    if not found:
        raise ValueError('"muon": this model trains no matrix in its decoder layers; use "adamw"')
    return found


def check_state_shapes(
    what: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ``ValueError`` unless a learner's state, named ``what`` in the error, has exactly the expected tensors."""
    if dict(found) != dict(expected):
        differing = sorted(set(found.items()) ^ set(expected.items()))[:3]
        raise ValueError(
            f"{what} does not belong to this model: it differs in {[name for name, _ in differing]} "
            f"({len(found)} tensors there, {len(expected)} expected); resume with the recipe that wrote it"
        )


def _add_to_master(master: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's and drop it."""
    if parameter.grad is None:
        return
    assert master.grad is not None
    if serves(parameter.grad):
        add_widened(master.grad, parameter.grad)
        parameter.grad = None
        return
    total, part = master.grad.view(-1), parameter.grad.reshape(-1)
    # Widened in a small buffer, which is six times as fast as torch's sum of two precisions.
    buffer = torch.empty(min(_WIDEN_CHUNK, len(total)), dtype=total.dtype, device=total.device)
    for into, piece in zip(total.split(_WIDEN_CHUNK), part.split(_WIDEN_CHUNK), strict=True):
        into.add_(buffer[: len(piece)].copy_(piece))
    parameter.grad = None


def square_sum(values: Tensor) -> Tensor:
    """Return the sum of squares in float64. One float32 sum over an embedding's gradient has only two right digits."""
    if serves_both(values, width=LANES):  # numbers of any shape, one after the other
        return cpu_kernels.square_sum(values)
    flat = values.reshape(-1)
    whole = len(flat) // _NORM_CHUNK * _NORM_CHUNK
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_CHUNK), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    return rows.square().sum() + rest.square()


WORTH_IT_BYTES = 1 << 30
"""Resident size below which memory is not returned: there is little to win, and the call takes time."""


_MALLOC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # None where the C library has none (macOS, musl)


def release_free_memory() -> None:
    """Return the allocator's free pages to the system if the process is large.

    Micro-batches differ in size, so glibc's heap fragments: with a 135M-parameter model it kept 4 GB of free pages
    after thirty steps. ``malloc_trim`` returns them and changes only the resident size.
    """
    if _MALLOC_TRIM is not None and psutil.Process().memory_info().rss > WORTH_IT_BYTES:
        _MALLOC_TRIM(ctypes.c_size_t(0))


START_SCALE = 2.0**16
LEAST_SCALE = 1.0
"""Scale below which an overflow has another cause."""
GROWS_AFTER = 100
"""Updates without an overflow after which the factor doubles. If it is then too high, one update in 100 runs twice."""


class LossScale:
    """Factor on the loss that keeps float16 gradients inside float16's range: a power of two, constant 1 unless
    ``dynamic``.

    float16 has a finer resolution than bfloat16 (10 fraction bits, not 7) and a smaller range: numbers below 3e-8
    become 0, numbers above 65504 infinite. In a mini-batch of 100,000 tokens one token's gradient on an unlikely
    token's logit is below 1e-8. So the loss is multiplied by a power of two before the backward pass, and the float32
    gradient sums are divided by it, exactly, before clipping and AdamW read them. The scaling is dynamic as in
    Micikevicius et al. (2018, section 3.2), with one difference: a mini-batch whose gradients overflow is not skipped
    but computed again with half the factor, so that every mini-batch makes its update.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self._dynamic = dynamic
        self.value = START_SCALE if dynamic else 1.0
        """Current factor on the loss."""
        self._passed = 0

    def lower(self) -> bool:
        """Halve the factor after an overflow. Returns False if it cannot be lowered."""
        if not self._dynamic or self.value <= LEAST_SCALE:
            return False
        self.value, self._passed = self.value / 2, 0
        return True

    def passed(self) -> None:
        """Count an update without an overflow, and double the factor when it is due."""
        self._passed += self._dynamic
        if self._passed == GROWS_AFTER:
            self.value, self._passed = self.value * 2, 0

    def metrics(self) -> dict[str, float]:
        """Return ``loss_scale``, or nothing where it is constant."""
        return {"loss_scale": self.value} if self._dynamic else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, empty where the factor is constant."""
        return {"loss_scale": self.value, "updates_at_loss_scale": self._passed} if self._dynamic else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. The state of another precision has no factor, so it starts again."""
        if self._dynamic:
            self.value = float(state.get("loss_scale", START_SCALE))
            self._passed = int(state.get("updates_at_loss_scale", 0))
