"""Recipes: what a person sees for mistakes that ``tests/unit/errors`` does not list; that nothing is silently
rewritten."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from magicrl.config.errors import RecipeError
from magicrl.config.loader import config_hash, custom_files, leaves, load_start_recipe, load_train_recipe, to_toml
from magicrl.config.overrides import Override
from magicrl.config.paths import FOLDER, find_recipe
from magicrl.config.schema import StartConfig, TrainConfig
from magicrl.config.verifier_schema import JudgeConfig, VerifierConfig
from magicrl.data.schemas import catalogue
from magicrl_verifiers.secrets import without_secrets

GOOD = """
[start]
model = "m"

[[data.train]]
family = "running_sum"
count = 10

[optimizer]
learning_rate = 1e-4

[[stages]]
max_tokens = 8
rollout_batch = 4
group_size = 2
max_steps = 3

[[stages]]
max_tokens = 16
rollout_batch = 4
group_size = 2
max_steps = 3
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_a_good_recipe_loads_and_round_trips(tmp_path: Path) -> None:
    config = load_train_recipe(write(tmp_path, GOOD))
    assert config.stages[1].max_tokens == 16
    again = TrainConfig.model_validate(tomllib.loads(to_toml(config)))
    assert again == config
    assert config_hash(again) == config_hash(config)


@pytest.mark.parametrize(
    "setting",
    ["rollout.temperature=inf", "optimizer.learning_rate=nan", "evaluation.temperatures=[nan]", "entropy.target=inf"],
)
def test_numbers_are_finite(setting: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="should be a finite number"):
        load_train_recipe(write(tmp_path, GOOD), [setting])


@pytest.mark.parametrize("setting", ["optimizer.max_grad_norm", "rollout.max_sampler_gap"])
def test_a_limit_may_be_infinite_and_is_a_number(setting: str, tmp_path: Path) -> None:
    load_train_recipe(write(tmp_path, GOOD), [f"{setting}=inf"])
    with pytest.raises(RecipeError, match="greater than 0"):
        load_train_recipe(write(tmp_path, GOOD), [f"{setting}=nan"])


