"""``magicrl explain``: the repeated step is the recorded one, a fault shows in a hash, figures are computed by hand."""

from __future__ import annotations

import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import magicrl
from magicrl.commands.explain import NOT_EQUAL
from magicrl.commands.explain import command as explain
from magicrl.config.errors import RecipeError
from magicrl.training.repeating import recorded_config, varied_config

SETTINGS = {
    "stages.1.mini_batch": 2,
    "stages.0.max_steps": 3,
    "stages.0.max_tokens": 24,
    "stages.0.group_size": 8,
    "stages.0.clip_high": 0.3,
    "stages.1.group_size": 8,
    "stages.1.max_steps": 2,
    "optimizer.learning_rate": 1e-4,
    "optimizer.warmup_steps": 2,
    "optimizer.weight_decay": 0.1,
    "entropy.controller": "fixed",
    "entropy.alpha": 0.05,
    "evaluation.every": 2,
    "evaluation.validation_samples": 1,
    "evaluation.samples": 1,
    "evaluation.pass_at": [1],
    "evaluation.temperatures": [1.0],
    "checkpoint.every": 1,
    "checkpoint.keep_last": 4,
    "checkpoint.keep_best": False,
}
ON_POLICY, SEVERAL = 3, 5
"""The first step has a checkpoint before and after it. The second makes four updates."""


