"""The whole algorithm in one file: MAGIC, the recipe of Skywork Open Reasoner 1, built from magicrl's parts.

    python examples/loop.py                  # a tiny model; half a minute on one CPU core
    python examples/loop.py FOLDER           # another starting model

Departures from GRPO, in the order of the report's section 3. The numbers appear again in the code.

1. Multi-stage training: a short response limit T first, the next one when accuracy has converged.
2. No advantage mask: a truncated response has reward 0 and takes part in its group's mean.
3. Sampling at temperature 1, and the loss is of that same distribution.
4. On-policy: one SGD step per rollout batch (N_SGD = 1), so the ratio rho is 1 and no clipping happens.
5. Token-level loss: one denominator, the response tokens of the whole batch, and no length normalisation.
6. Rejection: groups whose rewards are all equal leave the batch.
7. Adaptive entropy control: the coefficient alpha grows while entropy is below its target.
8. No KL loss.

`magicrl.training.step.Trainer` is the same loop with every option of the recipe. `tests/e2e/loop/test_loop_example.py`
shows that both compute the same weights, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from magicrl.algorithms.advantages import reject_zero_advantage, score_group
from magicrl.algorithms.entropy import AdaptiveEntropyController, measure_entropy
from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.loader import load_sft_recipe
from magicrl.config.model_schema import ModelConfig
from magicrl.config.schema import StageConfig
from magicrl.data.families import unique_problems
from magicrl.data.running_sum import make_running_sum
from magicrl.data.sampler import PromptSampler
from magicrl.models.loading import load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, RolloutRequest, SamplingParams, ScoredGroup, TrainBatch
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import in_process_engine
from magicrl.training.curriculum import StageSchedule
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls
from magicrl.training.sft import run_sft
from magicrl.training.step import train_samples
from magicrl_verifiers import JudgeOptions, VerifierPool

SEED = 0
TEMPERATURE = 1.0  # 3. tau
LEARNING_RATE = 5e-3
STAGES = (  # 1. T, D_R and M of each stage, and when it ends
    StageConfig.model_validate(
        {"max_tokens": 8, "rollout_batch": 16, "group_size": 8, "max_steps": 6, "transition": {"rule": "fixed"}}
    ),
    StageConfig.model_validate(
        {"max_tokens": 24, "rollout_batch": 16, "group_size": 8, "max_steps": 6, "transition": {"rule": "fixed"}}
    ),
)


class Loop:
    """A training run: its parts, one `step`, and `run`."""

    def __init__(self, model: Path | str, problems: Sequence[Problem], stages: Sequence[StageConfig]) -> None:
        policy, sampled_from = (load_policy(model, dtype="float32", device=torch.device("cpu")) for _ in range(2))
        encoder = PromptEncoder(policy.tokenizer, max_prompt_tokens=policy.max_context)
        self.encode = encoder.encode
        sizes = EngineSettings(model=policy.folder, max_rows=128, memory_limit_mb=256)
        self.engine = in_process_engine(sampled_from, encoder.decode, sizes)
        settings = LearnerSettings(
            algorithm=AlgorithmConfig(loss="magic"),  # 5. Eq. 3.1, with its own reducer: one token count for the batch
            model=ModelConfig(dtype="float32"),
        )
        self.learner = LocalLearner(policy.model, settings, tokenizer=policy.tokenizer, valid_vocab=policy.valid_vocab)
        self.verifiers = VerifierPool(options=JudgeOptions(extract="lenient"))
        self.controller = AdaptiveEntropyController(target=1.4, step=0.005)  # 7.
        self.schedule = StageSchedule(stages)
        self.sampler = PromptSampler(problems, seed=SEED)
        self.draws = itertools.count()
        self.engine.sync_weights(self.learner)

    def generate(self, stage: StageConfig) -> list[ScoredGroup]:
        """Return D_R groups of M verified responses, in the order in which their problems were drawn."""
        sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=stage.max_tokens, seed=SEED)
        requests = [
            RolloutRequest(
                draw=next(self.draws),
                problem=problem,
                prompt_tokens=self.encode(problem),
                group_size=stage.group_size,
                sampling=sampling,
            )
            for problem in self.sampler.next(stage.rollout_batch)
        ]
        self.engine.submit(requests)
        # a group is verified as soon as its last response ends, while the engine generates others
        tickets = [
            (group, self.verifiers.submit(group.request.problem, [c.text for c in group.completions]))
            for group in self.engine.finished()
        ]
        scored = [score_group(group, self.verifiers.result(ticket)) for group, ticket in tickets]
        return sorted(scored, key=lambda one: one.group.request.draw)

    def step(self, stage: StageConfig) -> dict[str, float]:
        """Run one training step: sample, verify, measure entropy, reject, advantages, update."""
        groups = self.generate(stage)

        # 7. measured over the whole buffer, before rejection, because rejected groups have another entropy
        entropy = measure_entropy([c for g in groups for c in g.group.completions], "exact")
        assert entropy is not None, "the in-process engine reports entropies"
        alpha = self.controller.coefficient(entropy.mean)

        kept = [groups[i] for i in reject_zero_advantage(groups).kept]  # 6.
        samples = train_samples(kept, mask="none")  # 2. advantages of Eq. 2.5: (r - mean) / standard deviation
        if samples:
            batch = TrainBatch.of(samples, max_response_tokens=stage.max_tokens)
            controls = Controls(
                alpha=alpha,
                clip_low=0.2,
                clip_high=0.2,
                temperature=TEMPERATURE,
                learning_rate=LEARNING_RATE,
                kl_coefficient=0.0,  # 8.
            )
            self.learner.update(batch, controls)  # 4. one update
        self.controller.observe(entropy.mean)
        self.engine.sync_weights(self.learner)

        correct = [bool(right) for group in groups for right in group.correct]
        accuracy = sum(correct) / len(correct)
        self.schedule.observe_accuracy(accuracy, None)  # 1. for stages that end by convergence
        self.schedule.finish_step()
        return {"accuracy": accuracy, "entropy": entropy.mean, "alpha": alpha, "groups kept": len(kept)}

    def run(self) -> None:
        """Train until the last stage ends."""
        while (stage := self.schedule.stage) is not None:
            shown = "  ".join(f"{name} {value:.3g}" for name, value in self.step(stage).items())
            print(f"update {self.learner.version:3d}  T {stage.max_tokens}  {shown}")
        self.engine.close()
        self.verifiers.close()


def problems() -> list[Problem]:
    """Return 80 problems: the running sum of some digits."""
    return unique_problems(make_running_sum(), seed=1, split="train", count=80, levels=[2])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        start: Path | str = sys.argv[1]
    else:  # a model that was taught to end its responses; made once, in two seconds
        start = run_sft(load_sft_recipe(Path("tiny-sft")), Path("runs/models/tiny-start"))
    Loop(start, problems(), STAGES).run()
