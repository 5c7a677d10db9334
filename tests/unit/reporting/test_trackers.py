"""Data sent to trackers, read back from the files of TensorBoard, W&B, trackio and MLflow; once, also if resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from magicrl.evaluation.statistics import Interval
from magicrl.records import StepMetrics
from magicrl.reporting.read_folders import SetEvaluation, TemperatureScore
from magicrl.reporting.trackers import TrackedRun, TrackerMirror, make_trackers, result_figures
from magicrl.training.recorder import RunObserver

from .conftest import write_run

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tracker.py"
KEY = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("tensorboard", "wandb", "trackio", "mlflow")
Curves = dict[str, list[tuple[int, Any]]]

# does with a run folder and its observer what `train` does, without training: start, rewind to a checkpoint, then a
# stage mark, steps and evaluations; the signal `end` ends it after step `last`, unless that is 0
DRIVER = """
import json, os, signal, sys
from pathlib import Path
from magicrl.records import StepMetrics
from magicrl.reporting.trackers import TrackerMirror, make_trackers

folder, names, checkpoint, last, end = Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:])
trackers = make_trackers(names)

def append(name, row):
    with (folder / name).open("a") as file:
        file.write(json.dumps(row) + "\\n")

def event(kind, step, message):
    append("events.jsonl", {"kind": kind, "step": step, "message": message})
    mirror.event({"kind": kind, "step": step, "message": message})

for name in ("metrics.jsonl", "events.jsonl"):
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(line + "\\n" for line in lines if json.loads(line)["step"] <= checkpoint))

def examine(name):
    if not (folder / "evaluations" / f"{name}.json").exists():
        (folder / f"{name}.json").rename(folder / "evaluations" / f"{name}.json")
        event("evaluation", checkpoint, f"test {name}")

with TrackerMirror(folder, trackers, project="tests", report=print) as mirror:
    if checkpoint:
        event("resume", checkpoint, "resumed")
    examine("before")
    if not checkpoint:
        event("stage_start", 0, "stage 1")
        event("warning", 0, "short")
        event("warning", 0, "long")
    for step in range(checkpoint + 1, last + 1):
        values = {"train/accuracy/mean": step / 100, "stage/max_tokens": 64, "learner/clip_ratio": None}
        append("metrics.jsonl", {"step": step, "stage": 0, "values": values})
        mirror.step(StepMetrics(step=step, stage=0, values=values))
    if end:
        os.kill(os.getpid(), end)
        signal.pause()
    checkpoint = last
    examine("after")
"""


def at_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    """Make W&B, trackio and MLflow write below this folder and send nothing."""
    patch.setenv("HOME", str(home / "home"))
    patch.setenv("TRACKIO_DIR", str(home / "trackio"))
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("WANDB_API_KEY", KEY)
    patch.setenv("MLFLOW_TRACKING_URI", (home / "mlflow").as_uri())  # the same client as with a server
    patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    # an earlier test in this process may have left W&B's service running
    for name in (
        "WANDB_DIR",
        "WANDB_PROJECT",
        "WANDB_RUN_ID",
        "WANDB_SERVICE",
        "TRACKIO_SPACE_ID",
        "TRACKIO_SERVER_URL",
    ):
        patch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home(tmp_path, monkeypatch)


def young(folder: Path) -> Path:
    """Return the recorded run before its first step, with its tests still to come."""
    write_run(folder)
    (folder / "metrics.jsonl").unlink()
    (folder / "events.jsonl").unlink()
    for name in ("before", "after"):
        (folder / "evaluations" / f"{name}.json").rename(folder / f"{name}.json")
    return folder


@pytest.fixture
def young_run(tmp_path: Path) -> Path:
    return young(tmp_path / "run")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every tracker, a custom one too, with a run stopped after step 7 and resumed from step 4."""
    home = tmp_path_factory.mktemp("resumed")
    folder = young(home / "run")
    with (folder / "config.toml").open("a") as file:
        file.write("\n[evaluation]\npass_at = [1, 2]\n")
    with pytest.MonkeyPatch.context() as patch:
        at_home(home, patch)
        names = (*NAMES, f"{EXAMPLE}:CsvTracker")
        drive(folder, names, checkpoint=0, last=7, end=signal.SIGINT)
        drive(folder, names, checkpoint=4, last=9)
    return folder


