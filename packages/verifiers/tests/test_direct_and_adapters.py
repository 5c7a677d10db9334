"""`verify_maths`, `verify_code`, and the adapters, tested with the packages that they adapt to."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from magicrl_verifiers import verify_code, verify_maths
from magicrl_verifiers.adapters.trl import reward_function
from magicrl_verifiers.adapters.verl import compute_score

TESTS = {"inputs": ["3", "4"], "outputs": ["6", "8"]}
PROGRAM = "print(2 * int(input()))"


def test_one_answer_or_program_is_judged() -> None:
    assert verify_maths("1/2", r"It is \boxed{0.5}.").correct
    assert verify_maths(["1/3", "1/2"], "It is 0.5").correct
    assert not verify_maths("1/2", "It is 0.5", extract="box").correct
    assert not verify_maths("1/2", r"<think>\boxed{0.5}").correct
    assert verify_maths("1/2", r"<think>\boxed{0.5}", reasoning="none").correct
    assert verify_code(TESTS, PROGRAM).correct
    assert verify_code(TESTS, f"\n```python\n{PROGRAM}\n```\n").correct, "a code block is taken for its program"
    assert verify_code(TESTS, f"```python\n{PROGRAM}").status == "no_code"
    assert verify_code(TESTS, "print(6)").passed == 1
    assert verify_code(TESTS, f"So:\n```python\n{PROGRAM}\n```", response=True).correct
    assert verify_code(TESTS, PROGRAM, response=True).status == "no_code"
    assert verify_code(TESTS, "while True: pass", time_limit=0.3).status == "time_limit"


def test_limits_of_calls_need_no_processes_of_their_own() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert verify_code(TESTS, "while True: pass", time_limit=0.2).status == "time_limit"
    assert verify_code(TESTS, "while True: pass", time_limit=0.3).status == "time_limit"
    assert verify_code(TESTS, "x = bytearray(200 << 20)", memory_limit_mb=64).status == "memory_limit"
    more = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert len(more) <= 3  # a worker and its fork servers


FORKED = """
import os, sys
from magicrl_verifiers import verify_code, verify_maths

def right():
    return verify_maths("5", "5").correct and verify_code({"inputs": [""], "outputs": ["5"]}, "print(5)").correct

