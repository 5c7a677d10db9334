"""Logs of Inspect that an evaluation is written to. inspect_ai 0.3.285 reads them; CI does not install it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from magicrl.commands.eval import Evaluation
from magicrl.reporting.inspect_log import write_inspect_logs
from magicrl.reporting.read_folders import read_evaluation_folder
from magicrl.reporting.samples import evaluation_browsers

from .conftest import write_evaluation


def documents(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write an evaluation whose second response to the first problem was truncated, and whose last was not judged."""
    folder = write_evaluation(tmp_path / "run", {"a/1": [True, True], "b": [False, False]}, text="It is 7.")
    (samples,) = (folder / "sums").glob("samples*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows[1]["finish_reason"], rows[3]["outcome"] = "length", "not_judged"
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_log_has_every_response_with_what_it_earned(folder: Path, tmp_path: Path) -> None:
    (path,) = write_inspect_logs(read_evaluation_folder(folder), tmp_path / "logs")
    assert path == tmp_path / "logs" / "sums.eval"
    found = documents(path)
    header, summaries = found.pop("header.json"), found.pop("summaries.json")
    assert list(found) == [f"samples/{name}_epoch_{n}.json" for name in ("a/1", "b") for n in (1, 2)]
    samples = list(found.values())
    assert [(s["id"], s["epoch"]) for s in samples] == [("a/1", 1), ("a/1", 2), ("b", 1), ("b", 2)]
    assert [s.get("scores", {}).get("magicrl", {}).get("value") for s in samples] == [1.0, 0.0, 0.0, None]
    assert [s["output"]["choices"][0]["stop_reason"] for s in samples] == ["stop", "max_tokens", "stop", "stop"]
    assert samples[0]["messages"][0]["content"] == "Add <b>a/1</b>"
    assert (samples[0]["target"], samples[0]["scores"]["magicrl"]["answer"]) == (["7"], "7")
    assert samples[0]["output"]["usage"]["output_tokens"] == 40
    assert samples[3]["metadata"]["outcome"] == "not_judged"
    assert [s["id"] for s in summaries] == ["a/1", "a/1", "b", "b"]
    assert "messages" not in summaries[0]
    assert (header["version"], header["status"], header["eval"]["task"]) == (2, "success", "sums")
    assert header["eval"]["model"] == "models/start"
    settings = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 128, "seed": 0}
    assert header["eval"]["model_generate_config"] == header["plan"]["config"] == settings
    (score,) = header["results"]["scores"]
    assert (score["scored_samples"], score["unscored_samples"]) == (3, 1)


def test_a_logs_figures_are_those_of_the_results(folder: Path, tmp_path: Path) -> None:
    (path,) = write_inspect_logs(read_evaluation_folder(folder), tmp_path / "logs")
    metrics = documents(path)["header.json"]["results"]["scores"][0]["metrics"]
    result = json.loads((folder / "results.json").read_text())["benchmarks"]["sums"]
    for name, figure in (("accuracy", result["accuracy"]), ("pass_at_2", result["pass_at"]["2"])):
        ends = {name: figure["mean"], f"{name}_low": figure["low"], f"{name}_high": figure["high"]}
        assert {key: metrics[key]["value"] for key in ends} == ends


def test_a_log_has_the_whole_conversation(folder: Path, tmp_path: Path) -> None:
    path = folder / "sums" / "problems.jsonl"
    first, *others = map(json.loads, path.read_text().splitlines())
    first["context"] = [{"role": "system", "content": "Be brief."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, *others)))
    (log,) = write_inspect_logs(read_evaluation_folder(folder), tmp_path / "logs")
    found = documents(log)
    sample, plain = found["samples/a/1_epoch_1.json"], found["samples/b_epoch_1.json"]
    asked = [*first["context"], {"role": "user", "content": "Add <b>a/1</b>"}]
    assert (sample["messages"][:-1], sample["input"], plain["input"]) == (asked, asked, "Add <b>b</b>")
    assert Evaluation(read_evaluation_folder(folder)).samples()["prompt"][0] == (
        "system: Be brief.\n\nuser: Add <b>a/1</b>"
    )
    assert evaluation_browsers([read_evaluation_folder(folder)], ["m"])[0]["problems"][0]["prompt"].startswith("system")


def test_problems_whose_ids_differ_in_a_slash_are_two_samples(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "run", {"a/1": [True], "a_1": [False]}, text="It is 7.")
    (path,) = write_inspect_logs(read_evaluation_folder(folder), tmp_path / "logs")
    found = documents(path)
    for name, value in (("a/1", 1.0), ("a_1", 0.0)):
        sample = found[f"samples/{name}_epoch_1.json"]
        assert (sample["id"], sample["scores"]["magicrl"]["value"]) == (name, value)
