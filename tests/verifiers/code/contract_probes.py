"""Probes of the contract for test code, in the forms that users bring; each with the outcome it must have, and why.

Written before the contract: on the code of then 54 of the first 113 had another outcome, and two took 47 and 106 s.
"""
# ruff: noqa: E501 - programs of one line

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Any

ADD = "def add(a, b):\n    return a + b\n"
BAD_ADD = "def add(a, b):\n    return a - b\n"
STACK = """
class EmptyError(Exception):
    pass
class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def pop(self):
        if not self.items:
            raise EmptyError("empty")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __contains__(self, item):
        return item in self.items
"""
VECTOR = """
class Vector:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, factor):
        return Vector(self.x * factor, self.y * factor)
    def __eq__(self, other):
        return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
    def __repr__(self):
        return f"Vector({self.x}, {self.y})"
"""
UNIT = """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self):
        self.values = [(1, 2, 3), (0, 0, 0), (-1, 1, 0)]
    def test_values(self):
        for a, b, wanted in self.values:
            with self.subTest(a=a, b=b):
                self.assertEqual(add(a, b), wanted)
    def test_types(self):
        with self.assertRaises(TypeError):
            add(1, "x")
"""
PYTEST = """
import pytest
@pytest.fixture
def base():
    return 10
@pytest.mark.parametrize("a,b,wanted", [(1, 2, 3), (0, 0, 0), pytest.param(-1, 1, 0, id="zero")])
def test_values(a, b, wanted):
    assert add(a, b) == wanted
def test_base(base):
    assert add(base, 1) == 11
def test_raises():
    with pytest.raises(TypeError, match="unsupported"):
        add(1, "x")
def test_floats():
    assert add(0.1, 0.2) == pytest.approx(0.3)
"""


@dataclass(frozen=True)
class Probe:
    """A program, its tests, and the outcome (``correct``, ``wrong`` or ``not_judged``) that they must have."""

    name: str
    program: str
    tests: dict[str, Any]
    outcome: str
    why: str


PROBES: list[Probe] = []


def _probe(name: str, program: str, tests: dict[str, Any] | str, outcome: str, why: str) -> None:
    given = {"test_code": dedent(tests)} if isinstance(tests, str) else tests
    PROBES.append(Probe(name, dedent(program), given, outcome, why))


def _check(body: str, entry: str | None = "f", **more: Any) -> dict[str, Any]:
    code = "def check(candidate):\n" + "".join(f"    {line}\n" for line in dedent(body).strip().splitlines())
    return {"test_code": code, **({"entry_point": entry} if entry else {}), **more}


RIGHT, WRONG, NOT = "correct", "wrong", "not_judged"

# --- unittest --------------------------------------------------------------------------------------------------------
_probe("unittest right", ADD, UNIT, RIGHT, "all methods hold")
_probe("unittest wrong", BAD_ADD, UNIT, WRONG, "assertEqual fails in a subtest")
_probe("unittest pass", "pass", UNIT, WRONG, "the program defines no add")
_probe(
    "unittest never raises",
    "def add(a, b):\n    return int(a) + int(b if b != 'x' else 0)",
    UNIT,
    WRONG,
    "assertRaises must see the program's TypeError",
)
_probe(
    "unittest main guard", ADD, UNIT + "if __name__ == '__main__':\n    unittest.main()\n", RIGHT, "a usual file end"
)
_probe("unittest bare main", ADD, UNIT + "unittest.main()\n", RIGHT, "a file end without the guard")
_probe("unittest imports solution", ADD, "from solution import add\n" + UNIT, RIGHT, "solution is the program")
_probe(
    "unittest class fixtures",
    ADD,
    """
    import unittest
    class T(unittest.TestCase):
        @classmethod
        def setUpClass(cls): cls.one = 1
        def tearDown(self): self.one = None
        def test(self): self.assertTrue(add(self.one, 1) == 2)
    """,
    RIGHT,
    "setUpClass and tearDown run",
)
_probe(
    "unittest setUp calls the class",
    STACK,
    """
    import unittest
    class T(unittest.TestCase):
        def setUp(self): self.s = Stack()
        def test_push(self):
            self.s.push(1); self.assertEqual(len(self.s), 1); self.assertIn(1, self.s); self.assertIsInstance(self.s, Stack)
        def test_empty(self):
            with self.assertRaises(EmptyError): self.s.pop()
        def test_items(self): self.assertEqual(self.s.items, [])
    """,
    RIGHT,
    "objects of the program, its own exception, isinstance",
)
_probe(
    "unittest class wrong",
    STACK.replace("self.items.pop()", "self.items[0]"),
    """
    import unittest
    class T(unittest.TestCase):
        def test_pop(self):
            s = Stack(); s.push(1); s.push(2); self.assertEqual(s.pop(), 2)
    """,
    WRONG,
    "pop takes the first",
)
_probe(
    "unittest without assertion",
    ADD,
    """
    import unittest
    class T(unittest.TestCase):
        def test(self): add(1, 2)
    """,
    NOT,
    "nothing is asserted",
)
_probe(
    "unittest skipped",
    ADD,
    """
    import unittest
    class T(unittest.TestCase):
        @unittest.skip("later")
        def test(self): self.assertEqual(add(1, 2), 3)
    """,
    NOT,
    "nothing ran",
)
_probe(
    "unittest broken helper",
    ADD,
    """
    import unittest
    class T(unittest.TestCase):
        def test(self): self.assertEqual(add(1, 2), self.wanted)
    """,
    NOT,
    "the test case has no such attribute: its own mistake",
)
_probe(
    "unittest almost equal",
    "def f(x):\n    return x / 3",
    """
    import unittest
    class T(unittest.TestCase):
        def test(self):
            self.assertAlmostEqual(f(1), 0.3333333, places=5)
            self.assertCountEqual([f(3), 2], [2, 1])
    """,
    RIGHT,
    "other assertion methods",
)
_probe(
    "unittest async",
    "async def f(x):\n    return x + 1",
    """
    import unittest
    class T(unittest.IsolatedAsyncioTestCase):
        async def test(self): self.assertEqual(await f(1), 2)
    """,
    RIGHT,
    "a coroutine function",
)

