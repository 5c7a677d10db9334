"""The value of a formula at a point: exactly where it is rational, else to many digits.

Real evaluation is real throughout: an even root of a negative number is undefined, never complex, so that an
identity that holds only on a branch is not taken for one. Sizes are bounded before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from magicrl.verifiers.maths.expression import Expr

Value = Any
"""`fractions.Fraction` while exact, else an mpmath number."""

_EXACT_BITS = 6000
_MOST_EXPONENT_DIGITS = 30
_MOST_ARGUMENT = 10**12
_MOST_TERMS = 500
_MOST_ZETA = 100


class UndefinedError(Exception):
    """The formula has no (real) value here."""


class OutOfReachError(Exception):
    """Too large to be computed, or not of a kind that has a value."""


class Evaluator:
    """Evaluates formulas with so many decimal digits; ``logs`` says what a bare ``log`` is (e or 10)."""

    def __init__(self, digits: int, *, real: bool, log_base: int = 0) -> None:
        self.context = mpmath.MPContext()
        self.context.dps = digits
        self._real = real
        self._log_base = log_base

    def value(self, tree: Expr, point: Mapping[str, Value]) -> Value:
        """The value of ``tree`` where its symbols have the values of ``point``.

        Raises:
            UndefinedError: division by zero, a root or logarithm outside its domain.
            OutOfReachError: too large, or infinite.
        """
        if tree.op == "num":
            return tree.value
        if tree.op == "sym":
            return point[tree.name]
        if tree.op == "const":
            return self._constant(tree.name)
        if tree.op == "series":
            return self._checked(self._series(tree, point))
        args = [self.value(part, point) for part in tree.args]
        try:
            result = self._apply(tree, args)
        except (ZeroDivisionError, ValueError) as error:
            raise UndefinedError from error
        except (OverflowError, MemoryError, self.context.NoConvergence) as error:
            raise OutOfReachError from error
        return self._checked(result)

    def number(self, value: Value) -> Any:
        """``value`` as an mpmath number."""
        if isinstance(value, Fraction):
            return self.context.mpf(value.numerator) / value.denominator
        return value

    def _checked(self, result: Value) -> Value:
        if isinstance(result, Fraction):
            if result.numerator.bit_length() + result.denominator.bit_length() > _EXACT_BITS:
                return self.number(result)
            return result
        if self.context.isnan(result) or self.context.isinf(result):
            raise UndefinedError
        if isinstance(result, self.context.mpc):
            if result.imag == 0:
                return result.real
            if self._real:
                raise UndefinedError
        return result

    def _constant(self, name: str) -> Value:
        if name == "pi":
            return +self.context.pi
        if name == "e":
            return +self.context.e
        if name == "i" and not self._real:
            return self.context.j
        raise (UndefinedError if name == "i" else OutOfReachError)

    def _apply(self, tree: Expr, args: list[Value]) -> Value:
        if tree.op == "add":
            return self._sum(args)
        if tree.op == "neg":
            return -args[0]
        if tree.op == "mul":
            return self._product(args)
        if tree.op == "div":
            if args[1] == 0:
                raise UndefinedError
            return self._quotient(args[0], args[1])
        if tree.op == "pow":
            return self._power(args[0], args[1])
        if tree.op == "apply":
            return self._unknown(tree.name, args)
        if tree.op == "fn":
            return self._function(tree.name, args)
        raise OutOfReachError

    def _series(self, tree: Expr, point: Mapping[str, Value]) -> Value:
        """A sum or product over the whole numbers between two bounds; an empty one only right below the first."""
        low, high = (self.value(bound, point) for bound in tree.args[:2])
        kind, name = tree.name.split()
        for bound in (low, high):
            if not isinstance(bound, Fraction) or bound.denominator != 1:
                raise UndefinedError
        if high < low - 1:
            raise UndefinedError
        if high - low > _MOST_TERMS:
            raise OutOfReachError
        total: Value = Fraction(kind == "prod")
        for place in range(int(low), int(high) + 1):
            term = self.value(tree.args[2], {**point, name: Fraction(place)})
            total = self._sum([total, term]) if kind == "sum" else self._product([total, term])
            total = self._checked(total)
        return total

    def _sum(self, args: list[Value]) -> Value:
        total = args[0]
        for part in args[1:]:
            exact = isinstance(total, Fraction) and isinstance(part, Fraction)
            total = total + part if exact else self.number(total) + self.number(part)
        return total

    def _product(self, args: list[Value]) -> Value:
        total = args[0]
        for part in args[1:]:
            exact = isinstance(total, Fraction) and isinstance(part, Fraction)
            total = total * part if exact else self.number(total) * self.number(part)
        return total

    def _quotient(self, top: Value, bottom: Value) -> Value:
        if isinstance(top, Fraction) and isinstance(bottom, Fraction):
            return top / bottom
        return self.number(top) / self.number(bottom)

    def _power(self, base: Value, exponent: Value) -> Value:
        if isinstance(exponent, Fraction):
            if base == 0 and exponent <= 0:
                raise UndefinedError
            if exponent.denominator == 1 and isinstance(base, Fraction):
                bits = max(base.numerator.bit_length(), base.denominator.bit_length())
                if abs(exponent.numerator) * bits <= _EXACT_BITS:
                    return base**exponent.numerator
            if exponent.denominator != 1:
                return self._root(self._power(base, Fraction(exponent.numerator)), exponent.denominator)
            if exponent.numerator.bit_length() > 3 * _MOST_EXPONENT_DIGITS:
                raise OutOfReachError
            return self._bounded_power(self.number(base), exponent.numerator)
        if base == 0:
            raise UndefinedError
        if self._real and base < 0:
            raise UndefinedError
        return self._bounded_power(self.number(base), exponent)

    def _bounded_power(self, base: Any, exponent: Any) -> Any:
        size = self.context.log(abs(base)) * (exponent if isinstance(exponent, int) else abs(exponent)) if base else 0
        if abs(size) > self.context.mpf(10) ** _MOST_EXPONENT_DIGITS:
            raise OutOfReachError
        return base**exponent

    def _root(self, base: Value, degree: Value) -> Value:
        """Real root: odd roots of negative numbers are negative. Complex: the principal one."""
        if not (isinstance(degree, Fraction | int) and degree > 0 and Fraction(degree).denominator == 1):
            return self._power(base, self._quotient(Fraction(1), degree))
        count = int(degree)
        if count > 10**6:
            return self._power(self.number(base), 1 / self.context.mpf(count))
        if isinstance(base, Fraction) and base >= 0:
            exact = _exact_root(base, count)
            if exact is not None:
                return exact
        value = self.number(base)
        if self._real and value < 0:
            if count % 2 == 0:
                raise UndefinedError
            return -self.context.root(-value, count)
        return self.context.root(value, count)

    def _function(self, name: str, args: list[Value]) -> Value:
        first = args[0]
        if name == "root":
            return self._root(first, args[1])
        if name == "abs":
            return abs(first)
        if name in ("max", "min", "gcd", "lcm"):
            return self._of_several(name, args)
        if name == "mod":
            return self._sum([first, -self._product([args[1], self._rounded("floor", self._quotient(first, args[1]))])])
        if name == "zeta":
            if len(args) != 1 or first == 1 or abs(first) > _MOST_ZETA:
                raise UndefinedError
            return self.context.zeta(self.number(first))
        if name in ("floor", "ceil"):
            return self._rounded(name, first)
        if name in ("factorial", "factorial2", "binomial"):
            return self._gamma(name, args)
        if name in ("ln", "log", "lg", "logb"):
            return self._logarithm(name, args)
        return self._elementary(name, self.number(first))

    def _unknown(self, name: str, args: list[Value]) -> Any:
        """A function of which only the name is known: some function, another for every name."""
        seed = sum(ord(char) * 31**position for position, char in enumerate(name)) % 997
        total = self.context.mpf(seed) / 7
        for position, arg in enumerate(args):
            if abs(arg) > _MOST_ARGUMENT:
                raise OutOfReachError
            total += self.context.cos(self.number(arg) * (position + 2) + seed) * (position + 3)
        return total

    def _of_several(self, name: str, args: list[Value]) -> Value:
        if name in ("max", "min"):
            if any(isinstance(arg, self.context.mpc) for arg in args):
                raise UndefinedError
            return max(args, key=self.number) if name == "max" else min(args, key=self.number)
        if any(not isinstance(arg, Fraction) or arg.denominator != 1 for arg in args):
            raise UndefinedError
        whole = [int(arg) for arg in args]
        return Fraction(math.gcd(*whole) if name == "gcd" else math.lcm(*whole))

    def _rounded(self, name: str, value: Value) -> Fraction:
        if not isinstance(value, Fraction):
            if not isinstance(value, self.context.mpf):
                raise UndefinedError
            if abs(value) > _MOST_ARGUMENT:
                raise OutOfReachError
            nearest = self.context.nint(value)
            if value != nearest and abs(value - nearest) < self.context.mpf(10) ** (-self.context.dps // 2):
                raise UndefinedError  # on the edge: which side is not known
            return Fraction(int(self.context.floor(value) if name == "floor" else self.context.ceil(value)))
        return Fraction(value.__floor__() if name == "floor" else value.__ceil__())

    def _gamma(self, name: str, args: list[Value]) -> Value:
        if any(abs(arg) > _MOST_ARGUMENT for arg in args):
            raise OutOfReachError
        first = args[0]
        whole = all(isinstance(arg, Fraction) and arg.denominator == 1 for arg in args)
        if name == "factorial2":
            if not whole or first < 0 or first > 500:
                raise UndefinedError
            return Fraction(math.prod(range(int(first), 0, -2)))
        if name == "factorial":
            if whole and first < 0:
                raise UndefinedError
            if whole and first <= 500:
                return Fraction(math.factorial(int(first)))
            return self.context.gamma(self.number(first) + 1)
        if whole and 0 <= args[1] <= first <= 500:
            return Fraction(math.comb(int(first), int(args[1])))
        return self.context.binomial(self.number(first), self.number(args[1]))

    def _logarithm(self, name: str, args: list[Value]) -> Any:
        value = self.number(args[0])
        if value == 0 or (self._real and value < 0):
            raise UndefinedError
        if name == "ln" or (name == "log" and self._log_base == 0):
            return self.context.log(value)
        base = self.number(args[1]) if name == "logb" else self.context.mpf(10)
        if base in (0, 1) or (self._real and base < 0):
            raise UndefinedError
        return self.context.log(value) / self.context.log(base)

    def _elementary(self, name: str, value: Any) -> Any:
        """Trigonometric, hyperbolic and exponential functions, and their inverses."""
        if abs(value) > _MOST_ARGUMENT:
            raise OutOfReachError
        mp = self.context
        functions: dict[str, Callable[[Any], Any]] = {
            "sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc,
            "arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "arccot": mp.acot,
            "sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "coth": mp.coth, "exp": mp.exp,
            "arcsec": mp.asec, "arccsc": mp.acsc, "sech": mp.sech, "csch": mp.csch,
            "arsinh": mp.asinh, "arcosh": mp.acosh, "artanh": mp.atanh,
        }  # fmt: skip
        if name not in functions:
            raise OutOfReachError
        return functions[name](value)


def _exact_root(base: Fraction, count: int) -> Fraction | None:
    top, bottom = _integer_root(base.numerator, count), _integer_root(base.denominator, count)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, count: int) -> int | None:
    if value < 2:
        return value
    if value.bit_length() > 1000:
        return None
    guess = round(mpmath.mpf(value) ** (mpmath.mpf(1) / count)) if value.bit_length() < 50 else None
    if guess is None:
        low, high = 0, 1 << (value.bit_length() // count + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**count <= value else (low, middle - 1)
        guess = low
    return int(guess) if int(guess) ** count == value else None
