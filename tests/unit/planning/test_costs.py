"""Cost functions compared with values computed by hand, and shapes with published parameter counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from magicrl.planning.costs import (
    Efficiency,
    Exchange,
    LearnerWork,
    System,
    decode_cost,
    exchange_seconds,
    forward_flops,
    kv_capacity,
    learner_flops,
    learner_seconds,
    logprob_seconds,
    offload_seconds,
    straggling,
    weight_sync_seconds,
)
from magicrl.planning.hardware import Hardware, known_hardware, load_hardware
from magicrl.planning.planner import flops_bound
from magicrl.planning.shapes import ModelShape, known_models, load_shape, shape_from_config
from magicrl.planning.workload import Lengths, Workload

# d 4, ff 8, one layer, 2 query heads and 1 KV head of width 2, 10 vocabulary entries
TOY = ModelShape(
    name="toy", hidden=4, intermediate=8, layers=1, heads=2, kv_heads=1, head_dim=2, vocabulary=10, tied=True
)
# attention: q 4x4, o 4x4, k and v 4x2 each = 48; feed-forward 3 x 32 = 96; norms 2 x 4 = 8
TOY_LAYER = 152
MACHINE = Hardware(
    name="m", memory=1e6, usable=1.0, flops=1000.0, bandwidth=100.0, link=10.0, network=2.0, gpus_per_node=2
)
HALF = Efficiency(kv=0.25, step_overhead=1.0, learner=0.5, other=0.1, weights=0.5, matmul=0.5, network=0.5)
TOY_SYSTEM = System(TOY, MACHINE, HALF)
WORK = LearnerWork(
    tokens=40, mean_context=5, responses=4, variation=0, sgd_steps=1, micro_batch_tokens=10, recompute=False
)


def test_parameters_of_a_toy_are_those_counted_by_hand() -> None:
    assert TOY.layer_parameters == TOY_LAYER
    assert TOY.parameters == TOY_LAYER + 40 + 4
    assert replace(TOY, tied=False).parameters == TOY_LAYER + 80 + 4
    assert replace(TOY, qkv_bias=True).layer_parameters == TOY_LAYER + 4 + 2 + 2
    assert replace(TOY, qk_norm=True).layer_parameters == TOY_LAYER + 4
    assert TOY.kv_bytes_per_token() == 2 * 1 * 1 * 2 * 2  # k and v, layer, head, width, bytes


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1.777088),
        ("DeepSeek-R1-Distill-Qwen-7B", 7.615616512),
        ("DeepSeek-R1-Distill-Qwen-14B", 14.770033664),
        ("DeepSeek-R1-Distill-Qwen-32B", 32.763876352),
        ("DeepSeek-R1-Distill-Llama-70B", 70.553706496),
        ("Qwen2.5-0.5B", 0.494032768),
        ("Qwen2.5-1.5B", 1.543714304),
        ("Qwen2.5-3B", 3.085938688),
        ("Qwen2.5-72B", 72.706203648),
        ("Qwen3-0.6B", 0.596049920),
        ("Qwen3-1.7B", 1.720574976),
        ("Qwen3-4B", 4.022468096),
        ("Qwen3-8B", 8.190735360),
        ("Qwen3-14B", 14.768307200),
        ("Qwen3-32B", 32.762123264),
        ("Qwen3-30B-A3B", 30.532122624),
        ("Qwen3-235B-A22B", 235.093634560),
        ("Llama-3.2-1B", 1.235814400),
        ("Llama-3.2-3B", 3.212749824),
        ("Llama-3.1-8B", 8.030261248),
        ("Mistral-7B", 7.248023552),
        ("Mixtral-8x7B", 46.702792704),
        ("SmolLM2-135M", 0.134515008),
        ("SmolLM2-360M", 0.361821120),
        ("SmolLM2-1.7B", 1.711376384),
    ],
)
def test_known_models_have_their_published_parameters(name: str, billions: float) -> None:
    assert known_models()[name].parameters == round(billions * 1e9)


def test_a_step_of_decoding_by_hand() -> None:
    cost = decode_cost(TOY_SYSTEM)
    assert cost.overhead == 1.0
    assert cost.weights == pytest.approx(2 * (TOY_LAYER + 40) / 50)
    assert cost.context == pytest.approx(8 / 25)
    assert cost.sequence == pytest.approx(2 * (TOY_LAYER + 40) / 500)
    # with few sequences, reading the weights hides the arithmetic; with many, the reverse
    assert cost.step(3, 10) == pytest.approx(1 + 7.68 + 3.2)
    assert cost.step(20, 10) == pytest.approx(1 + 20 * 0.768 + 3.2)


def test_a_rows_own_time_hides_behind_nothing_and_adds_to_every_row() -> None:
    """A narrow model's step costs more with a larger batch, although weights and arithmetic cost nothing."""
    plain, rows = (decode_cost(System(TOY, MACHINE, replace(HALF, row=row))) for row in (0.0, 0.25))
    for sequences in (1, 3, 20):
        assert rows.step(sequences, 10) == pytest.approx(plain.step(sequences, 10) + 0.25 * sequences)
    assert rows.prefill == plain.prefill