assert right()
child = os.fork()
if child == 0:
    sys.exit(0 if right() else 3)  # runs what is registered for the end of the process
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert right()
"""


def test_a_forked_process_has_workers_of_its_own_and_leaves_those_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("reference", "response", "name"),
    [(5, "5", "reference must be text, got 5"), (["4", 5], "5", "reference must"), ("5", 5, "response must be text")],
)
def test_what_is_no_text_is_the_callers_mistake(reference: Any, response: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        verify_maths(reference, response)


def test_a_trl_reward_reads_columns_and_leaves_out_what_is_not_judged() -> None:
    reward = reward_function("maths", reference="solution", extract="lenient", workers=1)
    chat = [[{"role": "assistant", "content": text}] for text in ("5", "6")]
    assert reward(prompts=["", ""], completions=chat, solution=["5", ["5", "6"]], completion_ids=[]) == [1.0, 1.0]
    assert reward(completions=["7", "7"], solution=["8", ""]) == [0.0, None]
    assert reward.__name__ == "maths_reward"
    with pytest.raises(ValueError, match="no column 'solution'"):
        reward(completions=["7"], answer=["7"])
    code = reward_function("code", workers=1)
    assert code(completions=[f"```python\n{PROGRAM}\n```"] * 2, answer=[TESTS, json.dumps(TESTS)]) == [1.0, 1.0]
    assert code(completions=["```python\ndef f(x): return x\n```"], answer=[["assert f(1) == 1"]]) == [1.0]


def test_rows_of_another_trl_reward_are_none_and_parts_of_a_message_are_its_text() -> None:
    reward = reward_function("maths", workers=1)
    others = [None, float("nan"), []]
    assert reward(completions=[r"\boxed{null}"] * 4, answer=[*others, "5"]) == [None, None, None, 0.0]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{\frac{1}"}, {"text": "{2}}"}]}]
    assert reward(completions=[parts, [{"role": "assistant", "content": None}]], answer=["0.5", "1"]) == [1.0, 0.0]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    used = [call, {"role": "tool", "content": 5}, {"role": "assistant", "content": r"\boxed{5}"}]
    assert reward(completions=[used, [call]], prompts=[[*used[::2]], "?"], answer=np.array(["5", "5"])) == [1.0, 0.0]
    several = reward_function("maths + exact", workers=1)
    assert several(completions=[r"\boxed{5}"] * 2, answer=["5", None]) == [1.0, None]
    with pytest.raises(ValueError, match="no column 'answer'"):
        several(completions=["5"])
    # pandas makes decimals of integers in a column with a gap
    exact = reward_function("exact", workers=1)
    assert exact(completions=[r"\boxed{51}"] * 4, answer=[51.0, 51, 51.5, "51"]) == [1.0, 1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="answer holds 1 answers for 2 completions"):
        reward(completions=["5", "5"], answer=["5"])
    with pytest.raises(TypeError, match="must be text or a list of parts, got 5"):
        reward(completions=[[{"role": "assistant", "content": 5}]], answer=["5"])


def test_a_reward_of_ones_own_gets_prompt_and_columns_from_trl(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(problem, response):\n"
        "    return (problem.prompt == 'why?') * (len(problem.context) + problem.extra['level'])\n"
    )
    reward = reward_function(f"{file}:score", workers=1)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}]
    given: dict[str, Any] = {"completions": ["a", "b", "c"], "prompts": ["why?", chat, "how?"], "level": [1, 2, 3]}
    assert reward(**given) == reward(**given, answer=["5", None, "5"]) == [1.0, 3.0, 0.0]


def test_a_verl_score_tells_tests_from_answers() -> None:
    right = {"score": 1.0, "acc": 1.0, "judged": 1.0}
    assert compute_score("any", r"\boxed{1,2}", "{1,2}", {"index": 3}) == right
    assert compute_score("any", "3", "3") == {"score": 0.0, "acc": 0.0, "judged": 1.0}
    assert compute_score("any", "3", ["4", "3"], extract="lenient") == right
    assert compute_score("any", f"```python\n{PROGRAM}\n```", json.dumps(TESTS), num_turns=1) == right
    assert compute_score("any", "```python\nprint(6)\n```", TESTS)["score"] == 0.0
    assert compute_score("any", r"\boxed{5}", r"\frac{")["judged"] == 0.0
    doubled: dict[str, Any] = {"data_source": "any", "solution_str": "```python\ndef f(x): return 2 * x\n```"}
    cases = ["assert f(1) == 2"]
    mixed = ["from fractions import Fraction as F", "assert f(1) == F(2)"]
    for truth in (
        cases,
        json.dumps(cases),
        cases[0],
        mixed,
        json.dumps(mixed),
        repr({"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
    ):
        assert compute_score(**doubled, ground_truth=truth) == right
    with pytest.raises(ValueError, match=r"no tests of a program.*text but not JSON"):
        compute_score("any", "3", '{"inputs": ["1"], "outputs": [')
    for truth in (["import math", "assert f(1 == 2"], ["assert f(1) == 2", 5], {"inputs": ["1"]}):
        with pytest.raises(ValueError, match=r"ground_truth .*(does not parse|must be a list)"):
            compute_score(**doubled, ground_truth=truth)
    with pytest.raises(ValueError, match="no tests"):
        compute_score("any", "3", "3", verifier="code")
    with pytest.raises(ValueError, match="maths or code, got 'exact'"):
        compute_score("any", "3", "3", verifier="exact")


@pytest.mark.slow
def test_trl_trains_with_the_reward(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = Dataset.from_list(
        [{"prompt": "what is 1 + 2 ?", "answer": "3"}, {"prompt": "what is 0 + 0 ?", "answer": "0"}]
    )
    settings: dict[str, Any] = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8}
    trainer = GRPOTrainer(
        model=str(tiny_models[0]),
        reward_funcs=reward_function("maths", extract="lenient", workers=1),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            max_completion_length=4,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            **settings,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(tiny_models[0]),
    )
    trainer.train()
    logged = [
        row["rewards/maths_reward/mean"] for row in trainer.state.log_history if "rewards/maths_reward/mean" in row
    ]
    assert len(logged) == 2
    assert all(0 <= mean <= 1 for mean in logged)


@pytest.mark.slow
def test_verl_loads_the_score_by_its_own_code() -> None:
    try:
        distribution = importlib.metadata.distribution("verl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no verl")
    # load by path: the package itself imports Ray, tensordict and vLLM
    path = distribution.locate_file("verl/utils/import_utils.py")
    spec = importlib.util.spec_from_file_location("verl_import_utils", str(path))
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    score = loader.load_extern_object("pkg://magicrl_verifiers.adapters.verl", "compute_score")
    given: dict[str, Any] = {"data_source": "x", "ground_truth": "3", "extra_info": {"num_turns": 1}}
    assert score(solution_str=r"\boxed{3}", **given)["score"] == 1.0


JUDGED = r"""
import asyncio, sys
from types import SimpleNamespace
from verifiers.v1.utils.loaders import judge_config_type, load_judge

config = judge_config_type("magicrl_judge").model_validate({"id": "magicrl_judge", "answer_field": "reference"})
judge = load_judge(config)
for reply in (r"\boxed{3}", "4"):
    task, trace = SimpleNamespace(reference="3"), SimpleNamespace(last_reply=reply)
    print(judge.reward_name, asyncio.run(judge.score(task, trace)))
try:
    asyncio.run(judge.score(SimpleNamespace(answer="3"), SimpleNamespace(last_reply="3")))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pydantic_config") is None, reason="no extra `verifiers`")
def test_verifiers_loads_the_judge_by_its_own_code() -> None:
    done = subprocess.run([sys.executable, "-c", JUDGED], check=False, capture_output=True, text=True)
    expected = "maths 1.0\nmaths 0.0\nthe task has no field 'reference'; set answer_field\n"
    assert done.stdout == expected, done.stderr
