"""Names of `import magicrl`: kept signatures, errors for wrong arguments, the same verdicts and plans as the commands.

After an intended change, ``python tests/unit/test_api.py`` rewrites ``tests/unit/api.txt``.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import magicrl
from magicrl.commands.given import in_python, overrides_of
from magicrl.config.errors import RecipeError
from magicrl.config.given import reward_reference
from magicrl.config.loader import load_train_recipe
from magicrl.registry import resolve
from magicrl.training.recorder import NullObserver
from magicrl_verifiers.references import live, live_text

KEPT = Path(__file__).with_name("api.txt")
RECIPE: dict[str, Any] = {
    "run": {"name": "dict"},
    "start": {"sft": "quickstart-sft"},
    "data": {"train": [{"family": "running_sum", "count": 20}]},
    "stages": [{"max_tokens": 8, "rollout_batch": 4, "group_size": 4, "max_steps": 1}],
}


def signatures() -> str:
    """Return every public name of the API with its parameters, a line each. A class also has its public members."""
    lines: list[str] = []
    for name in magicrl.__all__:
        thing = getattr(magicrl, name)
        if name in ("Problem", "Verdict"):  # records: their fields are the same in every package
            continue
        lines += _described(name, thing)
        for member, value in vars(thing).items() if thing.__module__.startswith("magicrl.commands") else ():
            if not member.startswith("_"):
                lines += _described(f"{name}.{member}", value)
    return "\n".join(lines) + "\n"


def _described(name: str, thing: Any) -> list[str]:
    if isinstance(thing, property):
        return [f"{name}: {inspect.signature(thing.fget).return_annotation}"]
    if not callable(thing):
        return [f"{name}: a field"]
    found = inspect.signature(thing)
    parameters = [f"    {parameter}" for parameter in found.parameters.values() if parameter.name != "self"]
    returned = found.return_annotation
    return [f"{name} -> {'itself' if inspect.isclass(thing) else returned}", *parameters]


def test_signatures_are_kept() -> None:
    assert signatures() == KEPT.read_text(), "meant? python tests/unit/test_api.py"


def test_the_options_of_an_evaluation_are_documented() -> None:
    described = (inspect.getdoc(magicrl.evaluate) or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    lines = re.findall(r"^    (\w+): (.+)$", described, flags=re.MULTILINE)
    assert [name for name, _ in lines] == [*inspect.signature(magicrl.evaluate).parameters]
    assert dict(lines)["limit"] == "Number of problems of each benchmark, from the first on."
    with pytest.raises(TypeError, match="unexpected keyword argument 'limits'"):
        magicrl.evaluate("model", "gsm8k", output="out", limits=3)  # pyright: ignore[reportCallIssue]


def test_importing_magicrl_loads_nothing_else() -> None:
    program = "import sys, magicrl; print([n for n in sys.modules if n.startswith(('magicrl.', 'torch', 'pydantic'))])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert set(magicrl.__all__) <= set(dir(magicrl))
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        _ = magicrl.trane  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_torchs_threads_sleep_early_unless_the_user_says_otherwise(variables: dict[str, str], spins: str) -> None:
    """GNU OpenMP, which torch loads, prints the settings that it read."""
    own = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = [sys.executable, "-c", "import magicrl, torch"]
    given = own | variables | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=given)
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"recipe": 3}, r"recipe must be a shipped recipe's name, a file or a dict, got 3 \(int\)"),
        ({"recipe": "quickstrt"}, "no such recipe; did you mean quickstart?"),
        ({"recipe": {}}, "recipe: start is missing"),
        ({"recipe": RECIPE | {"rollot": {}}}, "recipe: unknown key rollot; did you mean 'rollout'?"),
        (
            {"recipe": RECIPE | {"rollout": {"temprature": 1}}},
            "unknown key rollout.temprature; did you mean 'temperature'",
        ),
        ({"recipe": {"phases": []}}, "recipe: is a supervised recipe, which `magicrl sft` takes"),
        ({"settings": 5}, r"settings must be a dict of dotted keys.*\(int\)"),
        (
            {"settings": {"rollout.temprature": 1}},
            r"settings\['rollout.temprature'\]: unknown key rollout.temprature; did",
        ),
        ({"settings": {"run.seed": "one"}}, r"settings\['run.seed'\]: run.seed: .*integer.*'one'"),
        (
            {"settings": {"stages.7.max_steps": 1}},
            r"settings\['stages.7.max_steps'\]: stages is a list of 1; use an index",
        ),
        ({"model": 3}, r"model must be a path or a name, got 3 \(int\)"),
        ({"model": "./none"}, r"model = './none': start.model: .*/none"),
        ({"data": 3}, r"data must be a path, a hub name, a list of records .* got 3 \(int\)"),
        ({"data": []}, "data holds no records"),
        ({"data": ["1 + 1"]}, r"data\[0\] must be a record, e.g. .* got '1 \+ 1' \(str\)"),
        ({"data": "missing.jsonl"}, "data: data.train.0.path: .*missing.jsonl: no such file"),
        ({"reward": 3}, r"reward must be a name .* a function or a list of functions, got 3 \(int\)"),
        ({"reward": "mths"}, "reward: data.train.0.verifier: unknown reward 'mths'; did you mean 'maths'"),
        ({"output": 3}, r"output must be a path or a name, got 3 \(int\)"),
        ({"progress": "yes"}, r"progress must be True, False or an object .* got 'yes' \(str\)"),
        ({"progress": NullObserver}, r"progress must be True, False or an object .*NullObserver'> \(type\)"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, str) else "",
)
def test_wrong_arguments_are_told(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for function in (magicrl.train, magicrl.start):
        with pytest.raises(ValueError, match=said):
            function(**{"recipe": RECIPE} | arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_rewards_is_their_sum() -> None:
    def long(completions: list[str], **columns: object) -> list[float]:
        return [float(len(text)) for text in completions]

    def half(problem: magicrl.Problem, response: str) -> float:
        return 0.5

    verdict = magicrl.verify("abc", reward=[long, half])
    assert (verdict.score, verdict.metrics) == (3.5, {"long": 3.0, "half": 0.5})
    names = [reward_reference(functions) for functions in ([long, half], [long, long], (long, half))]
    assert names[0] == names[2], "resuming a run needs the same functions again"
    assert names[0].partition("@")[2] != names[1].partition("@")[2]
    with pytest.raises(ValueError, match="an empty list of rewards"):
        magicrl.verify("abc", reward=[])
    with pytest.raises(ValueError, match="a function or a list of functions, got"):
        magicrl.verify("abc", reward=[long, "maths"])  # type: ignore[list-item]


def test_what_other_processes_would_have_to_call_is_refused() -> None:
    @magicrl.reward(isolated=True)
    def apart(problem: magicrl.Problem, response: str) -> float:
        return 0.0

    place = rf"live:apart@\w+: isolated=True calls .* its name, '{__file__}:apart', in its place"
    with pytest.raises(ValueError, match=place):
        magicrl.train(RECIPE, reward=apart)

    def near(problem: magicrl.Problem, response: str) -> float:
        return 0.0

    with pytest.raises(RecipeError, match=rf"data.train.0.verifier: live:near@\w+ on a cluster: .*'{__file__}:near'"):
        magicrl.train(RECIPE | {"cluster": {}}, reward=near)
    with pytest.raises(
        RecipeError, match=r"data.train.0.source: live:data@\w+ on a cluster: .* the records into a file"
    ):
        magicrl.train(RECIPE | {"cluster": {}}, data=[{"prompt": "1 + 1", "answer": "2"}])
    with pytest.raises(RecipeError, match=r"'my_reward\.py:NAME'"):
        magicrl.train(RECIPE | {"cluster": {}}, reward=lambda problem, response: 0.0)


def test_references_of_this_process() -> None:
    def one(problem: Any, response: str) -> float:
        return 1.0

    reference = live(one)
    assert resolve("reward", reference) is one
    assert (live_text(reference) or "").endswith("-> float:\n    return 1.0")
    assert live(one, text="return 1.0") != live(one, text="return 2.0"), "another text is another reward"
    assert live(partial(one, 1)).startswith("live:partial@")
    assert live(partial(one, 1)) == live(partial(one, 1)) != live(partial(one, 2))

    def made(most: int, seen: list[int]) -> Any:
        def score(problem: Any, response: str) -> float:
            return float(len(response) + len(seen) > most)

        return score

    assert live(made(4, [])) == live(made(4, [1])) != live(made(16, [])), "what it reads from around it"
    assert live(eval("lambda p, r: 0.0")) == "live:lambda@unknown"
    with pytest.raises(ValueError, match="'live:two@00' was given in Python to another process"):
        resolve("reward", "live:two@00")


def test_settings_hold_over_arguments() -> None:
    def verifier(**given: Any) -> str:
        return load_train_recipe(RECIPE, overrides_of(**given)).data.train[0].verifier

    assert verifier(reward="maths") == "maths"
    assert verifier(reward="maths", settings={"reward": "exact"}) == "exact"


@pytest.mark.parametrize(
    ("typed", "in_words_of_python"),
    {
        "--temperature 0 needs --samples 1": "temperature=0 needs samples=1",
        "give both --price-in and --price-out": "give both price_in and price_out",
        "--benchmark is missing; continue with --resume": "benchmarks is missing; continue with resume=True",
        "--set optimizer.beta2=0.9, for instance": "settings={'optimizer.beta2': '0.9'}, for instance",
        "give --limit; pip install --no-deps 'x'": "give limit; pip install --no-deps 'x'",
        "look: magicrl eval --list": "look: magicrl eval --list",
        'Remedy: --set a.0.b=c --set a.0.d="e f", or': "Remedy: settings={'a.0.b': 'c', 'a.0.d': 'e f'}, or",
        "off (--set data.filter=none).": "off (settings={'data.filter': 'none'}).",
        "--field prompt=q --field answer=COLUMN, or": "fields={'prompt': 'q', 'answer': 'COLUMN'}, or",
        "--field x=...: known are": "fields x=...: known are",
        "--engine-option enforce_eager=true": "engine_options={'enforce_eager': 'true'}",
    }.items(),
)
def test_errors_name_arguments_instead_of_options(typed: str, in_words_of_python: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(in_words_of_python)}$"), in_python():
        raise ValueError(typed)


def test_verdicts(tmp_path: Path) -> None:
    assert magicrl.verify(r"\boxed{0.5}", "1/2").correct
    assert magicrl.verify("7", ["6", "7"], reward="exact", extract="lenient").correct
    reason = magicrl.verify("print(2)", "2", reward="code").reason
    assert reason == 'field \'tests\' must be an object, {"inputs": [...], "outputs": [...]}, or assertions, got 2'
    rows = [{"response": "8", "reference": "8"}, {"response": "8", "reference": ["7", "9"]}]
    for given in (rows, pd.DataFrame(rows)):
        assert [verdict.correct for verdict in magicrl.verify(given, reward="exact")] == [True, False]
    graded = magicrl.verify([{"response": "abc", "wanted": 5}], reward=lambda p, r: len(r) - p.extra["wanted"])
    assert [verdict.score for verdict in graded] == [-2.0]
    assert magicrl.verify("a", reward=lambda p, r: 1 / 0).status == "reward_failed"
    assert [magicrl.verify("It is 7.", "7", extract=extract).correct for extract in ("lenient", "box")] == [True, False]
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\nfrom magicrl import reward\n\n@reward(isolated=True)\ndef busy(problem, response):\n"
        "    end = time.process_time() + 3\n    while time.process_time() < end:\n        pass\n    return 1.0\n"
    )
    assert magicrl.verify("a", reward=f"{slow}:busy", time_limit=0.1).status == "reward_failed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3,), "response must be a text, or records"),
        (([{"response": "8"}], "8"), "reference goes with one response"),
        ((None, "8"), "response must be a text, or records"),
        (("8",), "^reference is missing$"),
        (("8", True), "^reference must be a string or a list of strings"),
        (([{"response": "8"}],), "^record 0: field 'reference' is missing$"),
    ],
)
def test_what_cannot_be_judged_is_told(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        magicrl.verify(*arguments, reward="exact")


def test_plans_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from magicrl.commands.main import app

    assert app(["plan", "smollm2", "--gpus", "1", "--gpu", "cpu-2core", "--json"], result_action="return_value") == 0
    told = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(magicrl.plan("smollm2", gpu="cpu-2core"))) == told
    first, second = told["stages"]
    hours = first["hours"] + second["hours"] / 2
    within = magicrl.plan("smollm2", gpu="cpu-2core", hours=hours)["steps_in_budget"]
    assert within == pytest.approx(first["steps"] + second["steps"] / 2, abs=1)
    assert magicrl.plan("smollm2", gpu="H100-80G", gpus=2, staleness=1)["staleness"] == 1
    with pytest.raises(ValueError, match="hours must be above 0 and finite, got 0"):
        magicrl.plan("smollm2", gpu="cpu-2core", hours=0)
    with pytest.raises(ValueError, match="hours must be above 0 and finite, got inf"):
        magicrl.plan("smollm2", gpu="cpu-2core", hours=math.inf)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run folder"):
        magicrl.load_run(tmp_path)
    with pytest.raises(ValueError, match=r"path must be a path or a name, got None"):
        magicrl.load_run(None)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    KEPT.write_text(signatures())


def test_remedies_in_python_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"frage": "1 + 1?", "antwort": "2"}\n')
    with pytest.raises(
        ValueError, match=r"settings=\{'data.train.0.fields.prompt': 'frage', 'data.train.0.fields.answer': 'antwort'\}"
    ):
        magicrl.train("tiny", data=path, progress=False)
