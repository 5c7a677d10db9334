"""Pipeline files: the shipped ones parse, mistakes are explained, and every subcommand works on a small one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import write_lines
from json_server import free_port

from magicrl.commands.data import data_app
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_config, load_train_recipe, to_toml
from magicrl.pipeline.build import run_pipeline
from magicrl.pipeline.entry import is_entry
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.parts import read_part
from magicrl.pipeline.pipeline_schema import PipelineConfig, load_pipeline
from magicrl.pipeline.stats import counts_of

RECIPES = Path(__file__).resolve().parents[3] / "src" / "magicrl" / "recipes" / "data"


def test_the_reports_pipeline_is_whole() -> None:
    config = load_pipeline(RECIPES / "skywork-or1.toml")
    kinds = {source.kind for source in config.sources}
    assert kinds >= {"numina_math_1_5", "deepscaler", "still3", "omni_math", "aime_1983_2023", "leetcode", "taco"}
    uses = [step.use for step in config.steps]
    assert uses == ["dedup", "clean", "dedup", "decontaminate", "difficulty", "judge", "mix"]
    difficulty, judge = config.steps[4], config.steps[5]
    assert difficulty.use == "difficulty"
    assert (difficulty.samples, difficulty.code_samples, difficulty.temperature) == (16, 8, 1.0)
    assert difficulty.max_tokens == 32768
    assert judge.use == "judge"
    assert (judge.settings.votes, judge.settings.threshold) == (32, 9)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_pipelines_survive_being_written_out(path: Path, tmp_path: Path) -> None:
    config = load_pipeline(path)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "again.toml", [], PipelineConfig) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps.1.scpe=within", "--set steps.1.scpe=within: unknown key steps.1.scpe; did you mean 'scope'?"),
        ("steps.1.settings.near.similarty=1", "unknown key steps.1.settings.near.similarty; did you mean 'similarity'"),
        ("steps.0.maths.figure=false", "unknown key steps.0.maths.figure; did you mean 'figures'?"),
        ("steps.0.use=dedupe", "steps.0: unknown use 'dedupe'; did you mean 'dedup'?"),
        ("sources.0.kind=gsm8", "sources.0: unknown kind 'gsm8'; did you mean 'gsm8k'?"),
        ("sources.0.limt=1", "unknown key sources.0.limt; did you mean 'limit'?"),
        ("steps.3.samples=1", "steps.3.samples: Input should be greater than or equal to 2 (got 1)"),
        ("steps.3.sampler.gguf_package=a", "[steps.sampler] needs exactly one of: model, gguf_package"),
        ("steps.0.use=mix", "mix is the last step, and there is one at most"),
        ("sources.0.template=What?", "sources.0: template must hold {prompt}, got 'What?'"),
        ("sources.1.name=svamp", "two sources are called 'svamp'; give one of them another name"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest_right_one(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_pipeline(RECIPES / "laptop.toml", [override])
    assert message in str(caught.value)


def test_a_mistake_in_a_file_names_its_line(tmp_path: Path) -> None:
    text = (RECIPES / "laptop.toml").read_text().replace('use = "dedup"', 'use = "dedup"\nscpe = "within"')
    (tmp_path / "p.toml").write_text(text)
    line = text.splitlines().index('scpe = "within"') + 1
    with pytest.raises(RecipeError, match=rf"p\.toml, line {line}: unknown key steps\.1\.scpe; did you mean 'scope'"):
        load_pipeline(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text('sources = [{ path = "a.jsonl" }]\n[[steps]]\nname = "x"\n')
    with pytest.raises(RecipeError, match=r"steps\.0: use is missing; known: clean, decontaminate"):
        load_pipeline(tmp_path / "p.toml")


def test_an_import_names_its_first_unreadable_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "p.jsonl", [{"problem": "1?", "answer": 1}, {"problem": "", "answer": 2}, {"problem": "3?"}])
    command = ["import", "--input", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "run")]
    for _ in range(2):  # the second time the import is found unchanged
        assert data_app(command, result_action="return_value") == 0
        said = capsys.readouterr().out.replace("\n", "")
        assert "p: 2 unreadable records, the first: " in said
        assert "p.jsonl, line 2: field 'problem' is empty" in said


def test_a_missing_input_without_an_ending_is_missing(tmp_path: Path) -> None:
    command = ["clean", "--input", str(tmp_path / "nothere"), "--output", str(tmp_path / "run")]
    with pytest.raises(RecipeError, match="nothere: no such file"):
        data_app(command, result_action="return_value")


def test_each_step_alone_takes_up_the_rows_of_the_one_before(
    write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        "Ann has 3 red apples and eats one. How many are left?",
        "What is 1 + 1?",
        "Name the \x1bc\u202ethird odd prime number.",
    ]
    rows = [{"question": texts[place // 2], "answer": f"#### {place}"} for place in range(6)]
    path = write_rows("g.jsonl", rows)

    def command(*words: str) -> int:
        status: Any = data_app(list(words), result_action="return_value")
        return int(status)

    one, two, three, four = (str(tmp_path / name) for name in ("one", "two", "three", "four"))
    assert command("import", "--kind", "gsm8k", "--input", str(path), "--output", one, "--set", "limit=5") == 0
    assert command("dedup", "--input", one, "--output", two, "--set", 'settings.stages=["exact"]') == 0
    against = write_rows("test.jsonl", [{"problem": "What is 1 + 1?", "answer": "2"}])
    near = os.path.relpath(against)  # from the working directory, as the shell completes it
    words = ["--input", two, "--against", f"t={near}", "--output", three, "--set", "settings.use_embedding=false"]
    assert command("decontaminate", *words) == 0
    assert command("mix", "--input", three, "--output", four, "--set", "size=1") == 0
    (part,) = (tmp_path / "four" / "01-mix" / "kept").glob("*.parquet")
    (row,) = read_part(part).to_pylist()
    assert is_entry(row)
    assert row["source"] == "gsm8k"
    capsys.readouterr()
    assert command("stats", four) == 0
    assert "01-mix" in capsys.readouterr().out
    assert command("stats", three, "--problem", "gsm8k/gsm8k-2") == 0
    assert "dropped: in test set t" in capsys.readouterr().out
    assert command("stats", three, "--problem", "gsm8k/gsm8k-4") == 0
    assert "\nName the ␛c⟨U+202E⟩third odd" in capsys.readouterr().out, "a terminal would act on them"
    assert command("import", "--list") == 0
    assert "fixture" in capsys.readouterr().out


def test_a_step_alone_runs_all_such_steps_of_a_pipeline(write_rows: Callable[..., Path], tmp_path: Path) -> None:
    inputs = [write_rows(f"{name}.jsonl", [{"problem": "What is 1 + 1?", "answer": "2"}]) for name in "ab"]
    words = ["dedup", *(word for path in inputs for word in ("--input", str(path))), "--pipeline", "skywork-or1"]
    settings = ["--set", 'settings.stages=["exact"]', "--output", str(tmp_path / "out")]
    assert data_app([*words, *settings], result_action="return_value") == 0
    kept = {step.step: step.kept for step in counts_of(tmp_path / "out")}
    assert kept == {"import": 2, "01-dedup-within": 2, "02-dedup-across": 1}, "one copy across the sources"


def test_a_pipeline_stops_after_a_step_and_another_run_takes_the_rows_of_its_last_one(
    write_rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["What is 1 + 1?", "What is 1 + 1?", "How long is the side in the figure above?", "What is 2 + 5?"]
    path = write_rows("g.jsonl", [{"question": text, "answer": "#### 7"} for text in texts])
    pipeline, output = tmp_path / "small.toml", tmp_path / "run"
    pipeline.write_text(
        f'name = "small"\n[[sources]]\nkind = "gsm8k"\npath = "{path}"\n'
        '[[steps]]\nuse = "dedup"\nsettings = { stages = ["exact"] }\n[[steps]]\nuse = "clean"\n'
    )

    def counts(folder: Path) -> list[tuple[str, int]]:
        capsys.readouterr()
        assert data_app(["stats", str(folder), "--json"], result_action="return_value") == 0
        steps = json.loads(capsys.readouterr().out)
        return [(step["step"], sum(source["kept"] for source in step["sources"].values())) for step in steps]

    words = ["build", str(pipeline), "--output", str(output)]
    with pytest.raises(RecipeError, match="--until judge: no such step; known: dedup, clean"):
        data_app([*words, "--until", "judge"], result_action="return_value")
    assert data_app([*words, "--until", "dedup"], result_action="return_value") == 0
    assert counts(output) == [("import", 4), ("01-dedup", 3)]
    assert data_app(words, result_action="return_value") == 0
    assert counts(output) == [("import", 4), ("01-dedup", 3), ("02-clean", 2)]
    again = ["dedup", "--input", str(output), "--output", str(tmp_path / "again"), "--set", 'settings.stages=["exact"]']
    assert data_app(again, result_action="return_value") == 0
    assert counts(tmp_path / "again")[0][1] == 2
    # the last step of the run as it is now: cleaning, in a folder whose name is a pattern
    text = pipeline.read_text()
    pipeline.write_text(text[: text.index('[[steps]]\nuse = "dedup"')] + '[[steps]]\nuse = "clean"\n')
    output.rename(output := tmp_path / "run [1]")
    assert data_app(["build", str(pipeline), "--output", str(output)], result_action="return_value") == 0
    assert counts(output) == [("import", 4), ("01-clean", 3)]
    again[2], again[4] = str(output), str(tmp_path / "third")
    assert data_app(again, result_action="return_value") == 0
    assert counts(tmp_path / "third")[0][1] == 3


def test_rows_of_a_step_or_run_that_has_not_finished_are_refused(
    write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    rows = write_rows("g.jsonl", [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)])
    pipeline, output = tmp_path / "small.toml", tmp_path / "run"
    pipeline.write_text(
        f'[[sources]]\npath = "{rows}"\n[[steps]]\nuse = "dedup"\nsettings = {{ stages = ["exact"] }}\n'
        '[[steps]]\nuse = "mix"\nsize = 2\n'
    )

    def mixed(folder: Path) -> int:
        words = ["mix", "--input", str(folder), "--output", str(tmp_path / "mixed" / folder.name)]
        assert data_app(words, result_action="return_value") == 0
        return counts_of(tmp_path / "mixed" / folder.name)[-1].kept

    assert data_app(["build", str(pipeline), "--output", str(output)], result_action="return_value") == 0
    assert mixed(output) == mixed(output / "02-mix") == 2
    (output / "02-mix" / "step.json").unlink()  # as a kill leaves it
    for folder in (output, output / "02-mix"):
        with pytest.raises(RecipeError, match=r"02-mix has not finished; run its command to the end, or name"):
            mixed(folder)
    assert mixed(output / "01-dedup") == mixed(output / "sources" / "g") == 3
    (output / "sources" / "g" / "source.json").unlink()
    with pytest.raises(RecipeError, match="sources/g has not finished"):
        mixed(output)
    with pytest.raises(RecipeError, match="g has not finished"):
        mixed(output / "sources" / "g")


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Build the shipped pipeline in an empty folder, with further settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text("")
    monkeypatch.setattr(
        "magicrl.pipeline.build.import_sources",
        lambda *_: pytest.fail("a source was read first"),
    )
    here = [f"steps.2.against.{name}={{path='t.jsonl'}}" for name in ("aime24", "aime25", "math500")]

    def run(*settings: str) -> None:
        run_pipeline(load_pipeline(Path("laptop"), [*here, *settings]), output=tmp_path / "out", watcher=Watcher())

    return run


def test_what_a_pipeline_needs_is_found_before_its_first_step(
    laptop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"steps\.3\.sampler\.model: .*make it: magicrl sft smollm2-sft") as error:
        laptop()
    assert error.value.key == "steps.3.sampler.model"
    assert not (tmp_path / "out").exists()
    made = tmp_path / "runs" / "models" / "smollm2-start"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="'no_such_package' is not installed"):
        laptop('steps.3.sampler={gguf_package="no_such_package"}')
    address = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RecipeError, match=rf"steps\.4\.settings\.judges\.0\.base_url: .*no answer from {address}"):
        laptop(f"steps.4.settings.judges.0.base_url={address}")
    with pytest.raises(RecipeError, match=r"steps\.2\.against\.aime24\.path: .*nowhere\.jsonl: no such file"):
        laptop("steps.2.against.aime24={path='nowhere.jsonl'}")
    with pytest.raises(RecipeError, match=r"steps\.2\.settings\.embedder\.model: .*nowhere does not exist"):
        laptop("steps.2.settings.embedder={kind='model',model='./nowhere'}")


def test_a_made_start_is_named_from_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "runs" / "models" / "smollm2-start"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    step = load_pipeline(Path("laptop")).steps[3]
    assert step.use == "difficulty"
    assert step.sampler.model == str(made)
    assert load_train_recipe(Path("smollm2"), ["model=smollm2-start"]).start.model == str(made)
    served = load_pipeline(Path("laptop"), ["steps.3.sampler.engine=openai"]).steps[3]
    assert served.use == "difficulty"
    assert served.sampler.model == "smollm2-start"
