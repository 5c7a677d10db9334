"""Agreement against hand computations; the sheet on planted bad problems and votes of known agreement.

From a judging step's folder to a sheet, and from labels to a threshold, by the command.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import Reply, serving, verdict

from magicrl.cli.data import calibrate as calibrate_command
from magicrl.cli.data import sheet
from magicrl.pipeline.entry import Document
from magicrl.pipeline.judge_report import (
    as_text,
    calibrate,
    cohen_kappa,
    cost,
    estimated_cost,
    flawed_figures,
    fleiss_kappa,
    read_labels,
    report_of,
    sample_for_labels,
    strength,
    write_sheet,
)
from magicrl.pipeline.judge_step import FLAWED
from magicrl.pipeline.judge_votes import Judgement, Vote, decide, judge_problems
from magicrl.pipeline.pipeline_schema import JudgeSettings, JudgingSettings

SETTINGS = JudgingSettings(
    judges=tuple(
        JudgeSettings(name=name, base_url="http://x", model=name, votes=16, dollars_per_million_output=2.0)
        for name in ("sure", "coin")
    )
)


def vote(problem: str, judge: str, index: int, keep: bool | None) -> Vote:
    status = "valid" if keep is not None else "unreadable"
    return Vote(
        problem=problem,
        judge=judge,
        index=index,
        status=status,
        keep=keep,
        reasons="",
        criteria={},
        completion_tokens=50,
    )


def voted(good: bool, name: str, rng: random.Random, right: float = 0.9) -> Judgement:
    """Judge ``sure`` is right with this probability, judge ``coin`` with one half."""
    votes = [vote(name, "sure", i, good if rng.random() < right else not good) for i in range(16)]
    votes += [vote(name, "coin", i, rng.random() < 0.5) for i in range(16)]
    return decide(name, votes, SETTINGS.threshold, SETTINGS.undecided == "keep")


@pytest.fixture(scope="module")
def planted() -> tuple[list[Judgement], dict[str, bool]]:
    """1000 problems, a tenth of them flawed."""
    rng = random.Random(0)
    labels = {f"p{i}": i % 10 != 0 for i in range(1000)}
    return [voted(good, name, rng) for name, good in labels.items()], labels


def test_fleiss_kappa_by_hand() -> None:
    # 4 problems, 3 votes each: P_i = 1, 1, 1/3, 1/3; half of all votes keep, so chance is 1/2: (2/3 - 1/2) / (1/2)
    assert fleiss_kappa([(3, 0), (0, 3), (2, 1), (1, 2)]) == pytest.approx(1 / 3)
    # 3 problems, 4 votes: P_i = 1, 6/12, 4/12; p = 9/12, chance 10/16; mean P = 11/18
    assert fleiss_kappa([(4, 0), (3, 1), (2, 2)]) == pytest.approx((11 / 18 - 10 / 16) / (1 - 10 / 16))
    # unequal numbers: P_i = 1, 0, and one vote says nothing; p = 3/4 of four votes: chance 10/16
    assert fleiss_kappa([(2, 0), (1, 1), (0, 1)]) == pytest.approx((0.5 - 10 / 16) / (6 / 16))
    assert fleiss_kappa([(3, 0), (3, 0)]) is None
    assert fleiss_kappa([(1, 0), (0, 1)]) is None


def test_cohen_kappa_by_hand() -> None:
    # 10 problems: 4 both keep, 3 both drop, 2 and 1 apart: observed 0.7, chance 0.6 * 0.5 + 0.4 * 0.5 = 0.5
    pairs = [(True, True)] * 4 + [(False, False)] * 3 + [(True, False)] * 2 + [(False, True)]
    assert cohen_kappa(pairs) == pytest.approx(0.4)
    assert cohen_kappa([]) is None
    assert cohen_kappa([(True, True)]) is None


def test_votes_of_known_agreement(planted: tuple[list[Judgement], dict[str, bool]]) -> None:
    """Votes that are right with probability q on a share s of good problems have a kappa that can be told."""
    judgements, _ = planted
    told = report_of(judgements, SETTINGS)
    right, good = 0.9, 0.9
    keep = good * right + (1 - good) * (1 - right)
    chance = keep**2 + (1 - keep) ** 2
    expected = (right**2 + (1 - right) ** 2 - chance) / (1 - chance)
    assert told["judges"]["sure"]["fleiss_kappa"] == pytest.approx(expected, abs=0.03)
    assert told["judges"]["coin"]["fleiss_kappa"] == pytest.approx(0.0, abs=0.01)
    assert told["judges"]["coin"]["says_keep"] == pytest.approx(0.5, abs=0.01)
    assert told["judges"]["sure"]["dollars"] == pytest.approx(1000 * 16 * 50 * 2 / 1e6)
    assert "weak" in as_text(told) or "worthless" in as_text(told)
    assert "agreement with people is not known" in as_text(told)


def test_the_sheet_finds_the_threshold_and_the_weak_judge(planted: tuple[list[Judgement], dict[str, bool]]) -> None:
    judgements, labels = planted
    result = calibrate(judgements, labels, least_recall=0.95)
    assert (result.labelled, result.flawed) == (1000, 100)
    # good ones have 14.4 + 8 votes for them, flawed ones 1.6 + 8, both with a spread of about 2.3
    assert result.threshold in range(17, 21)
    row = result.rows[result.threshold - 1]
    assert row.recall >= 0.95
    assert result.rows[result.threshold].recall < 0.95
    assert row.flawed_kept is not None
    assert row.flawed_kept < 0.05
    assert row.precision is not None
    assert row.precision > 0.98
    assert row.precision_interval[0] <= row.precision <= row.precision_interval[1]
    recalls = [one.recall for one in result.rows]
    assert recalls == sorted(recalls, reverse=True)
    assert strength(result.judge_kappa["sure"]).endswith("agreement")
    assert "weak" not in strength(result.judge_kappa["sure"])
    assert strength(result.judge_kappa["coin"]).startswith(("weak", "worthless"))
    text = as_text(report_of(judgements, SETTINGS), result)
    assert f"threshold that follows: {result.threshold}" in text
    assert "judge coin against the labels" in text


def test_a_weighted_sample_tells_what_all_labels_tell(planted: tuple[list[Judgement], dict[str, bool]]) -> None:
    judgements, labels = planted
    sample = sample_for_labels(judgements, count=300, seed=1)
    assert len(sample) == 300
    assert sum(sample.values()) == pytest.approx(1000)
    assert sample == sample_for_labels(judgements, count=300, seed=1)
    some = calibrate(judgements, {name: labels[name] for name in sample}, weights=sample)
    whole = calibrate(judgements, labels)
    for few, all_ in zip(some.rows, whole.rows, strict=True):
        assert few.kept == pytest.approx(all_.kept, abs=1e-9)  # strata are the numbers of votes themselves
        assert few.recall == pytest.approx(all_.recall, abs=0.05)
    assert len(sample_for_labels(judgements, count=5000, seed=1)) == 1000


def test_a_calibration_by_hand() -> None:
    """Of five problems, three of them good, with two votes each."""
    votes = {"a": (True, True), "b": (True, False), "c": (False, False), "d": (True, True), "e": (False, False)}
    judgements = [
        decide(name, [vote(name, "sure", place, keep) for place, keep in enumerate(said)], 1)
        for name, said in votes.items()
    ]
    found = calibrate(judgements, {"a": True, "b": True, "c": True, "d": False, "e": False})
    one, two = found.rows
    assert (one.kept, one.precision, one.recall, one.flawed_kept) == pytest.approx((3 / 5, 2 / 3, 2 / 3, 1 / 2))
    assert (two.kept, two.precision, two.recall, two.flawed_kept) == pytest.approx((2 / 5, 1 / 2, 1 / 3, 1 / 2))
    assert found.judge_accuracy == {"sure": 2 / 4}, "the tie on b is no vote of either kind"


def test_worthless_votes_have_no_threshold() -> None:
    rng = random.Random(3)
    labels = {f"p{i}": i % 2 == 0 for i in range(100)}
    judgements = [decide(name, [vote(name, "coin", 0, rng.random() < 0.3)], SETTINGS.threshold) for name in labels]
    result = calibrate(judgements, labels)
    assert result.threshold is None
    with pytest.raises(ValueError, match="no labelled problem has votes"):
        calibrate(judgements, {"other": True})
    with pytest.raises(ValueError, match="every labelled problem is labelled drop"):
        calibrate(judgements, {"p0": False})


def test_the_page_is_whole_and_its_labels_come_back(tmp_path: Path) -> None:
    judgements = [voted(True, name, random.Random(0)) for name in ("a", "b", "c")]
    texts = {"a": "</script><b>x", "b": 'two\nlines, "quoted"', "c": "$x<y$"}
    page = write_sheet(sample_for_labels(judgements, count=3, seed=0), texts, tmp_path).read_text()
    assert page.count("</script>") == 1
    data = json.loads(page.partition("const problems = ")[2].partition(";\n")[0])
    assert {one["id"]: one["text"] for one in data} == texts
    assert "http://" not in page
    assert "https://" not in page
    assert sum(json.loads((tmp_path / "weights.json").read_text()).values()) == pytest.approx(3)
    assert read_labels(tmp_path / "sheet.csv") == {}
    (tmp_path / "labels.csv").write_text('\ufeffid,label,note\r\n"a","keep","a ""note"""\r\nb,DROP,\r\nc,,\r\n')
    assert read_labels(tmp_path / "labels.csv") == {"a": True, "b": False}
    labels = {"labels": [{"id": "a", "label": "drop", "note": ""}, {"id": "b", "label": "skip", "note": ""}]}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert read_labels(tmp_path / "labels.json") == {"a": False}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "id,label\na,perhaps\n", r"x\.csv, line 2: label is 'perhaps'; write keep, drop or nothing"),
        ("x.csv", "name,label\na,keep\n", "line 2: no column id"),
        ("x.csv", "id,label\na,keep\na,drop\n", "line 3: problem 'a' has both labels"),
        ("x.json", "{", "no table of labels"),
        ("x.json", '{"rows": []}', "no table of labels"),
    ],
)
def test_labels_that_cannot_be_read(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / name)


