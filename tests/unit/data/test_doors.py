"""Custom families, sources and benchmarks: the examples, from a folder outside the package."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
from processes import magicrl_here

from magicrl.config.data_schema import SourceConfig
from magicrl.config.errors import RecipeError
from magicrl.config.paths import counted_from
from magicrl.data.families import make_family
from magicrl.data.sources import load_problems
from magicrl.evaluation.benchmarks import load_benchmark, parse_asked
from magicrl.evaluation.options import arguments
from magicrl.models.small_models import make_miniature
from magicrl.records import Problem

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RECIPE = """
[run]
name = "doors"
[start]
model = "{model}"
[data]
max_prompt_tokens = 128
[[data.train]]
family = "family.py:MissingAddend"
count = 20
options = {{ largest = 30 }}
[[data.train]]
source = "source.py:read"
options = {{ path = "flashcards.txt" }}
[[stages]]
max_tokens = 8
rollout_batch = 2
group_size = 2
mini_batch = 2
max_steps = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's folder with the examples, and cards for one of them."""
    for name in ("family", "source", "benchmark"):
        shutil.copy(EXAMPLES / f"{name}.py", tmp_path)
    (tmp_path / "flashcards.txt").write_text("What is 2 + 3? => 5\n\nWhat is 6 x 7? => 42\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def source(folder: Path, **settings: object) -> SourceConfig:
    return SourceConfig.model_validate(settings, context=counted_from(folder / "recipe.toml"))


def test_a_family_of_ones_own_gives_splits_that_share_nothing(folder: Path) -> None:
    given = source(folder, family="family.py:MissingAddend", count=60, options={"largest": 50})
    train = load_problems(given)
    assert len({problem.id for problem in train}) == 60
    assert load_problems(given) == train
    test = load_problems(given.model_copy(update={"split": "test", "count": 20}))
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in test}
    family = make_family(str(folder / "family.py:MissingAddend"))
    (problem,) = islice(family.stream(seed=1, split="train", levels=[1]), 1)
    assert int(problem.references[0]) <= 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"family": "runing_sum"},
            r"'runing_sum'; did you mean 'running_sum'\?.*Known: .*running_sum, word",
        ),
        ({"family": "family.py:Missing"}, r"has no 'Missing'; did you mean 'MissingAddend'\?"),
        ({"family": "families.py:X"}, r"there is no file .*families.py"),
        ({"family": "family.py:MissingAddend", "options": {"larges": 3}}, r"unexpected.*'larges'.*it takes \(largest"),
        ({"family": "family.py:MissingAddend", "options": {"largest": 1}}, r"largest must be at least 2"),
        ({"source": "source.py:read"}, r"missing a required argument: 'path'; it takes \(path"),
        ({"source": "source.py:reads"}, r"has no 'reads'; did you mean 'read'\?"),
    ],
)
def test_what_a_reference_gets_wrong_is_said_with_the_nearest(
    folder: Path, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        load_problems(source(folder, count=2, **settings))


def test_a_source_of_ones_own_gives_records_or_problems(folder: Path) -> None:
    found = load_problems(source(folder, source="source.py:read", options={"path": "flashcards.txt"}))
    assert [(p.id, p.prompt, p.references) for p in found] == [
        ("source-0", "What is 2 + 3?", ("5",)),
        ("source-1", "What is 6 x 7?", ("42",)),
    ]
    (folder / "mixed.py").write_text(
        "from magicrl.records import Problem\n"
        "own = Problem(id='a', prompt='1?', references=('1',), verifier='exact', source='mine', level=3)\n"
        "def read(last=None):\n    yield own\n    yield {'question': '2?', 'answer': 2}\n"
        "    if last: yield last\n"
    )
    first, second = load_problems(source(folder, source="mixed.py:read"))
    assert first == Problem(id="a", prompt="1?", references=("1",), verifier="exact", source="mine", level=3)
    assert second.references == ("2",)
    assert load_problems(source(folder, source="mixed.py:read", levels=[3])) == [first]
    with pytest.raises(ValueError, match=r"mixed.py:read, item 3: expected a record \(a dict\) or .*, got 'x'"):
        load_problems(source(folder, source="mixed.py:read", options={"last": "x"}))


def test_a_benchmark_of_ones_own_is_named_on_the_command_line(folder: Path) -> None:
    loaded = load_benchmark(parse_asked("benchmark.py:problems"), arguments(limit=5))
    assert loaded.name == "benchmark"
    assert [problem.references for problem in loaded.problems] == [("2",), ("3",), ("4",), ("5",), ("6",)]
    assert loaded.problems[0].prompt.startswith("What is the square root of 4?")
    assert loaded.facts["source"] == "benchmark.py:problems"
    assert load_benchmark(parse_asked("roots=benchmark.py:problems"), arguments()).name == "roots"
    with pytest.raises(ValueError, match=r"has no 'problem'; did you mean 'problems'\?"):
        load_benchmark(parse_asked("benchmark.py:problem"), arguments())
    with pytest.raises(RecipeError, match=r"did you mean 'aime24'\?.*or your function as FILE.py:NAME"):
        parse_asked("aime-24")


def test_train_and_eval_take_them_from_a_users_folder(folder: Path) -> None:
    make_miniature({"model_type": "qwen2", "num_attention_heads": 4}, folder / "model", max_context=256)
    (folder / "recipe.toml").write_text(RECIPE.format(model="model"))

    done = magicrl_here("train", "recipe.toml", "--output", "run", cwd=folder)
    assert done.returncode in (0, 3), done  # 3: a run of random weights learned nothing
    assert json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    words = "--benchmark benchmark.py:problems --max-tokens 4 --limit 3 --workers 1 --output out"
    done = magicrl_here("eval", "--model", "model", *words.split(), cwd=folder)
    assert done.returncode == 0, done
    assert json.loads((folder / "out" / "results.json").read_text())["benchmarks"]["benchmark"]["samples"] == 1
