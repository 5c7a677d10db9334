"""Asynchronous mode end to end on the toy: what is requested, when it is used, effects of stops and stage changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import rollouts, run, same_weights

from magicrl.training.checkpoint import load_latest

ONE_STAGE = ("stages.0.max_steps=6", "stages.0.max_tokens=24", "stages.1.max_steps=1")


def draws_by_step(output: Path) -> list[list[int]]:
    steps: dict[int, list[int]] = {}
    for row in rollouts(output):
        if row["sample"] == 0:
            steps.setdefault(row["step"], []).append(row["draw"])
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize(("staleness", "rows"), [(4, 160), (2, 6)])
def test_groups_are_used_in_issue_order_and_within_the_bound(
    toy_recipe: Path, tmp_path: Path, staleness: int, rows: int
) -> None:
    # only responses of the newest weights meet this bound: older ones differ from the learner without any fault
    ahead = (f"rollout.max_staleness={staleness}", f"rollout.max_rows={rows}", "rollout.max_sampler_gap=5e-4")
    values = run(toy_recipe, tmp_path / "run", *ONE_STAGE, *ahead)
    synchronous = run(toy_recipe, tmp_path / "synchronous", *ONE_STAGE)
    assert draws_by_step(tmp_path / "run") == [list(range(8 * step, 8 * step + 8)) for step in range(7)]
    prompts = [[(row["draw"], row["problem_id"]) for row in rollouts(tmp_path / n)] for n in ("run", "synchronous")]
    assert prompts[0] == prompts[1], "the same prompts, whatever the staleness"
    begun = [row["staleness/max"] for row in values]
    assert 0 < max(begun) <= staleness
    if rows == 160:  # all of five steps start at once; a step that rejects every group does not change the weights
        assert begun[:5] == [sum(row["learner/sgd_steps"] > 0 for row in values[:step]) for step in range(5)]
    assert begun[0] == 0
    assert [row["queue/in_flight"] for row in values] == [8 * min(staleness, left) for left in (5, 4, 3, 2, 1, 0, 0)]
    for row in values:
        shares = [row[f"staleness/share_{steps}/ratio"] for steps in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1)
        assert row["staleness/older/ratio"] == pytest.approx(1 - shares[0])
        assert row["staleness/mean"] == pytest.approx(sum(n * share for n, share in enumerate(shares)))
        assert row["entropy/exact/mean"] > 0
        assert "entropy/sampled/mean" not in row, "the sampler's log-probs are of older policies"
    assert any(row["version_spans"] for row in rollouts(tmp_path / "run")), "some response spans an update"
    assert max(row.get("learner/sampler_gap_mean", 0) for row in values) > 1e-3
    assert max(row["staleness/fresh_gap/mean"] or 0 for row in values) < 1e-4
    assert len(synchronous) == len(values)


def test_the_schedule_is_a_function_of_the_recipe(toy_recipe: Path, tmp_path: Path) -> None:
    first, again = (run(toy_recipe, tmp_path / name, *ONE_STAGE, "rollout.max_staleness=2") for name in "ab")
    assert again == first
    assert rollouts(tmp_path / "a") == rollouts(tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")


def test_with_nothing_to_be_ahead_of_it_is_the_synchronous_run(toy_recipe: Path, tmp_path: Path) -> None:
    """Stages of one step: the sampler is the learner, so the proximal policy is the behaviour policy."""
    steps = ("stages.0.max_steps=1", "stages.1.max_steps=1")
    plain = run(toy_recipe, tmp_path / "plain", *steps)
    ahead = run(toy_recipe, tmp_path / "ahead", *steps, "rollout.max_staleness=4")
    assert [row["tokens/sampled"] for row in ahead] == [row["tokens/sampled"] for row in plain]
    for key in ("learner/grad_norm", "entropy/exact/mean", "entropy/alpha"):
        assert [row[key] for row in ahead] == pytest.approx([row[key] for row in plain], rel=1e-3, abs=1e-6)
    assert all(row["staleness/mean"] == 0 for row in ahead)
    events = (tmp_path / "ahead" / "events.jsonl").read_text()
    assert "nothing corrects for it" in events
    assert "nothing corrects for it" not in (tmp_path / "plain" / "events.jsonl").read_text()


@pytest.mark.parametrize("rows", [32, 5])
def test_a_killed_run_goes_on_with_what_was_in_flight(toy_recipe: Path, tmp_path: Path, rows: int) -> None:
    """Compare with an undisturbed run, bit for bit: tokens, log-probs, versions, metrics and weights."""
    sampling = ("rollout.temperature=0.8", "run.seed=3")  # a resumed request must use the same settings
    options = (*ONE_STAGE, *sampling, "rollout.max_staleness=2", f"rollout.max_rows={rows}", "checkpoint.every=2")
    whole = run(toy_recipe, tmp_path / "whole", *options)
    output = tmp_path / "killed"
    run(toy_recipe, output, *options, kill_after=3)
    checkpoint = load_latest(output / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert len(checkpoint.state["trainer"]["pending"]) == 16
    held = {5: "trainer/engine/cache/responses/keys/0", 32: "trainer/finished/logprobs"}[rows]  # under way, or waiting
    assert checkpoint.tensors[held].numel()
    assert run(toy_recipe, output, *options, kill_after=5, resume=True)[-1]["staleness/max"] > 0
    assert run(toy_recipe, output, *options, resume=True) == whole
    assert rollouts(output) == rollouts(tmp_path / "whole")
    assert same_weights(output, tmp_path / "whole")


def test_what_an_engine_cannot_go_on_with_is_generated_again(
    toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with a different cache layout keeps nothing: the tokens differ, but every prompt is accounted for."""
    monkeypatch.setattr("magicrl.rollout.in_process.InProcessEngine.snapshot", lambda _: {})
    options = (*ONE_STAGE, "rollout.max_staleness=2", "checkpoint.every=2")
    run(toy_recipe, tmp_path / "killed", *options, kill_after=3)
    run(toy_recipe, tmp_path / "killed", *options, resume=True)
    assert draws_by_step(tmp_path / "killed") == [list(range(8 * step, 8 * step + 8)) for step in range(7)]


