"""Variants: grouping and names of runs; scores with intervals over problems and the spread over runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from magicrl.config.loader import leaves
from magicrl.evaluation.statistics import paired_difference, share
from magicrl.reporting.comparison_page import write_comparison_page
from magicrl.reporting.read_folders import TemperatureScore, read_run
from magicrl.reporting.scores import mean_per_problem, variant_scores
from magicrl.reporting.variants import (
    contents,
    differing,
    distinguishing_keys,
    group_runs,
    path_labels,
    run_settings,
    setting_name,
    setting_names,
    value_text,
)
from magicrl.training.diagnosis import ACCURACY, REWARD

from .conftest import write_variant


def test_runs_that_differ_only_in_their_seed_are_one_variant(variant_folders: list[Path]) -> None:
    variants = group_runs([read_run(folder) for folder in variant_folders])
    assert [(variant.name, len(variant.runs)) for variant in variants] == [("loss magic", 2), ("loss ppo", 2)]


def test_name_output_and_logging_make_no_variant(variant_folders: list[Path]) -> None:
    path = variant_folders[1] / "config.toml"
    path.write_text(path.read_text().replace('"small"', '"other"') + "\n[logging]\nsamples = 3\n")
    assert len(group_runs([read_run(folder) for folder in variant_folders])) == 2


def test_keys_that_are_given_make_the_variants_alone(variant_folders: list[Path]) -> None:
    runs = [read_run(folder) for folder in variant_folders]
    assert [variant.name for variant in group_runs(runs, ["run.seed"])] == ["run seed 0", "run seed 1"]
    assert len(group_runs(runs, ["run.name"])) == 1
    with pytest.raises(ValueError, match=r"--group-by algorithm\.los: .*did you mean algorithm\.loss\?"):
        group_runs(runs, ["algorithm.los"])


@pytest.mark.parametrize(
    ("start", "told"),
    [("study/seed-{seed}/start", "study/seed-*/start"), ("study/seed-0/start", "study/seed-0/start")],
    ids=["one a seed", "one for all"],
)
def test_a_start_model_makes_no_variant_a_seed(start: str, told: str, tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / str(seed), seed) for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        with (folder / "config.toml").open("a") as file:
            file.write(f'\n[start]\nmodel = "{start.format(seed=seed)}"\n')
    runs = [read_run(folder) for folder in folders]
    assert len(group_runs(runs)) == 1
    settings = run_settings(runs)
    assert settings[0]["start.model"] == told
    assert differing(settings) == ["run.seed"]


def record(folder: Path, config: str, **facts: Any) -> None:
    """Add settings to a run's recipe and facts to its record."""
    with (folder / "config.toml").open("a") as file:
        file.write(config)
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def contents_of(folders: list[Path]) -> list[dict[str, str]]:
    return contents([read_run(folder) for folder in folders])


def test_runs_of_one_setting_with_other_files_are_other_variants(variant_folders: list[Path]) -> None:
    digests = ("aaaaaaaa1", "aaaaaaaa1", "bbbbbbbb1", "bbbbbbbb1")
    for folder, digest in zip(variant_folders, digests, strict=True):
        text = (folder / "config.toml").read_text().replace('"ppo"', '"magic"')
        (folder / "config.toml").write_text(text)
        custom = {"data.train.0.verifier": digest, "data.test.own.verifier": digest, "logging.trackers.0": folder.name}
        own = 'verifier = "../../my/brief.py:score"\n'
        record(
            folder,
            f'[logging]\ntrackers = ["../t.py:T"]\n[[data.train]]\n{own}[data.test.own]\n{own}',
            environments=[{"custom": custom}, {"brought": custom}],  # magicrl 0.1's name
        )
    name = "file of my/brief.py:score"
    variants = group_runs([read_run(folder) for folder in variant_folders])
    assert [(v.name, len(v.runs)) for v in variants] == [(f"{name} aaaaaaaa", 2), (f"{name} bbbbbbbb", 2)]
    # a session with another file
    sessions = [{"custom": {"data.train.0.verifier": digest}} for digest in ("aaaaaaaa1", "cccccccc1")]
    record(variant_folders[1], "", environments=sessions)
    assert contents_of(variant_folders[:2]) == [{name: "aaaaaaaa"}, {name: "aaaaaaaa, cccccccc"}]
    # without a record, or the file of another setting
    record(variant_folders[1], "", environments=[])
    assert contents_of(variant_folders[:2]) == [{}, {}]
    assert len(group_runs([read_run(folder) for folder in variant_folders[:2]])) == 1