# --- pytest ----------------------------------------------------------------------------------------------------------
_probe("pytest right", ADD, PYTEST, RIGHT, "parametrize, fixture, raises, approx")
_probe("pytest wrong", BAD_ADD, PYTEST, WRONG, "a parameter set fails")
_probe("pytest pass", "pass", PYTEST, WRONG, "the program defines no add")
_probe(
    "pytest only raises",
    "def f(x):\n    if x < 0: raise ValueError('negative')",
    """
    import pytest
    def test_f():
        with pytest.raises(ValueError) as caught: f(-1)
        assert "negative" in str(caught.value)
    """,
    RIGHT,
    "the exception and its text cross",
)
_probe(
    "pytest raises nothing",
    "def f(x):\n    return x",
    """
    import pytest
    def test_f():
        with pytest.raises(ValueError): f(-1)
    """,
    WRONG,
    "did not raise",
)
_probe(
    "pytest raises another",
    "def f(x):\n    return 1 // 0",
    """
    import pytest
    def test_f():
        with pytest.raises(ValueError): f(-1)
    """,
    WRONG,
    "the program's ZeroDivisionError",
)
_probe(
    "pytest class",
    STACK,
    """
    import pytest
    from solution import Stack, EmptyError
    class TestStack:
        def setup_method(self): self.s = Stack()
        def test_order(self):
            self.s.push(1); self.s.push(2)
            assert [self.s.pop(), self.s.pop()] == [2, 1]
        def test_empty(self):
            with pytest.raises(EmptyError): self.s.pop()
    """,
    RIGHT,
    "a class of tests, setup_method, an exception class of the program",
)
_probe(
    "pytest capsys",
    "def greet(name):\n    print('hello', name)",
    """
    def test_greet(capsys):
        greet("you")
        assert capsys.readouterr().out == "hello you\\n"
    """,
    RIGHT,
    "what the program prints reaches the tests",
)
_probe(
    "pytest monkeypatch",
    "def ask():\n    return int(input('n?')) + 1",
    """
    def test_ask(monkeypatch):
        monkeypatch.setattr("builtins.input", lambda prompt: "4")
        assert ask() == 5
    """,
    RIGHT,
    "what the tests replace is replaced in the program",
)
_probe("pytest no tests", ADD, "import pytest\ndef helper():\n    assert add(1, 2) == 3\n", NOT, "nothing calls helper")
_probe(
    "pytest unknown feature",
    ADD,
    """
    import pytest
    def test_add(benchmark):
        assert add(1, 2) == 3
    """,
    NOT,
    "a fixture that nobody defines",
)
_probe(
    "pytest yield fixture",
    ADD,
    """
    import pytest
    @pytest.fixture(params=[1, 2])
    def n(request):
        yield request.param
    def test_add(n): assert add(n, n) == 2 * n
    """,
    RIGHT,
    "fixtures with parameters and yield",
)
_probe(
    "pytest skipif and xfail",
    ADD,
    """
    import pytest
    @pytest.mark.skipif(True, reason="x")
    def test_a(): assert False
    @pytest.mark.xfail
    def test_b(): assert add(1, 1) == 3
    def test_c(): assert add(1, 1) == 2
    """,
    RIGHT,
    "marks are heeded",
)
_probe(
    "kodcode right",
    ADD,
    "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(-1, -2) == -3\n",
    RIGHT,
    "the usual KodCode item",
)
_probe(
    "kodcode wrong", BAD_ADD, "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\n", WRONG, "3 != -1"
)
_probe(
    "kodcode pass",
    "pass",
    "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\n",
    WRONG,
    "the program lacks what is imported from it",
)
_probe(
    "kodcode import inside",
    ADD,
    "def test_a():\n    import solution\n    assert solution.add(1, 2) == 3\n",
    RIGHT,
    "the module as a whole",
)
_probe(
    "kodcode constant",
    "LIMIT = 7\ndef add(a, b): return a + b",
    "from solution import add, LIMIT\ndef test_a():\n    assert add(LIMIT, 0) == 7 and LIMIT == 7\n",
    RIGHT,
    "a constant of the program",
)

# --- check(candidate) ------------------------------------------------------------------------------------------------
LISTS = "def f(n):\n    return list(range(n))"
for outer, right in {
    "assert len(candidate(3)) == 3": LISTS,
    "assert str(candidate(2)) == '[0, 1]'": LISTS,
    "assert sorted(candidate(3), reverse=True) == [2, 1, 0]": LISTS,
    "assert abs(candidate(3)[1] - 1) < 1e-6": LISTS,
    "assert isinstance(candidate(3), list)": LISTS,
    "assert all(x < 3 for x in candidate(3))\nassert len(candidate(2)) == 2": LISTS,
    "import math\nassert math.isclose(sum(candidate(4)), 6.0)": LISTS,
    "for n in range(4):\n    assert len(candidate(n)) == n": LISTS,
}.items():
    _probe(f"check {outer[:30]!r}", right, _check(outer), RIGHT, "the outer call is a builtin's")
    _probe(
        f"check called {outer[:25]!r}",
        right,
        {"test_code": _check(outer)["test_code"] + "check(f)\n"},
        RIGHT,
        "the same, check called by the code, no entry_point",
    )