def test_figures_of_the_flawed_ones() -> None:
    assert len({problem.text for problem in FLAWED}) == 6
    rng = random.Random(1)
    judgements = [voted(False, problem.id, rng, 0.95) for problem in FLAWED[:5]]
    told = flawed_figures(judgements, [problem.id for problem in FLAWED])
    assert told["flawed"] == 6
    assert told["judged"] == 5
    assert told["found_by_judges"] + len(told["missed_by_judges"]) == 5


def test_cost_is_told_before_and_after() -> None:
    judge = JudgeSettings(
        base_url="http://x", model="m", max_tokens=100, dollars_per_million_input=3, dollars_per_million_output=10
    )
    settings = JudgingSettings(judges=(judge,))
    assert cost(judge, 1_000_000, 500_000) == pytest.approx(8.0)
    told = estimated_cost(settings, {"m": 1000}, characters=350)["m"]
    assert told["votes"] == 1000
    assert told["prompt_tokens"] == 500_000
    assert told["most_dollars"] == pytest.approx(0.5 * 3 + 0.1 * 10)


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
        problems = [Document(id=name, text=text) for name, text in TEXTS.items()]
        report = report_of(judge_problems(problems, settings, folder=folder / "work"), settings)
    (folder / "work" / "judging.json").write_text(json.dumps(report))
    return folder


def test_a_sheet_is_made_and_its_labels_give_the_threshold(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sheet(step, count=10) == 0
    weights = json.loads((step / "work" / "labels" / "weights.json").read_text())
    assert len(weights) == 10
    labels = step / "labels.csv"
    rows = [f"{name},{'drop' if 'unclear' in TEXTS[name] else 'keep'}" for name in weights]
    labels.write_text("\n".join(["id,label", *rows]))
    assert calibrate_command(step, labels=labels) == 0
    told = json.loads((step / "work" / "calibration.json").read_text())
    assert told["threshold"] == 3  # good ones have three votes of four, flawed ones one
    assert told["judge_kappa"] == {"m": 1.0}
    said = capsys.readouterr().out
    assert calibrate_command(step, labels=labels, least_recall=0.0) == 0
    assert json.loads((step / "work" / "calibration.json").read_text())["threshold"] == 4
    assert "threshold that follows: 3" in said
    assert "almost perfect agreement" in said


def test_a_folder_without_votes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"judging\.json: no such file; give the folder of a judging step"):
        sheet(tmp_path)
