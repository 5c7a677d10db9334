"""Code records of the wrong shape are set aside with the field and what it should be."""

from __future__ import annotations

import base64
import json
import pickle
import re
import zlib
from typing import Any

import pytest

from magicrl.data import code_records
from magicrl.data.code_records import code_task


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


CASES = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
CALLED = json.dumps([{"input": "1", "output": "2", "testtype": "functional"}])
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tests": ("given", {}, "field 'tests' must be an object, got NoneType"),
    "no JSON": ("given", {"tests": "{"}, "field 'tests' is text that is no JSON"),
    "too deep": ("given", {"tests": "[" * 100_000}, "field 'tests' is text that is no JSON"),
    "no outputs": ("given", {"tests": {"inputs": ["1"]}}, "inputs without outputs, and no 'reference_solution'"),
    "no call": ("given", {"tests": {"checker": "sat", "call": "sol()"}}, "field 'tests.call' must be sat(NAME())"),
    "no field": ("mbpp", {}, "do not have the shape of a mbpp record (KeyError('test_list'))"),
    "no case": ("livecodebench", {"public_test_cases": "[]", "private_test_cases": "[]"}, "no test case; a problem"),
    "cases no text": ("livecodebench", {"public_test_cases": [], "private_test_cases": "[]"}, "must be text, got list"),
    "cases no list": ("livecodebench", {"public_test_cases": "{}", "private_test_cases": "[]"}, "must be a list of"),
    "cases too deep": ("livecodebench", {"public_test_cases": "[" * 100_000}, "test cases are nested too deeply"),
    "unnamed": (
        "livecodebench",
        {"public_test_cases": CALLED, "private_test_cases": "[]"},
        "without metadata.func_name",
    ),
    "mixed": (
        "livecodebench",
        {"public_test_cases": CASES, "private_test_cases": CALLED, "metadata": '{"func_name": "f"}'},
        "test cases of both kinds",
    ),
    "not packed": ("livecodebench", {"public_test_cases": CASES, "private_test_cases": "?"}, "are not base64 of zlib"),
    "two texts": (
        "livecodebench",
        {"public_test_cases": CASES, "private_test_cases": packed(["[]", "[]"])},
        "hold more than one text (pickle opcode",
    ),
    "no text": (
        "livecodebench",
        {"public_test_cases": CASES, "private_test_cases": packed(7)},
        "hold more than one text (pickle opcode BININT1)",
    ),
    "empty": ("apps", {"input_output": ""}, "field 'input_output' holds no tests"),
    "numbers": (
        "apps",
        {"input_output": {"inputs": [], "outputs": []}, "solutions": [1]},
        "'solutions' must be a list of",
    ),
    "no object": (
        "code_contests",
        {"public_tests": [1]},
        "field 'public_tests' must be an object of inputs and outputs",
    ),
    "inputs": (
        "code_contests",
        {"public_tests": {"input": "1"}},
        "'public_tests.input' must be a list of texts, got str",
    ),
    "languages": ("code_contests", {"solutions": ["x"]}, "field 'solutions' must be an object of languages and"),
    "no cases": ("code_contests_plus", {"test_cases": [1]}, "field 'test_cases' must be a list of objects"),
    "no programs": (
        "code_contests_plus",
        {"test_cases": [], "correct_submissions": ["x"]},
        "field 'correct_submissions' must be a list of objects",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_record_of_another_shape_names_the_field(name: str) -> None:
    kind, record, message = BROKEN[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        code_task(record, kind, "Add.")


def test_packed_tests_that_would_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_records, "MOST_BYTES", 1000)
    record = {"public_test_cases": CASES, "private_test_cases": packed("[" + " " * 5000 + "]")}
    with pytest.raises(ValueError, match="private tests unpack to more than 1000 bytes"):
        code_task(record, "livecodebench", "Add.")
