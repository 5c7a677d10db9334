"""An evaluation from problems to results: it resumes to the sample, shards merge, another job is rejected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_lines
from rich.console import Console

from magicrl.commands.evaluation_display import show_results
from magicrl.config.errors import RecipeError
from magicrl.evaluation.comparison import compare_all, compare_pair, correct
from magicrl.evaluation.engines import model_checksums, open_engine
from magicrl.evaluation.options import EvaluationOptions, JobCost, arguments
from magicrl.evaluation.results import Incomplete, write_results
from magicrl.evaluation.runner import run_evaluation
from magicrl.evaluation.samples import EvaluationFolder, SampleRow
from magicrl.models.small_models import make_miniature
from magicrl.rollout.engine_settings import EngineSettings

SETTINGS = arguments(
    samples=4, max_tokens=16, seed=5, template="{prompt}", reward="exact", threads=1, max_rows=8, workers=1
)
EXAMPLES = Path(__file__).parents[3] / "examples"


class Watcher:
    """Observer that can interrupt after a number of samples."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.costs: list[JobCost] = []
        self.notes: list[str] = []
        self.seen: list[tuple[str, int]] = []
        self.estimates: list[float] = []
        self._left = stop_after

    def cost(self, costs: Sequence[JobCost]) -> None:
        self.costs.extend(costs)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, name: str, done: int, total: int) -> None: ...

    def sample(self, name: str, row: SampleRow) -> None:
        self.seen.append((row.problem, row.sample))
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt

    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None:
        self.estimates.append(mean_tokens)


def run(
    model: Path,
    sums: Path,
    output: Path,
    settings: EvaluationOptions = SETTINGS,
    watcher: Watcher | None = None,
    name: str = "sums",
) -> Path | None:
    options = replace(settings, model=model, benchmarks=f"{name}={sums}", output=output)
    return run_evaluation(options, watcher or Watcher())


def results(path: Path | None) -> dict[str, Any]:
    assert path is not None
    return json.loads(path.read_text())["benchmarks"]["sums"]


