"""Ranks compared with the single learner: the same gradients, metrics, weights and state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import SIZES
from learning import learning
from model_cases import CASES, CONTEXT, WORDS, plain_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import DType, LoraConfig, ModelConfig, OptimizerConfig
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.models.loading import load_policy, load_shell, save_policy
from magicrl.models.model_files import stored_buffers
from magicrl.models.small_models import make_tokenizer
from magicrl.records import TrainBatch, TrainSample, frozen_floats
from magicrl.training.checkpoint import Checkpoint, CheckpointWriter, load_checkpoint
from magicrl.training.learner import LocalLearner, ReferenceModel
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls, Learner, NotFiniteError
from magicrl.training.step import minibatches, with_logprobs

# Learners that add in another order diverge: on these samples two single learners with other micro-batches
# differ by 6e-6 after five steps, and by 5e-7 on the same weights.
CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-4, clip_low=0.15, clip_high=0.25, kl_coefficient=0.1)
Loaded = Callable[[], Any]


def settings(model: dict[str, Any] | None = None, **algorithm: Any) -> LearnerSettings:
    return learning(
        **{"correction": "tis", **algorithm},
        optimizer=OptimizerConfig(max_grad_norm=0.05),
        model=ModelConfig(**{"dtype": "float32", "micro_batch_tokens": 70, "head_chunk_tokens": 16, **(model or {})}),
    )


def single(loaded: Loaded, **changes: Any) -> LocalLearner:
    policy = loaded()
    return LocalLearner(policy.model, settings(**changes), tokenizer=policy.tokenizer, valid_vocab=policy.valid_vocab)


def spread(
    loaded: Loaded,
    ranks: Any,
    count: int,
    sequence_parallel: int = 1,
    placed: Mapping[str, Any] | None = None,
    **changes: Any,
) -> DistributedLearner:
    placement = LearnerPlacement(ranks=count, sequence_parallel=sequence_parallel, **(placed or {}))
    return DistributedLearner(loaded(), settings(**changes), launcher=ranks, placement=placement, threads=1)


def shards(many: DistributedLearner, folder: Path) -> dict[str, Any]:
    """Write the state with its ranks into ``folder``, and return the information to read it."""
    folder.mkdir()
    begun = many.begin_shards(folder)
    many.finish_shards()
    return json.loads(json.dumps(begun.result()))


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[k] - theirs[k]).double().square().sum()) for k in ours)
    return (difference / sum(float(v.double().square().sum()) for v in theirs.values())) ** 0.5


def gradients(one: LocalLearner, batch: TrainBatch) -> dict[str, Tensor]:
    one.accumulate(batch.samples, one.objective.sample_weights(batch), CONTROLS, one.objective.statistics(batch))
    found = {name: value.clone() for name, value in one.gradients().items()}
    one.optimizer.forget()
    return found


def batches(learner: Learner, samples: Sequence[TrainSample], steps: int) -> list[TrainBatch]:
    """Return ``steps`` uneven mini-batches, with old log-probs of this learner and some reference's."""
    logprobs, _ = learner.logprobs(samples, CONTROLS.temperature)
    rng = np.random.default_rng(5)
    ref = [frozen_floats(values + rng.normal(0, 0.3, len(values))) for values in logprobs]
    carried = with_logprobs(with_logprobs(samples, "old_logprobs", logprobs), "ref_logprobs", ref)
    longest = max(range(len(carried)), key=lambda i: len(carried[i].tokens))
    mask = np.arange(len(carried[longest].tokens)) % 3 != 1
    carried[longest] = dataclasses.replace(carried[longest], loss_mask=mask)
    made = minibatches(
        carried, parts=2, prompts_per_part=3, mode="keep_n_sgd", reuse=steps, seed=(0, 1), max_response_tokens=40
    )
    return list(made)[:steps]


def compare(one: LocalLearner, many: DistributedLearner, samples: Sequence[TrainSample], steps: int) -> None:
    """Make ``steps`` updates with both learners on the same samples. All reports must be equal."""
    pairs = zip(batches(one, samples, steps), batches(many, samples, steps), strict=True)
    for ours, theirs in pairs:
        assert relative_error(many.gradients(theirs, CONTROLS), gradients(one, ours)) < 1e-5
        expected, found = one.update(ours, CONTROLS), many.update(theirs, CONTROLS)
        assert found.keys() == expected.keys()
        assert dict(found) == pytest.approx(dict(expected), rel=1e-4, abs=1e-6)
    assert many.version == one.version == steps
    assert expected["grad_norm"] > 0.05, "the clip must act in this test"
    weights = many.weights()
    assert list(weights) == list(one.weights())
    for name, value in one.weights().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=5e-6)