def test_runs_of_one_setting_with_other_problems_are_other_variants(tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / "runs" / str(i), seed=i) for i in range(2)]
    for folder, digest in zip(folders, ("1111111122", "3333333344"), strict=True):
        data = {"train": {"sha256": digest}, "test/own": {"sha256": digest}, "test/holdout": {"sha256": "5"}}
        record(folder, '[[data.train]]\npath = "../t.jsonl"\n[data.test.own]\npath = "../s.jsonl"\n', data=data)
    assert contents_of(folders) == [
        {"problems of data.train": digest, "problems of data.test.own": digest} for digest in ("11111111", "33333333")
    ]
    name = "problems of data.train"
    assert [v.name for v in group_runs([read_run(f) for f in folders])] == [
        f"{name} 11111111 (+1)",
        f"{name} 33333333 (+1)",
    ]
    write_comparison_page(folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f'<th scope="row">{name} </th>' in page
    assert "Runs that differ only in their seed" not in page


@pytest.mark.parametrize(
    ("sources", "place"),
    [
        (['path = "../seed-0/t.jsonl"', 'path = "../seed-1/t.jsonl"'], "runs"),
        (['path = "../a/t.jsonl"', 'path = "../b/t.jsonl"'], "runs"),
        (['path = "../t.jsonl"\nverifier = "../my.py:score"'] * 2, "other"),
    ],
    ids=["a file per seed", "other settings", "a custom reward in another folder"],
)
def test_problems_of_other_settings_add_no_difference(sources: list[str], place: str, tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / name, seed=i) for i, name in enumerate(("runs/0", f"{place}/1"))]
    for folder, source in zip(folders, sources, strict=True):
        record(folder, f"[[data.train]]\n{source}\n", data={"train": {"sha256": folder.name}})
    assert contents_of(folders) == [{}, {}]


def test_runs_from_other_weights_of_one_folder_are_other_variants(tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / "runs" / str(i), seed=i) for i in range(2)]
    for folder, digest in zip(folders, ("1111111122", "3333333344"), strict=True):
        record(folder, '[start]\nmodel = "../model"\n', start_weights=digest)
    assert contents_of(folders) == [{"weights of start.model": digest} for digest in ("11111111", "33333333")]
    assert [v.name for v in group_runs([read_run(f) for f in folders])] == [
        f"weights of start.model {digest}" for digest in ("11111111", "33333333")
    ]


def test_variants_of_different_recipes_have_their_names(variant_folders: list[Path]) -> None:
    settings = [{f"table.setting_{i}": value for i in range(9)} for value in range(2)]
    assert setting_names(settings, ["quickstart", "tiny"]) == ["quickstart", "tiny"]
    assert setting_names(settings, ["tiny", "tiny"]) == ["table setting 0 0 (+8)", "table setting 0 1 (+8)"]
    assert setting_names([{"algorithm.loss": "ppo"}, {"algorithm.loss": "magic"}], ["a", "b"]) == [
        "loss ppo",
        "loss magic",
    ]
    for folder, name in zip((variant_folders[0], variant_folders[2]), ("quickstart", "tiny"), strict=True):
        record(folder, "".join(f"[{name}{i}]\nsetting = {i}\n" for i in range(9)), name=name)
    runs = [read_run(folder) for folder in (variant_folders[0], variant_folders[2])]
    assert [variant.name for variant in group_runs(runs)] == ["quickstart", "tiny"]