@pytest.fixture(scope="module")
def whole(tiny_models: tuple[Path, Path], same_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return results of the first model, without an interruption."""
    return results(run(tiny_models[0], same_sums, tmp_path_factory.mktemp("whole")))


def test_an_interrupted_evaluation_goes_on_to_identical_samples(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    model = tiny_models[0]
    with pytest.raises(KeyboardInterrupt):
        run(model, sums, tmp_path / "cut", watcher=Watcher(stop_after=13))
    again = Watcher()
    resumed = results(run(model, sums, tmp_path / "cut", watcher=again))
    assert again.costs[0].missing == 40 - 13
    assert len(again.seen) == 40 - 13, "nothing is generated twice"
    assert resumed["scored_sha256"] == whole["scored_sha256"]
    assert resumed["accuracy"] == whole["accuracy"]
    finished = Watcher()
    run(model, sums, tmp_path / "cut", watcher=finished)
    assert (finished.costs[0].missing, finished.seen) == (0, [])


def test_shards_merge_to_the_whole(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    model = tiny_models[0]
    watcher = Watcher()
    first = run(model, sums, tmp_path / "parts", replace(SETTINGS, shard="1/2"), watcher)
    assert first is None
    assert "20 of 40 samples are missing" in watcher.notes[0]
    with pytest.raises(Incomplete, match="20 of 40 samples"):
        write_results(arguments(output=tmp_path / "parts"), ["sums"])
    last = results(run(model, sums, tmp_path / "parts", replace(SETTINGS, shard="0/2")))
    assert last["scored_sha256"] == whole["scored_sha256"], "the last shard writes the results"
    merged = results(write_results(arguments(output=tmp_path / "parts", pass_at=(3,), majority_at="1,3"), ["sums"]))
    assert list(merged["pass_at"]) == ["3"]
    assert list(merged["majority_at"]) == ["1", "3"]


def test_more_samples_keep_those_that_exist(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    model = tiny_models[0]
    run(model, sums, tmp_path / "out", replace(SETTINGS, samples=1))
    begun = tmp_path / "out" / "sums" / "job.json"
    begun.write_text(begun.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    watcher = Watcher()
    grown = results(run(model, sums, tmp_path / "out", watcher=watcher))
    assert len(watcher.seen) == 30
    assert "sums: device: was cuda, is now cpu since the job was begun; samples may differ" in watcher.notes[0]
    assert grown["scored_sha256"] == whole["scored_sha256"]
    fewer = results(run(model, sums, tmp_path / "out", replace(SETTINGS, samples=2)))
    assert (fewer["samples"], fewer["usage"]["samples"]) == (2, 40), "those beyond are there and are not scored"
    assert {problem["counted"] for problem in fewer["per_problem"]} == {2}
    assert results(write_results(arguments(output=tmp_path / "out"), ["sums"]))["samples"] == 4, "no sample is lost"


def test_existing_samples_without_tokens_are_counted(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    model, keep = tiny_models[0], replace(SETTINGS, samples=2, keep_tokens=True)
    run(model, sums, tmp_path / "out", replace(SETTINGS, samples=1))
    later, whole = Watcher(), Watcher()
    run(model, sums, tmp_path / "out", keep, later)
    assert [note.partition(",")[0] for note in later.notes] == ["sums: 10 existing samples have no tokens"]
    run(model, sums, tmp_path / "other", keep)
    run(model, sums, tmp_path / "other", keep, whole)
    assert whole.notes == []


def test_another_job_is_refused_with_what_differs(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    run(tiny_models[0], sums, tmp_path / "out")
    with pytest.raises(ValueError, match=r"sampling\.temperature: was 1\.0, is now 0\.5\n.*another --output"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, temperature=0.5))
    with pytest.raises(ValueError, match=r"judging\.extract: was lenient, is now box\n"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, extract="box"))
    with pytest.raises(ValueError, match=r"engine\.weights_sha256: was "):
        run(tiny_models[1], sums, tmp_path / "out")
    with pytest.raises(ValueError, match=r"problems\.sha256: was [^\n]*\n *limit: was not set, is now 2\n"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, limit=2))
    sums.write_text(sums.read_text().replace('"answer": 0', '"answer": 1'))
    with pytest.raises(ValueError, match=r"problems\.sha256: was "):
        run(tiny_models[0], sums, tmp_path / "out")
    (tmp_path / "out" / "sums" / "job.json").write_text("{")
    with pytest.raises(ValueError, match=r"job\.json is damaged"):
        EvaluationFolder(tmp_path / "out" / "sums").job()


def test_a_reward_whose_file_changed_is_another_job(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    """Samples that the old code judged must not count in a score of the new code."""
    reward = tmp_path / "mine.py"
    reward.write_text("def score(problem, response):\n    return 1.0\n")

    def evaluate() -> Path | None:
        return run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, reward=f"{reward}:score"))

    score = results(evaluate())["accuracy"]["mean"]
    assert score > 0
    assert results(evaluate())["accuracy"]["mean"] == score, "the same code continues"
    reward.write_text("def score(problem, response):\n    return 0.0\n")
    with pytest.raises(ValueError, match=r"judging\.rewards_sha256\.\S*mine\.py:score: was \w+, is now "):
        evaluate()


def test_a_pilot_precedes_a_long_job_and_changes_no_sample(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicrl.evaluation.runner.PILOT_SAMPLES", 8)
    watcher = Watcher()
    piloted = results(run(tiny_models[0], sums, tmp_path / "piloted", watcher=watcher))
    assert {sample for _, sample in watcher.seen[:8]} == {0}, "a pilot asks many problems, not one many times"
    assert 1 <= watcher.estimates[0] <= 16
    assert piloted["scored_sha256"] == whole["scored_sha256"]


def test_a_k_above_the_samples_is_refused_before_there_are_samples(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    watcher = Watcher()
    with pytest.raises(ValueError, match="--pass-at 8: k must be between 1 and the 4 samples"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, pass_at=(1, 8)), watcher)
    assert not watcher.seen


def test_what_results_say(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    path = run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, preset="report"))
    document = results(path)
    rows = [json.loads(line) for line in (tmp_path / "out/sums/samples-0-of-1.jsonl").read_text().splitlines()]
    right = {f"p{i}": [False] * 4 for i in range(10)}
    for row in rows:
        right[row["problem"]][row["sample"]] = row["outcome"] == "correct" and row["finish_reason"] == "stop"
    shares = [float(np.mean(values)) for values in right.values()]
    assert [entry["accuracy"] for entry in document["per_problem"]] == shares
    assert document["accuracy"]["mean"] == pytest.approx(np.mean(shares))
    assert document["pass_at"]["4"]["mean"] == pytest.approx(np.mean([share > 0 for share in shares]))
    assert document["length"]["mean"] == pytest.approx(np.mean([row["tokens"] for row in rows]))
    assert document["truncation"]["mean"] == pytest.approx(np.mean([row["finish_reason"] == "length" for row in rows]))
    last = document["scaling"]["over_limits"][-1]
    assert last["limit"] == 16
    assert last["accuracy"] == document["accuracy"]
    assert document["settings"]["engine"]["weights_sha256"] == model_checksums(tiny_models[0])["weights_sha256"]
    assert document["table13"]["differs"] == ["Table 13 has no such set"]
    assert document["preset"]["name"] == "report"
    assert document["preset"]["samples"] == {"aime24": 32, "aime25": 32, "livecodebench": 4}


def test_p_values_of_several_comparisons_are_corrected() -> None:
    rows = [{"comparable": True, "p_value": p} for p in (0.04, 0.01)] + [{"comparable": False}]
    assert correct(rows) == "p: Holm's correction for 2 comparisons; intervals are not corrected"
    assert rows == [
        {"comparable": True, "p_value": 0.04, "p_corrected": 0.04},
        {"comparable": True, "p_value": 0.01, "p_corrected": 0.02},
        {"comparable": False},
    ]
    assert correct(rows[:1]) == ""


def test_two_models_are_compared_problem_by_problem(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    old, new = (run(model, sums, tmp_path / model.name) for model in tiny_models)
    before, after = results(old), results(new)
    found = compare_pair(tmp_path / "0", tmp_path / "1")["benchmarks"]["sums"]
    deltas = [b["accuracy"] - a["accuracy"] for a, b in zip(before["per_problem"], after["per_problem"], strict=True)]
    assert found["difference"]["mean"] == pytest.approx(np.mean(deltas))
    assert found["difference"]["low"] <= np.mean(deltas) <= found["difference"]["high"]
    assert (found["better"], found["worse"]) == (sum(d > 0 for d in deltas), sum(d < 0 for d in deltas))
    assert 0 < found["p_value"] <= 1
    assert found["settings_differ"] == []
    for folder, name in (("0", "small"), ("1", "large")):
        document = json.loads((tmp_path / folder / "results.json").read_text())
        document["benchmarks"]["sums"]["settings"]["engine"] = {
            "engine": "openai",
            "served_model": name,
            "mode": "chat",
        }
        (tmp_path / f"served-{folder}.json").write_text(json.dumps(document))
    served = compare_pair(tmp_path / "served-0.json", tmp_path / "served-1.json")["benchmarks"]["sums"]
    assert served["settings_differ"] == [], "two models are compared"
    longer = after["length"]["mean"] - before["length"]["mean"]
    assert found["tokens_difference"] == pytest.approx(longer)
    run(tiny_models[1], sums, tmp_path / "hot", replace(SETTINGS, temperature=2.0, samples=2))
    warned = compare_pair(tmp_path / "0", tmp_path / "hot")["benchmarks"]["sums"]
    assert warned["settings_differ"] == ["samples: was 4, is now 2", "sampling.temperature: was 1.0, is now 2.0"]
    document = json.loads((tmp_path / "served-1.json").read_text())
    document["benchmarks"]["sums"]["settings"]["problems"]["sha256"] = "of prompts with another text around them"
    (tmp_path / "asked.json").write_text(json.dumps(document))
    asked = compare_pair(tmp_path / "0", tmp_path / "asked.json")["benchmarks"]["sums"]
    assert asked["why"].startswith("other problems or another template: sha256: was ")
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:5]))
    run(tiny_models[1], sums, tmp_path / "fewer")
    other = compare_pair(tmp_path / "0", tmp_path / "fewer")["benchmarks"]["sums"]
    assert not other["comparable"]
    assert "other problems: count: was 10, is now 5" in other["why"]
    with pytest.raises(ValueError, match="no results"):
        compare_pair(tmp_path / "0", tmp_path)


def test_fresh_samples_at_other_limits_are_tasks_that_resume(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    asked = replace(SETTINGS, samples=2, fresh_limits=(4, 24), price_in=1, price_out=2)
    model = tiny_models[0]
    path = run(model, sums, tmp_path / "whole", asked)
    whole = results(path)
    with pytest.raises(KeyboardInterrupt):
        run(model, sums, tmp_path / "cut", asked, Watcher(stop_after=29))
    again = Watcher()
    resumed = results(run(model, sums, tmp_path / "cut", asked, again))
    assert [cost.missing for cost in again.costs] == [0, 11, 20]
    assert [cost.name for cost in again.costs] == ["sums", "sums at 4", "sums at 24"]
    assert resumed["scaling"] == whole["scaling"]
    short, long = whole["scaling"]["fresh"]
    assert (short["limit"], long["limit"]) == (4, 24)
    assert short["mean_tokens"]["mean"] <= 4 < whole["length"]["mean"]
    assert short["cut"] is not None
    assert long["cut"] is None
    long_texts, fresh_texts = (
        {(row.problem, row.sample): row.text for row in EvaluationFolder(tmp_path / "whole/sums" / place).rows()}
        for place in ("", "fresh/4")
    )
    same = [long_texts[key].startswith(text) for key, text in fresh_texts.items()]
    assert not all(same), "fresh samples are drawn with random numbers of their own"
    plain = results(write_results(arguments(output=tmp_path / "whole"), ["sums"]))
    assert plain["scaling"]["fresh"] == whole["scaling"]["fresh"], "what is there is scored without being asked for"
    used = whole["usage"]
    assert used["samples"] == 60
    assert used["prompt_tokens"] == 6 * 60
    assert used["response_tokens"] > 0
    assert used["samples_without_times"] == 0
    assert used["price"]["total"] == pytest.approx((used["prompt_tokens"] + 2 * used["response_tokens"]) / 1e6)
    assert path is not None
    assert json.loads(path.read_text())["usage"]["samples"] == 60
    assert resumed["usage"]["calls"] == 4, "main, the cut call, and two that went on"


def test_one_more_benchmark_leaves_the_others_in_the_results(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    output, few = tmp_path / "out", replace(SETTINGS, samples=1)
    first = results(run(tiny_models[0], sums, output, few))
    path = run(tiny_models[0], sums, output, few, name="again")
    assert path is not None
    document = json.loads(path.read_text())
    assert list(document["benchmarks"]) == ["again", "sums"]
    assert document["benchmarks"]["sums"]["scored_sha256"] == first["scored_sha256"]
    assert document["means"]["all"]["sets"] == ["again", "sums"]
    path = run(tiny_models[1], sums, output, few, name="other")
    assert path is not None
    assert list(json.loads(path.read_text())["benchmarks"]) == ["other"], "another model's results are not mixed in"
    with pytest.raises(ValueError, match=r"different models or engines: again \(.*/0\), other \(.*/1\); name those"):
        write_results(arguments(output=output), ["again", "other"])


def test_several_evaluations_are_compared_with_the_first(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    for name, model, settings in (("a", 0, SETTINGS), ("b", 1, SETTINGS), ("c", 1, replace(SETTINGS, seed=9))):
        run(tiny_models[model], sums, tmp_path / name, settings)
    folders = [tmp_path / name for name in "abc"]
    document = compare_all(folders)
    assert [c["after"] for c in document["comparisons"]] == [str(folder) for folder in folders[1:]]
    found = document["comparisons"][0]["benchmarks"]["sums"]
    assert found.pop("p_corrected") >= found["p_value"]
    assert found == compare_pair(folders[0], folders[1])["benchmarks"]["sums"]
    curves = document["curves"]["sums"]
    assert [model["folder"] for model in curves["models"]] == [str(folder) for folder in folders]
    longest = max(range(3), key=lambda i: curves["models"][i]["length"]["mean"])
    assert curves["models"][longest]["efficiency"][-1] == curves["models"][longest]["accuracy"]
    assert sum(point is None for model in curves["models"] for point in model["efficiency"]) >= 1
    thrift = document["comparisons"][0]["benchmarks"]["sums"]["efficiency"]
    assert thrift["difference"]["mean"] == pytest.approx(thrift["after"] - thrift["before"])
    with pytest.raises(RecipeError, match="two folders or more"):
        compare_all(folders[:1])


def test_what_does_not_fit_is_refused_before_anything_is_generated(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"context of 96 tokens; use 90 or less"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, max_tokens=2000))
    with pytest.raises(RecipeError, match=r"--fresh-limits\) 2000 exceed the model's context of 96 tokens"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, fresh_limits=(8, 2000)))
    unknown = r"problem 'p0': the tokenizer does not know \['Please', .*: --template '\{prompt\}' leaves it out$"
    with pytest.raises(ValueError, match=unknown):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, template=None))
    with pytest.raises(ValueError, match=r"\['Please'\]; .* correct the problem$"):
        run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, template="Please {prompt}"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="same response every time"):
        arguments(temperature=0.0, samples=4)
    with pytest.raises(RecipeError, match="--engine: unknown engine 'warp'"):
        open_engine("warp", EngineSettings(model="x"))
    with pytest.raises(RecipeError, match="--engine-option url: the in_process engine has none"):
        open_engine("in_process", EngineSettings(model="x", options={"url": "http://x"}))


def test_a_checksum_follows_weights_and_tokenizer_not_the_model_card(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_models[0].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("a card")
    assert model_checksums(copy) == model_checksums(tiny_models[0])
    template = copy / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    changed = model_checksums(copy)
    assert changed["tokenizer_and_config_sha256"] != model_checksums(tiny_models[0])["tokenizer_and_config_sha256"]
    template.unlink()
    config = copy / "generation_config.json"
    config.write_text(config.read_text() + " ")
    changed = model_checksums(copy)
    assert changed["weights_sha256"] == model_checksums(tiny_models[0])["weights_sha256"]
    assert changed["tokenizer_and_config_sha256"] != model_checksums(tiny_models[0])["tokenizer_and_config_sha256"]


def test_programs_are_not_voted_on(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    rows = [{"id": f"c{i}", "prompt": "what is 1 + 1 ?", "tests": {"inputs": [""], "outputs": ["2"]}} for i in range(2)]
    write_lines(sums, rows)
    document = results(run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, samples=2, reward=None)))
    assert document["accuracy"]["mean"] == 0
    assert list(document["pass_at"]) == ["2"]
    assert document["majority_at"] == {}
    assert "majority" not in document["scaling"]["over_samples"][-1]
    assert document["answered_and_stopped"] is None


def test_a_problem_that_cannot_be_judged_takes_no_measure_away(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    rows = [{"id": f"{n}", "prompt": f"1 + {n}", "answer": r"\frac{" if n == 3 else str(1 + n)} for n in range(4)]
    write_lines(sums, rows)
    document = results(run(tiny_models[0], sums, tmp_path / "out", replace(SETTINGS, samples=4, reward="maths")))
    assert document["not_judged"] > 0
    assert list(document["pass_at"]) == ["2", "4"]
    assert list(document["majority_at"]) == ["4"]


def test_episodes_that_run_out_of_turns_are_scored(tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path) -> None:
    game = tmp_path / "game.py"
    game.write_text(
        "import time\n\nfrom magicrl.environments.base import Step\n\n\nclass Game:\n"
        "    def reset(self, problem): ...\n\n    def step(self, text):\n"
        "        begun = time.process_time()\n        while time.process_time() < begun + 0.02: ...\n"
        "        return Step(done=True, reward=1.0) if '1' in text else Step(observation='what')\n"
    )
    played = replace(SETTINGS, samples=2, max_tokens=24, environment=f"{game}:Game", max_turns=1, fresh_limits=(20,))
    path = run(tiny_models[0], sums, tmp_path / "out", played)
    found = results(path)
    assert 0 < found["truncation"]["mean"] < 1
    assert found["scaling"]["over_limits"][-1]["accuracy"] == found["accuracy"]
    assert found["scaling"]["exact"]
    assert found["scaling"]["truncated_early"] > 0
    assert found["usage"]["judging_cpu_seconds"] > 0.3, "of 20 responses, each judged in 0.02 s by its environment"
    assert path is not None
    console = Console(record=True, width=200)
    show_results(path, console)
    assert "--max-turns truncated" in console.export_text()


def test_the_likeliest_token_alone_is_greedy_decoding(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    greedy = results(run(tiny_models[0], sums, tmp_path / "greedy", replace(SETTINGS, temperature=0.0, samples=1)))
    for name, changes in {"top-k": {"top_k": 1}, "top-p": {"top_p": 1e-6}}.items():
        likeliest = results(run(tiny_models[0], sums, tmp_path / name, replace(SETTINGS, **changes)))
        assert likeliest["accuracy"]["mean"] == greedy["accuracy"]["mean"]
        assert likeliest["length"]["mean"] == greedy["length"]["mean"]
        assert likeliest["settings"]["sampling"].items() >= changes.items()
    with pytest.raises(ValueError, match=r"top_p must be above 0 and at most 1, got 1\.5"):
        arguments(top_p=1.5)
    with pytest.raises(ValueError, match="top_k must be >= 0, got -1"):
        arguments(top_k=-1)


def test_an_engine_that_samples_from_all_tokens_is_refused(
    tiny_models: tuple[Path, Path], sums: Path, tmp_path: Path
) -> None:
    other = replace(SETTINGS, engine=f"{EXAMPLES / 'engine.py'}:make", top_k=3)
    with pytest.raises(RecipeError, match="samples from all tokens; leave out --top-p and --top-k, or apply them"):
        run(tiny_models[0], sums, tmp_path / "out", other)
    assert not (tmp_path / "out").exists()


def test_greedy_decoding_takes_one_sample_whatever_the_preset_says() -> None:
    greedy = arguments(temperature=0.0, preset="report")
    assert greedy.samples_for("aime24") == 1
    assert replace(greedy, temperature=1.0).samples_for("aime24") == 32
    assert replace(greedy, temperature=1.0, samples=2).samples_for("aime24") == 2, "what is given holds over the preset"


def test_a_template_that_opens_the_reasoning_requires_its_end(sums: Path, tmp_path: Path) -> None:
    llama = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}
    model = make_miniature(llama, tmp_path / "model", max_context=128)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    few = replace(SETTINGS, samples=1, max_tokens=2)
    assert results(run(model, sums, tmp_path / "out", few))["settings"]["judging"]["reasoning"] == "required"
    given = results(run(model, sums, tmp_path / "given", replace(few, reasoning="none")))
    assert given["settings"]["judging"]["reasoning"] == "none"


def test_a_reward_that_is_not_there_is_told_before_a_model_is_loaded(sums: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(problem, response):\n    return 1.0\n")
    wrong = replace(SETTINGS, reward=f"{tmp_path}/mine.py:scor")
    with pytest.raises(ValueError, match=r"has no 'scor'; did you mean 'score'\?"):
        run(tmp_path / "no-model", sums, tmp_path / "out", wrong)
