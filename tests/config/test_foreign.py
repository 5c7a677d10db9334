"""Configurations of TRL and verl as recipes: figures worked out by hand from what the two libraries' sources do."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.write_recipe_page import section_of

from magicrl.config.errors import RecipeError
from magicrl.config.foreign import Library, Options, Sources, convert
from magicrl.config.foreign_files import read_options
from magicrl.config.foreign_trl import TRL
from magicrl.config.foreign_verl import VERL
from magicrl.config.loader import leaves, load_train_recipe
from magicrl.config.schema import Section, TrainConfig

# The shape of verl's recipe/dapo/test_dapo_7b_math.sh: Qwen2.5-Math-7B on DAPO's problems, 8 nodes of 8 GPUs.
DAPO = r"""
#!/usr/bin/env bash
set -xeuo pipefail
exp_name='DAPO-Qwen2.5-7b-MATH'
use_kl_in_reward=False
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
# RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
NNODES=${NNODES:-8}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-Math-7B"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
top_k=-1 # 0 for HF rollout, -1 for vLLM rollout
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 2))

python3 -m verl.trainer.main_ppo \
    data.train_files="${TRAIN_FILE}" \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.train_batch_size=${train_prompt_bsz:-256} \
    actor_rollout_ref.rollout.n=16 \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=${use_kl_in_reward} \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    +actor_rollout_ref.model.override_config.max_position_embeddings=32768 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.top_k="${top_k}" \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    trainer.logger=['console','wandb'] \
    trainer.experiment_name="${exp_name}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="${NNODES}" \
    trainer.total_epochs=10 \
    trainer.total_training_steps=200 $@
"""
BY_HAND = {
    "run.name": "DAPO-Qwen2.5-7b-MATH",
    "start.model": "~/verl/models/Qwen2.5-Math-7B",
    "data.train.0.path": "~/verl/data/dapo-math-17k.parquet",
    "data.max_prompt_tokens": 2048,
    "data.overlong_prompts": "drop",
    "stages.0.max_tokens": 8192,
    "stages.0.rollout_batch": 512,
    "stages.0.mini_batch": 32,
    "stages.0.group_size": 16,
    "stages.0.max_steps": 200,
    "algorithm.advantage": "group",
    "algorithm.reducer": "global_tokens",
    "algorithm.loss": "magic",
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.reject_zero_advantage": False,
    "algorithm.overlong_buffer": 4096,
    "entropy.controller": "none",
    "reference.mode": "none",
    "optimizer.learning_rate": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.warmup_steps": 160,  # 10 training steps of 512 / 32 updates
    "rollout.engine": "vllm",
    "rollout.vllm.gpu_share": 0.8,
    "model.micro_batch_tokens": 81920,  # 2 (2048 + 8192) a GPU, 4 GPUs a sequence
    "model.gradient_checkpointing": True,
    "logging.trackers": ["wandb"],
    "cluster.address": "auto",
    "cluster.learner.ranks": 64,
    "cluster.learner.sequence_parallel": 4,
    "cluster.learner.offload_optimizer": True,
    "cluster.rollout.replicas": 16,
    "cluster.rollout.tensor_parallel": 4,
    "cluster.rollout.colocated": True,
}


def made(
    library: Library, given: dict[str, Any], *, problems: int | None = 100, **beside: Any
) -> tuple[dict[str, Any], str]:
    """The recipe's settings, loaded once, and its text."""

    def count(sources: Sources) -> int | None:
        return problems

    needed = {"model": "some/model", "data": ({"path": "p.jsonl"},)}
    options = Options(library=library, given=given, beside=needed | beside, count=count)
    text = convert(options, "theirs").text
    tree = tomllib.loads(text)
    load_train_recipe(tree)
    return leaves(tree), text


def test_dapos_script_by_hand(tmp_path: Path) -> None:
    (tmp_path / "dapo.sh").write_text(DAPO)
    recipe = convert(Options(library=VERL, given=read_options(tmp_path / "dapo.sh")), "dapo.sh")
    found = leaves(tomllib.loads(recipe.text))
    assert BY_HAND.items() <= found.items(), {k: (v, found.get(k)) for k, v in BY_HAND.items() if found.get(k) != v}
    load_train_recipe(tomllib.loads(recipe.text))
    told = "\n".join(recipe.differs)
    assert "clip_ratio_c = 10.0" in told
    assert "data.truncation = left" in told
    assert "-1 and 1" in told
    left = "\n".join(recipe.left)
    assert "override_config.max_position_embeddings" in left
    assert "reward_manager: magicrl judges by" in left
    assert "unknown" not in left
    assert "weight_decay = 0.1  # actor.optim.weight_decay = 0.1" in recipe.text
    assert 'engine = "vllm"  # verl\'s default' in recipe.text


