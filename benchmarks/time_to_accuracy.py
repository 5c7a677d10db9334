"""Time to a held-out accuracy: MAGIC here beside GRPO in TRL, on the same model, problems and samples an update.

    python benchmarks/time_to_accuracy.py --case small      # writes docs/figures/bench-time-to-accuracy.json
    python benchmarks/time_to_accuracy.py --sides trl --steps 3 --trl per_device_batch=128 --output F     # a trial

Both sides start from the same weights (where the recipe has a supervised start, one made with the arm's seed), draw
from the same problems with as many prompts and responses a step, cut at the same length, are judged by the same
verifier and take one AdamW step an update (on-policy, no KL term). They are measured by the same engine on the same
held-out problems, outside the clock. The clock is CPU time of this process at one thread, which differs between
machines, and on one machine by what its neighbours do: each arm records how long the model's own products take before
and after it, and arms of a seed whose products differ by more than ``SAME_MACHINE`` are not compared. An arm ends
when its accuracy has reached the case's target, which was written into this file and into docs/claims.md before the
arms were run. Each arm is written as it ends; arms that are there already are not run again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from bench_models import plain_model
from common import FIGURES, ROOT, document, parser_of, rounded, with_tcmalloc, write_figure
from gemm_bound import GemmBound
from measure import Clock, Times
from trl_peer import train

from magicrl.config.loader import config_hash, load_start_recipe, load_train_recipe
from magicrl.config.schema import StartConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.evaluation.job import evaluation_seed, sample_problems, score
from magicrl.training.assemble import Built, build, start_model_folder
from magicrl.training.objective import entropy_controller
from magicrl.training.sft import run_sft
from magicrl.training.start_checks import check_run
from magicrl.training.step import Parts, Trainer
from magicrl_verifiers.service import VerifierPool

SIDES = ("magicrl", "trl", "magicrl-plain")
PLAIN = ("algorithm.reject_zero_advantage=false", "entropy.controller=none")
"""Makes of MAGIC what TRL's GRPO computes: every group takes part, and there is no entropy term."""
OUTPUT = FIGURES / "bench-time-to-accuracy.json"
SAME_MACHINE = 1.15
"""How many times slower the products of one arm may be than another's for their CPU times to be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison."""

    recipe: str  # magicrl's side whole, and what both sides share: start, problems, stage, optimizer
    overrides: tuple[str, ...]  # of the recipe, for both sides
    # what TRL was tuned to (docs/claims.md says how): ``per_device_batch``, ``bf16``, and ``weights``, the dtype of its
    # model's own weights, float32 unless it says otherwise
    trl: Mapping[str, Any]
    target: float  # accuracy at temperature 1 on the held-out problems at which an arm ends
    every: int  # updates between measurements
    problems: int  # of a measurement, each with so many samples
    samples: int
    steps: int  # an arm that has not reached the target by then never does


CASES = {
    "small": Case(
        recipe="small.toml",
        overrides=("model.dtype=bfloat16",),  # as TRL's autocast
        trl={"per_device_batch": 32, "bf16": True},
        target=0.85,
        every=5,
        problems=200,
        samples=4,
        steps=60,
    ),
    "smollm2": Case(
        recipe="smollm2.toml",
        overrides=("optimizer.learning_rate=6e-5",),
        trl={"per_device_batch": 4, "bf16": True},
        target=0.4,
        every=4,
        problems=100,
        samples=4,
        steps=40,
    ),
}


def main() -> None:
    parser = parser_of(__doc__, OUTPUT)
    parser.add_argument("--case", choices=sorted(CASES), default="small")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="end every arm after so many updates (for a trial)")
    parser.add_argument("--set", action="append", default=[], help="override the recipe, for both sides (for a trial)")
    parser.add_argument("--trl", action="append", default=[], metavar="KEY=JSON", help="override TRL's settings")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "models")
    parser.add_argument("--starts", type=Path, nargs="+", help="model folders, one a seed, instead of the recipe's")
    arguments = parser.parse_args()
    if arguments.starts and len(arguments.starts) != len(arguments.seeds):
        parser.error(f"{len(arguments.starts)} starts for {len(arguments.seeds)} seeds; give one a seed")
    torch.set_num_threads(1)
    case = CASES[arguments.case]
    case = replace(
        case,
        overrides=(*case.overrides, *arguments.set),
        trl={**case.trl, **{k: json.loads(v) for k, v in (item.split("=", 1) for item in arguments.trl)}},
        steps=arguments.steps or case.steps,
    )
    for seed, given in zip(arguments.seeds, arguments.starts or [None] * len(arguments.seeds), strict=True):
        for side in arguments.sides:
            run_arm(arguments.case, case, side, seed, given, arguments.models, arguments.output)
    arms = json.loads(arguments.output.read_text())["arms"]
    if apart := [pair for pair in pairs(arms) if not same_machine(*pair)]:
        found = "; ".join(
            f"{ours['key']['case']}, seed {ours['key']['seed']}, {ours['key']['side']}" for _, ours in apart
        )
        raise SystemExit(
            f"the products of these arms and of TRL's take different times, so that nothing is compared: {found}; take "
            f"the seed's arms out of {arguments.output} and run all its sides on one idle machine"
        )