def test_settings_are_flat_in_their_order_and_a_missing_one_differs() -> None:
    old = leaves({"a": {"b": 1, "c": [1, 2]}, "stages": [{"t": 3}]})
    assert old == {"a.b": 1, "a.c": [1, 2], "stages.0.t": 3}
    assert differing([old, leaves({"a": {"b": 1, "c": [1]}})]) == ["a.c", "stages.0.t"]


def test_names_say_every_difference_while_that_is_short() -> None:
    settings = [{"algorithm.loss": "magic", "algorithm.reuse": 1}, {"algorithm.loss": "ppo", "algorithm.reuse": 2}]
    assert setting_names(settings) == ["loss magic, reuse 1", "loss ppo, reuse 2"]


def test_long_names_keep_what_tells_variants_apart_and_count_the_rest() -> None:
    common = {"x.first_long_setting": 1.0, "x.second_long_setting": "yes", "x.third_long_setting": "no"}
    settings = [
        {"algorithm.loss": "magic", **common},
        {"algorithm.loss": "ppo", **dict.fromkeys(common, 3)},
        {"algorithm.loss": "gspo", **dict.fromkeys(common, 3)},
    ]
    assert setting_names(settings) == ["loss magic (+3)", "loss ppo (+3)", "loss gspo (+3)"]
    assert distinguishing_keys(settings, list(settings[0])) == ["algorithm.loss"]


def test_names_are_unique_even_where_the_settings_read_alike() -> None:
    assert setting_names([{"start.model": "a/x"}, {"start.model": "b/x"}]) == [
        "1: initial model x",
        "2: initial model x",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.learning_rate", "learning rate"),
        ("stages.1.max_tokens", "stage 2 T"),
        ("data.train.0.seed", "train 1 seed"),
        ("stages.1.kl_coefficient", "stage 2 KL β"),
        ("stages.1.clip_low", "stage 2 clip low"),
        ("stages.0.transition.rule", "stage 1 transition rule"),
        ("optimizer.beta1", "optimizer beta1"),
        ("file of my/brief.py:score", "file of my/brief.py:score"),
        ("name", "name"),
    ],
)
def test_a_setting_in_words(key: str, words: str) -> None:
    assert setting_name(key) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (True, "on"), (0.0003, "0.0003"), ([0.0, 1.0], "0, 1"), ([], "none"), ("\x1b[1m", "␛[1m")],
)
def test_a_value_in_words(value: object, words: str) -> None:
    assert value_text(value) == words


def test_paths_are_told_apart_by_their_shortest_end() -> None:
    assert path_labels([Path("/r/a/x"), Path("/r/b/y")]) == ["x", "y"]
    assert path_labels([Path("/r/a/run"), Path("/r/b/run")]) == ["a", "b"]
    assert path_labels([Path("/r/a/x"), Path("/r/b/x"), Path("/r/b/y")]) == ["a/x", "b/x", "b/y"]


def scores(folders: list[Path]) -> list[dict[str, Any]]:
    return variant_scores(group_runs([read_run(folder) for folder in folders]))