_probe(
    "check builtin wrong", "def f(n):\n    return [0] * (n + 1)", _check("assert len(candidate(3)) == 3"), WRONG, "4"
)
_probe(
    "check program's len",
    "def len(x): return 3\ndef f(n): return []",
    _check("for _ in range(2):\n    assert len(candidate(3)) == 3"),
    WRONG,
    "len is the tests' builtin, not the program's",
)
_probe(
    "check program named as a builtin",
    "def sum(a, b): return a + b",
    {"assert_case": ["assert sum(1, 2) == 3"]},
    RIGHT,
    "the only function that the tests call",
)
_probe("check never called candidate", ADD, _check("assert 1 + 1 == 2", "add"), NOT, "the program is never called")
_probe("check without assertion", ADD, _check("candidate(1, 2)", "add"), NOT, "nothing is asserted")
_probe("check empty", ADD, _check("pass", "add"), NOT, "nothing at all")
_probe(
    "check raises by hand",
    ADD,
    _check("if candidate(1, 2) != 3:\n    raise ValueError('wrong')", "add"),
    RIGHT,
    "a raise under a condition is an assertion",
)
_probe(
    "check raises by hand, wrong",
    BAD_ADD,
    _check("if candidate(1, 2) != 3:\n    raise ValueError('wrong')", "add"),
    WRONG,
    "the condition held",
)
_probe(
    "check helper of numpy",
    "def f(n):\n    return [n / 2] * 2",
    _check("import numpy as np\nnp.testing.assert_allclose(candidate(1), [0.5, 0.5])"),
    RIGHT,
    "an assertion function counts",
)

# --- MBPP ------------------------------------------------------------------------------------------------------------
_probe("mbpp right", ADD, {"assert_case": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}, RIGHT, "")
_probe("mbpp pass", "pass", {"assert_case": ["assert add(1, 2) == 3"]}, WRONG, "no add")
_probe("mbpp set", LISTS, {"assert_case": ["assert set(f(2)) == set([1, 0])"]}, RIGHT, "")
_probe(
    "mbpp isclose",
    "def f(x):\n    return x ** .5",
    {"assert_case": ["import math\nassert math.isclose(f(4), 2)"]},
    RIGHT,
    "",
)
_probe("mbpp constant", ADD, {"assert_case": ["assert True"]}, NOT, "asserts nothing of the program")
_probe("mbpp tests that fail by themselves", ADD, {"assert_case": ["assert 1 == 2"]}, NOT, "the program was not called")
_probe(
    "mbpp regex",
    "import re\ndef f(s):\n    return re.search('a', s)",
    {"assert_case": ["assert f('cat')", "assert not f('dog')"]},
    RIGHT,
    "the truth of a match object",
)

# --- BigCodeBench ----------------------------------------------------------------------------------------------------
_probe(
    "bigcode right",
    "import random\ndef task_func(n, seed=0):\n    random.seed(seed)\n    return [random.randint(0, 9) for _ in range(n)]",
    {
        "test_code": dedent("""
    import unittest
    from unittest.mock import patch
    class TestCases(unittest.TestCase):
        def test_case_1(self):
            self.assertEqual(len(task_func(5)), 5)
        @patch("random.randint", return_value=4)
        def test_case_2(self, randint):
            self.assertEqual(task_func(2), [4, 4])
            self.assertEqual(randint.call_count, 2)
            randint.assert_called_with(0, 9)
    """),
        "entry_point": "task_func",
    },
    RIGHT,
    "a mock of a module that the program uses",
)
_probe(
    "bigcode mock ignored",
    "def task_func(n):\n    return [4] * n",
    """
    import unittest
    from unittest.mock import patch
    class TestCases(unittest.TestCase):
        @patch("random.randint", return_value=4)
        def test_case_2(self, randint):
            self.assertEqual(task_func(2), [4, 4])
            randint.assert_called()
    """,
    WRONG,
    "the mock was not called",
)
_probe(
    "bigcode response",
    "import urllib.request\ndef task_func(url):\n    with urllib.request.urlopen(url) as r:\n        return r.read().decode().upper()",
    """
    import unittest
    from unittest.mock import patch, MagicMock
    class TestCases(unittest.TestCase):
        def test_case(self):
            with patch("urllib.request.urlopen") as opened:
                opened.return_value.__enter__.return_value.read.return_value = b"abc"
                self.assertEqual(task_func("http://x"), "ABC")
                opened.assert_called_once_with("http://x")
    """,
    RIGHT,
    "a chain of mocks, a context manager",
)
FILES = """
    import os, tempfile, unittest, shutil
    class TestCases(unittest.TestCase):
        def setUp(self):
            self.dir = tempfile.mkdtemp()
            self.path = os.path.join(self.dir, "in.txt")
            with open(self.path, "w") as file: file.write("a b\\nc")
        def tearDown(self): shutil.rmtree(self.dir)
        def test_words(self):
            out = os.path.join(self.dir, "out.txt")
            self.assertEqual(task_func(self.path, out), 3)
            with open(out) as file: self.assertEqual(file.read(), "3")
"""
_probe(
    "bigcode files",
    "def task_func(path, out):\n    n = len(open(path).read().split())\n    with open(out, 'w') as f: f.write(str(n))\n    return n",
    FILES,
    RIGHT,
    "a temporary folder that both use",
)
_probe("bigcode files wrong", "def task_func(path, out):\n    return 3", FILES, WRONG, "the output file is missing")
_probe(
    "bigcode stdout",
    "def task_func():\n    print('x')",
    """
    import io, unittest
    from unittest.mock import patch
    class TestCases(unittest.TestCase):
        @patch("sys.stdout", new_callable=io.StringIO)
        def test_case(self, out):
            task_func()
            self.assertEqual(out.getvalue(), "x\\n")
    """,
    RIGHT,
    "printed text reaches a patched sys.stdout",
)
_probe(
    "bigcode missing library in both",
    "import no_such_library\ndef task_func(): return 1",
    """
    import unittest, no_such_library
    class TestCases(unittest.TestCase):
        def test_case(self): self.assertEqual(task_func(), 1)
    """,
    NOT,
    "the tests cannot run here",
)