def run_arm(name: str, case: Case, side: str, seed: int, given: Path | None, models: Path, output: Path) -> None:
    """One side with one seed, from the ``given`` start or the recipe's, written as it ends."""
    recipe = ROOT / "src" / "magicrl" / "recipes" / case.recipe
    plain = PLAIN if side == "magicrl-plain" else ()
    config = load_train_recipe(recipe, [*case.overrides, *plain, f"run.seed={seed}", "run.threads=1"])
    key = {"case": name, "side": side, "seed": seed, "settings": settings_key(config, case, side)}
    if given is not None:  # the folder of a start of the studies is named by what made it
        key["start"] = given.name
    arms: list[dict[str, Any]] = json.loads(output.read_text())["arms"] if output.exists() else []
    if any(arm["key"] == key for arm in arms):
        return
    head = document(asdict(case), ["trl", "transformers"])
    start = given or start_of(config.start, seed, models)
    config = config.model_copy(update={"start": StartConfig(model=str(start))})
    ready = check_run(config, models / "not-written", resume=False)
    with config.verifier.pool() as judge:
        built = build(config, ready, start)
        judge.warm_up(built.data.verifiers())
        products = [products_s(built, config.model.dtype)]
        curve = Curve(case, built, judge, seed, config.stages[-1].max_tokens)
        (theirs if side == "trl" else ours)(config, built, judge, seed, curve, case)
        products.append(products_s(built, config.model.dtype))
    arm = {"key": key, "run": head, "products_s": products, "curve": curve.points, "to_target": curve.to_target()}
    write_figure(output, {"arms": [*arms, arm], "ratios": ratios([*arms, arm])})


def products_s(built: Built, dtype: str) -> float:
    """Seconds that the start model's products take here and now, in ``dtype``, in training on 1,000 tokens."""
    bound = GemmBound(plain_model(Path(built.start.folder), dtype))
    return rounded(1000 * sum(bound.training(512)))


def start_of(start: StartConfig, seed: int, models: Path) -> Path | str:
    """The start model: the recipe's, or where that is made here, one made with this seed from its first step."""
    if start.sft is None:
        return start_model_folder(start, models, lambda *_: None)
    recipe = load_start_recipe(start.sft)
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})
    return run_sft(recipe, models / f"{recipe.run.name}-{seed}").folder


def settings_key(config: TrainConfig, case: Case, side: str) -> str:
    """What decides an arm beside its seed."""
    shared = [case.target, case.every, case.problems, case.samples, case.steps]
    peer = dict(case.trl) if side == "trl" else None
    seedless = config.model_copy(update={"run": config.run.model_copy(update={"seed": 0})})
    return f"{config_hash(seedless)}-{json.dumps([shared, peer], sort_keys=True)}"


