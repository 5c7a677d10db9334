"""verl's options as settings: the tree of its PPO trainer. Read in the source of verl 0.6.

verl's batches count prompts, as ours. Its learning rate moves once a training step, ours with every update.
"""

from __future__ import annotations

from typing import Any

from magicrl.config.foreign import Options, Settings, policy, read_library, steps_of, trackers

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ADVANTAGES = {
    "grpo": "group",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
REDUCERS = {
    "token-mean": "global_tokens",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "response_mean",
    "seq-mean-token-sum-norm": "constant",
}
# DAPO's soft punishment, by the names that versions of verl gave its table
BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "custom_reward_function.overlong_buffer",
)


def _paths(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def problems(o: Options) -> Settings:
    key = {} if o["data.prompt_key"] == "prompt" else {"fields": {"prompt": o["data.prompt_key"]}}
    sources = tuple({"path": o.place(path), **key} for path in _paths(o["data.train_files"]))
    return {"data.train": sources} if sources else {}


def validation(o: Options) -> Settings:
    every, files, sampled = o["trainer.test_freq"], _paths(o["data.val_files"]), o[f"{ROLLOUT}.val_kwargs.do_sample"]
    if every <= 0 or not files:
        if files and o.states("data.val_files"):
            o.differ(
                "data.val_files with trainer.test_freq below 1: name them in [data.test.NAME] (docs/evaluation.md)"
            )
        return {}
    if (o[f"{ROLLOUT}.val_kwargs.top_p"], o[f"{ROLLOUT}.val_kwargs.top_k"]) not in ((1, -1), (1, 0)) and sampled:
        o.differ(f"{ROLLOUT}.val_kwargs.top_p, top_k: validated on the whole distribution")
    return {
        "evaluation.every": every,
        "evaluation.validation_samples": o[f"{ROLLOUT}.val_kwargs.n"],
        "evaluation.validation_temperature": o[f"{ROLLOUT}.val_kwargs.temperature"] if sampled else 0.0,
        "data.validation": tuple({"path": o.place(path)} for path in files),
    }


def overlong(o: Options) -> Settings:
    cut = o["data.truncation"] != "error"
    if cut and not o["data.filter_overlong_prompts"]:
        o.differ(f"data.truncation = {o['data.truncation']}: a prompt over the limit is dropped, not cut")
    return {"data.overlong_prompts": "drop" if cut or o["data.filter_overlong_prompts"] else "error"}


def _updates(o: Options) -> int:
    """Optimizer steps of a training step."""
    batch, mini = o["data.train_batch_size"], o[f"{ACTOR}.ppo_mini_batch_size"]
    if batch % mini:
        o.refuse("data.train_batch_size", f"is no multiple of ppo_mini_batch_size = {mini}")
    return batch // mini * o[f"{ACTOR}.ppo_epochs"]


def steps(o: Options) -> Settings:
    total = o["trainer.total_training_steps"]
    return {"stages.max_steps": total or steps_of(o, o["trainer.total_epochs"], o["data.train_batch_size"])}


def warmup(o: Options) -> Settings:
    warm = o[f"{ACTOR}.optim.lr_warmup_steps"] or 0
    if warm <= 0:
        share = o[f"{ACTOR}.optim.lr_warmup_steps_ratio"]
        warm = int(share * steps(o)["stages.max_steps"]) if share else 0
    for name in ("warmup_style", "lr_scheduler_type"):
        if o[f"{ACTOR}.optim.{name}"] not in (None, "constant"):
            o.differ(f"{ACTOR}.optim.{name} = {o[f'{ACTOR}.optim.{name}']}: constant after the warm-up")
    return {"optimizer.warmup_steps": warm * _updates(o)}


def loss(o: Options) -> Settings:
    estimator, mode = o["algorithm.adv_estimator"], o[f"{ACTOR}.policy_loss.loss_mode"]
    reducer = o[f"{ACTOR}.loss_agg_mode"]
    if estimator not in ADVANTAGES:
        o.refuse("algorithm.adv_estimator", f"has no counterpart (no critic); there are {', '.join(ADVANTAGES)}")
    if mode not in ("vanilla", "gspo"):
        o.refuse(f"{ACTOR}.policy_loss.loss_mode", "has no counterpart; there are vanilla and gspo (docs/own.md)")
    if reducer not in REDUCERS:
        o.refuse(f"{ACTOR}.loss_agg_mode", f"has no counterpart; there are {', '.join(REDUCERS)}")
    # verl takes clip_ratio only where the pair is null
    pair = [o[f"{ACTOR}.clip_ratio_{side}"] for side in ("low", "high")]
    low, high = (o[f"{ACTOR}.clip_ratio"] if bound is None else bound for bound in pair)
    if None not in pair and o[f"{ACTOR}.clip_ratio"] not in pair:
        o.differ(f"{ACTOR}.clip_ratio: not read, as verl does where clip_ratio_low and clip_ratio_high are set")
    if mode == "vanilla":
        bound = o[f"{ACTOR}.clip_ratio_c"]
        o.differ(f"{ACTOR}.clip_ratio_c = {bound}: no bound of the ratio where the advantage is negative")
    if reducer == "seq-mean-token-sum-norm":
        o.differ(f"{ACTOR}.loss_agg_mode = {reducer}: divided by the responses, too")
    settings = policy(
        o,
        "clip" if mode == "vanilla" else "sequence",
        reducer=REDUCERS[reducer] if mode == "vanilla" else "response_mean",
        clip=(low, high),
        normalised=bool(o["algorithm.norm_adv_by_std_in_grpo"]) or estimator != "grpo",
    )
    return settings if estimator == "grpo" else settings | {"algorithm.advantage": ADVANTAGES[estimator]}


def reference(o: Options) -> Settings:
    if o["algorithm.use_kl_in_reward"]:
        o.refuse("algorithm.use_kl_in_reward", "has no counterpart: the KL is part of the loss; set use_kl_loss")
    if not o[f"{ACTOR}.use_kl_loss"] or not o[f"{ACTOR}.kl_loss_coef"]:
        return {"reference.mode": "none"}
    if o[f"{ACTOR}.kl_loss_type"] not in ("low_var_kl", "k3"):
        o.differ(f"{ACTOR}.kl_loss_type = {o[f'{ACTOR}.kl_loss_type']}: k3")
    return {"reference.mode": "loss", "reference.coefficient": o[f"{ACTOR}.kl_loss_coef"]}


def entropy(o: Options) -> Settings:
    alpha = o[f"{ACTOR}.entropy_coeff"]
    return {"entropy.controller": "fixed", "entropy.alpha": alpha} if alpha else {"entropy.controller": "none"}


def filter(o: Options) -> Settings:
    if not o["algorithm.filter_groups.enable"]:
        return {"algorithm.reject_zero_advantage": False}
    settings: Settings = {"algorithm.reject_zero_advantage": True, "algorithm.refill": "until_full"}
    rounds = o["algorithm.filter_groups.max_num_gen_batches"] - 1
    if rounds < 1:
        o.differ("algorithm.filter_groups.max_num_gen_batches: not unlimited, algorithm.refill_rounds at most")
        return settings
    return settings | {"algorithm.refill_rounds": rounds}


def buffer(o: Options) -> Settings:
    for name in BUFFERS:
        if not o[f"{name}.enable"]:
            continue
        factor = o[f"{name}.penalty_factor"] or 1.0
        o.differ(
            f"{name}: the reward falls by up to 1 (there {factor:g}), and rewards are 0 and 1, where verl's dapo "
            "manager has -1 and 1"
        )
        return {"algorithm.overlong_buffer": o[f"{name}.len"]}
    return {}


def correction(o: Options) -> Settings:
    level = o["algorithm.rollout_correction.rollout_is"]
    cap = o["algorithm.rollout_correction.rollout_is_threshold"]
    if level == "token":
        return {"algorithm.correction": "tis", "algorithm.correction_cap": cap}
    if o[f"{ACTOR}.tis_imp_ratio_cap"] > 0:
        return {"algorithm.correction": "tis", "algorithm.correction_cap": o[f"{ACTOR}.tis_imp_ratio_cap"]}
    if level is not None:
        o.differ("algorithm.rollout_correction.rollout_is: no correction by response; the nearest is tis, by token")
    return {"algorithm.correction": "none"}


def engine(o: Options) -> Settings:
    name = o[f"{ROLLOUT}.name"]
    if name == "hf":
        return {"rollout.engine": "in_process"}
    if name != "vllm":
        o.differ(f"{ROLLOUT}.name = {name}: sampled by vLLM")
    return {"rollout.engine": "vllm", "entropy.estimator": "sampled"}


def micro_batch(o: Options) -> Settings:
    if not o[f"{ACTOR}.use_dynamic_bsz"]:
        return {}
    tokens, shared = o[f"{ACTOR}.ppo_max_token_len_per_gpu"], o[f"{ACTOR}.ulysses_sequence_parallel_size"]
    return {"model.micro_batch_tokens": tokens * shared}


def adapters(o: Options) -> Settings:
    if not o[f"{MODEL}.lora_rank"]:
        return {}
    modules = o[f"{MODEL}.target_modules"]
    named = {} if modules == "all-linear" else {"model.lora.target_modules": _paths(modules)}
    return {"model.lora.rank": o[f"{MODEL}.lora_rank"], "model.lora.alpha": o[f"{MODEL}.lora_alpha"], **named}


def cluster(o: Options) -> Settings:
    nodes, parallel = o["trainer.nnodes"], o[f"{ROLLOUT}.tensor_model_parallel_size"]
    gpus = nodes * o["trainer.n_gpus_per_node"]
    if gpus == 1:
        return {}
    if gpus % parallel:
        o.refuse(f"{ROLLOUT}.tensor_model_parallel_size", f"does not divide the {gpus} GPUs")
    return {
        **({"cluster.address": "auto"} if nodes > 1 else {}),
        "cluster.learner.ranks": gpus,
        "cluster.learner.sequence_parallel": o[f"{ACTOR}.ulysses_sequence_parallel_size"],
        "cluster.learner.offload_optimizer": o[f"{ACTOR}.fsdp_config.optimizer_offload"],
        "cluster.rollout.replicas": gpus // parallel,
        "cluster.rollout.tensor_parallel": parallel,
        "cluster.rollout.colocated": o[f"{ROLLOUT}.name"] != "hf",
    }


def betas(o: Options) -> Settings:
    first, second = o[f"{ACTOR}.optim.betas"]
    return {"optimizer.beta1": first, "optimizer.beta2": second}


def named_trackers(o: Options) -> Settings:
    return trackers(o, _paths(o["trainer.logger"])) if o.states("trainer.logger") else {}


VERL = read_library("foreign_verl.toml", globals())
