"""TRL's options as settings: `GRPOConfig`, and what else ``trl grpo --config`` reads. Read in TRL 1.16's source.

TRL counts completions: an optimizer step takes ``per_device_train_batch_size * gradient_accumulation_steps *
processes`` of them, and sampling happens once in ``steps_per_generation`` micro-steps.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from magicrl.config.foreign import Options, Settings, policy, read_library, steps_of, trackers

REDUCERS = {
    "grpo": "response_mean",
    "sapo": "response_mean",
    "bnpo": "global_tokens",
    "dapo": "global_tokens",
    "cispo": "global_tokens",
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
}


class _Sizes(NamedTuple):
    """In completions: sampled at once, and used by an optimizer step; optimizer steps of a training step."""

    sampled: int
    update: int
    updates: int


def _sizes(o: Options) -> _Sizes:
    device = o["per_device_train_batch_size"] * o.beside.get("processes", 1)
    accumulated, group, passes = o["gradient_accumulation_steps"], o["num_generations"], o["num_iterations"]
    update = device * accumulated
    sampled = o["generation_batch_size"] or device * (o["steps_per_generation"] or accumulated)
    if sampled < update and update % sampled == 0 and passes == 1:
        sampled = update  # several samplings by the same weights
    if sampled % update:
        o.refuse("gradient_accumulation_steps", f"gives updates of {update} completions from samplings of {sampled}")
    if update % group:
        o.refuse(
            "num_generations", f"does not divide the {update} completions of an update, and here updates take prompts"
        )
    return _Sizes(sampled, update, sampled // update * passes)


def batch(o: Options) -> Settings:
    return {"stages.rollout_batch": _sizes(o).sampled // o["num_generations"]}


def mini_batch(o: Options) -> Settings:
    sampled, update, _ = _sizes(o)
    if sampled > update:
        o.differ("mini-batches hold whole groups; TRL shuffles the completions of a sampling before it splits them")
    return {"stages.mini_batch": update // o["num_generations"]}


def steps(o: Options) -> Settings:
    sampled, _, updates = _sizes(o)
    if o["max_steps"] > 0:
        return {"stages.max_steps": math.ceil(o["max_steps"] / updates)}
    return {"stages.max_steps": steps_of(o, o["num_train_epochs"], sampled // o["num_generations"])}


def warmup(o: Options) -> Settings:
    kind, warm = o["lr_scheduler_type"], o["warmup_steps"]
    if kind not in ("constant", "constant_with_warmup"):
        o.differ(f"lr_scheduler_type = {kind}: the learning rate is constant after its warm-up")
    if kind == "constant":
        warm = 0
    if 0 < warm < 1:  # a share of the run
        warm = math.ceil(warm * steps(o)["stages.max_steps"] * _sizes(o).updates)
    return {"optimizer.warmup_steps": int(warm)}


def loss(o: Options) -> Settings:
    kind, level = o["loss_type"], o["importance_sampling_level"]
    scale = {True: "group", False: "none"}.get(o["scale_rewards"], o["scale_rewards"])
    low = o["epsilon"]
    high = low if o["epsilon_high"] is None else o["epsilon_high"]
    if kind not in REDUCERS:
        o.refuse(
            "loss_type", f"has no counterpart; there are {', '.join(REDUCERS)}, or a row of your own (docs/own.md)"
        )
    if kind == "cispo":
        # TRL bounds the weight itself, magicrl its distance from 1
        clip = (1.0, high - 1)
        if high <= 1:
            o.refuse("epsilon_high", f"bounds every weight of cispo at {high:g}, below 1; TRL advises 5.0")
    else:
        clip = None if kind == "sapo" else (low, high)
    if kind == "bnpo" and _sizes(o).update > o["per_device_train_batch_size"]:
        o.differ("loss_type = bnpo: the mean is over the tokens of the mini-batch, not of each device's micro-batch")
    if scale == "batch":
        o.differ("scale_rewards = batch: divided by the deviation of the rewards less their group's mean")
    form = kind if kind in ("cispo", "sapo") else "sequence" if level == "sequence" else "clip"
    if form == "sapo" and (o["sapo_temperature_pos"], o["sapo_temperature_neg"]) != (1.0, 1.05):
        o.differ("sapo_temperature_*: the row's 1.0 and 1.05; others are a row of your own (docs/losses.md)")
    settings = policy(o, form, reducer=REDUCERS[kind], clip=clip, normalised=scale != "none")
    return settings | ({"algorithm.advantage": "batch_std"} if scale == "batch" else {})


def reference(o: Options) -> Settings:
    if not o["beta"]:
        return {"reference.mode": "none"}
    if o["use_bias_correction_kl"]:
        o.differ("use_bias_correction_kl: k3 is not multiplied by the importance ratio")
    return {"reference.mode": "loss", "reference.coefficient": o["beta"]}


def entropy(o: Options) -> Settings:
    if o["use_adaptive_entropy"]:
        if o["entropy_coef"] or o["entropy_coef_min"]:
            o.differ("use_adaptive_entropy: the coefficient starts at 0 and may fall to 0")
        return {
            "entropy.controller": "adaptive",
            "entropy.target": o["entropy_target"],
            "entropy.step": o["entropy_coef_delta"],
            "entropy.maximum": o["entropy_coef_max"],
        }
    if o["entropy_coef"]:
        return {"entropy.controller": "fixed", "entropy.alpha": o["entropy_coef"]}
    return {"entropy.controller": "none"}


def engine(o: Options) -> Settings:
    if not o["use_vllm"]:
        return {}
    settings: Settings = {"rollout.engine": "vllm", "entropy.estimator": "sampled"}
    if o["vllm_mode"] == "colocate":
        settings["rollout.vllm.gpu_share"] = o["vllm_gpu_memory_utilization"]
    else:
        o.differ(f"vllm_mode = {o['vllm_mode']}: vLLM is started by the run; [cluster] gives it GPUs of its own")
    corrections = {"token_truncate": "tis", "token_mask": "mis"}
    mode = o["vllm_importance_sampling_mode"]
    cap = o["vllm_importance_sampling_cap"] or o["vllm_importance_sampling_clip_max"]
    if not o["vllm_importance_sampling_correction"]:
        return settings
    if mode in corrections and cap and cap > 1 and not o["vllm_importance_sampling_clip_min"]:
        return settings | {"algorithm.correction": corrections[mode], "algorithm.correction_cap": cap}
    o.differ(
        f"vllm_importance_sampling_mode = {mode}: no correction; the nearest is algorithm.correction = mis, which "
        f"masks tokens, with correction_cap = {cap}"
    )
    return settings


def adapters(o: Options) -> Settings:
    if not o["use_peft"]:
        return {}
    modules = o["lora_target_modules"]
    if o["lora_dropout"] or o["use_rslora"] or o["use_dora"]:
        o.differ("lora_dropout, use_rslora, use_dora: plain adapters, scaled by alpha / rank, without dropout")
    settings: Settings = {"model.lora.rank": o["lora_r"], "model.lora.alpha": o["lora_alpha"]}
    if modules in ("all-linear", ["all-linear"]):
        return settings
    # without a list PEFT takes these of Llama's and Qwen's families
    return settings | {"model.lora.target_modules": list(modules or ("q_proj", "v_proj"))}


def problems(o: Options) -> Settings:
    name = o["dataset_name"]
    if name is None:
        return {}
    subset = {"options": {"subset": o["dataset_config"]}} if o["dataset_config"] else {}
    where = {"path": o.place(name)} if Path(name).exists() else {"hub": name}
    return {"data.train": ({**where, "split": o["dataset_train_split"], **subset},)}


def named_trackers(o: Options) -> Settings:
    return trackers(o, [o["report_to"]] if isinstance(o["report_to"], str) else o["report_to"] or [])


def precision(o: Options) -> Settings:
    return {"model.dtype": "float16" if o["fp16"] else "float32" if o["bf16"] is False else "bfloat16"}


def truncated(o: Options) -> Settings:
    return {"algorithm.advantage_mask": "after" if o["mask_truncated_completions"] else "none"}


def head(o: Options) -> Settings:
    return {"model.head_dtype": "float32"} if o["cast_lm_head_to_fp32"] else {}


def save(o: Options) -> Settings:
    return {"checkpoint.every": max(1, round(o["save_steps"] / _sizes(o).updates))} if o.states("save_steps") else {}


TRL = read_library("foreign_trl.toml", globals())