class Curve:
    """Held-out accuracy against the time spent on training."""

    def __init__(self, case: Case, built: Built, judge: VerifierPool, seed: int, max_tokens: int) -> None:
        self._case, self._built, self._judge, self._seed = case, built, judge, seed
        self._problems = next(iter(built.data.test.values()))[: case.problems]
        self._max_tokens = max_tokens
        self.points: list[dict[str, float]] = []
        self.measure(0, Times(cpu=0.0, wall=0.0), built.learner.weights())

    def measure(self, updates: int, spent: Times, weights: Mapping[str, Any]) -> bool:
        """Measure where it is due; whether the arm has ended."""
        if updates % self._case.every and updates < self._case.steps:
            print(f"update {updates}: {spent.cpu:.1f} CPU s", flush=True)
            return False
        engine = self._built.engine
        engine.load_weights(weights, updates)
        groups = sample_problems(
            engine,
            self._judge,
            self._problems,
            self._built.encoder.encode,
            samples=self._case.samples,
            temperature=1.0,
            max_tokens=self._max_tokens,
            seed=evaluation_seed(self._seed, f"time-to-accuracy/{updates}"),
        )
        found = score(groups)
        self.points.append(
            {
                "updates": updates,
                "cpu_s": rounded(spent.cpu),
                "wall_s": rounded(spent.wall),
                "accuracy": rounded(found.accuracy.mean),
                "low": rounded(found.accuracy.low),
                "high": rounded(found.accuracy.high),
                "length": rounded(found.length.mean),
                "entropy": rounded(found.entropy or 0.0),
            }
        )
        print(self.points[-1], flush=True)
        return found.accuracy.mean >= self._case.target or updates >= self._case.steps

    def to_target(self) -> dict[str, float] | None:
        """Where the curve crosses the target, on the straight line between two measurements; None if it does not."""
        goal = self._case.target
        for before, after in zip(self.points, self.points[1:], strict=False):
            if before["accuracy"] < goal <= after["accuracy"]:
                share = (goal - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
                keys = ("updates", "cpu_s", "wall_s")
                return {k: rounded(before[k] + share * (after[k] - before[k])) for k in keys}
        return None


def ours(config: TrainConfig, built: Built, judge: VerifierPool, seed: int, curve: Curve, case: Case) -> None:
    """The recipe's last stage with magicrl's own loop."""
    parts = Parts(
        engine=built.engine,
        learner=built.learner,
        judge=judge,
        encode=built.encoder.encode,
        sampler=PromptSampler(built.data.train, seed=seed),
        controller=entropy_controller(config.entropy),
    )
    trainer = Trainer(config, parts, lambda *_: None)
    spent = Times(cpu=0.0, wall=0.0)
    while True:
        clock = Clock()
        trainer.step(config.stages[-1], 0)
        spent = spent + clock.read()
        if curve.measure(trainer.steps_done, spent, built.learner.weights()):
            return


def theirs(config: TrainConfig, built: Built, judge: VerifierPool, seed: int, curve: Curve, case: Case) -> None:
    """The same with TRL's trainer."""
    chosen = dict(case.trl)
    weights = chosen.pop("weights", "float32")

    def measure(updates: int, spent: Times, model: Any) -> bool:
        return curve.measure(updates, spent, {n: p.detach() for n, p in model.named_parameters()})

    with tempfile.TemporaryDirectory() as scratch:
        train(
            plain_model(Path(built.start.folder), weights),
            built.start.tokenizer,
            built.data.train,
            peer_prompts(built),
            judge,
            measure,
            stage=config.stages[-1],
            optimizer=config.optimizer,
            steps=case.steps,
            seed=seed,
            scratch=Path(scratch),
            **chosen,
        )


def peer_prompts(built: Built) -> list[Any]:
    """The training prompts as TRL takes them: text, or chat messages where the tokenizer has a template.

    Raises:
        RuntimeError: TRL's way of encoding gives other tokens than magicrl's.
    """
    tokenizer = built.start.tokenizer
    if not tokenizer.chat_template:
        prompts: list[Any] = [p.prompt for p in built.data.train]
        encoded = tokenizer(text=prompts)["input_ids"]
    else:
        prompts = [[{"role": "user", "content": p.prompt}] for p in built.data.train]
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    for problem, tokens in zip(built.data.train, encoded, strict=True):
        if list(built.encoder.encode(problem)) != list(tokens):
            raise RuntimeError(f"{problem.id}: TRL and magicrl encode the prompt differently; nothing can be compared")
    return prompts


def pairs(arms: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """TRL's arm and ours, of each case, seed and side that both ended."""
    reached = [arm for arm in arms if arm["to_target"] is not None]
    return [
        (trl, ours)
        for trl in reached
        for ours in reached
        if trl["key"]["side"] == "trl" != ours["key"]["side"]
        and all(trl["key"][what] == ours["key"][what] for what in ("case", "seed"))
    ]


def same_machine(*arms: Mapping[str, Any]) -> bool:
    """Whether the products took as long in all arms, before and after; arms before 2026-11-24 did not record it."""
    seconds = [s for arm in arms for s in arm.get("products_s", ())]
    return not seconds or max(seconds) <= SAME_MACHINE * min(seconds)


def ratios(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each case and each side of ours: TRL's CPU time and updates to the target over that side's, a seed, and the
    geometric mean of the times; of the seeds that both ended on one machine."""
    found: dict[str, Any] = {}
    for trl, ours in pairs(arms):
        if same_machine(trl, ours):
            of_case = found.setdefault(ours["key"]["case"], {})
            over = of_case.setdefault(ours["key"]["side"], {"times_faster": {}, "updates_of_trl_over_ours": {}})
            for what, name in (("cpu_s", "times_faster"), ("updates", "updates_of_trl_over_ours")):
                over[name][str(ours["key"]["seed"])] = rounded(trl["to_target"][what] / ours["to_target"][what])
    for over in (over for of_case in found.values() for over in of_case.values()):
        over["geometric_mean"] = rounded(geometric_mean(over["times_faster"].values()))
    return found


if __name__ == "__main__":
    with_tcmalloc()
    main()