def test_scores_at_the_temperature_of_training_come_first(variant_folders: list[Path], tmp_path: Path) -> None:
    for folder, at in zip(variant_folders, (0.6, 0.6, 1.0, 1.0), strict=True):
        path = folder / "config.toml"
        path.write_text(path.read_text().replace("temperature = 0.7", f"temperature = {at}"))
    assert [score["temperature"] for score in scores(variant_folders)] == [0.6, 1.0, 0.0]
    assert [score["temperature"] for score in scores(variant_folders[2:])] == [1.0, 0.6, 0.0]
    write_comparison_page(variant_folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Accuracy at temperature 0.6" in page
    assert page.count("trained at temperature 1, at which its test scores in the table of runs are") == 1


def test_an_variant_s_score_is_clustered_by_problem_over_its_runs(variant_folders: list[Path]) -> None:
    first = scores(variant_folders)[0]
    assert (first["set_name"], first["temperature"]) == ("test", 1.0)
    magic, ppo = first["variants"]
    assert magic["after"] is not None
    wanted = share([0.51, 0.51, 1.0, 1.0])
    assert (magic["after"].mean, magic["after"].low) == pytest.approx((wanted.mean, wanted.low))
    assert magic["spread"] is not None
    assert (magic["against"], magic["unpaired"]) == (None, "")
    assert ppo["rise"] is not None
    assert ppo["rise"].mean == pytest.approx(np.mean([0.65, 0.15, 0.5, 0.0]))


def test_the_difference_to_the_first_variant_is_paired_by_problem(variant_folders: list[Path]) -> None:
    _, ppo = scores(variant_folders)[0]["variants"]
    wanted = paired_difference([0.65, 0.65, 1.0, 1.0], [0.51, 0.51, 1.0, 1.0])
    assert ppo["against"] is not None
    assert (ppo["against"].mean, ppo["against"].low, ppo["against"].high) == pytest.approx(
        (wanted.mean, wanted.low, wanted.high)
    )
    assert ppo["against_spread"] is not None
    assert ppo["against_spread"] == pytest.approx((0.045, 0.095))


def test_problems_of_one_template_are_one_observation(variant_folders: list[Path]) -> None:
    for folder in variant_folders:
        for path in (folder / "evaluations").glob("*.json"):
            document = json.loads(path.read_text())
            document["temperatures"]["1.0"]["clusters"] = [0, 0, 1, 1]
            path.write_text(json.dumps(document))
    magic, ppo = scores(variant_folders)[0]["variants"]
    wanted = share([0.51, 0.51, 1.0, 1.0], [0, 0, 1, 1])
    assert magic["after"] is not None
    assert magic["after"].low == pytest.approx(wanted.low)
    assert wanted.low < share([0.51, 0.51, 1.0, 1.0]).low, "two observations say less than four"
    changed = paired_difference([0.65, 0.65, 1.0, 1.0], [0.51, 0.51, 1.0, 1.0], [0, 0, 1, 1])
    assert ppo["against"] is not None
    assert ppo["against"].low == pytest.approx(changed.low)


def test_other_problems_are_not_paired(variant_folders: list[Path]) -> None:
    for folder in variant_folders[2:]:
        path = folder / "run.json"
        path.write_text(path.read_text().replace('"sha256": "a"', '"sha256": "b"'))
    _, ppo = scores(variant_folders)[0]["variants"]
    assert ppo["against"] is None
    assert ppo["unpaired"] == "the test sets have different problems (by checksum)"
    assert ppo["rise"] is not None, "before and after are of one run's own problems"


def test_a_run_that_was_not_tested_yet_is_counted(variant_folders: list[Path]) -> None:
    (variant_folders[3] / "evaluations" / "after.json").unlink()
    _, ppo = scores(variant_folders)[0]["variants"]
    assert (ppo["tested"], ppo["runs"]) == (1, 2)
    assert ppo["spread"] is None
    (variant_folders[2] / "evaluations" / "after.json").unlink()
    assert scores(variant_folders)[0]["variants"][1]["unpaired"] == "not tested after training"


def test_the_rise_is_over_runs_with_both_tests_and_other_seeds_are_named(
    variant_folders: list[Path], tmp_path: Path
) -> None:
    path = variant_folders[3] / "evaluations" / "before.json"
    document = json.loads(path.read_text())
    document["temperatures"]["1.0"]["per_problem"] = [0.0, 0.0, 0.0, 0.0]
    path.write_text(json.dumps(document))
    write_comparison_page(variant_folders, tmp_path / "page.html")
    assert "are compared with seeds" not in (tmp_path / "page.html").read_text()
    (variant_folders[3] / "evaluations" / "after.json").unlink()
    _, ppo = scores(variant_folders)[0]["variants"]
    assert ppo["rise"].mean == pytest.approx(np.mean([0.6, 0.1, 0.5, 0.0])), "of the first run"
    assert ppo["seeds"] == ["0"]
    write_comparison_page(variant_folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "loss ppo: seeds 0 are compared with seeds 0, 1 of the first variant." in page


def test_a_seed_that_was_run_twice_is_named(variant_folders: list[Path], tmp_path: Path) -> None:
    said = "several runs have the seed"
    write_comparison_page(variant_folders, tmp_path / "page.html")
    assert said not in (tmp_path / "page.html").read_text()
    shutil.copytree(variant_folders[0], tmp_path / "copy")
    write_comparison_page([*variant_folders, tmp_path / "copy"], tmp_path / "page.html")
    assert f"loss magic: {said} 0; a repeated or copied run" in (tmp_path / "page.html").read_text()


def test_unlike_test_sets_of_a_variant_are_not_averaged(variant_folders: list[Path]) -> None:
    record(variant_folders[1], "", data={"test/test": {"sha256": "b", "problems": 4}})
    runs = [read_run(folder) for folder in variant_folders]
    magic, ppo = variant_scores(group_runs(runs, ["algorithm.loss"]))[0]["variants"]
    assert [magic[key] for key in ("before", "after", "rise", "spread")] == [None] * 4
    assert ppo["after"] is not None
    assert ppo["unpaired"] == "the test sets have different problems (by checksum)"


def test_another_grader_or_limit_of_the_test_is_named(variant_folders: list[Path], tmp_path: Path) -> None:
    limits = (64, 64, 64, 16)
    for folder, limit, extract in zip(variant_folders, limits, ("box", "box", "lenient", "lenient"), strict=True):
        record(
            folder,
            f'[verifier]\nextract = "{extract}"\nworkers = {limit}\n[verifier.judge]\ncache = "{folder}"\n',
            environments=[{"custom": {"data.test.test.verifier": f"{extract:x<9}", "algorithm.loss": extract}}],
        )
        path = folder / "evaluations" / "after.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_tokens": limit}))
    write_comparison_page(variant_folders, tmp_path / "page.html", keys=["algorithm.loss"])
    page = (tmp_path / "page.html").read_text()
    assert page.count("settings of the test differ too") == 1
    assert (
        "loss ppo: settings of the test differ too and may explain a part of the difference: file of "
        "data.test.test.verifier: was boxxxxxx, is now lenientx; verifier.extract: was box, is now lenient; response "
        "limit: was 64, is now 16."
    ) in page
    # a run that recorded nothing is not compared
    (variant_folders[0] / "config.toml").write_text('[algorithm]\nloss = "magic"\n')
    record(variant_folders[0], "", environments=[])
    path = variant_folders[0] / "evaluations" / "after.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_tokens": None}))
    write_comparison_page(variant_folders, tmp_path / "page.html", keys=["algorithm.loss"])
    assert "settings of the test differ too" not in (tmp_path / "page.html").read_text()


