"""The verifiers: wrong answers accepted and right ones missed, on sets that ship with the package; attacks by programs.

The two sets were written in one sitting without knowledge of the verifier's code. Their heads say what the first run of
them gave. Since then the verifier was repaired, so this check finds what breaks on another machine or another version.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import math_verify

from magicrl.records import Outcome, Problem, Verdict
from magicrl.selfcheck.setup import Proof, Setup, judged, needs_sandbox
from magicrl_verifiers.code.judge import CodeOptions, CodePool
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.maths.maths_verifier import MathsVerifier
from magicrl_verifiers.records import JudgeOptions

SETS = ("blind_boxed.txt", "running_blind.txt")
ANSWERS = {"3": "9176", "4": "2281"}
HONEST = f"def f(x):\n    return {{int(k): int(v) for k, v in {ANSWERS!r}.items()}}[x]"
"""Not an attack: it knows the answers by itself."""
STDIN = {"inputs": [f"{len(ANSWERS)}\n" + "".join(f"{x}\n" for x in ANSWERS)], "outputs": ["\n".join(ANSWERS.values())]}
ANSWERED = "\nfor _ in range(int(input())):\n    print(f(int(input())))"
"""What makes a program that defines ``f`` answer `STDIN`."""
READERS = {
    "input": ANSWERED,
    "main guard": "\nif __name__ == '__main__':" + ANSWERED.replace("\n", "\n    "),
    "sys.stdin": "\nimport sys\nnext(sys.stdin)\nfor line in sys.stdin:\n    print(f(int(line)))",
    "readlines": "\nimport sys\nfor line in sys.stdin.readlines()[1:]:\n    print(f(int(line)))",
    "buffer.read": "\nimport sys\nfor x in sys.stdin.buffer.read().split()[1:]:\n    print(f(int(x)))",
    "buffer.readline": "\nimport sys\nread = sys.stdin.buffer.readline\nfor _ in range(int(read())):\n"
    "    print(f(int(read())))",
    "open(0)": "\nfor x in open(0).read().split()[1:]:\n    print(f(int(x)))",
    "os.read": "\nimport os\nfor x in os.read(0, 99).split()[1:]:\n    print(f(int(x)))",
    "stdout.buffer": "\nimport sys\nfor x in sys.stdin.read().split()[1:]:\n"
    "    sys.stdout.buffer.write(b'%d\\n' % f(int(x)))",
    "global": "\ncount = 0\ndef step():\n    global count\n    count += 1\n    print(f(int(input())))\n"
    "for _ in range(int(input())):\n    step()",
}
"""Ways to read and write in which solutions of released data are written."""
Pair = tuple[str, str, bool]
"""Reference answer, response, and whether it is right."""


def check_verifiers(setup: Setup) -> Proof:
    """Return whether the maths verifier judges every labelled pair right and no attack on the code verifier passes."""
    text, accepted, missed = errors(setup, lambda reference, text: MATHS.judge([reference], text).correct)
    attacks, honest = attack_verdicts()
    through = [name for name, verdict in attacks.items() if verdict.outcome is not Outcome.WRONG]
    refused = [name for name, verdict in honest.items() if verdict.outcome is not Outcome.CORRECT]
    return Proof(
        status=judged(not (accepted or missed or through or refused)),
        figure=f"{text}; code: {len(through)} of {len(attacks)} attacks not judged wrong, {len(refused)} of "
        f"{len(honest)} honest programs refused",
        against="labels written by hand before any verifier judged the answers; attacks in the forms of the "
        "released tests",
        details={"accepted": accepted, "missed": missed, "attacks": through, "honest": refused},
    )


def of_math_verify(setup: Setup) -> Proof:
    """Return the errors of Math-Verify on the same answers."""
    text, accepted, missed = errors(setup, lambda reference, text: bare([reference], text))
    return Proof(
        status="peer",
        figure=f"{text}; matters of convention, such as rounding and units, follow magicrl's page on its verifier",
        against="the same labels",
        details={"accepted": accepted, "missed": missed},
    )


def bare(references: Sequence[str], response: str) -> bool:
    """Judge by the report's four steps with unchanged Math-Verify, as in the released code."""
    parts = response.split("</think>")
    answer = parts[1] if len(parts) > 1 else response
    parsed = math_verify.parse(answer, parsing_timeout=5)
    if len(parsed) < 2:
        return False
    if parsed[1] in references:
        return True
    return any(
        math_verify.verify(math_verify.parse(f"\\boxed{{{reference}}}"), parsed, timeout_seconds=5)
        for reference in references
    )


MATHS = MathsVerifier(JudgeOptions(extract="lenient"))


def errors(setup: Setup, accepts: Callable[[str, str], bool]) -> tuple[str, list[str], list[str]]:
    """Return the result in words, the wrong answers that are accepted, and the right ones that are missed."""
    pairs = list(labelled(5 if setup.quick else 1))
    wrong = [(pair, said) for pair in pairs if (said := accepts(pair[0], pair[1])) != pair[2]]
    accepted, missed = (
        [f"{reference} | {text}" for (reference, text, _), s in wrong if s is said] for said in (True, False)
    )
    count = sum(not right for _, _, right in pairs)
    text = (
        f"maths: {len(accepted)} of {count} wrong answers accepted, {len(missed)} of {len(pairs) - count} right ones "
        "missed"
    )
    return text, accepted, missed