# --- classes and operators -------------------------------------------------------------------------------------------
_probe(
    "operators",
    VECTOR,
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)\nassert Vector(1, 2) * 2 == Vector(2, 4)\n"
    "assert repr(Vector(1, 2)) == 'Vector(1, 2)'\nassert Vector(1, 2) != Vector(2, 1)\n",
    RIGHT,
    "operators of the program's class",
)
_probe(
    "operators wrong",
    VECTOR.replace("self.x + other.x", "self.x"),
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)\n",
    WRONG,
    "",
)
_probe(
    "generator",
    "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1",
    "from itertools import islice\nassert list(islice(naturals(), 3)) == [0, 1, 2]\ng = naturals()\nassert next(g) == 0 and next(g) == 1\n",
    RIGHT,
    "an endless generator",
)

# --- broken tests ----------------------------------------------------------------------------------------------------
_probe("broken missing module", ADD, "import no_such_module\nassert add(1, 2) == 3\n", NOT, "the tests' own import")
_probe("broken undefined name", ADD, _check("assert candidate(1, 2) == wanted", "add"), NOT, "the tests' own name")
_probe("broken undefined name, no entry", ADD, "x = 1\nassert add(x, 2) == WANTED\n", NOT, "the tests' own name")
_probe(
    "broken undefined helper", ADD, _check("assert close_to(candidate(1, 2), 3)", "add"), NOT, "the tests' own helper"
)
_probe("broken syntax", ADD, "assert add(1, 2 == 3\n", NOT, "does not parse")
_probe(
    "broken before the call",
    ADD,
    "table = {}\nassert table['x'] == add(1, 2)\n",
    NOT,
    "the error comes before the program",
)
_probe("broken attribute of a module", ADD, "import math\nassert math.add(1, 2) == add(1, 2)\n", NOT, "math has no add")
_probe(
    "program's missing module",
    "import no_such_module\n" + ADD,
    "for i in range(2):\n    assert add(i, i) == 2 * i\n",
    WRONG,
    "the program's import",
)
_probe(
    "program's missing module, late",
    "def add(a, b):\n    import no_such_module\n    return a + b",
    "for i in range(2):\n    assert add(i, i) == 2 * i\n",
    WRONG,
    "the program's import, when called",
)
_probe(
    "program's undefined name",
    "def add(a, b):\n    return a + c",
    "for i in range(2):\n    assert add(i, i) == 2 * i\n",
    WRONG,
    "the program's name",
)
_probe(
    "program returns None",
    "def f(n):\n    pass",
    _check("for n in (1, 2):\n    assert candidate(n)[0] == n"),
    WRONG,
    "the tests' TypeError comes from the program's None",
)

# --- hostile ---------------------------------------------------------------------------------------------------------
EQUAL = (
    "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    def __sub__(self, o): return 0\n"
    "    def __lt__(self, o): return True\n    def __contains__(self, o): return True\n    def __call__(self, *a, **k): return self\n"
    "    def __getattr__(self, n): return self\n    def __float__(self): return 3.0\n    __gt__ = __le__ = __ge__ = __lt__\n    __rsub__ = __sub__\n    def __abs__(self): return self\n"
)
for test in (
    "self.assertEqual(add(1, 2), 3)",
    "self.assertIn(3, add(1, 2))",
    "self.assertAlmostEqual(add(1, 2), 3)",
    "self.assertTrue(abs(add(1, 2) - 3) < 1)",
    "self.assertGreater(add(1, 2), 2)",
):
    _probe(
        f"hostile object, {test[5:17]}",
        EQUAL + "def add(a, b): return E()",
        f"import unittest\nclass T(unittest.TestCase):\n    def test(self): {test}\n",
        WRONG,
        "an object that agrees with everything",
    )
_probe(
    "hostile class for a function",
    EQUAL.replace("class E", "class add").replace(
        "    def __eq__", "    def __init__(self, *a): pass\n    def __eq__", 1
    ),
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertTrue(abs(add(1, 2) - 3) < 1)\n",
    WRONG,
    "the same, as a class",
)
for name, body in {
    "assertEqual": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n",
    "settrace": "import sys\nsys.settrace(lambda *a: None)\n",
    "SystemExit": "raise SystemExit(0)\n",
    "_exit": "import os\nos._exit(0)\n",
    "counter module": "from magicrl.verifiers.code import testrun\ntestrun.run = lambda *a, **k: None\n",
    "modules": "import sys, types\nfor n in ('solution', 'unittest', 'tests', '__main__'):\n    sys.modules[n] = types.ModuleType(n)\n",
    "result channel": 'import os\nfor fd in range(3, 256):\n    try: os.write(fd, b\'{"said": "held", "asserted": 9, "called": 9}\\n\')\n    except OSError: pass\n',
    "loader": "import unittest\nunittest.TestLoader.loadTestsFromTestCase = lambda *a: unittest.TestSuite()\n",
    "mock ANY": "from unittest.mock import ANY\n",
}.items():
    _probe(
        f"hostile {name}",
        body + ("def add(a, b): return ANY\n" if name == "mock ANY" else BAD_ADD),
        UNIT,
        WRONG,
        "no way around the tests",
    )
