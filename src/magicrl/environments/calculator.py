"""A calculator that the model may call in a turn. The observation is the result. A turn without a call is the last one.

A turn may have several calls, in two forms:

* ``<calc>473 + 285</calc>``;
* ``<tool_call>{"name": "calculator", "arguments": {"expression": "473 + 285"}}</tool_call>``, the form of chat models
  (Qwen; SmolLM2 puts a list of calls between the tags), which chat templates describe from `Calculator.tools`.

A parser (`calculate`) evaluates expressions exactly, with limits on their length and on the size of every number. An
observation names the error of a call. The problem's verifier judges the last turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from magicrl.environments.base import Step
from magicrl.environments.packages import read_call
from magicrl.records import Problem
from magicrl_verifiers.extraction import answer_part

SYNTAX = "error: write numbers with + - * / ^ and ( )"
ZERO = "error: division by zero"
TOO_LARGE = "error: number too large"
TOO_LONG = "error: expression too long"
BAD_CALL = "error: no whole call of calculator with an expression"
TOO_MANY = "error: too many calls"
ERRORS = (SYNTAX, ZERO, TOO_LARGE, TOO_LONG, BAD_CALL, TOO_MANY)

MAX_EXPRESSION = 200
"""Most characters of one expression."""
_MAX_BRACKETS = 30
MAX_CALLS = 8
"""Most calls that are answered in one turn."""
_MAX_BODY = 2000
_MAX_BITS = 200  # of numerator and denominator: 60 digits
_DIGITS = Context(prec=12)

_TAG = re.compile(r"<(/?)(tool_call|calc)>")
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\*\*|[-+*/^()])", re.ASCII)
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "x": "*", "÷": "/", "−": "-", "·": "*"})
_APART = re.compile(r"(?<=\d) (?=[\d.])|(?<=\.) (?=\d)", re.ASCII)


class CalculationError(ValueError):
    """An expression without a value; the message is the observation."""


def calculate(expression: str) -> str:
    """Return the value of an expression: a whole number, or a decimal of at most 12 significant digits.

    Numbers (``1,250``, ``0.5``), ``+ - * /``, ``x`` as ``*``, powers with a whole exponent (``^`` or ``**``), brackets.

    Raises:
        CalculationError: it is no such expression, or exceeds a limit.

    Example:
        >>> calculate("(473 + 285) x 2"), calculate("1 / 3")
        ('1516', '0.333333333333')
    """
    if len(expression) > MAX_EXPRESSION or expression.count("(") > _MAX_BRACKETS:
        raise CalculationError(TOO_LONG)
    value = _Parser(_COMMA.sub("", expression.translate(_SIGNS))).value()
    if value.denominator == 1:
        return str(value.numerator)
    return f"{_DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(_DIGITS):f}"


class _Parser:
    """A recursive descent parser over fractions. Limits on length and brackets bound its depth."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        place, text = 0, text.rstrip()
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise CalculationError(SYNTAX)
            self._tokens.append(found[1])
            place = found.end()
        self._tokens.append("")
        self._at = 0

    def value(self) -> Fraction:
        result = self._sum()
        if self._tokens[self._at]:
            raise CalculationError(SYNTAX)
        return result

    def _take(self, *symbols: str) -> str | None:
        token = self._tokens[self._at]
        if token not in symbols:
            return None
        self._at += 1
        return token

    def _sum(self) -> Fraction:
        left = self._product()
        while sign := self._take("+", "-"):
            right = self._product()
            left = _small(left + right if sign == "+" else left - right)
        return left

    def _product(self) -> Fraction:
        left = self._signed()
        while sign := self._take("*", "/"):
            right = self._signed()
            if sign == "/" and not right:
                raise CalculationError(ZERO)
            left = _small(left * right if sign == "*" else left / right)
        return left

    def _signed(self) -> Fraction:
        if self._take("-"):
            return -self._signed()
        return self._signed() if self._take("+") else self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("^", "**"):
            return base
        # powers are right-associative, and an exponent may have a sign: 2 ^ -1
        exponent = self._signed()
        if exponent.denominator != 1 or (exponent < 0 and not base):
            raise CalculationError(SYNTAX if base else ZERO)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        # before the evaluation: 9 ^ 9 ^ 9 has more digits than a machine holds
        if abs(exponent) > _MAX_BITS or (bits - 1) * abs(exponent) > _MAX_BITS:
            raise CalculationError(TOO_LARGE)
        return _small(base ** int(exponent))

    def _atom(self) -> Fraction:
        token = self._tokens[self._at]
        self._at += bool(token)
        if token == "(":
            inside = self._sum()
            if not self._take(")"):
                raise CalculationError(SYNTAX)
            return inside
        if not token or token[0] not in "0123456789.":
            raise CalculationError(SYNTAX)
        return _small(Fraction(token))


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise CalculationError(TOO_LARGE)
    return value