def test_tensor_parallel_divides_weights_and_pays_for_reductions() -> None:
    one, two = decode_cost(TOY_SYSTEM), decode_cost(TOY_SYSTEM, 2)
    assert two.weights == one.weights / 2
    assert two.overhead > one.overhead
    assert two.context == one.context  # one KV head cannot be split, so each accelerator holds it
    wide = replace(TOY, kv_heads=2)
    assert decode_cost(System(wide, MACHINE, HALF), 2).context == decode_cost(System(wide, MACHINE, HALF)).context / 2
    assert kv_capacity(TOY, 80) == 10
    assert kv_capacity(wide, 80, 2) == 10
    assert kv_capacity(TOY, 80, 2) == 10, "two copies of one head hold no more tokens"


def test_learner_by_hand() -> None:
    forward = 2 * 192 + 4 * 1 * 2 * 2 * 5  # per token: 2 N, and scores and sums over 5 tokens of context
    assert forward_flops(TOY, 10, 5) == 10 * forward
    assert learner_flops(TOY, 10, 5, recompute=False) == 30 * forward
    assert learner_flops(TOY, 10, 5, recompute=True) == 40 * forward - 10 * 2 * 40  # the head is not computed again
    work = replace(WORK, tokens=1000, responses=10, micro_batch_tokens=1000)
    optimizer = 28 * TOY.parameters / 50
    assert learner_seconds(TOY_SYSTEM, work, 1) == pytest.approx(3000 * forward / 500 + optimizer)
    assert logprob_seconds(TOY_SYSTEM, 10, 5, 2) == pytest.approx(10 * forward / 1000)
    # LoRA: the products of frozen weights have no gradient of the weights, a third of theirs
    adapted = 3000 * forward - 1000 * (2 * 192 - 6 * 20)
    found = learner_seconds(System(TOY, MACHINE, HALF, adapters=20), work, 1)
    assert found == pytest.approx(adapted / 500 + 28 * 20 / 50)


def test_many_small_micro_batches_are_bound_by_communication() -> None:
    # two accelerators, one node: 2 micro-batches each gather 2 x 2 bytes and reduce 4, of half the parameters, at 5/s
    seconds = learner_seconds(TOY_SYSTEM, WORK, 2)
    assert seconds == pytest.approx(2 * 0.5 * TOY.parameters * 8 / 5 + 28 * TOY.parameters / 2 / 50)
    assert learner_seconds(TOY_SYSTEM, WORK, 4) > seconds / 2  # beyond the node the network is slower


@pytest.mark.parametrize(
    ("told", "bytes_inside", "bytes_across"),
    [
        # 3 micro-batches in 2 updates; 2 of 4 accelerators hold the model: half of it is gathered twice in 2 bytes and
        # scattered in 4 each time, and copies exchange their half (both ways, halved: 1 x 1/2 of it) in each update
        ({}, 3 * 0.5 * (4 + 4), 2 * 0.5 * 4),
        ({"reduce_bytes": 2.0}, 3 * 0.5 * (4 + 2), 3 * 0.5 * 2),
        ({"reduce_once": True}, 0.5 * (3 * 4 + 2 * 4), 2 * 0.5 * 4),
    ],
)
def test_copies_of_the_model_meet_once_an_update(
    told: dict[str, Any], bytes_inside: float, bytes_across: float
) -> None:
    exchange = Exchange(shards=2, **told)
    found = exchange_seconds(TOY_SYSTEM, exchange, 4, 3, 2)
    link, network = (x * HALF.network for x in (MACHINE.link, MACHINE.network))
    assert link != network
    assert MACHINE.gpus_per_node == 2
    assert found == pytest.approx(TOY.parameters * (bytes_inside / link + bytes_across / network))
    adapted = exchange_seconds(replace(TOY_SYSTEM, adapters=20), exchange, 4, 3, 2)
    frozen = 3 * 0.5 * 4  # only weights are gathered
    sums = 20 * ((bytes_inside - frozen) / link + bytes_across / network)
    assert adapted == pytest.approx(TOY.parameters * frozen / link + sums)
    # one copy over both nodes, and one on every accelerator
    all_ranks = exchange_seconds(TOY_SYSTEM, Exchange(), 4, 3, 2)
    assert all_ranks == pytest.approx(TOY.parameters * 3 * 0.75 * 8 / network)
    assert exchange_seconds(TOY_SYSTEM, Exchange(shards=1), 2, 3, 2) == pytest.approx(
        TOY.parameters * 2 * 2 * 0.5 * 4 / link
    )
    # the optimizer steps on a shard of one copy
    few = replace(WORK, tokens=0.0, responses=1e9)
    spread, copied = (learner_seconds(TOY_SYSTEM, few, 4, 1, Exchange(shards=n)) for n in (4, 2))
    moved = [exchange_seconds(TOY_SYSTEM, Exchange(shards=n), 4, WORK.sgd_steps, WORK.sgd_steps) for n in (4, 2)]
    assert copied - moved[1] == pytest.approx(2 * (spread - moved[0]))


