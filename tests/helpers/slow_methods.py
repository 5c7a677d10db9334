"""The slow loop with all built-in losses, advantages, reducers and presets of the entropy control.

Like `slow_loop.py` it shares no code with `magicrl.algorithms`: one group, one response and one token at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from slow_loop import CLIPS, Group, Response, SlowLoop
from torch import Tensor

FURTHER_CLIPS = {"ce_gppo": (0.2, 0.2), "aspo": (0.2, 0.2), "dppo": (0.2, 0.2), "dppo_kl": (0.05, 0.05)}
LOSSES = (*CLIPS, *FURTHER_CLIPS, "sapo")
REDUCERS = {
    **dict.fromkeys(("grpo", "gspo", "sapo"), "response_mean"),
    **dict.fromkeys(("ppo", "pg"), "sequence_sum"),
    "dr_grpo": "constant",
    "scalerl": "prompt_mean",
}
PRESETS = {"report": (0.2, 0.005, math.inf), "code": (0.2, 1e-4, 0.005), "small": (0.2, 0.01, 0.1)}
"""Target, D and c_max."""


def deviation(values: Sequence[float], less: int = 1) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - less)) if len(values) > less else 0.0


def pass_at_k(values: Sequence[float], at: int, k: int) -> float:
    """Return n times what a response adds to the best of k - 1 others, over all sets of k that contain it."""
    others = [value for place, value in enumerate(values) if place != at]
    gains = [max(0.0, values[at] - max(chosen)) for chosen in itertools.combinations(others, k - 1)]
    return len(values) * sum(gains) / math.comb(len(values), k)


class SlowMethods(SlowLoop):
    """A slow loop whose recipe may name any built-in method."""

    previous_entropy: float | None = None

    @property
    def target(self) -> float:
        stated = self.stated("entropy_target", "entropy", "target")
        return PRESETS[self.recipe["entropy"].get("preset", "report")][0] if stated is None else stated

    def _alpha(self, entropy: float) -> float:
        lagged = self.recipe["entropy"].get("preset") == "code" and self.recipe["entropy"]["controller"] == "adaptive"
        if lagged and self.previous_entropy is None:
            return 0.0
        return super()._alpha(self.previous_entropy if lagged and self.previous_entropy is not None else entropy)

    def _move_c(self, entropy: float) -> None:
        settings = self.recipe["entropy"]
        if settings["controller"] != "adaptive":
            return
        preset = settings.get("preset", "report")
        falls = entropy > self.target or (preset == "code" and entropy == self.target)
        self.c += settings.get("step", PRESETS[preset][1]) * ((entropy < self.target) - falls)
        self.c = min(max(self.c, 0.0), settings.get("maximum", PRESETS[preset][2]))
        self.previous_entropy = entropy

    def _give_logprobs(self, kept: Sequence[Group]) -> None:
        self._give_all_advantages(kept)
        super()._give_logprobs(kept)

    def _give_all_advantages(self, kept: Sequence[Group]) -> None:
        """Replace the advantages of all groups: some read the whole step."""
        algorithm = self.recipe["algorithm"]
        name = algorithm.get("advantage", "group")
        given: list[tuple[Response, float]] = []
        for group in kept:
            members = self._members(group)
            values = [self._shaped(response) for response in members]
            mean, spread = (sum(values) / len(values), deviation(values) + 1e-6) if values else (0.0, 1.0)
            apart = len(set(values)) > 1
            for place, (response, value) in enumerate(zip(members, values, strict=True)):
                advantage = value if name == "reinforce_pp" else value - mean if apart else 0.0
                if apart and (name == "gdpo" or (name == "group" and algorithm["loss"] != "dr_grpo")):
                    advantage /= spread
                elif apart and name == "rloo":
                    advantage = value - (sum(values) - value) / (len(values) - 1)
                elif apart and name == "maxrl":
                    advantage /= mean
                elif apart and name == "pass_at_k":
                    advantage = pass_at_k(values, place, min(algorithm["advantage_k"], len(values)))
                given.append((response, advantage))
        each = [advantage for _, advantage in given]
        if name.startswith("reinforce_pp"):  # over tokens
            each = [advantage for response, advantage in given for _ in response.tokens]
        centre = sum(each) / len(each) if each and (name == "gdpo" or name.startswith("reinforce_pp")) else 0.0
        scale = 1.0
        if each and (name in ("batch_std", "gdpo") or name.startswith("reinforce_pp")):
            scale = deviation(each, less=0 if name.startswith("reinforce_pp") else 1) + 1e-6
        for response in (r for group in kept for r in group.responses):
            response.advantage = 0.0
        for response, advantage in given:
            masked = response.truncated and algorithm["advantage_mask"] == "after"
            response.advantage = 0.0 if masked else (advantage - centre) / scale

    def _token_weight(self, response: Response, group: Group, groups: Sequence[Group]) -> float:
        algorithm = self.recipe["algorithm"]
        reducer = algorithm.get("reducer") or REDUCERS.get(algorithm["loss"], "global_tokens")
        each = 1 / (len(groups) * len(group.judged))
        if reducer == "global_tokens":
            return 1 / sum(len(r.tokens) for g in groups for r in g.judged)
        if reducer == "prompt_mean":
            return 1 / (len(groups) * sum(len(r.tokens) for r in group.judged))
        return each / {"response_mean": len(response.tokens), "constant": self.now["max_tokens"]}.get(reducer, 1)

    def _correction(self, log_weights: Tensor, advantage: float, kept: float) -> Tensor:
        self.log_weights = log_weights.detach()
        return super()._correction(log_weights, advantage, kept)

    def _surrogate(self, logprobs: Tensor, old: Tensor, advantage: float) -> tuple[Tensor, Tensor, Tensor]:
        name = self.recipe["algorithm"]["loss"]
        if name in CLIPS:
            return super()._surrogate(logprobs, old, advantage)
        rho = (logprobs - old).exp()
        if name == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            gate = 1 / (1 + (-tau * (rho - 1)).exp())
            return 4 / tau * gate * advantage, rho.detach(), torch.zeros(len(rho), dtype=torch.bool)
        low, high = (
            self.stated(key, "algorithm") or usual
            for key, usual in zip(("clip_low", "clip_high"), FURTHER_CLIPS[name], strict=True)
        )
        now, then, ratios = logprobs.detach().tolist(), (old - self.log_weights).detach().tolist(), rho.tolist()
        factors: list[float] = []
        clipped: list[bool] = []
        for log_pi, log_mu, ratio in zip(now, then, ratios, strict=True):
            risen, fallen = advantage > 0 and ratio > 1 + high, advantage < 0 and ratio < 1 - low
            if name.startswith("dppo"):
                pi, mu = math.exp(log_pi), math.exp(log_mu)
                distance = abs(pi - mu)
                if name == "dppo_kl":
                    others, then_others = -math.expm1(log_pi), -math.expm1(log_mu)
                    distance = mu * (log_mu - log_pi) + then_others * math.log(then_others / others)
                risen, fallen = (
                    advantage > 0 and pi > mu and distance > high,
                    advantage < 0 and pi < mu and distance > low,
                )
            factor = 0.0 if risen or fallen else 1.0
            if name == "ce_gppo":
                factor = (1 + high) / ratio if risen else 0.75 * (1 - low) / ratio if fallen else 1.0
            elif name == "aspo" and advantage > 0:
                factor *= min(1 / ratio, 3.0) / ratio
            factors.append(factor)
            clipped.append(risen or fallen)
        return torch.tensor(factors).double() * rho * advantage, rho.detach(), torch.tensor(clipped)