_probe(
    "hostile exception class",
    "class EmptyError(AssertionError, metaclass=type('M', (type,), {'__instancecheck__': lambda *a: True})): pass\ndef f(x): raise EmptyError",
    "import pytest\ndef test_f():\n    with pytest.raises(ValueError): f(1)\n",
    WRONG,
    "the program's class is no ValueError",
)
_probe(
    "hostile mock settings",
    "import random\ndef f():\n    random.randint.configure_mock(assert_called_with=lambda *a: None)\n    random.randint.assert_called_with = lambda *a: None\n    return 4",
    """
    import unittest
    from unittest.mock import patch
    class T(unittest.TestCase):
        @patch("random.randint", return_value=4)
        def test(self, m):
            self.assertEqual(f(), 4)
            m.assert_called_with(1, 6)
    """,
    WRONG,
    "the program may call a mock, not set it up",
)
_probe(
    "hostile reach through a callback",
    "def f(g):\n    g.__globals__['__builtins__']['__counted__'] = 1\n    return g.__globals__\n",
    """
    import unittest
    class T(unittest.TestCase):
        def test(self): self.assertEqual(f(lambda x: x), 3)
    """,
    WRONG,
    "only calls cross",
)

# --- checkers --------------------------------------------------------------------------------------------------------
_INT = {"inputs": ["1"], "outputs": ["5"]}
_probe(
    "checker crashes always",
    "print(5)",
    {**_INT, "checker": "def check(i, o, a):\n    return int(o) / 0 == 1"},
    NOT,
    "it crashes on the expected output",
)
_probe(
    "checker crashes always, other output",
    "print(6)",
    {**_INT, "checker": "def check(i, o, a):\n    return int(o) / 0 == 1"},
    NOT,
    "the same",
)
_probe(
    "checker crashes on bad output",
    "print('x')",
    {**_INT, "checker": "def check(i, o, a):\n    return int(o) == int(a)"},
    WRONG,
    "the output is no integer",
)
_probe(
    "checker asserts and returns nothing",
    "print(5)",
    {**_INT, "checker": "def check(i, o, a):\n    assert int(o) == int(a)"},
    NOT,
    "None is no verdict",
)
_probe(
    "checker never ends",
    "print(5)",
    {**_INT, "checker": "def check(i, o, a):\n    while True: pass"},
    NOT,
    "nor on the expected output",
)
_probe(
    "checker undefined name",
    "print(5)",
    {**_INT, "checker": "def check(i, o, a):\n    return oops"},
    NOT,
    "the checker's own name",
)
_probe(
    "checker and a number of 4 MB",
    "print('7' * 4_000_000)",
    {**_INT, "checker": "def check(i, o, a):\n    return int(o) == int(a)"},
    WRONG,
    "the digits are capped",
)
_probe(
    "checker and a flood",
    "print('7 ' * 1_900_000)",
    {**_INT, "checker": "def check(i, o, a):\n    return list(map(int, o.split())) == [5]"},
    WRONG,
    "",
)
_probe(
    "checker right",
    "print(5.0)",
    {**_INT, "checker": "def check(i, o, a):\n    return float(o) == float(a)"},
    RIGHT,
    "",
)

