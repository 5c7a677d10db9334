"""Conversion of code datasets to a statement and tests with the names of the released schema.

Nothing is executed or unpickled here. A value of the wrong shape raises ``ValueError``, and the record is set aside
with that reason.
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Style = Literal["stdin", "function", "complete"]
MOST_BYTES = 1 << 30
"""Largest size in bytes of a problem's unpacked private tests. Larger ones are treated as an attack on memory."""

IMPORTS = "\n".join(
    [
        "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys",
        "from bisect import bisect_left, bisect_right, insort",
        "from collections import Counter, OrderedDict, defaultdict, deque",
        "from functools import cache, cmp_to_key, lru_cache, reduce",
        "from heapq import heapify, heappop, heappush, nlargest, nsmallest",
        "from itertools import accumulate, combinations, groupby, pairwise, permutations, product",
        "from math import ceil, comb, floor, gcd, inf, isqrt, lcm, sqrt",
        "from typing import *",
        "",
    ]
)  # what a site such as LeetCode imports before a solution; starter code takes ``List`` for granted

_TEXT_OPCODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_OTHER_OPCODES = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTask:
    """A code problem: statement, tests, name of its template, and reference programs."""

    prompt: str
    tests: dict[str, Any]
    style: Style
    solutions: tuple[str, ...] = ()


def code_task(record: Mapping[str, Any], kind: str, prompt: str) -> CodeTask:
    """Return the task of a record in this format.

    Raises:
        ValueError: A field is missing or has the wrong type (names the field).
    """
    try:
        task = _KINDS[kind](record, prompt)
    # foreign records: a missing field and one of another type need the same message
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the tests do not have the shape of a {kind} record ({error!r})") from None
    return replace(task, tests=released_tests(task.tests))


_RELEASED_NAMES = {"code": "test_code", "prelude": "import_prefix", "inputs_kw": "inputs"}


def released_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return tests with the names of the released schema, which all commands read and write.

    Example:
        >>> released_tests({"type": "assert", "code": "assert f(1) == 2"})
        {'test_code': 'assert f(1) == 2'}
    """
    known = {name: value for name, value in tests.items() if name not in _RELEASED_NAMES and name != "type"}
    for name, own in _RELEASED_NAMES.items():
        if tests.get(name) is not None:
            # the released name takes precedence if both exist
            known.setdefault(own, tests[name])
    return known


def _parsed(record: Mapping[str, Any], name: str) -> Any:
    """Return a field that may be JSON text; None for empty text."""
    value = record.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:  # int() refuses more than 4300 digits with a ValueError, too
        raise ValueError(f"field {name!r} is text that is no JSON ({error})") from None


def _given(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read tests from an object: ``{type, inputs, outputs, fn_name?}``, ``{type, code}``, or a checker."""
    tests = _parsed(record, "tests")
    if not isinstance(tests, Mapping):
        raise ValueError(f"field 'tests' must be an object, got {type(tests).__name__}")
    known = {name: value for name, value in tests.items() if name != "type" and value is not None}
    for name, own in (("entry_point", "entry_point"), ("prelude", "import_prefix"), ("import_prefix", "import_prefix")):
        if record.get(name) and not known.get(own):
            known[own] = record[name]
    tolerance = known.pop("atol", None) or record.get("atol")
    if tolerance:
        known.setdefault("float_tolerance", tolerance)
    # EvalPlus gives further inputs without outputs: its reference solution judges them
    if record.get("plus_inputs") and record.get("entry_point") and record.get("reference_solution"):
        plus = {"fn_name": record["entry_point"], "inputs": _parsed(record, "plus_inputs")}
        shown = _statement(record, known, prompt)[0]
        checker = reference_checker(record, str(record["entry_point"]), tolerance)
        return CodeTask(prompt=shown, tests=plus | {"checker": checker}, style="function")
    if "checker" in known and "inputs" not in known:
        return _puzzle(known, prompt)
    if "inputs" in known and "outputs" not in known and "checker" not in known:
        known["checker"] = reference_checker(record, str(known.get("fn_name")), tolerance)
    statement, style = _statement(record, known, prompt)
    if style == "complete":
        known.setdefault("import_prefix", before_stub(statement))
    return CodeTask(prompt=statement, tests=known, style=style)


def _statement(record: Mapping[str, Any], tests: Mapping[str, Any], prompt: str) -> tuple[str, Style]:
    """Return the prompt, extended if needed so that it names what the tests call, and the template."""
    starter = tests.get("starter_code") or record.get("starter_code")
    if starter:
        return _started(prompt, str(starter)), "function"
    entry = tests.get("entry_point") or tests.get("fn_name")
    last = _last_function(prompt) if entry else None
    known = (ast.Expr, ast.Import, ast.ImportFrom, ast.Pass)
    # Python that ends in the function to write, with only a docstring as body
    if last is not None and last.name == str(entry) and all(isinstance(node, known) for node in last.body):
        return prompt, "complete"
    code = str(tests.get("code") or tests.get("test_code") or "")
    if code and "assert " not in prompt:
        lines = [line for line in code.splitlines() if line.strip()]
        only = all(line.startswith("assert ") for line in lines)
        return _with_tests(prompt, "\n".join(lines[:3] if only else lines)), "function"
    if tests.get("fn_name") and str(entry) not in prompt:
        return f"{prompt.rstrip()}\n\nThe function is named {entry}.", "function"
    return prompt, "function" if entry or code else "stdin"