def read_calls(text: str) -> list[str | None]:
    """Return the expressions of a turn's calls, in order; None for a call that is unreadable or never closed.

    Calls inside a ``<think>`` block do not count.

    Example:
        >>> read_calls('<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>')
        ['2+3']
    """
    text = answer_part(text, "auto") or ""
    found: list[str | None] = []
    opened: re.Match[str] | None = None
    # one pass over the tags: a lazy pattern would search to the end of the text from each of them
    for tag in _TAG.finditer(text):
        if not tag[1]:
            if opened is not None:
                found.append(None)
            opened = tag
        elif opened is not None and opened[2] == tag[2]:
            body = text[opened.end() : tag.start()]
            found.extend([body.strip()] if tag[2] == "calc" else _expressions(body))
            opened = None
    return found if opened is None else [*found, None]


def _expressions(body: str) -> Iterator[str | None]:
    """Yield the expressions of a JSON call or of a list of calls; None for one that is unreadable."""
    try:
        calls: Any = json.loads(body) if len(body) <= _MAX_BODY else None
    except (ValueError, RecursionError):  # brackets thousands deep
        calls = None
    for call in calls if isinstance(calls, list) and calls else [calls]:
        name, arguments = read_call(call) or ("", {})
        expression = arguments.get("expression") if name == "calculator" else None
        yield expression if isinstance(expression, str) else None


def apart(text: str) -> str:
    r"""Return ``text`` as symbols separated by spaces, digits one by one, for tiny models with small vocabularies.

    Example:
        >>> apart("473 + 28 is \\boxed{501}.")
        '4 7 3 + 2 8 is \\boxed{ 5 0 1 } .'
    """
    return " ".join(re.findall(r"\\boxed\{|</?calc>|[^\W\d_]+|\S", text))


class Calculator:
    """The tool, with the metrics ``calls`` (their number), ``call_errors`` and ``called`` (1 if there was a call).

    With ``extra["digits_apart"]`` numbers are read and written digit by digit (``4 7 3``), for tiny models.
    """

    tools: tuple[Mapping[str, Any], ...] = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Works out an arithmetic expression exactly.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "expression": {"type": "string", "description": "Numbers with + - * / ^ and brackets."}
                    },
                    "required": ["expression"],
                },
            },
        },
    )

    def reset(self, problem: Problem) -> None:
        """Begin the episode of ``problem``."""
        self._apart = problem.extra.get("digits_apart") is True
        self._calls = self._errors = 0

    def step(self, text: str) -> Step:
        """Return the results of the turn's calls, one per line. A turn without a call is the last one."""
        calls = read_calls(text)
        if not calls:
            used = {"calls": self._calls, "call_errors": self._errors, "called": self._calls > 0}
            return Step(done=True, metrics={name: float(value) for name, value in used.items()})
        lines = [self._answer(call) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            lines.append(TOO_MANY)
        self._calls += len(calls)
        self._errors += sum(line in ERRORS for line in lines)
        return Step(observation=apart("\n".join(lines)) if self._apart else "\n".join(lines))

    def _answer(self, expression: str | None) -> str:
        if expression is None:
            return BAD_CALL
        if self._apart:
            expression = _APART.sub("", expression)
        try:
            return calculate(expression)
        except CalculationError as error:
            return str(error)