# --- the second set, written when the first 113 were right --------------------------------------------------------------
_probe(
    "evaluates its own text",
    "def f(s):\n    return 3",
    "for e in ('1 + 2', 'max(3, 1)'):\n    assert f(e) == eval(e)\n",
    RIGHT,
    "an expression of literals",
)
_probe(
    "hostile text to evaluate",
    'def f(n):\n    return \'__import__("os").write(205, b"called\\\\n{}") or 9\'',
    "for n in (1, 2):\n    assert eval(f(n)) == 9\n",
    NOT,
    "what the program wrote is never executed beside the tests",
)
_probe(
    "hostile text with open",
    'def f(n):\n    return \'open(205, "w").write("x")\'',
    "for n in (1, 2):\n    assert eval(f(n)) == 1\n",
    NOT,
    "the same",
)
_probe(
    "hostile pickle",
    "import os\nclass P:\n    def __reduce__(self): return (os._exit, (0,))\nimport pickle\n"
    "def f(path):\n    open(path, 'wb').write(pickle.dumps(P()))",
    """
    import pickle, tempfile, os
    def test_f():
        path = os.path.join(tempfile.mkdtemp(), "x")
        f(path)
        assert pickle.load(open(path, "rb")) == [1]
    """,
    NOT,
    "no class but those of plain data is unpickled",
)
_probe(
    "honest pickle",
    "import pickle\ndef f(path):\n    pickle.dump([1, {'a'}], open(path, 'wb'))",
    """
    import pickle, tempfile, os
    def test_f():
        path = os.path.join(tempfile.mkdtemp(), "x")
        f(path)
        assert pickle.load(open(path, "rb")) == [1, {"a"}]
    """,
    RIGHT,
    "plain data",
)
_probe(
    "hostile skip",
    "import unittest\ndef f(x): raise unittest.SkipTest('x')",
    """
    import unittest
    class T(unittest.TestCase):
        def test_a(self): self.assertEqual(f(1), 1)
        def test_b(self): self.assertEqual(1, 1)
    """,
    WRONG,
    "a program does not skip tests",
)
_probe(
    "hostile pytest skip",
    "try:\n    import pytest\n    Skip = pytest.skip.Exception\nexcept ImportError:\n    Skip = BaseException\ndef f(x): raise Skip('x')",
    "def test_f():\n    assert f(1) == 1\n",
    WRONG,
    "the same",
)
_probe(
    "hostile exit where an error is expected",
    "import os\ndef f(x): os._exit(0)",
    """
    import pytest
    def test_f():
        with pytest.raises(Exception): f(1)
    def test_g():
        try: f(1)
        except: pass
        assert True
    """,
    WRONG,
    "the end of the program is no exception",
)
_probe(
    "expects SystemExit",
    "import sys\ndef main(): sys.exit(2)",
    """
    import pytest
    def test_main():
        with pytest.raises(SystemExit) as left: main()
        assert left.value.code == 2
    """,
    RIGHT,
    "an exception like others",
)
_probe(
    "SystemExit", "def f(x): raise SystemExit(0)", "for n in (1, 2):\n    assert f(n) == n\n", WRONG, "the program's"
)
_probe(
    "hostile length",
    EQUAL + "    def __len__(self): return 3\ndef f(n): return E()",
    _check("for n in (1, 2):\n    assert candidate(n) == [n] * 3"),
    WRONG,
    "no list",
)
_probe(
    "program kills the other process",
    "import os, signal\ndef f(n):\n    for pid in range(2, 400):\n        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass\n    return n + 1",
    "for n in (1, 2):\n    assert f(n) == n\n",
    WRONG,
    "signals reach nobody else",
)
_probe(
    "program floods the channel",
    "def f(n): return 'x' * 20_000_000",
    "for n in (1, 2):\n    assert f(n) == n\n",
    WRONG,
    "",
)
_probe(
    "program never ends",
    "def f(n):\n    while True: pass",
    "for n in (1, 2):\n    assert f(n) == n\n",
    WRONG,
    "its own time",
)
_probe("tests never end", ADD, "while True: pass\nassert add(1, 2) == 3\n", NOT, "nothing of the program was used")
_probe(
    "named tuple",
    "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
    "for _ in range(2):\n    p = f()\n    assert p == (1, 2) and p.x == 1\n",
    RIGHT,
    "fields cross",
)
_probe(
    "dataclass",
    "from dataclasses import dataclass\n@dataclass\nclass Item:\n    name: str\n    price: float = 1.0\ndef cheapest(items): return min(items, key=lambda i: i.price)",
    "a, b = Item('a', 3.0), Item('b', 2.0)\nassert cheapest([a, b]) == b\nassert cheapest([a, b]).name == 'b'\nassert cheapest([a, b]) is not None\n",
    RIGHT,
    "objects of the program in lists",
)
_probe(
    "enum",
    "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef pick(n): return Color.RED if n else Color.BLUE",
    "assert pick(1) == Color.RED\nassert pick(0) != Color.RED\nassert pick(1).name == 'RED'\n",
    RIGHT,
    "members are equal to themselves",
)
_probe(
    "exception attributes",
    "class TooBig(ValueError):\n    def __init__(self, n):\n        super().__init__(f'{n} is too big')\n        self.n = n\ndef f(n):\n    if n > 3: raise TooBig(n)\n    return n",
    """
    import pytest
    def test_f():
        with pytest.raises(TooBig) as caught: f(5)
        assert caught.value.n == 5 and str(caught.value) == "5 is too big"
        with pytest.raises(ValueError): f(6)
    """,
    RIGHT,
    "attributes and base classes of the program's exception",
)
_probe(
    "context manager",
    "class Timer:\n    def __enter__(self):\n        self.on = True\n        return self\n    def __exit__(self, *a): self.on = False",
    "t = Timer()\nwith t as u:\n    assert u.on is True\nassert t.on is False\n",
    RIGHT,
    "",
)
_probe(
    "decorator",
    "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a): return 2 * f(*a)\n    return g",
    "@twice\ndef three(): return 3\nassert three() == 6\n",
    RIGHT,
    "a function of the tests wrapped by the program",
)
_probe(
    "callbacks counted",
    "def retry(f, n):\n    for _ in range(n):\n        try: return f()\n        except ValueError: pass\n    raise RuntimeError('no')",
    """
    import pytest
    def test_retry():
        calls = []
        def flaky():
            calls.append(1)
            if len(calls) < 3: raise ValueError("x")
            return "ok"
        assert retry(flaky, 5) == "ok" and len(calls) == 3
        with pytest.raises(RuntimeError): retry(lambda: int("x"), 2)
    """,
    RIGHT,
    "exceptions of the tests' own functions reach the program",
)
_probe(
    "mock side effect",
    "import time\ndef wait(n):\n    time.sleep(n)\n    return 'done'",
    """
    from unittest import mock
    def test_wait():
        with mock.patch("time.sleep") as sleep:
            assert wait(100) == "done"
            sleep.assert_called_once_with(100)
    """,
    RIGHT,
    "",
)
_probe(
    "patch of the program's own helper",
    "def helper(): return 1\ndef f(): return helper() + 1",
    """
    from unittest.mock import patch
    import solution
    def test_f():
        with patch("solution.helper", return_value=10): assert solution.f() == 11
        assert solution.f() == 2
        with patch.object(solution, "helper", lambda: 20): assert solution.f() == 21
        assert solution.f() == 2
    """,
    RIGHT,
    "",
)
_probe(
    "environment",
    "import os\ndef f(): return os.environ.get('MODE', 'none') + os.getenv('MODE', 'none')",
    """
    import os
    from unittest.mock import patch
    def test_f(monkeypatch):
        assert f() == "nonenone"
        monkeypatch.setenv("MODE", "x")
        assert f() == "xx"
    def test_g():
        with patch.dict(os.environ, {"MODE": "y"}): assert f() == "yy"
        assert f() == "nonenone"
    """,
    RIGHT,
    "",
)
_probe(
    "several inputs",
    "def f():\n    return sum(int(input()) for _ in range(2))",
    """
    from unittest.mock import patch
    def test_f():
        with patch("builtins.input", side_effect=["1", "2"]): assert f() == 3
    """,
    RIGHT,
    "",
)
_probe(
    "patched stdin",
    "import sys\ndef f():\n    n = int(input())\n    return n + sum(map(int, sys.stdin.read().split()))",
    """
    import io
    def test_f(monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO("1\\n2 3\\n"))
        assert f() == 6
    """,
    RIGHT,
    "",
)
_probe(
    "redirected output",
    "def f(n):\n    for i in range(n): print(i)",
    """
    import io, contextlib
    out = io.StringIO()
    with contextlib.redirect_stdout(out): f(3)
    assert out.getvalue() == "0\\n1\\n2\\n"
    """,
    RIGHT,
    "",
)
_probe(
    "tmp_path",
    "import json\ndef save(path, data):\n    path.parent.mkdir(exist_ok=True) if hasattr(path, 'parent') else None\n    open(path, 'w').write(json.dumps(data))\n",
    """
    import json
    def test_save(tmp_path):
        save(str(tmp_path / "a.json"), {"x": [1]})
        assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1]}
    """,
    RIGHT,
    "",
)
_probe(
    "autouse fixture and class scope",
    STACK,
    """
    import pytest
    class TestStack:
        @pytest.fixture(autouse=True)
        def make(self): self.s = Stack()
        @pytest.mark.parametrize("n", range(3))
        @pytest.mark.parametrize("m", [1, 2])
        def test_len(self, n, m):
            for _ in range(n * m): self.s.push(n)
            assert len(self.s) == n * m
    """,
    RIGHT,
    "",
)
_probe(
    "numpy array",
    "import numpy as np\ndef f(n): return np.arange(n) * 2.0",
    """
    import numpy as np, unittest
    class T(unittest.TestCase):
        def test(self):
            np.testing.assert_array_equal(f(3), np.array([0.0, 2.0, 4.0]))
            self.assertEqual(f(2).shape, (2,))
            self.assertIsInstance(f(2), np.ndarray)
    """,
    RIGHT,
    "an array arrives as one",
)
_probe("bool of a container", STACK, "s = Stack()\nassert not s\ns.push(1)\nassert s\n", RIGHT, "asked anew each time")
_probe("import star", ADD, "from solution import *\ndef test_a():\n    assert add(1, 2) == 3\n", RIGHT, "")
_probe(
    "candidate handed on",
    "def f(x): return x * x",
    _check("assert list(map(candidate, [1, 2])) == [1, 4]\nassert sum(candidate(x) for x in range(3)) == 5"),
    RIGHT,
    "",
)
_probe(
    "wrong base exception",
    "class Mine(Exception): pass\ndef f(x): raise Mine('x')",
    """
    import unittest
    class T(unittest.TestCase):
        def test(self):
            with self.assertRaises(ValueError): f(1)
    """,
    WRONG,
    "",
)
_probe(
    "fixture undefined name",
    ADD,
    "import pytest\n@pytest.fixture\ndef n(): return undefined_n\ndef test_a(n):\n    assert add(n, 1) == 3\n",
    NOT,
    "the fixture's own name",
)
_probe(
    "assertion helper",
    ADD,
    "def expect(found, wanted):\n    assert found == wanted, f'{found} != {wanted}'\nexpect(add(1, 2), 3)\nexpect(add(2, 2), 4)\n",
    RIGHT,
    "",
)
_probe(
    "runner by hand",
    ADD,
    "def test_a():\n    assert add(1, 2) == 3\ndef run():\n    test_a()\nif __name__ == '__main__':\n    run()\n",
    RIGHT,
    "",
)
_probe(
    "leetcode solution class",
    "class Solution:\n    def twice(self, x): return 2 * x",
    {
        "test_code": "def check(candidate):\n    for x in (1, 2):\n        assert candidate(x) == 2 * x\n",
        "entry_point": "Solution().twice",
    },
    RIGHT,
    "",
)
_probe(
    "leetcode method by name",
    "class Solution:\n    def twice(self, x): return 2 * x",
    _check("for x in (1, 2):\n    assert candidate(x) == 2 * x", "twice"),
    RIGHT,
    "",
)
_probe(
    "subclass of a program's class",
    "class Shape:\n    def area(self): raise NotImplementedError\ndef total(shapes): return sum(s.area() for s in shapes)",
    "class Square:\n    def __init__(self, n): self.n = n\n    def area(self): return self.n * self.n\nassert total([Square(2), Square(3)]) == 13\n",
    RIGHT,
    "objects of the tests used by the program",
)
_probe(
    "mocked open",
    "def f(path):\n    with open(path) as file:\n        return [line.strip() for line in file]",
    """
    from unittest.mock import patch, mock_open
    def test_f():
        with patch("builtins.open", mock_open(read_data="a\\nb\\n")) as opened:
            assert f("x.txt") == ["a", "b"]
        opened.assert_called_once_with("x.txt")
    """,
    RIGHT,
    "a mock of a built-in function, iterated by the program",
)
_probe(
    "mocked print and json",
    "import json\ndef f(x):\n    print('got', x)\n    return json.dumps(x)",
    """
    from unittest.mock import patch
    def test_f():
        with patch("builtins.print") as shown, patch("json.dumps", return_value="J"):
            assert f(1) == "J"
        shown.assert_called_once_with("got", 1)
    """,
    RIGHT,
    "functions that the channel itself uses",
)
_probe(
    "threads",
    "import threading\nclass Counter:\n    def __init__(self):\n        self.n = 0\n        self.lock = threading.Lock()\n    def add(self):\n        with self.lock: self.n += 1",
    """
    import threading
    def test_counter():
        c = Counter()
        threads = [threading.Thread(target=lambda: [c.add() for _ in range(20)]) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert c.n == 80
    """,
    RIGHT,
    "calls of several threads do not mix",
)
_probe(
    "hostile np",
    "class np:\n    @staticmethod\n    def allclose(*a): return True\nimport numpy\ndef f(x): return 0",
    "import numpy\nfor x in (1, 2):\n    assert numpy.allclose(f(x), x)\n",
    WRONG,
    "the tests' own import",
)
_probe(
    "forgotten import",
    "import numpy as np\ndef f(x): return x",
    _check("assert np.allclose(candidate(1), 1)"),
    NOT,
    "a module that the tests do not import",
)
_probe(
    "tests' class in __main__",
    ADD,
    "import pickle\nclass Box: pass\ndef test_a():\n    import __main__\n    assert __main__.Box is Box and __main__.add(1, 2) == 3\n",
    RIGHT,
    "",
)
_probe(
    "hostile equality with numbers",
    "class E:\n    def __eq__(self, o): return isinstance(o, int)\ndef f(x): return E()",
    "for x in (1, 2):\n    assert f(x) == x\n",
    WRONG,
    "an object equals no value of the tests'",
)
_probe(
    "hostile equality of objects",
    VECTOR.replace("return isinstance(other, Vector) and", "return True or"),
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)\nassert repr(Vector(1, 2)) == 'Vector(1, 2)'\n",
    WRONG,
    "it equals a stranger too",
)
_probe(
    "hostile exit, swallowed",
    "import os\ndef f(x): os._exit(0)",
    "def test_g():\n    try: f(1)\n    except: pass\n    assert True\n",
    WRONG,
    "the program is gone, whatever the tests make of it",
)
_probe(
    "checker of values crashes always",
    "def f(): return 5",
    {"fn_name": "f", "inputs": [[]], "outputs": [5], "checker": "def check(i, o, a):\n    return o['x'] == a"},
    NOT,
    "the output is the expected one",
)
_probe(
    "assertLogs",
    "import logging\ndef f(): logging.warning('x')",
    """
    import unittest
    class T(unittest.TestCase):
        def test(self):
            with self.assertLogs(level="WARNING"): f()
    """,
    NOT,
    "log records stay in the program's process",
)
_probe(
    "pytest.warns",
    "import warnings\ndef f(): warnings.warn('x')",
    "import pytest\ndef test_f():\n    with pytest.warns(UserWarning): f()\n",
    NOT,
    "so do warnings",
)
_probe(
    "setUpModule and assertRaisesRegex",
    "def f(x):\n    raise KeyError(f'no {x}')",
    """
    import unittest
    def setUpModule():
        global wanted
        wanted = "no 1"
    class T(unittest.TestCase):
        def test(self):
            with self.assertRaisesRegex(KeyError, wanted): f(1)
            self.assertRaises(LookupError, f, 2)
    """,
    RIGHT,
    "module fixtures; a base class of the exception",
)
_probe(
    "asserts on plain data of a class",
    STACK,
    """
    import unittest, copy
    class T(unittest.TestCase):
        def test(self):
            s = Stack()
            for n in range(3): s.push(n)
            self.assertListEqual(s.items, [0, 1, 2])
            self.assertEqual([s.pop() for _ in range(len(s))], [2, 1, 0])
            self.assertFalse(s)
            self.assertTrue(hasattr(s, "push") and not hasattr(s, "peek"))
            self.assertIsNone(s.push(1))
            self.assertNotIsInstance(s, list)
            self.assertIsNot(s, None)
    """,
    RIGHT,
    "attributes that are missing are missing",
)
_probe(
    "static and class methods, properties",
    "class C:\n    n = 0\n    def __init__(self, v): self._v = v; C.n += 1\n    @property\n    def v(self): return self._v\n    @v.setter\n    def v(self, x):\n        if x < 0: raise ValueError('neg')\n        self._v = x\n    @classmethod\n    def make(cls): return cls(5)\n    @staticmethod\n    def twice(x): return 2 * x",
    """
    import pytest
    def test_c():
        c = C(1)
        c.v = 3
        assert c.v == 3 and C.make().v == 5 and C.twice(4) == 8 and C.n == 2
        with pytest.raises(ValueError): c.v = -1
        with pytest.raises(AttributeError): c.w
    """,
    RIGHT,
    "",
)
_probe(
    "sorting objects of the program",
    "import functools\n@functools.total_ordering\nclass P:\n    def __init__(self, n): self.n = n\n    def __eq__(self, o): return isinstance(o, P) and self.n == o.n\n    def __lt__(self, o): return self.n < o.n\n    def __hash__(self): return hash(self.n)",
    """
    def test_p():
        assert [p.n for p in sorted([P(3), P(1), P(2)])] == [1, 2, 3]
        assert max(P(1), P(5)).n == 5
        assert len({P(1), P(1), P(2)}) == 2
        assert P(2) >= P(1) and not P(1) > P(2)
    """,
    RIGHT,
    "",
)