def test_an_update_has_at_least_one_micro_batch() -> None:
    assert WORK.micro_batches(1) == 4
    assert replace(WORK, sgd_steps=6).micro_batches(1) == 6


def test_ranks_beyond_the_number_of_samples_stand_idle() -> None:
    fast = replace(MACHINE, link=1e12, network=1e12, bandwidth=1e12)
    times = {gpus: learner_seconds(System(TOY, fast, HALF), WORK, gpus) for gpus in (2, 4, 8)}
    assert times[2] == pytest.approx(2 * times[4])
    assert times[8] == pytest.approx(times[4])
    assert learner_seconds(System(TOY, fast, HALF), WORK, 8, 2) == pytest.approx(times[8] / 2)


def test_the_fullest_rank_sets_the_pace() -> None:
    assert straggling(1, 5, 0.6) == 1.0
    assert straggling(32, 20, 0.0) == 1.0
    # 32 ranks of 4 samples, deviation 0.5: largest of 32 normal values is about 2.07 deviations
    assert straggling(32, 4, 0.5) == pytest.approx(1 + 2.07 * 0.25, abs=0.01)
    assert straggling(32, 1, 0.5) > straggling(32, 4, 0.5) > straggling(8, 4, 0.5)


def test_weights_travel_only_between_accelerators() -> None:
    assert weight_sync_seconds(TOY_SYSTEM, 1) == 0
    assert weight_sync_seconds(TOY_SYSTEM, 2) == pytest.approx(2 * TOY.parameters / 5)
    assert weight_sync_seconds(TOY_SYSTEM, 4) == pytest.approx(2 * TOY.parameters / 1)