def test_two_ranks_are_one_learner(loaded: Loaded, ranks: Any, recorded: list[TrainSample], tmp_path: Path) -> None:
    """Also with a sequence shared by both, and with work for only one. A failed step must leave nothing behind."""
    one, many = single(loaded), spread(loaded, ranks, 2)
    compare(one, many, recorded, steps=2)
    # a batch of one response leaves one rank without work
    samples = batches(one, recorded, 1)[0].samples
    alone = TrainBatch.of(samples[:1], max_response_tokens=40)
    many.restore(one.state())
    assert relative_error(many.gradients(alone, CONTROLS), gradients(one, alone)) < 1e-5

    before = many.state()
    broken = [*samples[:4], dataclasses.replace(samples[4], advantage=float("nan")), *samples[5:]]
    with pytest.raises(NotFiniteError, match="the loss of update 3 is nan") as caught:
        many.update(TrainBatch.of(broken), CONTROLS)
    assert caught.value.culprit == (samples[4].group_index, samples[4].sample_index)
    after = many.state()
    assert all(torch.equal(before[k], after[k]) for k in before if k != "meta")
    assert after["meta"] == one.state()["meta"]

    many.save_hf(tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in many.weights().items())

    together = spread(loaded, ranks, 2, sequence_parallel=2, model={"gradient_checkpointing": True})
    compare(single(loaded), together, recorded, steps=1)


def test_how_sums_over_ranks_are_made_changes_no_update(
    untied: Loaded, ranks: Any, recorded: list[TrainSample], tmp_path: Path
) -> None:
    """Embedding and head are separate units here. Two copies of the model exchange sums once per update."""
    compare(single(untied), spread(untied, ranks, 2, placed={"reduce_once": True}), recorded, steps=2)
    copies = spread(untied, ranks, 2, placed={"shard_ranks": 1})
    compare(single(untied), copies, recorded, steps=2)
    meta = shards(copies, tmp_path / "shards")
    gathered = copies.state()
    again = spread(untied, ranks, 2)
    again.read_shards(tmp_path / "shards", meta)
    state = again.state()
    assert all(torch.equal(state[k], gathered[k]) for k in gathered if k != "meta")
    copies.restore(state)
    restored = copies.state()
    assert all(torch.equal(restored[k], gathered[k]) for k in gathered if k != "meta")

    rounded, one = spread(untied, ranks, 2, placed={"reduce_dtype": "bfloat16"}), single(untied)
    (batch,) = batches(one, recorded, 1)
    error = relative_error(rounded.gradients(batch, CONTROLS), gradients(one, batch))
    assert 1e-4 < error < 1e-2, "a sum in bfloat16"


