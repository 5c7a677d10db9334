"""The recipe's ``[algorithm]``, ``[entropy]`` and ``[reference]``: what an update minimises."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FolderOrName, Reference, door
from magicrl.config.section import Section
from magicrl.registry import is_builtin

LossName = Annotated[Reference, door("loss")]
AdvantageName = Annotated[Reference, door("advantage")]
ReducerName = Annotated[Reference, door("reducer")]
CorrectionName = Annotated[Reference, door("correction")]
ControllerName = Annotated[Reference, door("controller")]


class AlgorithmConfig(Section):
    """The update: Eq. 3.1 by default."""

    loss: LossName = "magic"
    """`magic`, `dapo`, `dr_grpo`, `grpo`, `gspo`, `ppo`, `pg`, `cispo`, `scalerl`, `sapo`, `ce_gppo`, `aspo`, `dppo`,
    `dppo_kl` (docs/reference/losses.md), or your own `file.py:ROW` (docs/guides/custom-parts.md)."""
    advantage: AdvantageName = "group"
    """Rewards to advantages: `group` (the group's mean and deviation), `rloo`, `maxrl`, `pass_at_k`, `batch_std`,
    `reinforce_pp`, `reinforce_pp_baseline` (docs/reference/losses.md), or your own function, `file.py:function`."""
    advantage_k: int = Field(default=4, ge=2)
    """k of ``advantage = "pass_at_k"``, at most the group's size."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """Tokens before T in which the reward that advantages are made of falls by up to 1 (DAPO); default: nowhere."""
    reducer: ReducerName | None = None
    """How tokens weigh: `global_tokens`, `response_mean`, `prompt_mean`, `sequence_sum`, `constant`, or your own;
    default: the row's."""
    advantage_mask: Literal["none", "before", "after"] = "none"
    """What a truncated response is to the group: ``none`` keeps it (reward 0), ``before`` leaves it out of mean and
    deviation, ``after`` sets its advantage to 0."""
    clip_low: float | None = Field(default=None, gt=0)
    """eps_low; default: the loss row's own (0.2 for magic, ppo, grpo)."""
    clip_high: float | None = Field(default=None, gt=0)
    """eps_high; default: the loss row's own (0.2 for magic, ppo, grpo; 0.28 for dapo)."""
    reject_zero_advantage: bool = True
    """Leave out groups whose rewards are all equal."""
    stop_after_empty_steps: int = Field(default=20, ge=1)
    """Steps in a row whose groups were all rejected before the run stops with an error."""
    refill: Literal["none", "until_full"] = "none"
    """``until_full``: sample further prompts in place of rejected groups; needs ``reject_zero_advantage``."""
    refill_rounds: int = Field(default=4, ge=1)
    """Most further sampling rounds a step may take to refill."""
    minibatch: Literal["keep_n_sgd", "keep_d_t"] = "keep_n_sgd"
    """How survivors of the rejection are split: into D_R / D_T parts, or into parts of D_T prompts."""
    reuse: int = Field(default=1, ge=1)
    """N_reuse: passes over the rollout buffer."""
    correction: CorrectionName = "none"
    """Importance weights between sampler and learner: truncated (`tis`), masked one by one (`mis`), masked by their
    second moment (`m2po`), `none`, or your own function."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Largest importance weight (``tis``), or the one above which a token is left out (``mis``)."""
    second_moment: float = Field(default=0.04, gt=0)
    """tau_M2: mean square of the log weights that ``m2po`` leaves in a mini-batch."""

    @model_validator(mode="after")
    def _refills_what_is_rejected(self) -> Self:
        if self.refill == "until_full" and not self.reject_zero_advantage:
            raise ValueError(
                'algorithm.refill = "until_full" samples in place of rejected groups, and with '
                "reject_zero_advantage = false none is: what it samples would be thrown away. Leave one of them out"
            )
        return self


class EntropyConfig(Section):
    """The entropy bonus: off, a fixed coefficient, or adaptive control (section 3.2.5)."""

    controller: ControllerName = "adaptive"
    """``adaptive``: alpha is c where entropy is at or below the target, else 0; c goes up or down by D a step;
    ``fixed``, ``none``, or your own, `file.py:make`."""
    preset: Literal["report", "code", "small"] = "report"
    """``report``: D 0.005, c in [0, inf); ``code``: D 1e-4, c in [0, 0.005], lag 1; ``small``: small models."""
    alpha: float | None = Field(default=None, ge=0)
    """The coefficient of ``controller = "fixed"``."""
    target: float | None = Field(default=None, ge=0)
    """Target entropy in nats per token; overrides the preset's."""
    step: float | None = Field(default=None, gt=0)
    """D; overrides the preset's."""
    maximum: float | None = Field(default=None, gt=0)
    """c_max; overrides the preset's."""
    estimator: Literal["exact", "sampled"] = "exact"
    """``exact``: of the whole distribution at each token; ``sampled``: mean of -log p of the sampled tokens."""

    @model_validator(mode="after")
    def _fixed_has_alpha(self) -> Self:
        own = not is_builtin("controller", self.controller)  # which may read alpha as it likes
        if not own and (self.controller == "fixed") != (self.alpha is not None):
            raise ValueError('entropy.alpha goes with entropy.controller = "fixed", and only with it')
        return self


class ReferenceConfig(Section):
    """A frozen reference model: absent, watched (KL as a metric) or in the loss (beta times k3)."""

    mode: Literal["none", "monitor", "loss"] = "none"
    """``monitor`` measures the KL, ``loss`` adds it."""
    model: FolderOrName | None = None
    """Model folder; default: the start model. A stage change never moves it."""
    coefficient: float = Field(default=0.0, ge=0)
    """beta, for ``mode = "loss"``."""

    @model_validator(mode="after")
    def _beta_only_in_the_loss(self) -> Self:
        if (self.mode == "loss") != (self.coefficient > 0):
            raise ValueError('reference.coefficient > 0 goes with reference.mode = "loss", and only with it')
        return self