def test_trls_documented_example_by_hand(tmp_path: Path) -> None:
    """``trl grpo --config``: the example of TRL's command-line page, and what its silence means."""
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/DeepMath-103K\nreward_funcs: [accuracy_reward]\n"
    )
    given = read_options(tmp_path / "grpo.yaml")
    options = Options(library=TRL, given=given, beside={"steps": 12})
    found = leaves(tomllib.loads(convert(options, "grpo.yaml").text))
    assert found == {
        "start.model": "Qwen/Qwen2.5-0.5B",
        "model.gradient_checkpointing": True,
        "data.train.0.hub": "trl-lib/DeepMath-103K",
        "data.train.0.split": "train",
        "algorithm.reject_zero_advantage": False,
        "algorithm.reducer": "global_tokens",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.2,
        "entropy.controller": "none",
        "optimizer.weight_decay": 0.0,
        "stages.0.group_size": 8,
        "stages.0.max_tokens": 512,
        "stages.0.rollout_batch": 1,  # 8 completions a device, 8 a prompt
        "stages.0.mini_batch": 1,
        "stages.0.max_steps": 12,
        "stages.0.transition.rule": "fixed",
    }


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        # 16 * 2 * 4 processes = 128 completions an update, 16 * 4 * 8 = 512 a sampling: 4 updates, twice
        (
            {
                "num_generations": 16,
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 8,
                "num_iterations": 2,
                "max_steps": 400,
                "save_steps": 100,
                "warmup_steps": 0.1,
            },
            4,
            {
                "stages.0.rollout_batch": 32,
                "stages.0.mini_batch": 8,
                "stages.0.max_steps": 50,
                "algorithm.reuse": 2,
                "checkpoint.every": 12,
                "optimizer.warmup_steps": 40,
            },
        ),
        # two samplings by the same weights make one update
        (
            {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
            1,
            {"stages.0.rollout_batch": 4, "stages.0.mini_batch": 4},
        ),
        # three passes over 100 problems, 4 a sampling
        ({"generation_batch_size": 32, "num_train_epochs": 3}, 1, {"stages.0.max_steps": 75}),
        ({"loss_type": "dr_grpo"}, 1, {"algorithm.reducer": "constant", "algorithm.loss": "magic"}),
        (
            {"loss_type": "dr_grpo", "scale_rewards": False},
            1,
            {"algorithm.reducer": "constant", "algorithm.loss": "dr_grpo", "algorithm.advantage": "group"},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            1,
            {
                "algorithm.loss": "gspo",
                "algorithm.reducer": "response_mean",
                "algorithm.clip_low": 3e-4,
                "algorithm.clip_high": 4e-4,
            },
        ),
        # TRL's weight is at most 5: 1 + 4
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            1,
            {"algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0},
        ),
        ({"loss_type": "sapo", "scale_rewards": "batch"}, 1, {"algorithm.advantage": "batch_std"}),
        ({"loss_type": "sapo", "scale_rewards": "none"}, 1, {"algorithm.advantage": "rloo"}),
        ({"beta": 0.04}, 1, {"reference.mode": "loss", "reference.coefficient": 0.04}),
        (
            {"use_adaptive_entropy": True, "entropy_target": 0.5},
            1,
            {"entropy.target": 0.5, "entropy.step": 0.005, "entropy.maximum": 1.0},
        ),
        ({"entropy_coef": 0.01}, 1, {"entropy.controller": "fixed", "entropy.alpha": 0.01}),
        ({"mask_truncated_completions": True}, 1, {"algorithm.advantage_mask": "after"}),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            1,
            {"rollout.engine": "vllm", "algorithm.correction": "tis", "algorithm.correction_cap": 3.0},
        ),
        ({"use_peft": True, "lora_r": 8}, 1, {"model.lora.rank": 8, "model.lora.target_modules": ["q_proj", "v_proj"]}),
        ({"fp16": True, "cast_lm_head_to_fp32": True}, 1, {"model.dtype": "float16", "model.head_dtype": "float32"}),
        (
            {"bf16": False, "lr_scheduler_type": "constant", "warmup_steps": 9},
            1,
            {"optimizer.warmup_steps": 0, "model.dtype": "float32"},
        ),
    ],
)
def test_trls_options(given: dict[str, Any], processes: int, expected: dict[str, Any]) -> None:
    found, _ = made(TRL, {"max_steps": 400} | given if "num_train_epochs" not in given else given, processes=processes)
    assert {key: found.get(key) for key in expected} == expected