@pytest.fixture(scope="module")
def run(toy_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    return magicrl.train(tomllib.loads(toy_text), settings=SETTINGS, output=folder / "run", progress=False).path


@pytest.fixture(scope="module")
def found(run: Path) -> dict[str, Any]:
    mine = run.with_name("mine.py")
    mine.write_text("def odd(problem, response):\n    return float(len(response) % 2)\n")
    what_if = ["algorithm.loss=magic", "optimizer.learning_rate=2e-4", "reward=exact", f"reward={mine}:odd"]
    return magicrl.explain(run, ON_POLICY, what_if=what_if)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_step_of_several_updates_is_the_recorded_one_and_no_file_is_touched(run: Path) -> None:
    before = contents(run)
    found = magicrl.explain(run, SEVERAL)
    assert [(check["name"], check["equal"]) for check in found["checks"]] == [
        ("metrics", True),
        ("responses", True),
        ("weights", True),
    ]
    assert found["equal"]
    assert found["from_checkpoint"] == SEVERAL - 1
    assert found["update"]["sgd_steps"] == 4
    for norms in found["update"]["grad_norms"]:
        assert norms["float64"] == pytest.approx(norms["recorded"], rel=1e-4)
    shares = sum(group["norm"] for group in found["groups"])
    assert shares == pytest.approx(sum(norms["float64"] for norms in found["update"]["grad_norms"]), rel=1e-6)
    assert contents(run) == before


def test_a_step_without_a_kept_checkpoint_is_made_from_the_start(run: Path) -> None:
    found = magicrl.explain(run, 1)
    assert found["from_checkpoint"] == 0
    assert [check["equal"] for check in found["checks"]] == [True, True, None]
    assert "keeps no checkpoint" in found["checks"][2]["note"]


class ByHand:
    """The step by autograd, one token at a time, on transformers' model in float64 (its norms stay in float32)."""

    def __init__(self, run: Path, found: dict[str, Any], step: int) -> None:
        start = json.loads((run / "run.json").read_text())["start_model"]
        self.model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64, attn_implementation="eager")
        self.before, self.after = (
            load_file(run / "checkpoints" / f"step-{number:06d}" / "tensors.safetensors") for number in (step - 1, step)
        )
        self.parameters = dict(self.model.named_parameters())
        self.put({name: self.before[f"learner/weights/{name}"].double() for name in self.parameters})
        self.alpha, self.found = 0.05, found
        rollouts = magicrl.load_run(run).rollouts([step], tokens=True)
        self.prompts = [list(p) for p in rollouts["prompt_tokens"]]
        self.tokens = [list(t) for t in rollouts["tokens"]]
        self.responses = [r for group in found["groups"] for r in group["responses"]]
        self.group = [g for g, group in enumerate(found["groups"]) for _ in group["responses"]]

    def put(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def scores(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies of one response."""
        prompt, tokens = self.prompts[index], self.tokens[index]
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        every = logits.log_softmax(-1)
        return every.gather(1, torch.tensor(tokens)[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(value, list(self.parameters.values()), retain_graph=True, allow_unused=True)
        pairs = zip(found, self.parameters.values(), strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])

    def state(self, which: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
        return torch.cat([which[f"learner/{kind}/{name}"].double().reshape(-1) for name in self.parameters])

    def token_gradients(self) -> list[list[torch.Tensor]]:
        """Return g_t of each token of each response that was trained on: -(A logp + alpha H) over all their tokens."""
        learned = [r["advantage"] is not None for r in self.responses]
        count = sum(len(t) for t, there in zip(self.tokens, learned, strict=True) if there)
        gradients: list[list[torch.Tensor]] = []
        for index, response in enumerate(self.responses):
            if not learned[index]:
                gradients.append([])
                continue
            logprobs, entropies = self.scores(index)
            shares = -(response["advantage"] * logprobs + self.alpha * entropies) / count
            gradients.append([self.flat(share) for share in shares])
        return gradients


def test_every_figure_is_that_of_autograd_by_hand(run: Path, found: dict[str, Any]) -> None:
    hand = ByHand(run, found, ON_POLICY)
    gradients = hand.token_gradients()
    whole = sum(g for tokens in gradients for g in tokens)
    norm = float(whole.norm())
    assert found["update"]["grad_norms"][0]["float64"] == pytest.approx(norm, rel=1e-6)
    # shares in the gradient's norm
    for index, tokens in enumerate(gradients):
        expected = [float(g @ whole) / norm for g in tokens] or [0.0] * len(hand.tokens[index])
        assert hand.responses[index]["norm"] == pytest.approx(expected, rel=1e-4, abs=1e-8)
    # share of the step from this gradient: the change of the first moment, under AdamW's scale
    state = json.loads((run / "checkpoints" / f"step-{ON_POLICY:06d}" / "state.json").read_text())
    count = state["state"]["learner"]["meta"]["optimizer_steps"]
    root = (hand.state(hand.after, "exp_avg_sq") / (1 - 0.999**count)).sqrt() + 1e-8
    clipped = whole * min(1.0, 1.0 / norm)
    own = found["update"]["learning_rate"] * 0.1 / (1 - 0.9**count) * clipped / root
    assert found["update"]["own_norm"] == pytest.approx(float(own.norm()), rel=1e-4)


def members(hand: ByHand, group: int) -> list[int]:
    return [i for i, g in enumerate(hand.group) if g == group]


def gain(hand: ByHand, group: int) -> torch.Tensor:
    """Return the sum of (r - mean r) logp over the tokens of a group, divided by their number."""
    rewards = [hand.responses[i]["reward"] for i in members(hand, group)]
    tokens = sum(len(hand.tokens[i]) for i in members(hand, group))
    mean = sum(rewards) / len(rewards)
    pairs = zip(members(hand, group), rewards, strict=True)
    return sum(((r - mean) * hand.scores(i)[0].sum() for i, r in pairs), torch.zeros(())) / tokens


def test_what_was_measured_is_what_happened(run: Path, found: dict[str, Any]) -> None:
    hand = ByHand(run, found, ON_POLICY)
    groups = range(len(found["groups"]))
    with torch.no_grad():
        before = [hand.scores(i) for i in range(len(hand.tokens))]
        gains = [float(gain(hand, k)) for k in groups]
        hand.put({name: hand.after[f"learner/weights/{name}"].double() for name in hand.parameters})
        after = [hand.scores(i) for i in range(len(hand.tokens))]
        changes = [float(gain(hand, k)) - gains[k] for k in groups]
    for index, response in enumerate(hand.responses):
        assert response["logprob"] == pytest.approx(before[index][0].tolist(), abs=2e-6)
        moved = (after[index][0] - before[index][0]).tolist()
        assert response["change"] == pytest.approx(moved, abs=2e-6)
    assert [group["gain"] for group in found["groups"]] == pytest.approx(changes, abs=2e-6)
    total = sum(len(tokens) for tokens in hand.tokens)
    change = sum(float((a[1] - b[1]).sum()) for a, b in zip(after, before, strict=True)) / total
    assert found["update"]["entropy_change"] == pytest.approx(change, abs=2e-6)


def test_what_if(found: dict[str, Any]) -> None:
    same, faster, judged, otherwise = found["what_if"]
    for other in (same, judged):
        assert other["cosine"] == pytest.approx(1, abs=1e-12)
        assert other["norm"] == found["update"]["norm"]
        assert other["gains"] == pytest.approx([group["gain"] for group in found["groups"]], abs=1e-12)
    assert faster["own_norm"] == pytest.approx(2 * found["update"]["own_norm"], rel=1e-6)
    assert faster["own_cosine"] == pytest.approx(1, abs=1e-9)
    assert otherwise["gains"] != pytest.approx([group["gain"] for group in found["groups"]], rel=1e-3)
    assert otherwise["own_cosine"] < otherwise["cosine"] - 1e-3, "both steps share the momentum, not the gradient"


def test_what_if_replaces_the_setting_of_a_stage(run: Path) -> None:
    config = varied_config(run, "algorithm.clip_high=0.5")
    assert recorded_config(run).stages[0].clip_high == 0.3
    assert [config.in_stage(index).algorithm.clip_high for index in (0, 1)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout.temperature=0.5", "only settings of the update can change"),
        ("algorithm.loss=nonsense", "nonsense"),
        ("algorithm.clip_low=-1", "clip_low"),
        ("algorithm.reject_zero_advantage=false algorithm.refill=until_full", "refill"),
    ],
)
def test_a_wrong_what_if_is_refused_before_anything_is_computed(run: Path, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        magicrl.explain(run, ON_POLICY, what_if=[words])


@pytest.fixture
def broken(run: Path, tmp_path: Path) -> Path:
    """Return a copy of the run to damage. The starting model stays where it was."""
    return Path(shutil.copytree(run, tmp_path / "broken"))


def test_a_changed_seed_is_told(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = broken / "config.toml"
    text = config.read_text()
    assert "seed = 0" in text
    config.write_text(text.replace("seed = 0", "seed = 1", 1))
    assert explain(broken, step=ON_POLICY) == NOT_EQUAL
    assert "NOT equal to the recording, by metrics" in capsys.readouterr().out
    checks = {check["name"]: check["equal"] for check in magicrl.explain(broken, ON_POLICY)["checks"]}
    assert checks == {"metrics": False, "responses": False, "weights": False}


def changed_response(run: Path, step: int, column: str, value: Any) -> None:
    """Replace one field of the first recorded response of a step."""
    path = run / "rollouts" / f"step-{step:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    assert rows[0][column] != value
    rows[0][column] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def test_changed_weights_are_told(broken: Path) -> None:
    folder = broken / "checkpoints" / f"step-{ON_POLICY:06d}"
    tensors = load_file(folder / "tensors.safetensors")
    name = next(name for name in tensors if name.startswith("learner/weights/"))
    tensors[name].view(-1)[0] += 1e-6
    save_file(tensors, folder / "tensors.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        magicrl.explain(broken, ON_POLICY + 1)
    state = json.loads((folder / "state.json").read_text())
    state["tensors_sha256"] = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))
    changed_response(broken, ON_POLICY + 1, "tokens", [5])
    # both as the target of the comparison, and as the base of the next step
    checks = {check["name"]: check["equal"] for check in magicrl.explain(broken, ON_POLICY)["checks"]}
    assert checks == {"metrics": True, "responses": True, "weights": False}
    checks = {check["name"]: check["equal"] for check in magicrl.explain(broken, ON_POLICY + 1)["checks"]}
    assert not checks["responses"]
    assert not checks["weights"]


def test_a_changed_text_and_a_changed_moment_are_found(broken: Path) -> None:
    changed_response(broken, ON_POLICY, "text", "not what was sampled")
    folder = broken / "checkpoints" / f"step-{ON_POLICY:06d}"
    tensors = load_file(folder / "tensors.safetensors")
    name = next(name for name in tensors if name.startswith("learner/exp_avg_sq/"))
    tensors[name].view(-1)[0] += 1e-6
    save_file(tensors, folder / "tensors.safetensors")
    state = json.loads((folder / "state.json").read_text())
    state["tensors_sha256"] = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))
    checks = {check["name"]: check["equal"] for check in magicrl.explain(broken, ON_POLICY)["checks"]}
    assert checks == {"metrics": True, "responses": False, "weights": False}


def test_what_if_begins_with_the_entropy_coefficient_of_the_run(toy_recipe: Path, tmp_path: Path) -> None:
    adaptive = {"entropy.controller": "adaptive", "entropy.target": 100.0, "entropy.step": 0.05, "entropy.maximum": 1.0}
    short = {"stages.0.max_steps": 2, "stages.1.max_steps": 1, "evaluation.every": 0, "data.test": {}}
    settings = {key: value for key, value in SETTINGS.items() if key != "entropy.alpha"} | adaptive | short
    run = magicrl.train(toy_recipe, settings=settings, output=tmp_path / "run", progress=False).path
    found = magicrl.explain(run, 2, what_if=["algorithm.loss=magic"])
    assert found["what_if"][0]["cosine"] == pytest.approx(1, abs=1e-12)
    assert found["what_if"][0]["norm"] == found["update"]["norm"]


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"
    assert explain(run, step=ON_POLICY, what_if=["algorithm.loss=cispo"], page=page) == 0
    out = capsys.readouterr().out
    assert "equal to the recording bit for bit (metrics, responses, weights)" in out
    assert "algorithm.loss=cispo: groups" in out
    text = page.read_text()
    assert "bit for bit" in text
    assert "&lt;end&gt;" in text
    assert "<end>" not in text
    assert explain(run) == 0
    assert "notable steps: none of 5; --step N repeats any step" in capsys.readouterr().out
    assert explain(run, json=True) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    with pytest.raises(RecipeError, match="name one with --step"):
        explain(run, what_if=["algorithm.loss=cispo"])
    with pytest.raises(ValueError, match="has no step 9: it recorded the steps 1 to 5"):
        explain(run, step=9)
    with pytest.raises(ValueError, match="not a run folder"):
        explain(tmp_path)


def test_how_long_a_repetition_takes_counts_from_its_checkpoint(broken: Path) -> None:
    """Steps 6 to 12 are repeated from the newest checkpoint, that of step 5."""
    values = [{"entropy/exact/mean": 0.1 if step == 12 else 1.0, "time/step": 2.0} for step in range(1, 13)]
    rows = [json.dumps({"step": step, "stage": 0, "values": row}) for step, row in enumerate(values, 1)]
    (broken / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (notable,) = magicrl.explain(broken)["notable"]
    assert (notable["step"], notable["sign"], notable["from_checkpoint"]) == (12, "loss of entropy", 5)
    assert notable["seconds"] == 7 * 2.0


def test_a_run_that_works_ahead_is_repeated_and_varied_not(toy_recipe: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"rollout.max_staleness": 1, "stages.0.max_steps": 3, "stages.1.max_steps": 1}
    run = magicrl.train(toy_recipe, settings=settings, output=tmp_path / "ahead", progress=False).path
    found = magicrl.explain(run, 3)
    assert [check["equal"] for check in found["checks"]] == [True, True, True]
    assert found["update"]["grad_norms"][0]["float64"] == pytest.approx(
        found["update"]["grad_norms"][0]["recorded"], rel=1e-4
    )
    with pytest.raises(RecipeError, match=r"rollout\.max_staleness = 1"):
        magicrl.explain(run, 3, what_if=["algorithm.loss=cispo"])


def test_other_runs_are_refused_by_name(broken: Path) -> None:
    config = broken / "config.toml"
    text = config.read_text()
    assert 'engine = "in_process"' in text
    text = text.replace('engine = "in_process"', 'engine = "vllm"')
    config.write_text(text.replace('estimator = "exact"', 'estimator = "sampled"'))
    with pytest.raises(ValueError, match=r"rollout\.engine cannot be repeated: 'vllm' does not promise"):
        magicrl.explain(broken, ON_POLICY)
    config.write_text(text.replace("[[data.train]]\n", '[[data.train]]\nverifier = "maths + live:brief@571436a6"\n'))
    with pytest.raises(ValueError, match=f"^{broken}: live:brief@571436a6 was passed in Python and is in no file"):
        magicrl.explain(broken, ON_POLICY)
    config.write_text(text.replace('engine = "vllm"', 'engine = "in_process"').replace('"adamw"', '"muon"'))
    worked: list[str] = []
    with pytest.raises(ValueError, match=f'^{broken}: optimizer.kind = "muon": explain can take apart AdamW'):
        magicrl.explain(broken, ON_POLICY, progress=worked.append)
    assert worked == []


def test_the_code_of_the_page_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "preflight-and-explain.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("40", str(ON_POLICY)).replace("runs/quickstart", str(run)), {})
    assert capsys.readouterr().out
