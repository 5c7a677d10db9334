"""From a judging step's folder to a sheet, and from labels to a threshold, by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import Reply, serving, verdict

from magicrl.cli.data import calibrate, sheet
from magicrl.pipeline.judge_report import JudgingReport
from magicrl.pipeline.judge_votes import JudgedProblem, judge_problems
from magicrl.pipeline.pipeline_schema import JudgeSettings, JudgingSettings

TEXTS = {f"p{i}": f"What is {i} + 1?{' unclear' * (i % 3 == 0)}" for i in range(12)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A judge that drops what is unclear, with one vote of four the other way."""
    folder = tmp_path / "05-judge"
    for name, ids in (("kept", list(TEXTS)[:9]), ("dropped", list(TEXTS)[9:])):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"id": ids, "problem": [TEXTS[i] for i in ids]}), folder / name / "s.00000.parquet")
    seen: dict[str, int] = {}

    def answer(body: dict[str, object], number: int) -> Reply:
        text = str(body["messages"])
        seen[text] = seen.get(text, 0) + 1
        return verdict(("unclear" not in text) == (seen[text] != 1))

    with serving(answer) as server:
        judge = JudgeSettings(base_url=server.url, model="m", votes=4, concurrency=1)
        settings = JudgingSettings(judges=(judge,))
        report = JudgingReport(settings)
        problems = [JudgedProblem(id=name, text=text) for name, text in TEXTS.items()]
        for judgement in judge_problems(problems, settings, folder=folder / "work"):
            report.add(judgement)
    (folder / "work" / "judging.json").write_text(json.dumps(report.as_dict()))
    return folder


def test_a_sheet_is_made_and_its_labels_give_the_threshold(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sheet(step, count=10) == 0
    weights = json.loads((step / "work" / "labels" / "weights.json").read_text())
    assert len(weights) == 10
    labels = step / "labels.csv"
    rows = [f"{name},{'drop' if 'unclear' in TEXTS[name] else 'keep'}" for name in weights]
    labels.write_text("\n".join(["id,label", *rows]))
    assert calibrate(step, labels=labels) == 0
    told = json.loads((step / "work" / "calibration.json").read_text())
    assert told["threshold"] == 3  # good ones have three votes of four, flawed ones one
    assert told["judge_kappa"] == {"m": 1.0}
    said = capsys.readouterr().out
    assert "threshold that follows: 3" in said
    assert "almost perfect agreement" in said


def test_a_folder_without_votes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"judging\.json: no such file; give the folder of a judging step"):
        sheet(tmp_path)