def test_a_problem_that_no_run_judged_is_left_out() -> None:
    told = [
        TemperatureScore.model_validate(
            {"accuracy": {"mean": 0, "low": 0, "high": 0}, "problems": 3, "samples": 1, "per_problem": shares}
        )
        for shares in ([1.0, None, None], [0.0, 0.5, None])
    ]
    np.testing.assert_array_equal(mean_per_problem(told, ACCURACY), [0.5, 0.5, np.nan])


def test_variants_of_graded_runs_are_compared_by_their_mean_rewards(
    variant_folders: list[Path], tmp_path: Path
) -> None:
    for i, folder in enumerate(variant_folders):
        for path in (folder / "evaluations").glob("*.json"):
            document = json.loads(path.read_text())
            mean = 5.0 + i * (document["name"] == "after")
            for score in document["temperatures"].values():
                score["reward"] = {"mean": mean, "low": mean - 1, "high": mean + 1}
                score["reward_per_problem"] = [mean + n % 2 - 0.5 for n in range(len(score["per_problem"]))]
            path.write_text(json.dumps(document))
    (first, *_) = scores(variant_folders)
    assert first["measure"] is REWARD
    means = [variant["after"].mean for variant in first["variants"] if variant["after"] is not None]
    assert means == sorted(means)
    assert means[0] >= 5
    assert first["variants"][-1]["against"] is not None
    assert first["variants"][-1]["against"].mean == pytest.approx(means[-1] - means[0])
    write_comparison_page(variant_folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Mean reward at temperature" in page
    assert "Accuracy at temperature" not in page
    assert "compared with the first variant</th>" in page
