"""Time to a held-out accuracy: magicrl and TRL's GRPO on the showcase, with the same model, problems and batch.

    taskset -c 0 python -m benchmarks.speed.time_to_accuracy --seeds 1 --sides magicrl trl

Both sides start from the published SmolLM2-135M-Instruct and follow `src/magicrl/recipes/family.toml`: problems,
prompts and responses per update, response limit, verifier, learning rate, one AdamW step per update, no KL term. A
seed is that of sampling and of the training problems. One engine measures both on the same held-out problems, outside
the clock, which is CPU time in one thread. A run ends at the target or after `STEPS` updates. With ``--lower-bound``
TRL's run ends, and is measured, at the first update after `CLAIMED` times magicrl's CPU time. Runs are compared if the
model's own products took as long before and after both (`SAME_MACHINE`). A run that is in the JSON is not made again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import COMMITTED, ROOT, document, parser_of, rounded, with_tcmalloc, write_figure
from benchmarks.speed.measure import Clock, GemmBound, Times
from benchmarks.speed.models import SMOLLM2, model_folder, plain_model
from magicrl.config.loader import load_train_recipe
from magicrl.config.schema import TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.evaluation.job import evaluation_seed, sample_problems, score
from magicrl.training.assemble import Built, build_run
from magicrl.training.objective import entropy_controller
from magicrl.training.start_checks import check_run
from magicrl.training.step import Trainer
from magicrl_verifiers.records import VerifierService

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SIDES = ("magicrl", "trl", "magicrl-plain")
PLAIN = ("algorithm.reject_zero_advantage=false",)
"""Settings with which magicrl computes what TRL's GRPO computes: every group takes part."""
TARGET, EVERY, PROBLEMS, SAMPLES, STEPS = 0.25, 4, 100, 4, 60
"""Accuracy at temperature 1 at which a run ends; updates between measurements; problems and samples of each; limit."""
TRL = {"per_device_batch": 16}
"""The fastest of 4, 8, 16, 32 and 64 sequences per forward pass, in trials of one update of 64 responses."""
SAME_MACHINE = 1.15
"""Largest ratio of the products' times in two runs whose CPU times are compared."""

CLAIMED = 3
"""How many times less CPU time magicrl needs, at least."""

Measure = Callable[[int, Times, Mapping[str, Any]], bool]


def main() -> None:
    parser = parser_of(__doc__, COMMITTED / "bench-time-to-accuracy.json")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--lower-bound", action="store_true", help="end TRL's run once the claim is decided")
    parser.add_argument("--trial", type=int, help="only so many updates, without measurements")
    parser.add_argument("--set", action="append", default=[], help="override the recipe, for both sides (for a trial)")
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=JSON", help="override TRL's settings")
    arguments = parser.parse_args()
    TRL.update({k: json.loads(v) for k, v in (item.split("=", 1) for item in arguments.trl)})
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        for side in arguments.sides:
            run(side, seed, arguments)


def run(side: str, seed: int, arguments: Any) -> None:
    """Run one side with one seed and add it to the JSON."""
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"arms": [], "ratios": {}}
    key = {"case": "family", "side": side, "seed": seed}
    if any(arm["key"] == key for arm in found["arms"]):
        return
    reached = [arm["to_target"] for arm in found["arms"] if arm["key"] == key | {"side": "magicrl"}]
    capped = arguments.lower_bound and side == "trl" and any(reached)
    cap = CLAIMED * reached[0]["cpu_s"] if capped else float("inf")
    plain = PLAIN if side == "magicrl-plain" else ()
    seeds = (f"run.seed={seed}", f"data.train.0.seed={seed}", "run.threads=1")
    folder = model_folder(SMOLLM2)
    recipe = ROOT / "src" / "magicrl" / "recipes" / "family.toml"
    config = load_train_recipe(recipe, [f"start.model={folder}", *seeds, *plain, *arguments.set])
    settings = {"target": TARGET, "every": EVERY, "problems": PROBLEMS, "samples": SAMPLES, "steps": STEPS, "trl": TRL}
    head = document(settings, ["trl", "transformers"])
    with config.verifier.pool() as judge:
        built = build_run(config, check_run(config, ROOT / "runs" / "not-written", resume=False), folder)
        judge.warm_up(built.data.verifiers())
        products = [products_s(folder)]
        points: list[dict[str, float]] = []

        def measure(updates: int, spent: Times, weights: Mapping[str, Any]) -> bool:
            print(f"{side} {seed}, update {updates}: {spent.cpu:.1f} CPU s", flush=True)
            if arguments.trial:
                return updates >= arguments.trial
            over = spent.cpu >= cap or updates >= STEPS
            if updates % EVERY and not over:
                return False
            built.engine.load_weights(weights, updates)
            points.append({"updates": updates, "cpu_s": rounded(spent.cpu), **accuracy(config, built, judge, updates)})
            print(points[-1], flush=True)
            return over or points[-1]["accuracy"] >= TARGET

        measure(0, Times(cpu=0.0, wall=0.0), built.learner.weights())
        (theirs if side == "trl" else ours)(config, built, judge, measure)
        products.append(products_s(folder))
    print(products, flush=True)
    if not arguments.trial:
        arm = {"key": key, "run": head, "products_s": products, "curve": points, "to_target": to_target(points)}
        arms = [*found["arms"], arm]
        write_figure(arguments.output, found | {"arms": arms, "ratios": found["ratios"] | {"family": ratios(arms)}})


