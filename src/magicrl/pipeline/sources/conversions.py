"""Records of code sets that need code: rewritten into one form, ``{id, prompt, tests, starter_code?, solutions}``.

Nothing is executed or unpickled here. A value that does not have the shape it should raises ``ValueError``, and the
record is set aside with that reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_PYTHON3 = 3  # DeepMind's number for it


def converted(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The record in the common form.

    Raises:
        ValueError: a field has another shape; names it.
    """
    return CONVERSIONS[name](record)


def _json(record: Mapping[str, Any], name: str) -> Any:
    """A field that may be JSON text; empty text is None."""
    value = record.get(name)
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:  # int() refuses more than 4300 digits with a ValueError, too
        raise ValueError(f"field {name!r} is text that is no JSON ({error})") from None


def _texts(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"field {name!r} must be a list of texts, got {type(value).__name__}")
    return list(value)


def _apps(record: Mapping[str, Any]) -> dict[str, Any]:
    """APPS and TACO: tests and solutions are JSON texts, limits are written out (``2.0 seconds``)."""
    tests = _json(record, "input_output")
    if not isinstance(tests, Mapping):
        raise ValueError("field 'input_output' holds no tests")
    tests = dict(tests)
    seconds = _quantity(record.get("time_limit"), {"second": 1.0, "millisecond": 0.001})
    memory = _quantity(record.get("memory_limit"), {"megabyte": 1.0, "gigabyte": 1024.0, "kilobyte": 1 / 1024})
    limits = {"time_limit": seconds, "memory_limit_mb": memory}
    name = record.get("problem_id", record.get("id"))
    return {
        **record,
        "id": None if name is None else str(name),
        "prompt": record["question"],
        "tests": tests | {key: value for key, value in limits.items() if value is not None},
        "solutions": _texts(_json(record, "solutions"), "solutions"),
        "starter_code": record.get("starter_code") or None,
    }


def _quantity(value: Any, units: Mapping[str, float]) -> float | None:
    """``"2.0 seconds"`` as 2.0; None where nothing readable is said."""
    parts = str(value or "").split()
    if len(parts) != 2:
        return None
    try:
        return float(parts[0]) * units[parts[1].rstrip("s").lower()]
    except (ValueError, KeyError):
        return None


def _leetcode(record: Mapping[str, Any]) -> dict[str, Any]:
    """LeetCodeDataset: ``test`` defines ``check``, ``prompt`` holds the imports, ``completion`` the solution."""
    solution = record.get("completion")
    return {
        "id": record.get("task_id"),
        "prompt": record["problem_description"],
        "tests": {
            "test_code": record["test"],
            "entry_point": record["entry_point"],
            "import_prefix": record.get("prompt") or "",
        },
        "starter_code": record.get("starter_code") or None,
        "solutions": [] if solution is None else _texts([solution], "completion"),
        "difficulty": record.get("difficulty"),
    }


def _code_contests(record: Mapping[str, Any]) -> dict[str, Any]:
    """DeepMind's: three lists of tests, solutions in several languages, limits as a protobuf duration."""
    inputs: list[str] = []
    outputs: list[str] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        tests = record.get(name) or {}
        if not isinstance(tests, Mapping):
            raise ValueError(f"field {name!r} must be an object of inputs and outputs, got {type(tests).__name__}")
        inputs += _texts(tests.get("input"), f"{name}.input")
        outputs += _texts(tests.get("output"), f"{name}.output")
    limits: dict[str, Any] = {}
    duration = record.get("time_limit")
    if isinstance(duration, Mapping):
        seconds = float(duration.get("seconds") or 0) + float(duration.get("nanos") or 0) / 1e9
        limits |= {"time_limit": seconds} if seconds > 0 else {}
    if record.get("memory_limit_bytes"):
        limits["memory_limit_mb"] = int(record["memory_limit_bytes"]) >> 20
    return {
        "id": record.get("name"),
        "prompt": record["description"],
        "tests": {"inputs": inputs, "outputs": outputs, **limits},
        "solutions": _in_python(record.get("solutions"), "solutions"),
        "wrong_solutions": _in_python(record.get("incorrect_solutions"), "incorrect_solutions")[:4],
    }


def _in_python(value: Any, name: str) -> list[str]:
    """The Python 3 programs of ``{language: [...], solution: [...]}``."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise ValueError(f"field {name!r} must be an object of languages and solutions, got {type(value).__name__}")
    programs = _texts(value.get("solution"), f"{name}.solution")
    languages = list(value.get("language") or ())
    return [text for language, text in zip(languages, programs, strict=False) if language == _PYTHON3]


def _code_contests_plus(record: Mapping[str, Any]) -> dict[str, Any]:
    """ByteDance's: ``test_cases`` of {input, output}, submissions of {code, language}, limits in ms and MB.

    Their checkers are C++ programs against testlib, which our sandbox does not run: noted, so that cleaning can set
    aside the problems that need one.
    """
    cases = record["test_cases"]
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        raise ValueError("field 'test_cases' must be a list of objects with input and output")
    submissions = record["correct_submissions"] or []
    if not isinstance(submissions, list) or not all(isinstance(one, Mapping) for one in submissions):
        raise ValueError("field 'correct_submissions' must be a list of objects with code and language")
    python = [str(one.get("code")) for one in submissions if str(one.get("language")).lower() in ("py3", "python3")]
    limits: dict[str, Any] = {}
    if record.get("time_limit"):
        limits["time_limit"] = float(record["time_limit"]) / 1000
    if record.get("memory_limit"):
        limits["memory_limit_mb"] = int(record["memory_limit"])
    title = str(record.get("title") or "").strip()
    return {
        "id": record.get("id"),
        "prompt": f"{title}\n\n{record['description']}" if title else record["description"],
        "tests": {
            "inputs": [case.get("input") for case in cases],
            "outputs": [case.get("output") for case in cases],
            **limits,
        },
        "solutions": python,
        "their_checker": bool(record.get("checker")) or None,
    }


def _humaneval(record: Mapping[str, Any]) -> dict[str, Any]:
    """The solution continues the prompt."""
    solution = record.get("canonical_solution")
    whole = [] if solution is None else [str(record["prompt"]) + str(solution)]
    return {**record, "solutions": whole}


CONVERSIONS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "apps": _apps,
    "leetcode": _leetcode,
    "code_contests": _code_contests,
    "code_contests_plus": _code_contests_plus,
    "humaneval": _humaneval,
}
