"""A calculator that the model may call in a turn; the result is the observation. A turn without a call is the last one.

Calls are read in two forms, several in one turn as well:

* ``<calc>473 + 285</calc>``;
* ``<tool_call>{"name": "calculator", "arguments": {"expression": "473 + 285"}}</tool_call>``, what chat models write
  (Qwen; SmolLM2 puts a list of calls between the tags), and what `Calculator.tools` lets a chat template ask for.

An expression is worked out exactly by a parser of its own (`calculate`), with limits on its length and on the size of
every number in it. What is wrong with a call is said in the observation. The problem's verifier judges the last turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from magicrl.environments.base import Step
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
"""Characters of one expression."""
_MAX_BRACKETS = 30
MAX_CALLS = 8
"""Calls that are answered in one turn."""
_MAX_BODY = 2000
_MAX_BITS = 200  # of numerator and denominator: 60 digits
_DIGITS = Context(prec=12)

_TAG = re.compile(r"<(/?)(tool_call|calc)>")
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\*\*|[-+*/^()])", re.ASCII)
_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "x": "*", "÷": "/", "−": "-", "·": "*"})
_APART = re.compile(r"(?<=\d) (?=[\d.])|(?<=\.) (?=\d)", re.ASCII)


class CalculationError(ValueError):
    """Why an expression has no value; its text is the observation."""


def calculate(expression: str) -> str:
    """The value of an expression: a whole number, or a decimal of at most 12 significant digits.

    Numbers (``1,250``, ``0.5``), ``+ - * /``, ``x`` as ``*``, powers with a whole exponent (``^`` or ``**``), brackets.

    Raises:
        CalculationError: it is no such expression, or goes over a limit.

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
    """Recursive descent over Fractions; limits on length and brackets bound its depth."""

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
        # to the right first, and the sign of an exponent belongs to it: 2 ^ -1
        exponent = self._signed()
        if exponent.denominator != 1 or (exponent < 0 and not base):
            raise CalculationError(SYNTAX if base else ZERO)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        # before it is worked out: 9 ^ 9 ^ 9 has more digits than a machine holds
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
    """The expressions that a turn asks for, in order; None for a call that cannot be read or is never closed.

    Calls within a ``<think>`` block are reasoning, not calls.

    Example:
        >>> read_calls('<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>')
        ['2+3']
    """
    text = answer_part(text, "auto") or ""
    found: list[str | None] = []
    opened: re.Match[str] | None = None
    # one pass over the tags, whatever a model wrote: a lazy pattern would look to the end of the text from each of them
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
    """The expressions of a JSON call, or of a list of them."""
    try:
        calls: Any = json.loads(body) if len(body) <= _MAX_BODY else None
    except (ValueError, RecursionError):  # brackets thousands deep
        calls = None
    for call in calls if isinstance(calls, list) and calls else [calls]:
        yield _expression(call)


def _expression(call: Any) -> str | None:
    """What a call in the form of chat models asks for; its arguments may be JSON in a string, as in OpenAI's API."""
    if not isinstance(call, dict) or call.get("name") != "calculator":
        return None
    arguments: Any = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    return expression if isinstance(expression, str) else None


def apart(text: str) -> str:
    r"""``text`` as whitespace-separated symbols, digits one by one: how tiny models with few symbols read numbers.

    Example:
        >>> apart("473 + 28 is \\boxed{501}.")
        '4 7 3 + 2 8 is \\boxed{ 5 0 1 } .'
    """
    return " ".join(re.findall(r"\\boxed\{|</?calc>|[^\W\d_]+|\S", text))


class Calculator:
    """The tool; metrics: ``calls`` (how many were made), ``call_errors``, ``called`` (1 where there was any).

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
        """The results of the turn's calls, a line each; without a call the turn is the last, for the verifier."""
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
