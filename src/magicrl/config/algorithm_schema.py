"""Recipe tables ``[algorithm]``, ``[entropy]``, ``[reference]`` and ``[teacher]``: the loss of an update."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from magicrl.config.paths import FolderOrName, Reference, reference_to
from magicrl.config.section import Section
from magicrl.registry import is_builtin


class AlgorithmConfig(Section):
    """Loss, advantages and sampling rules of a training step. The defaults are MAGIC (Eq. 3.1 of the report)."""

    loss: Annotated[Reference, reference_to("loss")] = "magic"
    """Policy loss: {names in registry.py}, or a custom one, `file.py:ROW` (docs/guides/custom-parts.md)."""
    advantage: Annotated[Reference, reference_to("advantage")] = "group"
    """Advantage estimator: `group` (reward minus the group's mean, divided by its standard deviation), `rloo`, `maxrl`,
    `pass_at_k`, `batch_std`, `gdpo` (for several rewards), `reinforce_pp`, `reinforce_pp_baseline`
    (docs/guides/custom-parts.md), or a custom function, `file.py:function`."""
    advantage_k: int = Field(default=4, ge=2)
    """k of ``advantage = "pass_at_k"``, at most ``group_size``."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Number of tokens before ``max_tokens`` over which a length penalty of up to 1 is subtracted from the reward (soft
    overlong punishment of DAPO). Default: no penalty."""
    reducer: Annotated[Reference, reference_to("reducer")] | None = None
    """How token losses are averaged: `global_tokens`, `response_mean`, `prompt_mean`, `sequence_sum`, `constant`, or a
    custom function. Default: as the loss defines."""
    advantage_mask: Literal["none", "before", "after"] = "none"
    """Role of truncated responses in their group. ``none``: they count like others, with reward 0. ``before``: they are
    left out of the group's mean and deviation. ``after``: their advantage is set to 0."""
    clip_low: float | None = Field(default=None, gt=0)
    """eps_low, the lower clip range. Its meaning depends on the loss. Default: the loss's own value (0.2 for magic,
    ppo, grpo)."""
    clip_high: float | None = Field(default=None, gt=0)
    """eps_high, the upper clip range. Its meaning depends on the loss. Default: the loss's own value (0.2 for magic,
    ppo, grpo; 0.28 for dapo)."""
    reject_zero_advantage: bool = True
    """Leave out groups whose rewards are all equal. Their advantages are 0. With several rewards their weighted mean
    counts; with ``advantage = "gdpo"`` each reward of them must be equal."""
    stop_after_empty_steps: int = Field(default=20, ge=1)
    """Number of consecutive training steps without any usable group after which the run stops with an error."""
    refill: Literal["none", "until_full"] = "none"
    """``until_full``: sample more prompts to replace rejected groups (dynamic sampling); needs
    ``reject_zero_advantage``. ``none``: train on the groups that remain."""
    refill_rounds: int = Field(default=4, ge=1)
    """Maximum number of additional sampling rounds per training step."""
    minibatch: Literal["keep_n_sgd", "keep_d_t"] = "keep_n_sgd"
    """How the remaining groups are split into mini-batches. ``keep_n_sgd``: always into D_R / D_T parts. ``keep_d_t``:
    into parts of D_T prompts."""
    reuse: int = Field(default=1, ge=1)
    """N_reuse, the number of passes over the rollout buffer."""
    correction: Annotated[Reference, reference_to("correction")] = "none"
    """Importance sampling correction between engine and learner: ``none``, truncated (`tis`), masked per token (`mis`),
    masked by the second moment (`m2po`), or a custom function."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Maximum importance weight. ``tis`` truncates larger weights to it; ``mis`` leaves these tokens out."""
    second_moment: float = Field(default=0.04, gt=0)
    """tau_M2 of ``m2po``: maximum mean square of the log weights that remain in a mini-batch."""

    @model_validator(mode="after")
    def _refills_what_is_rejected(self) -> Self:
        if self.refill == "until_full" and not self.reject_zero_advantage:
            raise ValueError(
                'algorithm.refill = "until_full" samples in place of rejected groups, and with '
                "reject_zero_advantage = false none is: what it samples would be thrown away. Leave one of them out"
            )
        return self