def test_shapes_by_name_folder_and_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 26,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    assert shape.head_dim == 32
    assert load_shape(str(tmp_path / "config.json")).parameters == shape.parameters
    assert load_shape("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B").layers == 28
    assert load_shape("HuggingFaceTB/SmolLM2-135M-Instruct").name == "SmolLM2-135M"
    with pytest.raises(ValueError, match=r"no model folder and no known model 'Qwen3-8X'; did you mean 'Qwen3-8B'\?"):
        load_shape("Qwen3-8X")
    with pytest.raises(ValueError, match=r"knows the types llama, .* not 'gemma3_text'"):
        shape_from_config({**config, "model_type": "gemma3_text"}, "other")
    with pytest.raises(ValueError, match="has no 'vocab_size'"):
        shape_from_config({k: v for k, v in config.items() if k != "vocab_size"}, "cut")
    for wrong, message in (
        ({"hidden_size": -5}, "has hidden_size = -5; correct it"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers = -1"),
        ({"num_attention_heads": 3}, "hidden_size 64, 3 attention heads and 2 key/value heads, which do not divide"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "which do not divide"),
        ({"num_key_value_heads": 4}, "2 attention heads and 4 key/value heads"),
    ):
        with pytest.raises(ValueError, match=message):
            shape_from_config({**config, **wrong}, "wrong")
    assert shape_from_config({**config, "num_attention_heads": 6, "head_dim": 16}, "wide").head_dim == 16
    for content in (b"{", b"\xff{}", b"[" * 100_000, b"[]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json: not a model's config"):
            load_shape(str(tmp_path))


def test_a_mixture_of_experts_holds_all_of_them_and_computes_with_some() -> None:
    """Use two of eight experts: 6 x 96 parameters per layer are idle. A router of 4 x 8 is added. A batch reads all."""
    mixture = replace(TOY, experts=8, chosen=2)
    assert mixture.layer_parameters == TOY_LAYER + 7 * 96 + 32
    assert mixture.multiplied_parameters == TOY_LAYER + 96 + 32 + 40
    assert mixture.read_parameters == mixture.layer_parameters + 40
    cost, dense = (decode_cost(System(shape, MACHINE, HALF)) for shape in (mixture, TOY))
    assert cost.weights / dense.weights == pytest.approx((TOY_LAYER + 7 * 96 + 32 + 40) / (TOY_LAYER + 40))
    assert cost.sequence / dense.sequence == pytest.approx((TOY_LAYER + 96 + 32 + 40) / (TOY_LAYER + 40))
    assert mixture.adapter_parameters(2, ["q_proj", "up_proj"]) == TOY.adapter_parameters(2, ["q_proj"])
    published = known_models()["Qwen3-30B-A3B"]
    assert published.multiplied_parameters == pytest.approx(3.04e9, rel=0.01), "3.3 B active, embedding included"
    config = {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2}
    with pytest.raises(ValueError, match="experts in every layer; this one has dense layers"):
        shape_from_config(config, "mixed")
    with pytest.raises(ValueError, match="not 'llama'"):
        shape_from_config({"model_type": "llama", "num_experts": 4}, "odd")


def test_hardware_by_name_and_file(tmp_path: Path) -> None:
    assert {"A100-80G", "H100-80G", "H800-80G", "H200", "B200", "H20", "cpu-2core"} <= set(known_hardware())
    for short, name in (("H800", "H800-80G"), ("4090", "RTX-4090")):
        with pytest.raises(ValueError, match=rf"no hardware called '{short}'; did you mean '{name}'\?"):
            load_hardware(short)
    assert {"RTX-3090", "RTX-4090", "RTX-5090", "A6000", "L40S"} <= set(known_hardware())
    own = tmp_path / "own.toml"
    own.write_text(
        "[mine]\nmemory_gib = 16\nbf16_tflops = 100\nmemory_tb_s = 1\nlink_gb_s = 30\nnetwork_gb_s = 10\n"
        "gpus_per_node = 4\n"
    )
    assert load_hardware(str(own)).flops == 1e14
    own.write_text("[mine]\nmemory_gib = -1\n")
    with pytest.raises(ValueError, match="not a hardware file"):
        load_hardware(str(own))


def test_the_flops_bound_by_hand() -> None:
    """Count two responses of 3 tokens to a prompt of 2. Half survive, one pass has no gradient: 1 + 1 + 3/2 passes."""
    work = Workload(
        lengths=Lengths(median=1e6, sigma=0.1, limit=3), prompt=2, rollout_batch=1, group_size=2, kept=0.5, forwards=1
    )
    forward = forward_flops(TOY, 10, work.mean_context) / (2 * MACHINE.flops)
    bound = flops_bound(TOY, MACHINE, work, 2)
    assert bound == pytest.approx({"rollout": forward, "update": 1.5 * forward, "step": 3.5 * forward})


def test_the_flops_bound_knows_what_lora_saves_and_a_teacher_costs() -> None:
    """Frozen weights need no gradient: of 3 passes one is saved, except attention and 6 per adapter parameter."""
    work = Workload(lengths=Lengths(median=1e6, sigma=0.1, limit=3), prompt=2, rollout_batch=1, group_size=2)
    full, lora = (flops_bound(TOY, MACHINE, work, 2, adapters) for adapters in (0, 7))
    saved = 10 * (2 * TOY.multiplied_parameters - 6 * 7) / (2 * MACHINE.flops)
    assert full["update"] - lora["update"] == pytest.approx(saved)
    assert full["step"] - lora["step"] == pytest.approx(saved)
    taught = flops_bound(TOY, MACHINE, replace(work, teacher=TOY), 2)
    assert taught["step"] == pytest.approx(full["step"] + full["rollout"])


def test_shares_of_long_samples_are_those_of_drawn_ones() -> None:
    work = Workload(lengths=Lengths(median=900, sigma=0.6, limit=4000), prompt=100, rollout_batch=20000, group_size=1)
    sizes = np.minimum(np.ceil(900 * np.exp(0.6 * np.random.default_rng(0).standard_normal(20000))), 4000) + 100
    long = sizes[sizes > 1500]
    assert work.beyond(1500) == pytest.approx((long.size / sizes.size, long.sum() / sizes.sum()), rel=0.03)
    assert (work.beyond(4100), work.beyond(100)) == ((0.0, 0.0), (1.0, 1.0))
    short = sizes[sizes <= 1500].sum() / 1500
    assert work.micro_batch(1500) == pytest.approx(sizes.sum() / (short + long.size), rel=0.03)
    assert work.micro_batch(5000) == 5000


def test_state_in_the_hosts_memory_crosses_its_link() -> None:
    """Move 12 bytes per parameter in 4 micro-batches; an update touches 28. Each of two ranks has half of them."""
    slow = replace(MACHINE, host=10.0)
    seconds = offload_seconds(System(TOY, slow, HALF), WORK, 1, 2)
    assert seconds == pytest.approx((4 * 12 + 28) * TOY.parameters / 2 / 5)
