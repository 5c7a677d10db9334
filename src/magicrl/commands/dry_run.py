"""``magicrl train --dry-run``: everything of a recipe is built, and one step per stage runs, in seconds on a CPU.

The model is a miniature of the same architecture with random weights; data sets of the hub are replaced by rows of the
released schema; batches, lengths and ranks shrink. Every replacement is reported. The stages, the loss, the entropy
control, the readers, the filter, the verifiers, the checkpoints, the tests and the ``[cluster]`` with its ranks and
replicas are the recipe's.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from magicrl.commands.plan import start_model
from magicrl.commands.training import parts_of
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe, placed_errors
from magicrl.config.overrides import Overrides
from magicrl.config.schema import TrainConfig
from magicrl.registry import is_builtin
from magicrl.reporting.run_page import write_run_page
from magicrl.reporting.trackers import make_trackers

if TYPE_CHECKING:
    from magicrl.planning.shapes import ModelShape

TOKENS, PROMPT, CONTEXT = 16, 768, 1024
BATCH, GROUP, PROBLEMS = 4, 2, 6


def dry_run(recipe: Path | Mapping[str, Any], overrides: Overrides) -> int:
    """Load the recipe, shrink it, run it in a temporary folder, and return the exit status.

    Raises:
        ValueError: As for the run itself.
    """
    console = Console(emoji=False, highlight=False)
    config = load_train_recipe(recipe, overrides)
    # torch takes seconds to import, so the recipe is read first
    from magicrl.training.recorder import NullObserver
    from magicrl.training.session import run_training
    from magicrl.training.start_checks import check_peft

    # before the minutes of the rehearsal: packages that the run itself needs
    make_trackers(config.logging.trackers)
    with placed_errors(recipe, overrides):
        check_peft("model", config.model)
    with tempfile.TemporaryDirectory(prefix="magicrl-dry-") as name:
        folder = Path(name)
        with placed_errors(recipe, overrides):
            shrunk, replaced = shrink(config, folder)
        for line in replaced:
            console.print(f"dry run: {line}", soft_wrap=True, markup=False)
        with placed_errors(recipe, overrides), parts_of(shrunk) as parts:
            run_training(shrunk, folder / "run", NullObserver(), resume=False, parts=parts)
        write_run_page(folder / "run")
        steps = len((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    number = "a step" if steps == 1 else f"{steps} steps, one per stage"
    console.print(f"dry run: {number}, checkpoints, tests, a model and its report: it builds", soft_wrap=True)
    return 0


def shrink(config: TrainConfig, folder: Path) -> tuple[TrainConfig, list[str]]:
    """Return the recipe with a miniature model and small batches, and a line for each replacement.

    Args:
        config: The recipe.
        folder: Folder for the miniature and the substitute data.
    """
    from magicrl.models.small_models import make_miniature

    replaced: list[str] = []
    tree = config.model_dump(mode="json")
    model, name = _architecture(config)
    context = model.get("max_position_embeddings")
    for number, stage in enumerate(config.stages):
        if context is not None and stage.max_tokens >= context:
            raise RecipeError(
                f"{stage.max_tokens} leaves no room for a prompt in the context of {name} ({context} tokens); lower it",
                key=f"stages.{number}.max_tokens",
            )
    start = make_miniature(model, folder / "model", max_context=CONTEXT)
    replaced.append(f"model: random weights, {model['model_type']}, two layers, in place of {name}")
    tree["run"] |= {"device": "cpu", "output": None, "expected_minutes": None, "threads": 1}
    tree["start"] = {"model": str(start)}
    tree["data"] = _data(tree["data"], folder, replaced)
    if tree["reference"]["model"] is not None:
        tree["reference"]["model"] = str(start)
    if config.teacher is not None and config.teacher.server is not None:
        tree["teacher"] = None
        replaced.append("teacher: left out, since a server's tokenizer is not that of the miniature")
    elif config.teacher is not None and config.teacher.model is not None:
        tree["teacher"]["model"] = str(start)
        replaced.append(f"teacher: random weights, in place of {config.teacher.model}")
    if tree["model"]["lora"] is not None:
        tree["model"]["lora"]["rank"] = min(4, tree["model"]["lora"]["rank"])
    tree["rollout"] |= {"max_rows": 8, "memory_limit_mb": 64}
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        tree["rollout"]["engine"] = "in_process"
        replaced.append(
            "engine: in_process, since vLLM is not installed here; the run itself needs pip install 'magicrl[vllm-gpu]'"
        )
    tree["algorithm"] |= {"reject_zero_advantage": False, "refill": "none", "refill_rounds": 4}
    advantage = config.algorithm.advantage
    if advantage == "pass_at_k" or not is_builtin("advantage", advantage):
        tree["algorithm"]["advantage_k"] = min(GROUP, config.algorithm.advantage_k)
    if config.algorithm.overlong_buffer is not None:
        tree["algorithm"]["overlong_buffer"] = min(TOKENS - 1, config.algorithm.overlong_buffer)
    replaced.append("no group is rejected: random weights solve nothing")
    tree["stages"] = [_stage(stage) for stage in tree["stages"]]
    lengths = ", ".join(str(stage.max_tokens) for stage in config.stages)
    replaced.append(f"stages: {TOKENS} tokens for {lengths}, {BATCH} x {GROUP} responses, a step each")
    # the miniature's tokens are shorter than the recipe's, so its limits would truncate an observation to nothing
    tree["environment"] |= {"max_turns": min(4, config.environment.max_turns), "max_observation_tokens": 32}
    tree["evaluation"] |= {"samples": 1, "validation_samples": 1, "pass_at": [], "start_pass_at": None}
    tree["evaluation"]["max_tokens"] = TOKENS
    tree["evaluation"]["temperatures"] = tree["evaluation"]["temperatures"][:1]
    tree["verifier"]["workers"] = 1
    tree["checkpoint"]["every"] = 1
    tree["logging"]["trackers"] = []
    if config.cluster is not None:
        tree["cluster"] = _cluster(tree["cluster"], replaced)
    return TrainConfig.model_validate(tree), replaced


def _architecture(config: TrainConfig) -> tuple[dict[str, Any], str]:
    """Return the contents of the initial model's ``config.json``, from its folder or from the planner's table."""
    from magicrl.planning.shapes import load_shape, shape_of_tiny

    name = start_model(config)
    if not isinstance(name, str):
        return _of_shape(shape_of_tiny(name)), f"the start of {config.start.sft}"
    described = Path(name) / "config.json"
    if described.is_file():
        return json.loads(described.read_text(encoding="utf-8")), name
    try:
        return _of_shape(load_shape(name)), name
    except ValueError as error:
        reason = f"its architecture is not known here: {error}"
        if not Path(name).exists():
            reason = (
                f"no folder {name}, and no model of that name whose architecture is known without its files; "
                "correct the path, or fetch the model and give its folder"
            )
        raise RecipeError(reason, key="start.model") from error


def _of_shape(shape: ModelShape) -> dict[str, Any]:
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    return {
        "model_type": kind,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.context,
        **heads,
    }


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stage of one step with as many updates as in the recipe, as far as the batch allows."""
    mini = stage["mini_batch"]
    updates = 1 if mini is None else min(BATCH, -(-stage["rollout_batch"] // mini))
    small = {"max_tokens": TOKENS, "rollout_batch": BATCH, "group_size": GROUP, "min_steps": 1, "max_steps": 1}
    kept = {"mini_batch": None if mini is None else BATCH // updates, "transition": {"rule": "fixed"}}
    return stage | small | kept


def _data(data: dict[str, Any], folder: Path, replaced: list[str]) -> dict[str, Any]:
    stand_ins: list[str] = []

    def smaller(source: dict[str, Any], sets: int = 1) -> dict[str, Any]:
        if source["hub"] is None:
            return source | {"count": min(sets * PROBLEMS, source["count"] or sets * PROBLEMS)}
        name = f"{source['hub']} ({source['split']})"
        if name not in stand_ins:
            stand_ins.append(name)
        first = PROBLEMS * stand_ins.index(name)  # no set shares a problem with another
        path = folder / f"rows-{first}.jsonl"
        rows = [_row(first + n, source["split"] == "code", source["difficulty_of"]) for n in range(PROBLEMS)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return source | {"hub": None, "path": str(path), "fields": {}, "count": PROBLEMS, "split": "train"}

    # training problems that are in another set are left out: enough are read that some remain
    sets = 2 + len(data["validation"]) + len(data["test"])
    data["train"] = [smaller(source, sets) for source in data["train"]]
    data["validation"] = [smaller(source) for source in data["validation"]]
    data["test"] = {name: smaller(source) for name, source in data["test"].items()}
    data |= {"max_prompt_tokens": PROMPT, "holdout": 0}
    if data["difficulty_filter"] is not None:
        data["difficulty_filter"] = None
        replaced.append("no difficulty filter: it would drop every problem that random weights fail")
    if stand_ins:
        replaced.append(f"data: {PROBLEMS} rows of the released schema in place of {', '.join(stand_ins)}")
    return data


def _row(number: int, code: bool, difficulty_of: str | None) -> dict[str, Any]:
    """Return a problem in the columns of the released parquet file."""
    tests = {"inputs": [f"{number}\n"], "outputs": [f"{number + 1}\n"]}
    text = f"Read a number and print it plus one. Case {number}." if code else f"What is {number} + 1?"
    truth = json.dumps(tests) if code else json.dumps([str(number + 1)])
    return {
        "data_source": "dry-run-code" if code else "dry-run-maths",
        "prompt": [{"role": "user", "content": text}],
        "ability": "code" if code else "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": number, "model_difficulty": {difficulty_of: 8} if difficulty_of else {}},
    }


def _cluster(cluster: dict[str, Any], replaced: list[str]) -> dict[str, Any]:
    learner, rollout = cluster["learner"], cluster["rollout"]
    learner["sequence_parallel"] = min(2, learner["sequence_parallel"])
    learner["ranks"] = min(2, learner["ranks"])
    learner["shard_ranks"] = learner["shard_ranks"] and min(2, learner["shard_ranks"])
    replaced.append(
        f"cluster: a Ray of this machine, {learner['ranks']} ranks and {min(2, rollout['replicas'])} replicas on CPUs"
    )
    rollout |= {"replicas": min(2, rollout["replicas"]), "tensor_parallel": 1, "cpus": 0.5, "threads": 1}
    return cluster | {"address": None, "verifier": {"workers_per_node": 1}}