A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # verl's pair is 0.2 by default, and it reads clip_ratio only where that is null
        ({f"{A}.clip_ratio": 0.3}, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
        (
            {f"{A}.clip_ratio": 0.3, f"{A}.clip_ratio_low": None, f"{A}.clip_ratio_high": None},
            {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3},
        ),
        # 30 passes over 100 problems, 40 a step, the last 20 of a pass left out
        ({"data.train_batch_size": 40, f"{A}.ppo_mini_batch_size": 20}, {"stages.0.max_steps": 60}),
        (
            {f"{A}.optim.lr_warmup_steps_ratio": 0.1, f"{A}.ppo_epochs": 2, "trainer.total_training_steps": 50},
            {"optimizer.warmup_steps": 5 * 2 * 4},
        ),
        ({f"{A}.use_kl_loss": True}, {"reference.mode": "loss", "reference.coefficient": 0.001}),
        ({f"{A}.entropy_coeff": 0.001}, {"entropy.controller": "fixed", "entropy.alpha": 0.001}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"algorithm.loss": "dr_grpo"}),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, {"algorithm.advantage": "reinforce_pp"}),
        ({f"{A}.loss_agg_mode": "seq-mean-token-mean"}, {"algorithm.reducer": "response_mean"}),
        (
            {f"{A}.policy_loss.loss_mode": "gspo", f"{A}.clip_ratio_high": 4e-4},
            {"algorithm.loss": "gspo", "algorithm.reducer": "response_mean", "algorithm.clip_high": 4e-4},
        ),
        (
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10},
            {"algorithm.refill": "until_full", "algorithm.refill_rounds": 9},
        ),
        ({f"{A}.tis_imp_ratio_cap": 3.0}, {"algorithm.correction": "tis", "algorithm.correction_cap": 3.0}),
        ({"trainer.n_gpus_per_node": 1}, {"cluster.learner.ranks": None}),
        (
            {"trainer.test_freq": 5, "data.val_files": "v.parquet", f"{R}.val_kwargs.n": 8},
            {"evaluation.every": 5, "evaluation.validation_samples": 8, "evaluation.validation_temperature": 0.0},
        ),
        ({f"{R}.name": "hf"}, {"rollout.engine": "in_process", "cluster.rollout.colocated": False}),
    ],
)
def test_verls_options(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found, _ = made(VERL, {"algorithm.adv_estimator": "grpo", f"{R}.n": 8} | given)
    assert {key: found.get(key) for key in expected} == expected


def test_several_files_are_several_sources() -> None:
    given = {"data.train_files": ["a.parquet", "b.parquet"], "data.prompt_key": "question", f"{R}.n": 8}
    options = Options(
        library=VERL, given=given | {"algorithm.adv_estimator": "rloo"}, beside={"model": "m", "steps": 1}
    )
    sources = tomllib.loads(convert(options, "x").text)["data"]["train"]
    assert sources == [{"path": f"{name}.parquet", "fields": {"prompt": "question"}} for name in "ab"]


@pytest.mark.parametrize(
    ("library", "given", "said"),
    [
        (TRL, {"loss_type": "vespo"}, 'loss_type = "vespo" has no counterpart'),
        (TRL, {"loss_type": "cispo"}, "bounds every weight of cispo at 0.2"),
        (TRL, {"num_generations": 16}, "num_generations = 16 does not divide the 8 completions of an update"),
        (TRL, {"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "gives updates of 24 completions"),
        (TRL, {"learning_rate": 1e-6, "warmup_steps": "many"}, 'warmup_steps = "many".*cannot be read'),
        (VERL, {"data.train_batch_size": 8}, 'adv_estimator = "gae" has no counterpart|is no multiple of'),
        (VERL, {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True}, "the KL is part of the loss"),
        (VERL, {"algorithm.adv_estimator": "grpo", "data.train_batch_size": 300}, "no multiple of ppo_mini_batch_size"),
    ],
)
def test_what_no_recipe_means_is_refused(library: Library, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        made(library, given, steps=1)


def test_what_is_missing_is_asked_for() -> None:
    def options(**beside: Any) -> Options:
        return Options(library=TRL, given={"learning_rate": 1e-6}, beside=beside)

    with pytest.raises(RecipeError, match="say how many with --steps"):
        convert(options(), "x.yaml")
    with pytest.raises(RecipeError, match=r"x.yaml names no start.model, .* --model"):
        convert(options(steps=1), "x.yaml")
    with pytest.raises(RecipeError, match=r"x.yaml names no data.train, .* --data"):
        convert(options(steps=1, model="m"), "x.yaml")


def test_nothing_is_left_out_silently() -> None:
    given = {"max_steps": 8, "temprature": 0.7, "top_p": 0.9, "hub_token": "x", "new\n[run]\nseed=9 #": 1}
    found, text = made(TRL, given)
    assert "temprature: unknown to TRL 1.16, which has temperature" in text
    assert "top_p = 0.9: sampled from the whole distribution" in text
    assert "hub_token: how the job runs" in text
    assert "lr_scheduler_type = linear: the learning rate is constant" in text
    assert "run.seed" not in found
    assert r'"new\n[run]\nseed=9 #"' in text


def test_trls_tables_are_its_source() -> None:
    """Every option of TRL is read, or has a reason why it is not; the defaults are those of the installed version."""
    trl = pytest.importorskip("trl", reason="the extra `bench`")
    from trl.scripts.grpo import GRPOScriptArguments

    fields = {
        field.name: field.default
        for kind in (trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig, GRPOScriptArguments)
        for field in dataclasses.fields(kind)
    }
    assert trl.__version__.startswith(TRL.name.removeprefix("TRL "))
    assert TRL.known <= fields.keys(), TRL.known - fields.keys()
    assert [name for name in fields if name not in TRL.known and TRL.reason(name) is None] == []
    differing = {name: fields[name] for name in TRL.known if fields[name] != TRL.defaults.get(name)}
    assert differing == {}
    assert TRL.defaults.keys() <= TRL.known


def test_a_whole_grpo_config_is_read(tmp_path: Path) -> None:
    """The JSON that TRL writes of a configuration holds every option; no line of the recipe tells of a default."""
    trl = pytest.importorskip("trl", reason="the extra `bench`")
    config = trl.GRPOConfig(output_dir="out", use_cpu=True, bf16=False, max_steps=5, learning_rate=2e-6)
    (tmp_path / "config.json").write_text(config.to_json_string())
    found, text = made(TRL, read_options(tmp_path / "config.json"))
    assert (found["optimizer.learning_rate"], found["stages.0.rollout_batch"]) == (2e-6, 1)
    assert found["model.dtype"] == "float32"
    assert "unknown to" not in text


@pytest.mark.parametrize("library", [TRL, VERL], ids=lambda library: library.name)
def test_settings_of_ours_are_in_the_schema(library: Library) -> None:
    for name in {name for row in library.rows for name in row.ours} | library.always.keys():
        section: type[Section] | None = TrainConfig
        for key in name.split("."):
            assert section is not None
            assert key in section.model_fields, name
            section = section_of(section.model_fields[key].annotation)[0]


def test_references_of_a_tree_are_resolved(tmp_path: Path) -> None:
    tree = {
        "data": {"max_response_length": 700, "train_batch_size": "${actor_rollout_ref.actor.ppo_mini_batch_size}"},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 64, "optim": {"lr": "1e-5"}}},
        "algorithm": {"gamma": "${oc.select:algorithm.nothing,1.0}"},
    }
    (tmp_path / "v.yaml").write_text(yaml.safe_dump(tree))
    found = read_options(tmp_path / "v.yaml")
    assert found == {
        "data.max_response_length": 700,
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.optim.lr": 1e-5,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python -m verl data.train_batch_size=$BATCH", "data.train_batch_size=.BATCH: the script does not set"),
        ("echo hello", "holds no options"),
        ("A=$(id -u)\nPATH=$PATH:/x\nrun data.a=$A", "does not set"),
        ("A=$((2 ** 10))\nrun data.a=$A", "does not set"),
    ],
)
def test_scripts_that_cannot_be_read(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(RecipeError, match=said):
        read_options(tmp_path / "run.sh")


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "run.sh").write_text(f"A=`touch {mark}`\ntouch {mark}\nB=$((1 + 2))\nrun data.a=$B data.b='[1, 2]'\n")
    assert read_options(tmp_path / "run.sh") == {"data.a": 3, "data.b": [1, 2]}
    assert not mark.exists()
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_options(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(RecipeError, match="holds no options"):
        read_options(tmp_path / "list.json")