def test_a_stage_change_drains_the_queue(toy_recipe: Path, tmp_path: Path) -> None:
    """The first stage ends early by its rule, with groups of two steps in flight: their prompts are requested again."""
    rule = 'stages.0.transition={rule="truncation", truncation_below=1.0, window=4}'
    options = (rule, "stages.0.max_steps=30", "stages.1.max_steps=3", "rollout.max_staleness=2", "checkpoint.every=100")
    values = run(toy_recipe, tmp_path / "run", *options)
    drained = [row["queue/drained"] for row in values]
    assert sorted(drained)[-2:] == [0, 16], drained
    first = drained.index(16)
    assert [row["staleness/max"] for row in values[first : first + 3]] == [0, 1, 2]
    rows = [row for row in rollouts(tmp_path / "run") if row["sample"] == 0]
    assert {row["max_tokens"] for row in rows if row["step"] > first} == {24}
    draws = [row["draw"] for row in rows]
    assert draws == [*range(8 * first), *range(8 * first + 16, 8 * first + 16 + 8 * 3)]
    plain = run(toy_recipe, tmp_path / "plain", f"stages.0.max_steps={first + 3}", "data.online_filter=false")
    assert len(plain) > first
    expected = [row["problem_id"] for row in rollouts(tmp_path / "plain") if row["sample"] == 0]
    assert [row["problem_id"] for row in rows] == expected[: len(rows)], "no prompt is skipped"


def test_validation_sees_the_newest_weights_and_disturbs_nothing(toy_recipe: Path, tmp_path: Path) -> None:
    options = (*ONE_STAGE, "rollout.max_staleness=2")
    plain = run(toy_recipe, tmp_path / "plain", *options)
    measured = run(toy_recipe, tmp_path / "measured", *options, "evaluation.every=1")
    assert all("validation/accuracy/mean" in row for row in measured)
    kept = [{k: v for k, v in row.items() if not k.startswith("validation/")} for row in measured]
    assert kept == plain
    assert rollouts(tmp_path / "measured") == rollouts(tmp_path / "plain")


def test_refill_asks_in_issue_order_within_the_bound(toy_recipe: Path, tmp_path: Path) -> None:
    refill = ("algorithm.refill=until_full", "algorithm.refill_rounds=40")
    values = run(toy_recipe, tmp_path / "run", *ONE_STAGE, *refill, "rollout.max_staleness=2")
    assert all(row["groups/trained"] == 8 for row in values)
    assert any(row["groups/refilled"] for row in values)
    assert all(row["groups/sampled"] == 8 + row["groups/refilled"] for row in values)
    assert 0 < max(row["staleness/max"] for row in values) <= 2
    used = [draw for step in draws_by_step(tmp_path / "run") for draw in step]
    assert used == sorted(used)
    assert len(set(used)) == len(used)


@pytest.mark.parametrize(("correction", "staleness"), [("tis", 2), ("m2po", 2), ("m2po", 0)])
def test_corrections_act_on_stale_tokens(toy_recipe: Path, tmp_path: Path, correction: str, staleness: int) -> None:
    values = run(
        toy_recipe,
        tmp_path / "run",
        *ONE_STAGE,
        "stages.0.mini_batch=4",
        f"rollout.max_staleness={staleness}",
        f"algorithm.correction={correction}",
        "algorithm.correction_cap=1.05",
        "algorithm.second_moment=1e-4",
    )
    corrected = [row["learner/corrected_ratio"] for row in values if row["learner/sgd_steps"]]
    assert max(corrected) == 0 if staleness == 0 else 0 < max(corrected) < 1
    assert all(row["learner/grad_norm"] > 0 for row in values if row["learner/sgd_steps"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.weight_lag=1", "both make the sampler older"),
        ("entropy.estimator=sampled", 'use "exact", which the learner measures'),
    ],
)
def test_settings_that_make_no_sense_together(toy_recipe: Path, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(toy_recipe, tmp_path / "run", "rollout.max_staleness=1", setting)