@pytest.mark.slow
def test_compiled_ranks_are_one_learner(untied: Loaded, ranks: Any, recorded: list[TrainSample]) -> None:
    """Use sharded units around compiled layers, also with a rank that has no work."""
    model = {"gradient_checkpointing": True, "lora": LoraConfig(rank=3)}
    one = single(untied, model=model)
    many = spread(untied, ranks, 2, 2, model={"compile": True, **model})
    compare(one, many, recorded, steps=2)
    alone = TrainBatch.of(batches(one, recorded, 1)[0].samples[:1], max_response_tokens=40)
    many.restore(one.state())
    assert relative_error(many.gradients(alone, CONTROLS), gradients(one, alone)) < 1e-5
    assert not any("_orig_mod" in name for name in (*many.weights(), *many.state()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence_parallel", "placed"), [(1, {"reduce_once": True}), (2, {"offload_optimizer": True})]
)
def test_two_copies_of_two_shards_are_one_learner(
    untied: Loaded,
    ranks: Any,
    recorded: list[TrainSample],
    tmp_path: Path,
    sequence_parallel: int,
    placed: Mapping[str, Any],
) -> None:
    """HSDP on four processes: shards within a group, copies across groups, and a state from one copy's files."""
    one = single(untied)
    many = spread(untied, ranks, 4, sequence_parallel, placed={"shard_ranks": 2, **placed})
    compare(one, many, recorded, steps=2)
    meta = shards(many, tmp_path / "shards")
    gathered = many.state()
    again = spread(untied, ranks, 4)
    again.read_shards(tmp_path / "shards", meta)
    state = again.state()
    assert state.keys() == gathered.keys()
    assert all(torch.equal(state[k], gathered[k]) for k in gathered if k != "meta")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_hold_the_reference_in_shards(
    loaded: Loaded, untied: Loaded, ranks: Any, recorded: list[TrainSample], dtype: DType
) -> None:
    """Use a reference that is not the policy's model. Its scores must not change when the policy learns."""
    model: dict[str, Any] = {"dtype": dtype}
    policy = loaded()
    frozen = load_policy(policy.folder, dtype=dtype)
    whole = ReferenceModel(frozen.model, valid_vocab=frozen.valid_vocab, model_config=settings(model).model)
    expected, expected_entropies = whole.logprobs(recorded, 0.8)
    placement = LearnerPlacement(ranks=2)
    many = DistributedLearner(
        untied(), settings(model), launcher=ranks, placement=placement, threads=1, reference=load_shell(policy.folder)
    )
    assert many.reference is not None
    (batch,) = batches(many, recorded, 1)
    before = many.logprobs(recorded, 0.8)[0]
    bound = 1e-5 if dtype == "float32" else 0.1
    for _ in range(2):
        found, entropies = many.reference.logprobs(recorded, 0.8)
        for ours, theirs in zip([*found, *entropies], [*expected, *expected_entropies], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)
        many.update(batch, dataclasses.replace(CONTROLS, learning_rate=1e-2))
    moved = [np.abs(a - b).max() for a, b in zip(before, many.logprobs(recorded, 0.8)[0], strict=True)]
    assert max(moved) > 10 * bound, "the policy is not the reference"


EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
PACKED = {"share_prompts": False, "gradient_checkpointing": True}
LORA = {"lora": LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "sequence_parallel", "loss", "model"),
    [
        (4, 1, "magic", {}),
        (4, 2, "gspo", PACKED),
        (4, 2, "grpo", LORA),
        (2, 1, "dr_grpo", LORA | PACKED),
        (1, 1, "magic", PACKED),
        (2, 1, "scalerl", {}),
        (2, 1, f"{EXAMPLES}/loss.py:ROW", {}),
    ],
)
def test_steps_of_recorded_rollouts_equal_the_single_learner(
    loaded: Loaded,
    ranks: Any,
    recorded: list[TrainSample],
    count: int,
    sequence_parallel: int,
    loss: str,
    model: dict[str, Any],
) -> None:
    own = {"correction": f"{EXAMPLES}/correction.py:of_responses", "reducer": f"{EXAMPLES}/reducer.py:square_root"}
    brought = own if loss.startswith(str(EXAMPLES)) else {}  # each rank resolves the reference itself
    one = single(loaded, loss=loss, model=model, **brought)
    many = spread(loaded, ranks, count, sequence_parallel, loss=loss, model=model, **brought)
    compare(one, many, recorded, steps=3)
    assert set(many.state()) == set(one.state())
    if "lora" in model:
        adapters = many.adapters()
        assert list(adapters) == list(one.adapters())
        for name, value in one.adapters().items():
            torch.testing.assert_close(adapters[name], value, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("name", "lora"), [("Gemma 4", None), ("DeepSeek-V3", LoraConfig(rank=2))])
def test_a_written_model_has_the_tensors_that_are_not_trained(
    ranks: Any, tmp_path: Path, name: str, lora: LoraConfig | None
) -> None:
    """Gemma 4 scales its layers by stored numbers, and DeepSeek-V3 chooses experts with a stored bias."""
    model = plain_model(CASES[name], pad_token_id=0)
    untrained = stored_buffers(model)
    for buffer in untrained:
        model.get_buffer(buffer).fill_(0.5)
    folder = save_policy(model, make_tokenizer([f"w{i}" for i in range(WORDS - 2)], CONTEXT), tmp_path / "start")
    model.save_pretrained(folder, save_original_format=False)  # experts as ranks read them
    many = spread(lambda: load_shell(folder), ranks, 2, model={"lora": lora})
    for again in ("best", "last"):
        many.save_hf(tmp_path / again)
        written = load_policy(tmp_path / again).model.state_dict()
        assert all(torch.equal(written[key], value) for key, value in model.state_dict().items())
        assert all((written[buffer] == 0.5).all() for buffer in untrained)
    if lora is not None:
        described = json.loads((tmp_path / "last" / "adapter" / "adapter_config.json").read_text())
        assert described["target_modules"] == ["o_proj"], "the only layer of the default list that it has"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_models_compute_on_rounded_weights_and_keep_precise_ones(
    loaded: Loaded, ranks: Any, recorded: list[TrainSample], tmp_path: Path, dtype: str
) -> None:
    model = {"dtype": dtype, **({"head_dtype": "float32"} if dtype == "float16" else {})}
    one, many = single(loaded, model=model), spread(loaded, ranks, 2, model=model)
    (batch,) = batches(one, recorded, 1)
    assert relative_error(many.gradients(batch, CONTROLS), gradients(one, batch)) < 0.02
    theirs, ours = many.update(batch, CONTROLS), one.update(batch, CONTROLS)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=0.01), "no loss scale is left in it"
    weights, masters = many.weights(), many.state()
    for name, value in weights.items():
        assert str(value.dtype) == f"torch.{dtype}"
        assert torch.equal(value, masters[f"weights/{name}"].to(value.dtype))
        assert not torch.equal(value.float(), masters[f"weights/{name}"])
    meta = shards(many, tmp_path / "shards")
    assert masters["meta"] == one.state()["meta"] == {k: v for k, v in meta.items() if k != "files"}
    assert ("loss_scale" in meta) == (dtype == "float16")
    other = single(loaded, model=model)
    other.restore(masters)
    assert other.state()["meta"] == masters["meta"]
    many.read_shards(tmp_path / "shards", meta)
    assert many.state()["meta"] == masters["meta"]


