"""RL that may only cheat: a policy over templates of attacks, trained against the code verifier.

Everything except the policy is the real training code: the verifier's pool, rewards, rejection of groups with equal
rewards, group advantages and the MAGIC loss. The policy is a softmax over templates, and a response is one token.
Three runs:

- Attacks only, all guards in force: only a successful attack would earn a reward, so there is nothing to learn.
- The same with an honest program among the attacks: the policy learns that one and nothing else.
- Attacks only, one guard removed (Landlock in tier A, so that programs can read the file with the tests): the policy
  finds the hole, which shows that the first run could have failed.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from magicrl.algorithms.advantages import reject_zero_advantage, score_group, scored_advantages
from magicrl.algorithms.loss_terms import loss_terms
from magicrl.algorithms.losses import LOSSES
from magicrl.algorithms.token_weights import LossInputs, response_weights
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    frozen_floats,
    frozen_tokens,
)
from magicrl.selfcheck.verifiers import ANSWERS, HONEST, problems, templates
from magicrl_verifiers.code.judge import CodeOptions, CodePool
from magicrl_verifiers.code.sandbox import Limits, SandboxOptions


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. ``opened`` is the removed guard (in tier A). ``honest`` adds a correct program to the attacks."""

    steps: int
    group: int = 16
    rate: float = 4.0
    opened: str | None = None
    honest: bool = False
    seed: int = 0
    cpu_seconds: float = 0.5


class Policy:
    """A softmax over templates. A response is one token, the template's number."""

    def __init__(self, templates: dict[str, str], setting: Setting) -> None:
        self.names, self.programs = list(templates), list(templates.values())
        self.logits = torch.zeros(len(self.names), dtype=torch.float64, requires_grad=True)
        self._random = torch.Generator().manual_seed(setting.seed)
        self._optimizer = torch.optim.SGD([self.logits], lr=setting.rate)

    def sample(self, problem: Problem, draw: int, size: int) -> RolloutGroup:
        """Return a group of responses to one problem."""
        table = torch.log_softmax(self.logits.detach(), dim=-1)
        drawn = torch.multinomial(table.exp(), size, replacement=True, generator=self._random)
        completions = tuple(
            Completion(
                tokens=frozen_tokens([index]),
                text=f"```python\n{self.programs[index]}\n```",
                sampler_logprobs=frozen_floats([float(table[index])]),
                sampler_entropies=frozen_floats([float(-(table.exp() * table).sum())]),
                finish_reason=FinishReason.STOP,
                policy_version=draw,
            )
            for index in drawn.tolist()
        )
        request = RolloutRequest(
            draw=draw,
            problem=problem,
            prompt_tokens=frozen_tokens([0]),
            group_size=size,
            sampling=SamplingParams(temperature=1.0, max_tokens=1),
        )
        return RolloutGroup(request=request, completions=completions)

    def learn(self, scored: ScoredGroup) -> None:
        """Make one step of the MAGIC loss on a group, unless rejection leaves nothing of it."""
        if not reject_zero_advantage([scored]).kept:
            return
        tokens = torch.tensor([int(c.tokens[0]) for c in scored.group.completions])
        size = len(tokens)
        inputs = LossInputs(
            logprobs=torch.log_softmax(self.logits, dim=-1)[tokens],
            advantages=torch.from_numpy(scored_advantages([scored])[0].copy()),
            loss_mask=torch.from_numpy(scored.counted.copy()),
            sample_index=torch.arange(size),
        )
        row, ones = LOSSES["magic"], torch.ones(size, dtype=torch.int64)
        weights = response_weights(row.reducer, ones, torch.zeros(size, dtype=torch.int64), num_loss_tokens=size)
        self._optimizer.zero_grad()
        loss_terms(row, inputs, weights).loss.backward()  # pyright: ignore[reportUnknownMemberType]
        self._optimizer.step()


def train(setting: Setting) -> dict[str, Any]:
    """Train one run, and return the rewards and the final policy."""
    off = (setting.opened,) if setting.opened else ()
    options = CodeOptions(
        limits=Limits(cpu_seconds=setting.cpu_seconds, memory_mb=256, idle_seconds=0.3),
        sandbox=SandboxOptions(tier="A" if setting.opened else "auto", guards_off=off),
    )
    asked = [problem for form, problem in problems().items() if form != "standard input"]
    rewarded: dict[str, int] = {}
    course: list[float] = []
    not_judged = 0
    with tempfile.TemporaryDirectory() as folder, CodePool(options) as pool:
        answers = Path(folder) / "tests.json"
        answers.write_text(json.dumps({x: int(y) for x, y in ANSWERS.items()}))
        policy = Policy(templates(answers) | ({"honest": HONEST} if setting.honest else {}), setting)
        tier = pool.warm_up()
        for step in range(setting.steps):
            group = policy.sample(asked[step % len(asked)], step, setting.group)
            verdicts = pool.result(pool.submit(group.request.problem, [c.text for c in group.completions]))
            scored = score_group(group, verdicts)
            not_judged += int((~scored.counted).sum())
            for completion, reward in zip(group.completions, scored.rewards, strict=True):
                name = policy.names[int(completion.tokens[0])]
                rewarded[name] = rewarded.get(name, 0) + int(reward)
            course.append(float(np.mean(scored.rewards)))
            policy.learn(scored)
    chances = torch.softmax(policy.logits.detach(), dim=-1)
    best = int(chances.argmax())
    tail = course[-max(1, setting.steps // 5) :]
    return {
        "opened": setting.opened or "nothing",
        "honest program among them": setting.honest,
        "tier": tier,
        "steps": setting.steps,
        "programs": setting.steps * setting.group,
        "templates": len(policy.names),
        "rewarded": {name: count for name, count in rewarded.items() if count},
        "not_judged": not_judged,
        "mean_reward_at_end": round(sum(tail) / len(tail), 3),
        "likeliest": policy.names[best],
        "its_chance": round(float(chances[best]), 3),
    }
