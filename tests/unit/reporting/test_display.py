"""The live display: panel, lines, and one row per worker."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from magicrl.records import StepMetrics
from magicrl.reporting.display import LiveDisplay, RunPanel, memory_text, sparkline, worker_rows
from magicrl.training.recorder import NullObserver, RunObserver

WHOLE = {
    "train/accuracy/mean": 0.25,
    "tokens/per_second": 800.0,
    "time/step": 10.0,
    "time/rollout": 6.0,
    "time/train": 3.0,
    "memory/learner/peak_mb": 71680.0,
    "speed/learner/tokens_per_second": 53210.0,
    "speed/learner/tokens_per_second_per_device": 6651.25,
    "speed/learner/mfu": 0.412,
    "memory/engine/peak_mb": 512.0,
    "speed/engine/tokens_per_second": 12210.0,
    "speed/engine/tokens_per_second_per_device": 6105.0,
}


def step(replicas: int, verifiers: int = 0, **more: float) -> StepMetrics:
    values: dict[str, Any] = dict(WHOLE)
    for n in range(replicas):
        key = f"cluster/replica_{n}"
        values |= {f"{key}/tokens": 100, f"{key}/tokens_per_second": 2000.0 - 10 * n, f"{key}/busy_seconds": 4.0 + n}
        values |= {f"{key}/queue": 0, f"{key}/queue_max": 12, f"{key}/peak_mb": 512.0}
    for n in range(verifiers):
        key = f"cluster/verifier_{n}"
        values |= {f"{key}/judged": 8, f"{key}/busy_seconds": 1.0 + n, f"{key}/queue": 3}
    values |= {key.replace("__", "/"): value for key, value in more.items()}
    return StepMetrics(step=1, stage=0, values=values)


def drawn(metrics: StepMetrics, width: int = 80) -> str:
    panel = RunPanel(title="demo", max_steps=10, stage_steps=(10,), elapsed=lambda: 75.0)
    panel.step(metrics, 10.0)
    out = io.StringIO()
    Console(file=out, width=width).print(panel)
    return out.getvalue()


def test_every_worker_has_a_row() -> None:
    rows, note = worker_rows(
        step(2, 1, cluster__replicas__lost=1, cluster__verifiers__lost=2, cluster__learner__lost=0)
    )
    learner = {"tokens/s": "53,210", "busy": "30 %", "memory": "70.0 GiB", "MFU": "41 %", "per device": "6,651"}
    assert rows == [
        ("learner", learner),
        ("engine", {"tokens/s": "12,210", "busy": "60 %", "memory": "512 MiB", "per device": "6,105"}),
        ("replica 0", {"tokens/s": "2,000", "busy": "40 %", "queue": "0 (12)", "memory": "512 MiB"}),
        ("replica 1", {"tokens/s": "1,990", "busy": "50 %", "queue": "0 (12)", "memory": "512 MiB"}),
        ("verifier 0", {"busy": "10 %", "queue": "3"}),
    ]
    assert note.plain == "lost: 1 replica, 2 verifier nodes"


def test_of_many_workers_the_slowest_and_the_busiest_are_shown() -> None:
    rows, note = worker_rows(step(32, 5))
    assert [name for name, _ in rows[2:]] == [*(f"replica {n}" for n in range(28, 32)), "verifier 3", "verifier 4"]
    assert rows[2][1]["busy"] == "100 %", "seconds that came in late do not make it busier than the step is long"
    assert note.plain == "4 slowest replicas of 32, 2 busiest verifiers of 5"


def test_the_memory_stands_in_a_clusters_rows_else_in_the_panel() -> None:
    metrics = StepMetrics(step=1, stage=0, values=WHOLE)
    assert worker_rows(metrics)[0] == []
    alone, cluster = drawn(metrics), drawn(step(2))
    assert "tokens/s 800" in alone
    assert "memory 70.0 GiB" in alone, "of the fuller one"
    assert "MFU" not in alone
    assert "memory 70.0 GiB" not in cluster
    assert cluster.count("70.0 GiB") == 1


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_the_rows_fit_and_the_speed_stays(width: int) -> None:
    text = drawn(step(2, 1), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert [part for part in ("53,210", "12,210", "2,000", "1,990") if part not in text] == []
    assert ("per device" in text) == (width >= 80)


def test_memory_in_words() -> None:
    assert [memory_text(1.4), memory_text(1023.0), memory_text(1536.0)] == ["1 MiB", "1023 MiB", "1.5 GiB"]


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def metrics(step: int, stage: int = 0, **more: float | None) -> StepMetrics:
    values: dict[str, Any] = {
        "train/accuracy/mean": 0.25,
        "entropy/exact/mean": 0.312,
        "entropy/target": 0.2,
        "entropy/alpha": 0.005,
        "train/truncation/ratio": 0.12,
        "length/mean": 24.06,
        "groups/rejected/ratio": 0.3,
        "tokens/per_second": 1234.5,
        "time/step": 2.0,
        "stage/max_tokens": 64,
    }
    values |= {key.replace("__", "/"): value for key, value in more.items()}
    return StepMetrics(step=step, stage=stage, values=values)


def display(**options: Any) -> tuple[LiveDisplay, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=100, force_terminal=options.pop("terminal", False))
    return LiveDisplay(console=console, title="demo", clock=clock, **options), out, clock


def test_both_observers_keep_the_protocol() -> None:
    assert isinstance(display()[0], RunObserver)
    assert isinstance(NullObserver(), RunObserver)


def test_a_log_gets_the_first_step_and_then_one_line_each_interval() -> None:
    shown, out, clock = display(max_steps=100, interval=5.0)
    with shown:
        for step in range(1, 13):
            clock.now += 1.0
            shown.step(metrics(step))
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1", "step 6", "step 11"]
    assert lines[0] == (
        "step 1, stage 1, accuracy 25.0 %, entropy 0.312 (target 0.2), alpha 0.005, length 24.1, truncated 12 %, "
        "rejected 30 %, tokens/s 1,234, left at most 3 min 18 s"
    )


def test_a_stage_s_first_step_and_validations_always_show() -> None:
    shown, out, _ = display(interval=1e9)
    shown.step(metrics(1))
    shown.step(metrics(2))
    shown.step(metrics(3, validation__accuracy__mean=0.5))
    shown.step(metrics(4, stage=1))
    shown.step(metrics(5, stage=1))
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 1", "step 3", "step 4"]
    assert "validation 50.0 %" in lines[1]


def test_time_left_is_the_most_steps_left_times_the_recent_step_time() -> None:
    shown, _, clock = display(max_steps=90, stage_steps=(40, 50))
    assert shown.panel.time_left == ""
    shown.step(metrics(1))
    assert (shown.panel.most_steps_left, shown.panel.time_left) == (89, "at most 2 min 58 s"), "the step said 2 s"
    for step in range(2, 20):
        clock.now += 3.0
        shown.step(metrics(step))
    assert shown.panel.time_left == "at most 3 min 33 s", "71 steps of 3 s, the mean of the last ten"
    clock.now += 3.0
    shown.step(metrics(20, stage=1))
    assert shown.panel.most_steps_left == 49, "the first stage ended after 19 of its 40 steps"


def test_most_steps_left_where_less_is_known() -> None:
    shown, _, _ = display(max_steps=90)
    shown.step(metrics(30, stage=1))
    assert shown.panel.most_steps_left == 60, "no stages: of the whole"
    resumed, _, _ = display(max_steps=90, stage_steps=(40, 50))
    resumed.step(metrics(60, stage=1))
    assert resumed.panel.most_steps_left == 30, "the stage began at step 41 at the latest"
    endless, _, _ = display()
    endless.step(metrics(30))
    assert (endless.panel.most_steps_left, endless.panel.time_left) == (None, "")


def test_missing_metrics_are_left_out() -> None:
    shown, out, _ = display()
    shown.step(StepMetrics(step=1, stage=0, values={"train/accuracy/mean": None, "entropy/sampled/mean": 0.4}))
    assert out.getvalue().strip() == "step 1, stage 1, entropy 0.400"


def test_progress_breaks_a_long_silence_only() -> None:
    shown, out, clock = display()
    shown.progress("rollout", 1, 16)
    for i in range(2, 17):
        clock.now += 1.0
        shown.progress("rollout", i, 16)
    assert out.getvalue().splitlines() == ["rollout: 1 of 16", "rollout: 11 of 16, left 5.0 s"]


def test_progress_lines_of_slow_steps_do_not_silence_the_steps() -> None:
    shown, out, clock = display(max_steps=100, interval=5.0)
    for step in range(1, 4):
        clock.now += 20.0
        shown.progress("rollout", 8, 8)
        clock.now += 20.0
        shown.progress("train", 1, 1)
        clock.now += 0.5
        shown.step(metrics(step))
    steps = [line.split(",")[0] for line in out.getvalue().splitlines() if line.startswith("step")]
    assert steps == ["step 1", "step 2", "step 3"]


def test_events_are_told_with_their_remedy_and_without_control_characters() -> None:
    shown, out, _ = display()
    shown.event({"kind": "stage_end", "step": 20, "message": "converged [bold]\x1b[31m"})
    shown.event(
        {
            "kind": "health",
            "severity": "critical",
            "rule": "entropy_collapse",
            "message": "0.01",
            "remedy": "warm up\x1b[2J",
        }
    )
    assert out.getvalue().splitlines() == [
        "[step 20] stage end: converged [bold]␛[31m",
        "entropy collapse: 0.01",
        "  remedy: warm up␛[2J",
    ]


def test_the_panel_shows_the_run() -> None:
    shown, _, clock = display(stage_steps=(40, 50))
    shown.step(metrics(7, validation__accuracy__mean=0.5))
    shown.progress("rollout", 4, 16)
    clock.now += 75
    out = io.StringIO()
    Console(file=out, width=100).print(shown.panel)
    text = out.getvalue()
    for part in (
        "demo · stage 1 (T = 64) · step 7 of at most 90",
        "25.0 %",
        "validation 50.0 % (step 7)",
        "0.312 (target 0.2)",
        "alpha 0.005",
        "truncated 12 %",
        "rejected 30 %",
        "1,234",
        "elapsed 1 min 15 s",
        "left at most 2 min 46 s",
        "rollout",
        "4/16",
    ):
        assert part in text


@pytest.mark.parametrize("error", [None, RuntimeError("boom")])
def test_a_terminal_gets_a_panel_that_ends_cleanly(error: Exception | None) -> None:
    shown, out, _ = display(terminal=True, max_steps=10)
    with nullcontext() if error is None else pytest.raises(RuntimeError, match="boom"), shown:
        shown.progress("rollout", 1, 4)
        shown.step(metrics(1))
        shown.event({"kind": "filter", "message": "kept 3"})
        if error is not None:
            raise error
    text = out.getvalue()
    assert "step 1 of at most 10" in text
    assert "kept 3" in text
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_panel_fits_every_terminal_and_breaks_no_figure(width: int, encoding: str) -> None:
    shown, _, _ = display(stage_steps=(4000, 5000))
    shown.panel.step(metrics(1234, validation__accuracy__mean=0.5), 30.0)
    shown.progress("held_out before training, temperature 0.6", 4, 16000)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="replace")
    Console(file=out, width=width).print(shown.panel)
    out.flush()
    text = raw.getvalue().decode(encoding)
    assert max(len(line) for line in text.splitlines()) <= width
    whole = ["entropy 0.312 (target 0.2)", "alpha 0.005", "truncated 12 %", "tokens/s 1,234", "25.0 %"]
    assert [part for part in whole if part not in text] == []


@pytest.mark.parametrize("title", ["a", "demo", "smollm2-my-problems", "x" * 200])
def test_no_width_loses_the_total_of_the_heading_or_the_bar(title: str) -> None:
    shown, _, _ = display(stage_steps=(4000, 5000))
    shown.panel._title = title
    shown.panel.step(metrics(1234), 30.0)
    shown.progress("rollout", 4, 16000)
    for width in range(20, 121):
        out = io.StringIO()
        Console(file=out, width=width).print(shown.panel)
        head = out.getvalue().splitlines()[0]
        assert "1234 of at most 9000 " in head or "1234/9000 " in head, f"{width} columns: {head}"
        assert "4/16000" in out.getvalue()


@pytest.mark.parametrize(("updates", "share", "shown"), [(1, 0.0, False), (4, 0.0, True), (1, 0.1, True)])
def test_the_clip_ratio_shows_where_something_could_be_clipped(updates: int, share: float, shown: bool) -> None:
    display_, out, _ = display()
    display_.step(metrics(1, learner__clip_ratio=share, learner__sgd_steps=updates))
    assert ("clipped" in out.getvalue()) == shown


def test_after_the_last_step_nothing_is_foretold() -> None:
    shown, out, _ = display(max_steps=2)
    shown.step(metrics(1))
    shown.step(metrics(2, validation__accuracy__mean=0.5))
    first, last = out.getvalue().splitlines()
    assert "left at most" in first
    assert "left" not in last


def test_no_color_means_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown, out, _ = display(terminal=True, max_steps=10)
    with shown:
        shown.step(metrics(1))
        shown.event({"kind": "health", "severity": "critical", "rule": "entropy_collapse", "message": "0.01"})
    colours = re.findall(r"\x1b\[[0-9;]*m", out.getvalue())
    assert not any(int(code) in range(30, 108) for match in colours for code in match[2:-1].split(";") if code)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown, out, _ = display(terminal=True)
    with shown:
        shown.step(metrics(1))
    assert out.getvalue().startswith("step 1, stage 1")


def test_graded_rewards_are_shown_as_mean_rewards() -> None:
    seen = step(0, train__accuracy__mean=0.0, train__reward__mean=-1.5, validation__reward__mean=-0.75)
    text = drawn(replace(seen, values={**seen.values, "validation/accuracy/mean": 0.0}))
    assert "mean reward" in text
    assert "−1.5" in text
    assert "validation −0.75 (step 1)" in text
    assert "accuracy" not in text


def test_sparkline_bins_the_whole_run_on_a_fixed_scale() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([0.0, 0.5, 1.0], 8) == "▁▅█"
    assert sparkline([0.0] * 10 + [1.0] * 10, 4) == "▁▁██"
    assert sparkline([-1.0, 2.0], 4) == "▁█"