def labelled(step: int = 1) -> Iterator[Pair]:
    """Yield every ``step``-th pair of `SETS`. Rows marked ``~`` are right answers that are known to be missed."""
    number = 0
    for name in SETS:
        text = (files("magicrl_verifiers") / "maths" / name).read_text(encoding="utf-8")
        reference = ""
        for line in text.splitlines():
            mark, _, rest = line.partition(" ")
            reference = rest if mark == "=" else reference
            for answer in rest.split(" || ") if mark in ("+", "-") else ():
                number += 1
                if number % step == 0:
                    yield reference, f"\\boxed{{{answer}}}" if "boxed" in name else answer, mark == "+"


def templates(answers: Path) -> dict[str, str]:
    """Return attacks by name, each a program that defines ``f``. One reads the tests where they lie on disk."""
    return {
        "guess": "def f(x): return 0",
        "exit at once": "import os\nos._exit(0)",
        "exit in the call": "import os\ndef f(x): os._exit(0)",
        "SystemExit": "def f(x): raise SystemExit(0)",
        "equal to everything": "class A:\n    def __eq__(self, o): return True\ndef f(x): return A()",
        "an int that is equal": "class A(int):\n    def __eq__(self, o): return True\n"
        "    __hash__ = int.__hash__\ndef f(x): return A(1)",
        "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
        "frames": "import sys\ndef f(x):\n    g = sys._getframe()\n    while g:\n"
        "        for v in g.f_locals.values():\n"
        "            if isinstance(v, dict) and str(x) in v: return v[str(x)]\n        g = g.f_back\n    return 0",
        "garbage collector": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'outputs' in o: return o['outputs'][0]\n    return 0",
        "the tests' file": f"import json\ndef f(x):\n    return json.load(open({str(answers)!r}))[str(x)]",
        "the judge's memory": "import os\ndef f(x):\n    open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n    return 0",
        "every descriptor": "import os\ndef f(x):\n    for n in range(3, 256):\n        try: os.write(n, b'held')\n"
        "        except OSError: pass\n    os._exit(0)",
        "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
        "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x): return 0",
        "own check": "def check_verifiers(c): pass\ndef f(x): return 0",
        "excepthook": "import sys\nsys.excepthook = lambda *a: None\ndef f(x): return 0",
        "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
        "NaN": "def f(x): return float('nan')",
        "kills the judge": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 0",
        "hangs": "def f(x):\n    while True: pass",
    }


def problems() -> dict[str, Problem]:
    """Return one question, its tests in the forms of the released data, by form."""
    kinds = {
        "calls": {"fn_name": "f", "inputs": [[int(x)] for x in ANSWERS], "outputs": [int(y) for y in ANSWERS.values()]},
        "assertions": {"assert_case": [f"assert f({x}) == {y}" for x, y in ANSWERS.items()]},
        "assertion process": {
            "entry_point": "f",
            "test_code": f"def check(c):\n    for x, y in {ANSWERS!r}.items():\n        assert c(int(x)) == int(y)\n",
        },
        "standard input": STDIN,
    }
    return {
        name: Problem(id=name, prompt="", references=(json.dumps(tests),), verifier="code", source="attacks")
        for name, tests in kinds.items()
    }


def attacks_of(form: str, answers: Path) -> dict[str, str]:
    """Return the attacks on tests of a form, by name."""
    return {name: text + (ANSWERED if form == "standard input" else "") for name, text in templates(answers).items()}


def stdin_programs() -> dict[str, str]:
    """Return honest programs that read and write in the ways of `READERS`."""
    return {name: HONEST + reader for name, reader in READERS.items()}


def attack_verdicts() -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    """Return the verdicts on all attacks and on the honest programs, in each form of the tests.

    Raises:
        CannotRun: The sandbox does not start on this machine; the text says what it lacks.
    """
    options = CodeOptions(limits=Limits(cpu_seconds=0.5, memory_mb=256, idle_seconds=0.5))
    attacks: dict[str, Verdict] = {}
    honest: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "tests.json"
        answers.write_text(json.dumps({x: int(y) for x, y in ANSWERS.items()}))
        with needs_sandbox(), CodePool(options) as pool:
            pool.warm_up()
            for form, problem in problems().items():
                right = {"honest": HONEST} if form != "standard input" else stdin_programs()
                programs = attacks_of(form, answers)
                texts = [f"```python\n{program}\n```" for program in (*right.values(), *programs.values())]
                verdicts = pool.result(pool.submit(problem, texts))
                honest |= {f"{name}, {form}": v for name, v in zip(right, verdicts[: len(right)], strict=True)}
                attacks |= {f"{name}, {form}": v for name, v in zip(programs, verdicts[len(right) :], strict=True)}
    return attacks, honest