class EntropyConfig(Section):
    """Entropy bonus: adaptive control (section 3.2.5 of the report), a fixed coefficient, or none."""

    controller: Annotated[Reference, reference_to("controller")] = "adaptive"
    """``adaptive``: the coefficient alpha is c while entropy is at or below the target, otherwise 0; after each step c
    rises or falls by D. ``fixed``: alpha is constant. ``none``: no bonus. Or a custom controller, `file.py:make`."""
    preset: Literal["report", "code", "small"] = "report"
    """Values of the adaptive controller. ``report``: D 0.005, c in [0, inf). ``code`` (as the released code): D 1e-4, c
    in [0, 0.005], one step late. ``small``: for models far below a billion parameters."""
    alpha: float | None = Field(default=None, ge=0)
    """Coefficient of the bonus with ``controller = "fixed"``."""
    target: float | None = Field(default=None, ge=0)
    """Target entropy in nats per token. Default: the preset's."""
    step: float | None = Field(default=None, gt=0)
    """D, the amount by which c changes per training step. Default: the preset's."""
    maximum: float | None = Field(default=None, gt=0)
    """c_max, the upper limit of c. Default: the preset's."""
    estimator: Literal["exact", "sampled"] = "exact"
    """How entropy is measured. ``exact``: over the whole distribution at each token. ``sampled``: mean of -log p of the
    sampled tokens."""

    @model_validator(mode="after")
    def _fixed_has_alpha(self) -> Self:
        own = not is_builtin("controller", self.controller)  # which may read alpha as it likes
        if not own and (self.controller == "fixed") != (self.alpha is not None):
            raise ValueError('entropy.alpha goes with entropy.controller = "fixed", and only with it')
        return self


class ReferenceConfig(Section):
    """Frozen reference model, for the KL divergence from it."""

    mode: Literal["none", "monitor", "loss"] = "none"
    """``none``: no reference model. ``monitor``: the KL is a metric. ``loss``: beta x KL (the k3 estimator) is also
    added to the loss."""
    model: FolderOrName | None = None
    """Folder or hub name of the reference model. Default: the starting model. It is the same in all stages."""
    coefficient: float = Field(default=0.0, ge=0)
    """beta, the weight of the KL penalty, for ``mode = "loss"``."""

    @model_validator(mode="after")
    def _beta_only_in_the_loss(self) -> Self:
        if (self.mode == "loss") != (self.coefficient > 0):
            raise ValueError('reference.coefficient > 0 goes with reference.mode = "loss", and only with it')
        return self


class TeacherConfig(Section):
    """On-policy distillation: coefficient x (the teacher's log-prob - the policy's) is added to each token's advantage.

    The teacher has the policy's tokenizer. `algorithm.reject_zero_advantage` must be false: a teacher also teaches
    where all rewards of a group are equal (docs/guides/models.md#distillation).
    """

    model: FolderOrName | None = None
    """Folder or hub name of the teacher, or its name on the ``server``. Default: the policy itself, which then needs a
    ``prompt``."""
    server: str | None = None
    """Address of a vLLM server with the teacher, as ``http://localhost:8000/v1``. Needed with `[cluster]`."""
    prompt: str | None = Field(default=None, min_length=1)
    """The teacher's prompt, in which ``{prompt}`` and ``{reference}`` stand for the problem's text and reference
    answer. Default: the policy's prompt."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the difference in the advantage."""
    with_rewards: bool = False
    """Whether the advantages of the rewards count too. Otherwise the rewards are only measured."""

    @property
    def local_model(self) -> str | None:
        """The model next to the learner; None if the teacher is served or the policy."""
        return self.model if self.server is None else None

    @field_validator("server")
    @classmethod
    def _no_password(cls, server: str | None) -> str | None:
        if server is not None and "@" in urlsplit(server).netloc:
            raise ValueError("teacher.server holds a password, and recipes are kept; use an address without one")
        return server

    @model_validator(mode="after")
    def _somebody_knows_more(self) -> Self:
        if self.server is None and self.model is None and self.prompt is None:
            raise ValueError(
                "[teacher] names neither a model nor a server, so that the policy would teach itself what it knows: "
                "set teacher.model, teacher.server, or a teacher.prompt with {reference}"
            )
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError("teacher.prompt does not hold {prompt}, so that the teacher would not see the problem")
        return self