SECOND = "max_stepz = 3".join(GOOD.rsplit("max_steps = 3", 1))
LATER = "max_steps = 0".join(GOOD.rsplit("max_steps = 3", 1))


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (SECOND, [], r"line 22: unknown key stages\.1\.max_stepz; .*'max_steps'"),
        (GOOD.replace("1e-4", "-1"), [], r"line 10: optimizer\.learning_rate: .*greater than 0 \(got -1\)"),
        (LATER, [], r"line 22: stages\.1\.max_steps: .*greater than or equal to 1 \(got 0\)"),
        (GOOD, ["run.seed=-1", "run.seed=-2"], r"^--set run\.seed=-2: run\.seed: .*\(got -2\)"),
        (GOOD, ["run.seed=true"], r"^--set run\.seed=true: run\.seed: true or false is no value .*\(got True\)"),
        (GOOD, [f"run.seed={2**63}"], r"run\.seed: .*less than 9223372036854775808"),
        (GOOD, ["run.name="], r"run\.name: names no folder; use letters"),
        (GOOD, ["run.name=../"], "names no folder"),
        (GOOD, ["evaluation.temperatures=1.0"], r"temperatures: must be a list, values in brackets \(got 1\.0\)"),
        (GOOD, ["stages={}"], r"stages: must be a list, each entry under \[\[stages\]\]"),
        (GOOD + "[data.test]\npath = 'x'", [], r"line 24: data\.test\.path: belongs .* a name, \[data\.test\.NAME\]"),
        (GOOD + "[run]\nname = 'a'\nname = 'b'", [], "line 25: not valid TOML: .* appears twice"),
        (GOOD + "[run", [], "line 23: not valid TOML: .*; is the file cut off"),
        (GOOD, ["evaluation.temperatures=[1, true]"], r"evaluation\.temperatures: true or false is no value"),
        (GOOD, ["rollout.replay=folder"], r"^--set rollout\.replay=folder: rollout\.replay \(a folder\) goes with"),
        (
            GOOD,
            ["rollout.engine=replay", "rollout.replay=folder", "rollout.max_staleness=1", "entropy.estimator=exact"],
            r"rollout\.max_staleness = 1 with rollout\.engine = \"replay\"",
        ),
        (GOOD, ["nonsense"], "expected KEY=VALUE"),
        (GOOD, ["stages.7.max_tokens=1"], "index from 0 to 1"),
        (GOOD, ["run.seed.deeper=1"], "seed"),
        (GOOD, ["stages.0.mini_batch=3"], "must be a multiple of mini_batch 3"),
        (GOOD, ["algorithm.loss=nll"], "imitates every response"),
        (GOOD, ["teacher.model=x", "teacher.server=http://me:secret@host/v1"], "teacher.server holds a password"),
        (
            GOOD,
            ["model.entropy_clamp=0.2", "rollout.max_staleness=1"],
            r"entropy_clamp = 0\.2 with .*max_staleness = 1",
        ),
        (GOOD, ["algorithm.refill=until_full", "algorithm.reject_zero_advantage=false"], "would be thrown away"),
    ],
)
def test_a_mistake_names_its_place_and_what_is_wrong(
    tmp_path: Path, text: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_train_recipe(write(tmp_path, text), overrides)


KL = ["reference.mode=loss", "reference.coefficient=0.1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["stages.1.entropy_target=0.3", "entropy.controller=none"],
            r'stages\.1\.entropy_target = 0\.3 .*"none" has no',
        ),
        (
            ["reference.model=teacher"],
            r'reference\.model with reference\.mode = "none": .*set reference\.mode = "monitor"',
        ),
        (["stages.1.kl_coefficient=0.3"], r'stages\.1\.kl_coefficient = 0\.3 needs a reference: .*"monitor"'),
        ([*KL, "stages.0.kl_coefficient=0", "stages.1.kl_coefficient=0"], "every stage sets kl_coefficient = 0"),
        (["stages.1.temperature=0"], "greater than 0"),
        (["stages.1.reuse=0"], "greater than or equal to 1"),
    ],
)
def test_a_stage_changes_only_what_is_there(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_train_recipe(write(tmp_path, GOOD), overrides)


def test_the_recipe_as_it_is_in_a_stage(tmp_path: Path) -> None:
    changes = {
        "temperature": 0.7,
        "entropy_target": 0.4,
        "kl_coefficient": 0.02,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "reuse": 2,
        "learning_rate": 5e-5,
    }
    overrides = [*KL, *(f"stages.1.{name}={value}" for name, value in changes.items())]
    config = load_train_recipe(write(tmp_path, GOOD), overrides)
    assert config.in_stage(0) == config
    now = config.in_stage(1)
    assert (now.rollout.temperature, now.optimizer.learning_rate, now.entropy.target) == (0.7, 5e-5, 0.4)
    assert (now.algorithm.clip_low, now.algorithm.clip_high, now.algorithm.reuse) == (0.1, 0.3, 2)
    assert (now.reference.mode, now.reference.coefficient) == ("loss", 0.02)
    told = {key: (leaves(config.model_dump())[key], value) for key, value in leaves(now.model_dump()).items()}
    assert sum(before != after for before, after in told.values()) == len(changes), "nothing else is another"


@pytest.mark.parametrize(
    ("mode", "beta", "stage", "expected"),
    [
        ("loss", 0.1, None, ("loss", 0.1)),
        ("loss", 0.1, 0.0, ("none", 0.0)),
        ("monitor", 0.0, 0.2, ("loss", 0.2)),
        ("monitor", 0.0, 0.0, ("monitor", 0.0)),
    ],
)
def test_the_reference_is_asked_where_a_stage_needs_it(
    tmp_path: Path, mode: str, beta: float, stage: float | None, expected: tuple[str, float]
) -> None:
    overrides = [f"reference.mode={mode}", f"reference.coefficient={beta}"]
    overrides += [] if stage is None else [f"stages.0.kl_coefficient={stage}"]
    found = load_train_recipe(write(tmp_path, GOOD), overrides).in_stage(0).reference
    assert (found.mode, found.coefficient) == expected


def test_overrides_reach_tables_lists_and_bare_text(tmp_path: Path) -> None:
    config = load_train_recipe(
        write(tmp_path, GOOD), ["stages.1.max_tokens=99", "run.name=my-run", "evaluation.temperatures=[0.0, 1.0]"]
    )
    assert config.stages[1].max_tokens == 99
    assert config.run.name == "my-run"
    assert config.evaluation.temperatures == (0.0, 1.0)


def test_a_whole_table_that_drops_settings_of_the_recipe_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = write(tmp_path, GOOD.replace("[optimizer]", "[optimizer]\nwarmup_steps = 3"))
    words = "settings['optimizer']"
    found = load_train_recipe(recipe, [Override("optimizer", {"learning_rate": 1e-3}, words)])
    assert found.optimizer.warmup_steps != 3
    assert caplog.messages == [
        "settings['optimizer']: this table replaces the recipe's, which also sets warmup_steps; to keep them, give "
        "settings by their dotted keys, as in optimizer.learning_rate"
    ]
    caplog.clear()
    whole = Override("optimizer", {"warmup_steps": 4, "learning_rate": 1e-3, "beta2": 0.5}, words)
    found = load_train_recipe(recipe, [whole, "entropy={target=0.5}"])
    assert (found.optimizer.warmup_steps, found.optimizer.beta2, found.entropy.target) == (4, 0.5, 0.5)
    assert not caplog.messages


def test_a_reward_stands_for_the_verifier_of_every_set(tmp_path: Path) -> None:
    tests = '[data.test.held_out]\nfamily = "running_sum"\ncount = 2\nsplit = "test"\n'
    recipe = write(tmp_path, GOOD + tests)
    config = load_train_recipe(recipe, ["reward=exact"])
    assert {s.verifier for s in (*config.data.train, *config.data.test.values())} == {"exact"}
    # a source's verifier takes precedence where it is set
    config = load_train_recipe(recipe, ["reward=exact", "data.test.held_out.verifier=maths"])
    assert [s.verifier for s in config.data.test.values()] == ["maths"]
    with pytest.raises(RecipeError) as caught:
        load_train_recipe(recipe, ["reward=exat"])
    assert str(caught.value).startswith("--set reward=exat: data.train.0.verifier: unknown reward 'exat'; did you mean")
    assert "\n" not in str(caught.value)  # once, not for every set


def test_the_two_shorthands_of_a_users_own_run(tmp_path: Path) -> None:
    config = load_train_recipe(write(tmp_path, GOOD), ["model=./my-model", "data=problems.parquet"])
    assert config.start.model == str(Path.cwd() / "my-model")
    assert [s.path for s in config.data.train] == [str(Path.cwd() / "problems.parquet")]
    assert config.data.holdout == 100
    sets = '\n[{}]\nfamily = "running_sum"\ncount = 2\n'
    recipe = write(tmp_path, GOOD + sets.format("[data.validation]") + sets.format("data.test.held_out"))
    assert load_train_recipe(recipe).data.test
    own = load_train_recipe(recipe, ["data=problems.parquet"]).data
    assert (own.validation, own.test) == ((), {}), "the recipe's sets are of its own data"
    hub = load_train_recipe(tmp_path / "recipe.toml", ["data=openai/gsm8k"]).data.train[0]
    assert (hub.hub, hub.path) == ("openai/gsm8k", None)
    file = load_train_recipe(tmp_path / "recipe.toml", ["data=own/gsm8k.jsonl"]).data.train[0]
    assert file.hub is None


def test_a_table_is_not_the_shorthand_of_its_name(tmp_path: Path) -> None:
    recipe = write(tmp_path, GOOD)
    plain = load_train_recipe(recipe)
    config = load_train_recipe(recipe, ["model={dtype='float32'}", "data={train=[{family='running_sum', count=9}]}"])
    assert (config.model.dtype, config.start, config.run) == ("float32", plain.start, plain.run)
    assert [source.count for source in config.data.train] == [9]
    for table in ("stages=[]", "data={train=[]}"):
        with pytest.raises(RecipeError, match=r"(stages|data\.train): needs at least 1 entry, each under"):
            load_train_recipe(recipe, [table])


def test_the_order_of_overrides_decides_nothing(tmp_path: Path) -> None:
    recipe = write(tmp_path, GOOD)
    given = ["data.train.0.template={prompt}!", "data.holdout=7", "reward=exact", "data=problems.parquet"]
    for overrides in (given, given[::-1]):
        data = load_train_recipe(recipe, overrides).data
        assert (data.holdout, data.train[0].verifier, data.train[0].template) == (7, "exact", "{prompt}!")
    named = ["data.test.aime-24={path='problems.parquet'}", "reward=exact"]
    assert load_train_recipe(recipe, named[::-1]).data.test["aime-24"].verifier == "exact"
    sources = ["reward=exact", "data.train=[{path='problems.parquet'}]", "data.train.0.verifier=code"]
    for overrides in (sources, [sources[1], sources[2], sources[0]]):
        assert load_train_recipe(recipe, overrides).data.train[0].verifier == "code"


PATHS = """
[start]
sft = "own-sft.toml"

[reference]
mode = "monitor"
model = "models/first"

[[data.train]]
path = "train.jsonl"

[data.test.exam]
path = "/sets/exam.jsonl"

[[stages]]
max_tokens = 8
rollout_batch = 4
group_size = 4
max_steps = 2
"""


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe in ``there`` with a starting recipe and a model folder. Another recipe is in ``here``."""
    (tmp_path / "there" / "models" / "first").mkdir(parents=True)
    (tmp_path / "here" / "first").mkdir(parents=True)
    (tmp_path / "there" / "own-sft.toml").touch()
    (tmp_path / "here" / "smollm2-sft.toml").touch()
    (tmp_path / "there" / "recipe.toml").write_text(PATHS)
    monkeypatch.chdir(tmp_path / "here")
    return Path("../there/recipe.toml")


def test_paths_in_a_recipe_count_from_its_folder(placed: Path, tmp_path: Path) -> None:
    config = load_train_recipe(placed)
    assert config.start.sft == str(tmp_path / "there/own-sft.toml")
    assert config.reference.model == str(tmp_path / "there/models/first")
    assert config.data.train[0].path == str(tmp_path / "there/train.jsonl")
    assert config.data.test["exam"].path == "/sets/exam.jsonl"


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("model=first", "start.model", "here/first"),
        ("model=./second", "start.model", "here/second"),
        ("model=owner/name", "start.model", "owner/name"),
        ('start={sft="tiny-sft"}', "start.sft", "tiny-sft"),
        ('start={sft="own-sft.toml"}', "start.sft", "here/own-sft.toml"),
        ('start={sft="smollm2-sft.toml"}', "start.sft", "here/smollm2-sft.toml"),
        ("data=../x.jsonl", "data.train.0.path", "x.jsonl"),
        ("data.train.0.path=x.jsonl", "data.train.0.path", "here/x.jsonl"),
        ("data.test.exam.path=x.jsonl", "data.test.exam.path", "here/x.jsonl"),
        ('data.train=[{path="x.jsonl"}]', "data.train.0.path", "here/x.jsonl"),
        ('data.train=[{hub="owner/name"}]', "data.train.0.hub", "owner/name"),
        ("reference.model=first", "reference.model", "here/first"),
        ("run.output=runs/a", "run.output", "here/runs/a"),
        ('rollout={engine="replay",replay="r"}', "rollout.replay", "here/r"),
    ],
)
def test_paths_on_the_command_line_count_from_where_one_stands(
    placed: Path, tmp_path: Path, override: str, key: str, expected: str
) -> None:
    value: Any = load_train_recipe(placed, [override]).model_dump(mode="json")
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    assert value in (expected, str(tmp_path / expected))
    assert expected in ("owner/name", "tiny-sft") or Path(value).is_absolute()


def test_a_written_recipe_holds_its_paths_when_its_project_moves(placed: Path, tmp_path: Path) -> None:
    config = load_train_recipe(placed, ["run.output=out"])
    run = tmp_path / "here" / "out"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(config, run))
    assert load_train_recipe(run / "config.toml") == config
    assert str(tmp_path) not in (run / "config.toml").read_text()
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    again = load_train_recipe(moved / "here" / "out" / "config.toml")
    assert again.data.train[0].path == str(moved / "there/train.jsonl")
    assert again.reference.model == str(moved / "there/models/first")


def test_a_recipe_is_found_by_file_then_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("quickstart", "quickstart.toml", "or1-7b", "skywork/or1-7b", "laptop")
    assert [str(find_recipe(Path(name)).relative_to(FOLDER)) for name in names] == [
        "quickstart.toml",
        "quickstart.toml",
        "skywork/or1-7b.toml",
        "skywork/or1-7b.toml",
        "data/laptop.toml",
    ]
    Path("quickstart").write_text("x = 1")
    assert find_recipe(Path("quickstart")) == Path("quickstart")
    with pytest.raises(RecipeError, match=r"qickstart: no such recipe; did you mean quickstart\?.*Shipped.*smollm2"):
        find_recipe(Path("qickstart"))
    with pytest.raises(RecipeError, match=r"run\.toml: no such recipe; magicrl init writes a recipe, and"):
        find_recipe(Path("run.toml"))


@pytest.mark.parametrize("path", [path for name in ("deepseek", "skywork") for path in (FOLDER / name).glob("*.toml")])
def test_the_tests_of_large_recipes_request_the_box_that_they_count(path: Path) -> None:
    config = load_train_recipe(path)
    assert config.verifier.extract == "box"
    wanted = catalogue().templates["maths"].text  # that of `magicrl eval`
    assert [source.template for source in config.data.test.values()] == [wanted] * len(config.data.test)


def test_a_copied_recipe_keeps_the_shipped_start(tmp_path: Path) -> None:
    text = find_recipe(Path("smollm2")).read_text()
    config = load_train_recipe(write(tmp_path, text))
    assert config == load_train_recipe(Path("smollm2"))
    assert config.start.sft is not None
    assert load_start_recipe(config.start.sft).run.name == "smollm2-start"


@pytest.mark.parametrize(
    ("start", "said"), [({"model": "a/b", "sft": "tiny-sft"}, "model = 'a/b', sft = 'tiny-sft'"), ({}, "none")]
)
def test_a_start_with_both_or_neither_names_what_was_given(start: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=f"exactly one of: model, sft; given: {said} "):
        StartConfig.model_validate(start)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "small"),
        (["optimizer.learning_rate=1e-5", "data.train.0.count=9"], "small"),
        (["model=runs/mine/model"], "mine"),
        (["model=owner/Name-1B", "data=a b/my sums.jsonl"], "Name-1B-my-sums"),
        (["data=problems.parquet"], "small-problems"),
        (["start.model=x", "data.train=[{path='z.csv'}]", "data.train.0.path='y.csv'"], "x-y"),
        (["model=x", "run.name=mine"], "mine"),
    ],
)
def test_a_run_of_ones_own_carries_the_names_of_its_model_and_data(
    tmp_path: Path, overrides: list[str], name: str
) -> None:
    recipe = write(tmp_path, f'[run]\nname = "small"\n{GOOD}')
    assert load_train_recipe(recipe, overrides).run.name == name


def test_a_hash_is_of_what_differs_from_the_defaults(tmp_path: Path) -> None:
    config = load_train_recipe(write(tmp_path, GOOD))
    written = load_train_recipe(write(tmp_path, GOOD), [f"optimizer.weight_decay={config.optimizer.weight_decay}"])
    other = load_train_recipe(write(tmp_path, GOOD), [f"optimizer.weight_decay={config.optimizer.weight_decay + 1}"])
    assert config_hash(written) == config_hash(config)
    assert config_hash(other) != config_hash(config)
    tracker = tmp_path / "tracker.py"
    tracker.write_text("class Mine: ...\n")
    custom = load_train_recipe(write(tmp_path, GOOD), [f"logging.trackers=['wandb', '{tracker}:Mine']"])
    assert custom_files(custom).keys() == {"logging.trackers.1"}
    before = config_hash(custom)
    tracker.write_text("class Mine:\n    pass\n")
    assert config_hash(custom) != before, "and of what the files hold that it names"


def test_no_secret_is_written(tmp_path: Path) -> None:
    config = load_train_recipe(write(tmp_path, GOOD), ["cluster.address=ray://ann:hunter2@head:10001"])
    assert 'address = "ray://***@head:10001"' in to_toml(config)
    found = without_secrets("401 for abcd1234, efgh5678", {"my_api_key": "abcd1234", "HF_TOKEN": "efgh5678"})
    assert found == "401 for ***my_api_key***, ***HF_TOKEN***"


JUDGE = JudgeConfig(base_url="http://one", model="m")


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ({"base_url": "http://two"}, False),
        ({"key_variable": "OTHER"}, False),
        ({"concurrency": 2}, False),
        ({"attempt_seconds": 9.0}, False),
        ({"token_budget": 9}, False),
        ({"model": "n"}, True),
        ({"temperature": 0.5}, True),
        ({"max_tokens": 9}, True),
        ({"right_from": 0.5}, True),
        ({"read": "yes_no"}, True),
    ],
)
def test_a_resumed_run_may_reach_its_judge_otherwise_and_has_the_same_scores(
    change: dict[str, Any], decides: bool
) -> None:
    one, other = (VerifierConfig(judge=judge) for judge in (JUDGE, JUDGE.model_copy(update=change)))
    assert (one.deciding() != other.deciding()) is decides


COLOCATED = (
    GOOD
    + """
[rollout]
engine = "vllm"

[entropy]
estimator = "sampled"

[cluster.learner]
ranks = 4

[cluster.rollout]
replicas = 2
tensor_parallel = 2
colocated = true
"""
)


DIRECT = COLOCATED.replace("colocated = true", 'weight_copy = "direct"')
IN_PROCESS, LAGGED = (
    ('engine = "vllm"', 'engine = "in_process"'),
    ('engine = "vllm"', 'engine = "vllm"\nweight_lag = 1'),
)


@pytest.mark.parametrize(
    ("text", "changed", "words"),
    [
        (COLOCATED, ("ranks = 4", "ranks = 2"), r"set cluster\.learner\.ranks = 4 \(it is 2\)"),
        (COLOCATED, IN_PROCESS, "only vLLM releases its memory"),
        (COLOCATED, LAGGED, "nothing can be in flight"),
        (DIRECT, IN_PROCESS, "how vLLM takes the newest weights"),
        (DIRECT, LAGGED, "how vLLM takes the newest weights"),
    ],
)
def test_parts_that_share_gpus_or_hand_weights_over_directly_must_match(
    tmp_path: Path, text: str, changed: tuple[str, str], words: str
) -> None:
    assert load_train_recipe(write(tmp_path, text)).cluster is not None
    with pytest.raises(RecipeError, match=words):
        load_train_recipe(write(tmp_path, text.replace(*changed)))


def test_an_optional_table_is_switched_off_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(GOOD + "\n[data.difficulty_filter]\nsamples = 4\n")
    assert load_train_recipe(path).data.difficulty_filter is not None
    assert load_train_recipe(path, ["data.difficulty_filter=none"]).data.difficulty_filter is None
    with pytest.raises(RecipeError, match=r"--set data\.difficulty_filter=none switches it off"):
        load_train_recipe(path, ["data.difficulty_filter=off"])
    with pytest.raises(RecipeError, match="must be a table") as found:
        load_train_recipe(path, ["optimizer=none"])
    assert "switches it off" not in str(found.value)