def _started(prompt: str, starter: str) -> str:
    return f"{prompt.rstrip()}\n\nStart from this:\n```python\n{starter.rstrip()}\n```"


def _with_tests(prompt: str, tests: str) -> str:
    return f"{prompt.rstrip()}\n\nThese tests must pass:\n{tests}"


def _last_function(prompt: str) -> ast.FunctionDef | None:
    """Return the function at the end of a Python prompt, None if there is none."""
    try:
        body = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return body[-1] if body and isinstance(body[-1], ast.FunctionDef) else None


def before_stub(prompt: str) -> str:
    """Return the imports and helpers before the last function of a prompt, which programs and tests may use.

    The stub itself is left out, because in the process of the tests it would replace the program's function.
    """
    last = _last_function(prompt)
    if last is None:
        return ""
    # decorators belong to the function but come before its line
    start = min([last.lineno, *(node.lineno for node in last.decorator_list)])
    return "".join(prompt.splitlines(keepends=True)[: start - 1])


def reference_checker(record: Mapping[str, Any], entry: str, tolerance: Any) -> str:
    """Return a checker that runs the reference solution in the sandbox, for inputs without outputs.

    Raises:
        ValueError: There is no reference solution.
    """
    reference = record.get("reference_solution")
    if not isinstance(reference, str) or not reference.strip():
        raise ValueError("field 'tests': inputs without outputs, and no 'reference_solution' that could judge them")
    return f"{reference}\n\n_reference = {entry}\n_tolerance = {float(tolerance or 0)!r}\n{_COMPARE}"


_COMPARE = """
def _same(a, b):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, float) or isinstance(b, float):
        try:
            return a == b or abs(a - b) <= max(_tolerance, 1e-6 * abs(b)) or (a != a and b != b)
        except TypeError:
            return False
    return a == b


def check(input, output, answer):
    import copy
    return _same(output, _reference(*copy.deepcopy(input)))
"""


def _puzzle(tests: dict[str, Any], prompt: str) -> CodeTask:
    """Read a puzzle whose checker ``sat`` takes the result of ``sol()`` (P3)."""
    call = re.fullmatch(r"\s*sat\((\w+)\(\)\)\s*", str(tests.pop("call", "sat(sol())")))
    if call is None:
        raise ValueError("field 'tests.call' must be sat(NAME())")
    statement = (
        f"{prompt.rstrip()}\n\nWrite a function {call[1]}() without arguments for whose result `sat` is true:\n"
        f"```python\n{str(tests['checker']).rstrip()}\n```"
    )
    return CodeTask(prompt=statement, tests={**tests, "fn_name": call[1], "inputs": [[]]}, style="function")