@pytest.mark.slow
def test_a_state_goes_on_with_another_number_of_ranks(
    loaded: Loaded, ranks: Any, recorded: list[TrainSample], tmp_path: Path
) -> None:
    four = spread(loaded, ranks, 4)
    first, second = batches(four, recorded, 2)
    four.update(first, CONTROLS)
    meta = shards(four, tmp_path / "shards")
    gathered = four.state()
    assert len(meta["files"]) == 4
    after = four.update(second, CONTROLS)
    for count in (1, 2):
        other = spread(loaded, ranks, count)
        other.read_shards(tmp_path / "shards", meta)
        state = other.state()
        assert state.keys() == gathered.keys()
        assert state["meta"] == gathered["meta"] == {"optimizer_steps": 1}
        assert all(torch.equal(state[k], gathered[k]) for k in gathered if k != "meta")
        assert dict(other.update(second, CONTROLS)) == pytest.approx(dict(after), rel=1e-4, abs=1e-6)
    one = single(loaded)
    one.restore(gathered)
    assert dict(one.update(second, CONTROLS)) == pytest.approx(dict(after), rel=1e-4, abs=1e-6)
    # like a checkpoint: written by ranks, read by one process under the single learner's names
    kept = Checkpoint(step=1, tensors={}, state={"learner": {}})
    with CheckpointWriter(tmp_path / "checkpoints", other) as writer:
        writer.begin(kept, keep_last=1)
        written = writer.wait()
    assert written is not None
    found = load_checkpoint(written)
    assert (written / "learner").is_dir()
    alone = single(loaded)
    alone.restore(found.learner_state())
    expected = other.state()
    assert alone.version == expected["meta"]["optimizer_steps"]
    assert all(torch.equal(value, expected[k]) for k, value in alone.state().items() if k != "meta")
    # damage is reported, and the ranks can continue
    file = tmp_path / "shards" / sorted(meta["files"])[1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{file.name} does not have the checksum"):
        other.read_shards(tmp_path / "shards", meta)


@pytest.mark.slow
def test_mistakes_are_the_users_own_errors(loaded: Loaded, ranks: Any, recorded: list[TrainSample]) -> None:
    with pytest.raises(ValueError, match=r"4 does not divide the 4 query heads and 2 key/value heads.*possible: 1, 2"):
        spread(loaded, ranks, 4, sequence_parallel=4)
    many = spread(loaded, ranks, 2)
    state = dict(many.state())
    del state["weights/model.norm.weight"]
    with pytest.raises(ValueError, match="the checkpoint does not belong to this model"):
        many.restore(state)
    strange = dataclasses.replace(recorded[0], tokens=recorded[0].tokens + 30)
    with pytest.raises(ValueError, match="lies outside the vocabulary of 37 words"):
        many.logprobs([strange], 1.0)
    with pytest.raises(ValueError, match=r"beta = 0\.1 needs log-probs of the reference model"):
        many.update(TrainBatch.of(recorded), CONTROLS)


def test_ranks_send_tokens_where_the_sampler_did(
    start_folder: Path, ranks: Any, recorded: list[TrainSample], tmp_path: Path
) -> None:
    """Use a mixture of experts with arbitrary choices: the record travels with the samples."""
    config = MixtralConfig(
        **SIZES | {"max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0},
        initializer_range=0.3,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # ranks read the files' rows under the names of the loaded model
        MixtralForCausalLM(config).save_pretrained(folder := tmp_path / "mixture", save_original_format=False)
    load_policy(start_folder).tokenizer.save_pretrained(folder)

    def mixture() -> Any:
        return load_policy(folder)

    rng = np.random.default_rng(7)
    chosen = [rng.random((len(one) - 1, 2, 4)).argsort(-1)[..., :2].astype(np.uint8) for one in recorded]
    given = [dataclasses.replace(one, experts=experts) for one, experts in zip(recorded, chosen, strict=True)]
    replay = {"router_replay": True, "share_prompts": False}
    one, many = single(mixture, model=replay), spread(mixture, ranks, 2, model=replay)
    compare(one, many, given, steps=1)
    before = [single(mixture, model=m).logprobs(given, 1.0)[0] for m in (replay, {"share_prompts": False})]
    assert max(float(np.abs(a - b).max()) for a, b in zip(*before, strict=True)) > 0.1