def products_s(folder: Path) -> float:
    """Return how many seconds the model's products take now, in training on 1,000 tokens in bfloat16."""
    return rounded(1000 * sum(GemmBound(plain_model(folder, "bfloat16")).training(512)))


def accuracy(config: TrainConfig, built: Built, judge: VerifierService, updates: int) -> dict[str, float]:
    groups = sample_problems(
        built.engine,
        judge,
        built.data.test["held_out"][:PROBLEMS],
        built.encoder.encode,
        samples=SAMPLES,
        temperature=1.0,
        max_tokens=config.stages[-1].max_tokens,
        seed=evaluation_seed(config.run.seed, f"time-to-accuracy/{updates}"),
    )
    found = score(groups)
    of = {"accuracy": found.accuracy.mean, "low": found.accuracy.low, "high": found.accuracy.high}
    return {name: rounded(value) for name, value in {**of, "length": found.length.mean}.items()}


def ours(config: TrainConfig, built: Built, judge: VerifierService, measure: Measure) -> None:
    """Train with magicrl's steps."""
    trainer = Trainer(
        config,
        engine=built.engine,
        learner=built.learner,
        judge=judge,
        encode=built.encoder.encode,
        sampler=PromptSampler(built.data.train, config.run.seed),
        controller=entropy_controller(config.entropy),
    )
    built.engine.sync_weights(built.learner)
    spent = Times(cpu=0.0, wall=0.0)
    ended = False
    while not ended:
        clock = Clock()
        trainer.step(config.stages[-1], 0)
        spent = spent + clock.read()
        ended = measure(trainer.steps_done, spent, built.learner.weights())


class _Watch(TrainerCallback):
    """Adds up the time of TRL's steps and measures the model between them."""

    def __init__(self, measure: Measure) -> None:
        self._measure, self._clock, self._spent = measure, Clock(), Times(cpu=0.0, wall=0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._spent = self._spent + self._clock.read()
        weights = {name: weight.detach() for name, weight in kwargs["model"].named_parameters()}
        control.should_training_stop = self._measure(state.global_step, self._spent, weights)


def theirs(config: TrainConfig, built: Built, judge: VerifierService, measure: Measure) -> None:
    """Train with TRL: generation, learner and loop are its own, the verifier is magicrl's.

    Raises:
        RuntimeError: TRL encodes a prompt differently.
    """
    stage, optimizer, tokenizer, problems = config.stages[-1], config.optimizer, built.start.tokenizer, built.data.train
    prompts = [[{"role": "user", "content": p.prompt}] for p in problems]
    for problem, prompt in zip(problems, prompts, strict=True):
        tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        if list(built.encoder.encode(problem)) != list(tokens):
            raise RuntimeError(f"{problem.id}: TRL and magicrl encode the prompt differently; nothing can be compared")

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        tickets = [judge.submit(problems[n], [c[0]["content"]]) for n, c in zip(number, completions, strict=True)]
        verdicts = [judge.result(ticket)[0] for ticket in tickets]
        ended = [bool(ids) and ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        # As on the other side, a truncated response is wrong.
        rewards = [float(verdict.correct and end) for verdict, end in zip(verdicts, ended, strict=True)]
        print(f"TRL: {sum(rewards):.0f} of {len(ended)} right, {sum(ended)} not truncated", flush=True)
        return rewards

    further = dict(TRL)
    batch = further.pop("per_device_batch")
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=stage.rollout_batch * stage.group_size // batch,
            num_generations=stage.group_size,
            max_completion_length=stage.max_tokens,
            loss_type="dapo",  # the mean over all response tokens of the update
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            temperature=1.0,
            scale_rewards="group",
            learning_rate=optimizer.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm,
            gradient_checkpointing=False,
            max_steps=STEPS,
            seed=config.run.seed,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            **{"bf16": True, **further},
        )
        trainer = GRPOTrainer(
            model=plain_model(Path(built.start.folder), "float32"),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts, "number": list(range(len(problems)))}),
            processing_class=tokenizer,
            callbacks=[_Watch(measure)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def to_target(points: list[dict[str, float]]) -> dict[str, float] | None:
    """Return where the curve crosses the target, on the straight line between two measurements, or None."""
    for before, after in pairwise(points):
        if before["accuracy"] < TARGET <= after["accuracy"]:
            share = (TARGET - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return {k: rounded(before[k] + share * (after[k] - before[k])) for k in ("updates", "cpu_s")}
    return None


def ratios(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Return TRL's CPU time to the target over each side's by seed, or what it spent without reaching the target."""
    found: dict[str, Any] = {}
    family = {(arm["key"]["side"], arm["key"]["seed"]): arm for arm in arms if arm["key"]["case"] == "family"}
    for (side, seed), arm in family.items():
        trl = family.get(("trl", seed))
        if side == "trl" or trl is None or arm["to_target"] is None:
            continue
        seconds = [*arm["products_s"], *trl["products_s"]]
        spent = (trl["to_target"] or trl["curve"][-1])["cpu_s"]
        found.setdefault(side, {})[str(seed)] = {
            "trl_reached_target": trl["to_target"] is not None,
            "times_faster": rounded(spent / arm["to_target"]["cpu_s"]),
            "same_machine": max(seconds) <= SAME_MACHINE * min(seconds),
        }
    return found


if __name__ == "__main__":
    with_tcmalloc()
    main()