def _humaneval(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read HumanEval: imports and helpers of the prompt come before the program, as in the authors' harness."""
    tests = {"test_code": record["test"], "entry_point": record["entry_point"], "import_prefix": before_stub(prompt)}
    solution = record.get("canonical_solution")
    whole = () if solution is None else (prompt + str(solution),)
    return CodeTask(prompt=prompt, tests=tests, style="complete", solutions=whole)


def _mbpp(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read MBPP, whose prompt shows ``test_list``. MBPP is judged by ``test_list``, MBPP+ by ``test``."""
    cases = record["test_list"]
    setup = record.get("test_setup_code")
    prefix = "\n".join([*(record.get("test_imports") or []), *([setup] if setup else [])])
    tests = {"test_code": record["test"]} if "test" in record else {"assert_case": list(cases)}
    shown = _with_tests(prompt, "\n".join(map(str, cases)))
    return CodeTask(prompt=shown, tests={**tests, "import_prefix": prefix}, style="function")


def _livecodebench(record: Mapping[str, Any], prompt: str) -> CodeTask:
    cases = [*_cases(record["public_test_cases"]), *_cases(record["private_test_cases"])]
    if not cases:
        raise ValueError("no test case; a problem without tests cannot be judged")
    tests: dict[str, Any] = {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases]}
    metadata = _parsed(record, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    functional = [case.get("testtype") == "functional" for case in cases]
    if any(functional) and not (all(functional) and name):
        raise ValueError("test cases of both kinds, or functional ones without metadata.func_name")
    if not name or not all(functional):
        return CodeTask(prompt=prompt, tests=tests, style="stdin")
    statement = _started(prompt, str(record.get("starter_code") or ""))
    return CodeTask(prompt=statement, tests={**tests, "fn_name": name, "import_prefix": IMPORTS}, style="function")


def _cases(value: Any) -> list[Mapping[str, Any]]:
    """Return test cases from JSON text, plain or inside base64, zlib and pickle."""
    if not isinstance(value, str):
        raise ValueError(f"test cases must be text, got {type(value).__name__}")
    try:
        try:
            cases = json.loads(value)
        except ValueError:
            cases = json.loads(unwrapped_text(value))
    except RecursionError:
        raise ValueError("test cases are nested too deeply to be read") from None
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) and "input" in case for case in cases):
        raise ValueError("test cases must be a list of objects with input and output")
    return cases


def unwrapped_text(value: str) -> str:
    """Return the text inside base64, zlib and pickle, the format of LiveCodeBench's private tests.

    The pickle is never executed. Its opcodes are read, and anything but one text is an error, so no name is looked up
    and no object is created.

    Raises:
        ValueError: it is not base64 or zlib data, unpacks to more than a GiB, or holds more than one text.
    """
    try:
        packed = base64.b64decode(value, validate=True)
        unpacker = zlib.decompressobj()
        # zlib packs a thousand to one: a megabyte could fill a machine
        data = unpacker.decompress(packed, MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"private tests are not base64 of zlib data: {error}") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"private tests unpack to more than {MOST_BYTES} bytes")
    text: str | None = None
    # read, never loaded: a pickle can run anything
    for opcode, argument, _position in pickletools.genops(data):
        if opcode.name in _TEXT_OPCODES and text is None:
            text = str(argument)
        elif opcode.name not in _OTHER_OPCODES:
            raise ValueError(f"private tests hold more than one text (pickle opcode {opcode.name}); they are not read")
    if text is None:
        raise ValueError("private tests hold no text")
    return text


def _texts(value: Any, name: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"field {name!r} must be a list of texts, got {type(value).__name__}")
    return list(value)


def _apps(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read APPS and TACO: tests and solutions are JSON texts, limits are texts such as ``2.0 seconds``."""
    tests = _parsed(record, "input_output")
    if not isinstance(tests, Mapping):
        raise ValueError("field 'input_output' holds no tests")
    tests = dict(tests)
    seconds = _quantity(record.get("time_limit"), {"second": 1.0, "millisecond": 0.001})
    memory = _quantity(record.get("memory_limit"), {"megabyte": 1.0, "gigabyte": 1024.0, "kilobyte": 1 / 1024})
    limits = {"time_limit": seconds, "memory_limit_mb": memory}
    known = tests | {key: value for key, value in limits.items() if value is not None}
    solutions = _texts(_parsed(record, "solutions"), "solutions")
    return _with_solutions({**record, "tests": known}, prompt, solutions)


def _with_solutions(record: Mapping[str, Any], prompt: str, solutions: list[str]) -> CodeTask:
    """Return the task of a record whose tests were converted to the given format."""
    return replace(_given(record, prompt), solutions=tuple(solutions))


def _quantity(value: Any, units: Mapping[str, float]) -> float | None:
    """Return ``"2.0 seconds"`` as 2.0, None for unreadable text."""
    parts = str(value or "").split()
    if len(parts) != 2:
        return None
    try:
        return float(parts[0]) * units[parts[1].rstrip("s").lower()]
    except (ValueError, KeyError):
        return None


def _leetcode(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read LeetCodeDataset: ``test`` defines ``check``, ``prompt`` has the imports, ``completion`` the solution."""
    solution = record.get("completion")
    tests = {"test_code": record["test"], "import_prefix": record.get("prompt") or ""}
    solutions = [] if solution is None else _texts([solution], "completion")
    return _with_solutions({**record, "tests": tests}, prompt, solutions)


def _code_contests(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read CodeContests: three lists of tests, solutions in several languages, limits as a protobuf duration."""
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
    tests = {"inputs": inputs, "outputs": outputs, **limits}
    solutions = _in_python(record.get("solutions"))
    return _with_solutions({"tests": tests}, prompt, solutions)


def _in_python(value: Any) -> list[str]:
    """Return the Python 3 programs of ``{language: [...], solution: [...]}``."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise ValueError(f"field 'solutions' must be an object of languages and solutions, got {type(value).__name__}")
    programs = _texts(value.get("solution"), "solutions.solution")
    languages = list(value.get("language") or ())
    # 3 is Python 3 in this data set
    return [text for language, text in zip(languages, programs, strict=False) if language == 3]


def _code_contests_plus(record: Mapping[str, Any], prompt: str) -> CodeTask:
    """Read CodeContests+: ``test_cases`` of {input, output}, submissions of {code, language}, limits in ms and MB.

    Its checkers are C++ programs with testlib, which the sandbox does not run: outputs are compared with the expected.
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
    tests = {
        "inputs": [case.get("input") for case in cases],
        "outputs": [case.get("output") for case in cases],
        **limits,
    }
    statement = f"{title}\n\n{prompt}" if title else prompt
    return _with_solutions({"tests": tests}, statement, python)


_KINDS: dict[str, Callable[[Mapping[str, Any], str], CodeTask]] = {
    "given": _given,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "mbpp_plus": _mbpp,
    "livecodebench": _livecodebench,
    "leetcode": _leetcode,
    "apps": _apps,
    "code_contests": _code_contests,
    "code_contests_plus": _code_contests_plus,
}