def drive(folder: Path, names: tuple[str, ...], *, checkpoint: int, last: int, end: int = 0) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), json.dumps(names), str(checkpoint), str(last), str(int(end))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -end, done.stderr
    assert done.stdout == "", "a tracker printed into the display, or failed"


def read_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    curves: Curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag in events.Tags()["tensors"]:
        curves[tag] = [(e.step, v.decode()) for e in events.Tensors(tag) for v in e.tensor_proto.string_val]
    return curves


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline file: a LevelDB log of protocol buffers after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0 and length == 0:
            return
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def read_wandb(folder: Path) -> Curves:
    """Return the records of all offline files by time, as a sync reads them."""
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    curves: Curves = {}
    for record in (record for file in files for record in wandb_records(file)):
        if record.HasField("history"):
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for key, value in row.items():
                if not key.startswith("_"):
                    curves.setdefault(key, []).append((row["_step"], value))
        for item in record.summary.update:
            key = item.key or "/".join(item.nested_key)
            if key.startswith("test_"):
                curves.setdefault(key, []).append((0, json.loads(item.value_json)))
    return curves


def read_trackio(folder: Path) -> Curves:
    document = subprocess.run(
        [
            sys.executable,
            *("-m", "trackio.cli", "query", "project", "--project", "tests", "--json"),
            *("--sql", "SELECT step, metrics FROM metrics ORDER BY step"),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRACKIO_DIR": str(folder.parent / "trackio")},
    ).stdout
    curves: Curves = {}
    for row in json.loads(document)["rows"]:
        metrics = row["metrics"] if isinstance(row["metrics"], dict) else json.loads(row["metrics"])
        for key, value in metrics.items():
            curves.setdefault(key, []).append((row["step"], value))
    return curves


def mlflow_runs(folder: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient((folder.parent / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("tests")
    return client.search_runs([experiment.experiment_id]) if experiment else []


def read_mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient((folder.parent / "mlflow").as_uri())
    (run,) = mlflow_runs(folder)
    curves: Curves = {
        key: [(row.step, row.value) for row in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    for tag, message in sorted(run.data.tags.items()):
        if tag.startswith("events/"):
            kind, step = tag.rsplit("/", 1)
            curves.setdefault(kind, []).append((int(step), message))
    return curves


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_and_resumed_run_has_every_point_once(name: str, resumed: Path) -> None:
    curves = READERS[name](resumed)
    assert [step for step, _ in curves["train/accuracy/mean"]] == list(range(1, 10))
    assert [value for _, value in curves["train/accuracy/mean"]] == pytest.approx([s / 100 for s in range(1, 10)])
    assert curves["events/stage_start"] == [(0, "stage 1")]
    warned = [text for step, text in curves["events/warning"] if step == 0]
    assert "\n".join(warned) == "short\nlong", "two events of one kind and step"
    assert curves["events/resume"] == [(4, "resumed")], "though the stopped run had sent step 4"
    assert "learner/clip_ratio" not in curves
    assert [value for _, value in curves["test_after/test_t0.6/mean"]] == pytest.approx([0.94])
    assert [value for _, value in curves["test_before/test_pass16/low"]] == pytest.approx([0.87])


def test_graded_tests_have_their_mean_rewards() -> None:
    interval = Interval(mean=0.5, low=0.25, high=0.75)
    score = TemperatureScore(accuracy=interval, reward=interval, problems=2, samples=1, per_problem=(0.0, 1.0))
    found = result_figures((SetEvaluation(name="after", set="sums", temperatures={1.0: score}),))
    assert found["test_after/sums_reward_t1/low"] == found["test_after/sums_t1/low"] == 0.25
    plain = SetEvaluation(name="after", set="sums", temperatures={1.0: score.model_copy(update={"reward": None})})
    assert not any("reward" in key for key in result_figures((plain,)))


def read_csv(folder: Path) -> Curves:
    """Return the rows that examples/tracker.py wrote."""
    curves: Curves = {}
    for step, key, value in csv.reader((folder / "csv" / "steps.csv").open()):
        curves.setdefault(key, []).append((int(step), float(value)))
    return curves


def test_the_example_of_a_custom_tracker_has_every_point_once(resumed: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    assert [step for step, _ in read_csv(resumed)["train/accuracy/mean"]] == list(range(1, 10))
    results = {key: float(value) for _, key, value in csv.reader((resumed / "csv" / "results.csv").open())}
    assert results["test_after/test_t0.6/mean"] == 0.94
    events = list(csv.reader((resumed / "csv" / "events.csv").open()))
    first = ["evaluation", "stage_start", "warning", "warning", "end"]
    assert [kind for _, kind, _ in events] == [*first, "resume", "evaluation", "end"]


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        ("nothing_there:Tracker", "there is no module 'nothing_there'"),
        ("json:dumps", "which makes no tracker: dumps() missing"),
        ("builtins:dict", "which makes no tracker: no open, step, event, results, close"),
        ("builtins:Tracker", "builtins has no 'Tracker'"),
    ],
)
def test_what_is_no_tracker_is_refused_before_anything_is_trained(reference: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make_trackers([reference])


def test_a_tracker_chosen_after_a_kill_gets_the_whole_history(young_run: Path) -> None:
    drive(young_run, (), checkpoint=0, last=5, end=signal.SIGKILL)
    drive(young_run, NAMES, checkpoint=4, last=6)
    for name in NAMES:
        assert [step for step, _ in READERS[name](young_run)["train/accuracy/mean"]] == list(range(1, 7)), name


def test_trackers_that_write_at_once_lose_no_step_to_a_kill(young_run: Path) -> None:
    names = ("tensorboard", f"{EXAMPLE}:CsvTracker")
    drive(young_run, names, checkpoint=0, last=7, end=signal.SIGKILL)
    drive(young_run, names, checkpoint=4, last=9)
    for read in (read_tensorboard, read_csv):
        assert [step for step, _ in read(young_run)["train/accuracy/mean"]] == list(range(1, 10))


class Sent:
    """Tracker that stores the identity of its run, and the steps and events that it received."""

    def __init__(self) -> None:
        self.identity = ""
        self.steps: list[int] = []
        self.events: list[tuple[int, str]] = []
        self.scores: dict[str, float] = {}

    def open(self, run: TrackedRun) -> None:
        self.identity = run.identity

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def event(self, step: int, kind: str, message: str) -> None:
        self.events.append((step, message))

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self.scores |= values

    def close(self, status: str) -> None: ...


def send(folder: Path, steps: Iterable[int], names: Sequence[str] = ("sent",)) -> list[Sent]:
    """Run a process that makes these steps, with these trackers."""
    trackers = {name: Sent() for name in names}
    with TrackerMirror(folder, trackers, project="tests", report=print) as mirror:
        for step in steps:
            metrics = StepMetrics(step=step, stage=0, values={})
            recorded = [json.dumps({"step": n, "stage": 0, "values": {}}) for n in range(1, step + 1)]
            (folder / "metrics.jsonl").write_text("\n".join(recorded) + "\n")
            mirror.step(metrics)
    return [*trackers.values()]


def test_a_step_that_was_sent_and_not_written_down_comes_twice_and_no_other(young_run: Path) -> None:
    (first,) = send(young_run, range(1, 8))
    state = json.loads((young_run / "trackers.json").read_text())
    assert state == {"id": first.identity, "last": {"sent": 7}, "events": {}, "results": {}}
    # as after a kill between sending step 7 and recording it
    (young_run / "trackers.json").write_text(json.dumps(state | {"last": {"sent": 6}}))
    (second,) = send(young_run, range(5, 10))
    assert (second.identity, second.steps) == (first.identity, [7, 8, 9])


@pytest.mark.parametrize("text", ["", '{"id": "a', "[]", '{"last": {"sent": 2}}', '{"id": "a", "last": 3}'])
def test_a_damaged_state_of_trackers_does_not_end_the_run(
    young_run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    send(young_run, range(1, 4))
    (young_run / "trackers.json").write_text(text)
    (second,) = send(young_run, range(4, 6))
    assert second.steps == [1, 2, 3, 4, 5]
    state = {"id": second.identity, "last": {"sent": 5}, "events": {}, "results": {}}
    assert json.loads((young_run / "trackers.json").read_text()) == state
    assert f"the trackers get this run again, as {second.identity}" in capsys.readouterr().out


def test_each_event_is_sent_once_also_those_of_a_resume(young_run: Path) -> None:
    """Every resume writes events at the checkpoint's step, to which the trackers got all metrics."""
    path, everything = young_run / "events.jsonl", [(0, "stage 1"), (2, "long"), (4, "low")]

    def go(checkpoint: int, *messages: tuple[int, str], name: str = "sent") -> list[tuple[int, str]]:
        lines = path.read_text().splitlines() if path.exists() else []
        path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= checkpoint))
        tracker = Sent()
        with TrackerMirror(young_run, {name: tracker}, project="tests", report=print) as mirror:
            for step, message in messages:
                event = {"kind": "warning", "step": step, "message": message}
                with path.open("a") as file:
                    file.write(json.dumps(event) + "\n")
                mirror.event(event)
                if step > checkpoint:
                    mirror.step(StepMetrics(step=step, stage=0, values={}))
        return tracker.events

    again = [(2, "resumed"), (2, "the file has changed")]
    assert go(0, *everything) == everything
    assert go(2, *again, (4, "low")) == again, "step 4 is repeated"
    assert go(2, (2, "resumed"), (4, "low"), (5, "new")) == [(2, "resumed"), (5, "new")]
    in_log = [(0, "stage 1"), (2, "long"), *again, (2, "resumed"), (4, "low"), (5, "new")]
    assert go(5, name="added") == [], "no event and no step: it was never opened"
    assert go(5, (5, "resumed"), name="added") == [*in_log, (5, "resumed")]


def test_each_tracker_continues_where_it_was(young_run: Path) -> None:
    send(young_run, range(1, 4), ["sent", "other"])
    send(young_run, range(4, 6), ["other"])
    sent, other, new = send(young_run, range(6, 8), ["sent", "other", "new"])
    assert (sent.steps, other.steps, new.steps) == ([4, 5, 6, 7], [6, 7], list(range(1, 8)))


def test_a_resume_sends_the_results_that_are_new_or_other_ones(young_run: Path) -> None:
    # A tracker may have failed before the tests after training, and a longer run is tested again.
    tests = young_run / "evaluations"
    (young_run / "before.json").rename(tests / "before.json")
    send(young_run, [1])
    after = (young_run / "after.json").read_text()
    (tests / "after.json").write_text(after)  # the tracker had failed
    (second,) = send(young_run, [2])
    assert second.scores["test_after/test_t0.6/mean"] == pytest.approx(0.94)
    assert not any(key.startswith("test_before/") for key in second.scores), "sent before"
    document = json.loads(after)
    document["temperatures"]["0.6"]["accuracy"]["mean"] = 0.95
    third = Sent()
    with TrackerMirror(young_run, {"sent": third}, project="tests", report=print) as mirror:
        mirror.event({"kind": "resume", "step": 2, "message": "resumed"})  # with the old result in the folder
        assert third.scores == {}
        (tests / "after.json").write_text(json.dumps(document))
        mirror.event({"kind": "evaluation", "step": 3, "message": "test after"})
    assert third.scores == {"test_after/test_t0.6/mean": 0.95}


def test_a_kill_while_trackers_open_leaves_the_name_of_the_run(young_run: Path) -> None:
    class Killed(Sent):
        def open(self, run: TrackedRun) -> None:
            super().open(run)
            raise SystemExit

    killed = Killed()
    with TrackerMirror(young_run, {"sent": killed}, project="tests", report=print) as mirror, suppress(SystemExit):
        mirror.event({"kind": "stage_start", "step": 0, "message": "stage 1"})
    (later,) = send(young_run, [1])
    assert later.identity == killed.identity != ""


def test_tensorboard_gets_the_configuration_and_every_steps_curves_in_one_run(resumed: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    events = EventAccumulator(str(resumed / "tensorboard")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    started = metadata.parse_session_start_info_plugin_data(content)
    assert started.hparams["stages.1.mini_batch"].number_value == 4
    assert started.hparams["run.name"].string_value == "small"
    assert started.hparams["evaluation.pass_at"].string_value == "[1, 2]"


def test_wandb_gets_the_configuration_and_keeps_its_name_over_processes(resumed: Path) -> None:
    files = sorted((resumed / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = json.loads((resumed / "trackers.json").read_text())["id"]
    assert [file.stem for file in files] == [f"run-{identity}"] * 2
    runs = [record.run for record in wandb_records(files[-1]) if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert {run.run_id for run in runs} == {identity}
    assert runs[0].project == "tests"
    assert config["run"] == {"name": "small"}


def test_mlflow_gets_the_configuration_and_one_finished_run(resumed: Path) -> None:
    (run,) = mlflow_runs(resumed)
    assert run.data.params["stages.1.mini_batch"] == "4"
    assert run.data.params["run.name"] == "small"
    assert run.data.tags["magicrl.run"] == json.loads((resumed / "trackers.json").read_text())["id"]
    assert (run.info.run_name, run.info.status) == ("small (run)", "FINISHED")


def test_mlflow_without_a_server_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ValueError, match=r"logging\.trackers names mlflow, and MLFLOW_TRACKING_URI is not set"):
        make_trackers(["mlflow"])


def test_no_key_is_written_anywhere(resumed: Path) -> None:
    written = [path for path in resumed.parent.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


class Breaking:
    """Tracker whose disk or network fails at one step, with the key in its message."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[int] = []

    def open(self, run: TrackedRun) -> None:
        if self.at == 0:
            raise ConnectionError(f"401 for {os.environ['WANDB_API_KEY']}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise SystemExit(0)
        self.seen.append(step)

    def event(self, step: int, kind: str, message: str) -> None:
        raise OSError(28, "No space left on device")

    def results(self, step: int, values: Mapping[str, float]) -> None:
        raise AssertionError("a tracker that ended gets no results")

    def close(self, status: str) -> None:
        raise AssertionError("a tracker that ended is not closed")


@pytest.mark.parametrize(("at", "seen"), [(0, []), (3, [1, 2]), (9, [1, 2, 3, 4, 5])])
def test_a_tracker_that_fails_is_told_of_once_and_harms_nobody(at: int, seen: list[int], young_run: Path) -> None:
    told: list[Mapping[str, object]] = []
    broken, whole = Breaking(at), make_trackers(["tensorboard"])
    with TrackerMirror(young_run, {"breaking": broken, **whole}, project="tests", report=told.append) as mirror:
        assert isinstance(mirror, RunObserver)
        for step in range(1, 6):
            row = {"step": step, "stage": 0, "values": {"train/accuracy/mean": 0.5}}
            with (young_run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            mirror.step(StepMetrics(step=step, stage=0, values={"train/accuracy/mean": 0.5}))
        mirror.event({"kind": "evaluation", "step": 5, "message": "test after"})
    assert broken.seen == seen
    assert [event["kind"] for event in told] == ["warning"]
    assert "tracker breaking ended" in str(told[0]["message"])
    recorded = (young_run / "events.jsonl").read_text()
    assert [json.loads(line)["message"] for line in recorded.splitlines()] == [told[0]["message"]]
    assert KEY not in recorded
    assert Counter(step for step, _ in read_tensorboard(young_run)["train/accuracy/mean"]) == Counter(range(1, 6))


BREAK = """
import contextlib, os, resource, sys
from pathlib import Path
from magicrl.records import StepMetrics
from magicrl.reporting.trackers import TrackerMirror, make_trackers

folder, name = Path(sys.argv[1]), sys.argv[2]

def kill_service():
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # others come and go
            parent = int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(int(process), 9)

with TrackerMirror(folder, make_trackers([name]), project="tests", report=lambda e: print(e["message"])) as mirror:
    for step in range(1, 30):
        mirror.step(StepMetrics(step=step, stage=0, values={f"many/{i}/mean": 0.5 for i in range(100)}))
        if step == 3:
            kill_service() if name == "wandb" else resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
print("trained")
"""


@pytest.mark.parametrize(("name", "reason"), [("wandb", "Error"), ("tensorboard", "File too large")])
def test_a_full_disk_or_a_dead_service_ends_the_tracker_only(name: str, reason: str, young_run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BREAK, str(young_run), name], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    told, last = done.stdout.splitlines()
    assert told.startswith(f"tracker {name} ended (")
    assert reason in told
    assert last == "trained"
    assert len((young_run / "events.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_extra_is_named_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[start]\nmodel = "none"\n[[data.train]]\npath = "none.jsonl"\n[[stages]]\nmax_tokens = 8\n'
        f'rollout_batch = 1\ngroup_size = 2\nmax_steps = 1\n[logging]\ntrackers = ["{name}"]\n'
    )
    blocked = f"import sys; sys.modules['{name}'] = None; from magicrl.commands.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "train", str(recipe), "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"logging.trackers names {name}, which is not installed" in done.stderr
    assert f"pip install 'magicrl[{name}]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_wandb_without_a_key_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from magicrl.reporting.trackers import make_trackers; make_trackers(['wandb'])"
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "online")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert "ValueError: logging.trackers names wandb, and W&B has no API key" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr
