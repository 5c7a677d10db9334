"""Value of a formula at a point: an exact rational number, else a ball that contains it (Arb in python-flint).

Real evaluation is real in every step: an even root of a negative number is undefined, never complex, so that an
identity on one branch is not taken for an identity. If a ball is too wide for a decision, the value is unclear.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from flint import acb, arb, ctx, fmpq, fmpz

from magicrl_verifiers.maths.answers import Expr
from magicrl_verifiers.maths.literals import word_set

Value = fmpq | arb | acb
Point = Mapping[str, fmpq]

EXACT_BITS = 2 * 10**6
"""Longest exact numerator or denominator; a longer one becomes a ball, and is compared by its residues."""
MOST_BITS = 2**19
"""Highest precision of a ball."""
_MOST_WORK = 10**7
"""Most bits of all long fractions in one evaluation; a fraction of 10^6 bits takes a tenth of a second."""
_MOST_TERMS = 10_000
_MOST_FACTORIAL = 10**6
_MOST_CHOSEN = 1000
_MOST_ROOT = 10**6
_MOST_ZETA = 100
_LONG_EXPONENT = 10**4
_ZETA_BITS, _GAMMA_BITS = 4096, 16384
"""With more bits Arb needs over a tenth of a second for one value."""
_SHORT = 128


class UndefinedError(Exception):
    """The formula has no (real) value here."""


class UnclearError(Exception):
    """The ball is too wide, the number too long, or the formula has no value."""


class Enclosure:
    """Evaluator of formulas with a number of bits; ``log_base`` is the base of a bare ``log`` (0 for e, or 10).

    Attributes:
        spread: Sum of the bits by which values differ in size from 1: a difference may hide so far behind the point.
        rounded: Whether a rational number was too long to be kept exactly.
    """

    def __init__(self, bits: int, *, real: bool, log_base: int = 0) -> None:
        self.spread = 0
        self.rounded = False
        self._bits = bits
        self._real = real
        self._log_base = log_base
        self._work = 0

    def value(self, tree: Expr, point: Point) -> Value:
        """Return the value of ``tree`` at ``point``.

        Raises:
            UndefinedError: Division by zero, a root or logarithm outside its domain.
            UnclearError: With more bits there may be a value.
        """
        # the precision is global in FLINT
        ctx.prec = self._bits
        try:
            return self._value(tree, point)
        except (ZeroDivisionError, ValueError) as error:
            raise UndefinedError from error
        except (OverflowError, MemoryError, RecursionError) as error:
            raise UnclearError from error

    def _value(self, tree: Expr, point: Point) -> Value:
        if tree.op == "num":
            return self._checked(fmpq(tree.value.numerator, tree.value.denominator))
        if tree.op == "sym":
            return point[tree.name]
        if tree.op == "const":
            if tree.name == "pi":
                return arb.pi()
            if tree.name == "e":
                return arb.const_e()
            if tree.name == "i" and not self._real:
                return acb(0, 1)
            raise (UndefinedError if tree.name == "i" else UnclearError)
        if tree.op == "series":
            return self._series(tree, point)
        if tree.op == "cases":
            for value, condition in zip(tree.args[::2], tree.args[1::2], strict=True):
                if all(self._holds(bound, point) for bound in condition.args):
                    return self._value(value, point)
            raise UndefinedError
        args = [self._value(part, point) for part in tree.args]
        if tree.op == "add":
            return self._checked(reduce(lambda one, other: one + other, args))
        if tree.op == "mul":
            return self._checked(reduce(lambda one, other: one * other, args))
        if tree.op == "neg":
            return -args[0]
        if tree.op == "div":
            return self._checked(_over(args[0], args[1]))
        if tree.op == "pow":
            return self._checked(self._power(args[0], args[1]))
        if tree.op == "apply":
            return self._unknown(tree.name, args)
        if tree.op == "fn":
            if tree.name == "mod" and not isinstance(args[0], fmpq):
                # 2^{10^{30}} mod 7, without writing the power out
                modulus = _whole(args[1])
                if modulus <= 0:
                    raise UnclearError
                return fmpq(Residues(modulus).value(tree.args[0], point))
            return self._checked(self._function(tree.name, args))
        raise UnclearError

    def _checked(self, result: Value) -> Value:
        if isinstance(result, fmpq):
            height = result.height_bits()
            # short fractions hide nothing; long ones may differ by as little as 2^-(2 height)
            if height > _SHORT:
                self.spread = max(self.spread, 2 * height)
                # fractions are reduced at every step; for a whole number a sixteenth of its bits counts
                self._work += height if result.denominator != 1 else height // 16
                if height > EXACT_BITS or self._work > _MOST_WORK:
                    self.rounded = True
                    return arb(result)
            return result
        if not result.is_finite():
            raise UnclearError
        if isinstance(result, acb):
            # exactly real values stay real
            if result.imag == 0:
                result = result.real
            elif self._real:
                raise UndefinedError
        size = abs(result)
        if size > 0:
            # summed over all values, since a product adds the bits of its factors
            mantissa, exponent = size.mid().man_exp()
            self.spread += abs(mantissa.bit_length() + int(exponent))
        return result

    def _series(self, tree: Expr, point: Point) -> Value:
        """Return a sum or product over the whole numbers between two bounds; it may be empty, not reversed."""
        low, high = (_whole(self._value(bound, point)) for bound in tree.args[:2])
        kind, name = tree.name.split()
        if high < low - 1:
            raise UndefinedError
        if high - low > _MOST_TERMS:
            raise UnclearError
        total: Value = fmpq(kind == "prod")
        before = most = self.spread
        for place in range(low, high + 1):
            self.spread = before  # the largest spread of a term counts
            term = self._value(tree.args[2], {**point, name: fmpq(place)})
            total = self._checked(total + term if kind == "sum" else total * term)
            most = max(most, self.spread)
        self.spread = most
        return total

    def _holds(self, bound: Expr, point: Point) -> bool:
        margin = self._value(bound.args[0], point)
        if isinstance(margin, acb):
            raise UndefinedError
        # a ball that contains zero leaves the case open
        if margin > 0 or margin < 0:
            return bool(margin > 0)
        if margin == 0:
            return bound.name == "closed"
        raise UnclearError

    def _power(self, base: Value, exponent: Value) -> Value:
        if not isinstance(exponent, fmpq):
            if base == 0 or (self._real and not isinstance(base, acb) and base < 0):
                raise UndefinedError
            return _number(base, self._real) ** exponent
        if base == 0 and exponent <= 0:
            raise UndefinedError
        # the power first: (-8)^(2/3) is the cube root of 64, which is real
        if exponent.denominator != 1:
            return self._root(self._power(base, fmpq(exponent.numerator)), fmpq(exponent.denominator))
        whole = int(exponent.numerator)
        if not isinstance(base, fmpq):
            return base**whole
        if abs(whole) * base.height_bits() <= EXACT_BITS or base == 0 or abs(base) == 1:
            # for the bases 0, 1 and -1 only the parity of a long exponent matters
            return base ** (whole if abs(whole) <= EXACT_BITS else 2 + whole % 2)
        self.rounded = True
        return arb(base) ** whole

    def _root(self, base: Value, degree: Value) -> Value:
        """Return the real root, for odd degrees also of a negative number, or the principal complex one."""
        if not isinstance(degree, fmpq) or degree.denominator != 1 or not 0 < degree <= _MOST_ROOT:
            return self._power(base, _over(fmpq(1), _number(degree, self._real)))
        count = int(degree.numerator)
        if isinstance(base, fmpq) and base >= 0:
            # a rational root stays exact
            top, bottom = base.numerator.root(count), base.denominator.root(count)
            if fmpq(top, bottom) ** count == base:
                return fmpq(top, bottom)
        if isinstance(base, acb) or (not self._real and base < 0):
            return acb(base).sqrt() if count == 2 else acb(base) ** (acb(1) / count)
        ball = arb(base)
        if ball < 0:
            if count % 2 == 0:
                raise UndefinedError
            return -((-ball).root(count))
        if ball > 0 or count % 2 == 0:
            return ball.nonnegative_part().root(count)
        # the ball contains zero and the degree is odd: the root has either sign
        widest = ball.abs_upper().root(count)
        return (-widest).union(widest)

    def _function(self, name: str, args: list[Value]) -> Value:
        first = args[0]
        if name == "root":
            return self._root(first, args[1])
        if name == "abs":
            return abs(first)
        if name in ("max", "min"):
            return _extreme(name, args)
        if name in ("gcd", "lcm"):
            whole = [fmpz(_whole(arg)) for arg in args]
            return fmpq(reduce(fmpz.gcd if name == "gcd" else fmpz.lcm, whole))
        if name == "mod":
            return first - args[1] * _rounded("floor", _over(first, args[1]))
        if name in ("floor", "ceil"):
            return _rounded(name, first)
        if name in ("factorial", "factorial2", "binomial"):
            return self._gamma(name, args)
        if name in ("ln", "log", "lg", "logb"):
            return self._logarithm(name, args)
        if name == "zeta":
            if len(args) != 1 or first == 1 or not abs(first) <= _MOST_ZETA:
                raise UndefinedError
            self._at_most(_ZETA_BITS)
            return _number(first, self._real).zeta()
        return self._elementary(name, _number(first, self._real))

    def _unknown(self, name: str, args: list[Value]) -> Value:
        """Return the value of an unknown function: an arbitrary one that depends on the name."""
        seed = sum(ord(char) * 31**position for position, char in enumerate(name)) % 997
        total: Value = arb(seed) / 7
        for position, arg in enumerate(args):
            total += (_number(arg, self._real) * (position + 2) + seed).cos() * (position + 3)
        return self._checked(total)

    def _gamma(self, name: str, args: list[Value]) -> Value:
        first, second = args[0], args[-1]
        whole, chosen = _as_whole(first), _as_whole(second)
        if name == "factorial2":
            if whole is None or not 0 <= whole <= _MOST_TERMS:
                raise UndefinedError
            return fmpq(reduce(lambda total, factor: total * factor, range(whole, 0, -2), fmpz(1)))
        if name == "factorial":
            if whole is not None and whole < 0:
                raise UndefinedError
            if whole is not None and whole * whole.bit_length() <= EXACT_BITS:
                return fmpq(fmpz.fac_ui(fmpz(whole)))
            self.rounded = self.rounded or whole is not None
            self._at_most(_GAMMA_BITS)
            return (_number(first, self._real) + 1).gamma()
        if chosen is not None and isinstance(first, fmpq):
            if whole is not None and 0 <= chosen <= whole <= EXACT_BITS:
                return fmpq(fmpz.bin_uiui(whole, chosen))
            if chosen < 0 or (whole is not None and 0 <= whole < chosen):
                return fmpq(0)
            if chosen <= _MOST_CHOSEN:
                top = first
                return reduce(lambda total, at: total * (top - at) / (at + 1), range(chosen), fmpq(1))
        self._at_most(_GAMMA_BITS)
        above, below = _number(first, self._real), _number(second, self._real)
        return (above + 1).gamma() * (below + 1).rgamma() * (above - below + 1).rgamma()

    def _at_most(self, bits: int) -> None:
        if self._bits > bits:
            raise UnclearError

    def _logarithm(self, name: str, args: list[Value]) -> Value:
        base = args[1] if name == "logb" else fmpq(10)
        natural = name == "ln" or (name == "log" and self._log_base == 0)
        for arg in args:
            if arg == 0 or (self._real and not isinstance(arg, acb) and arg < 0):
                raise UndefinedError
        top = _number(args[0], self._real).log()
        if natural:
            return top
        if base == 1:
            raise UndefinedError
        quotient = top / _number(base, self._real).log()
        # log_2 8 is exactly 3 if 2^3 is 8: a ball around 3 would never equal it
        power = quotient.unique_fmpz() if isinstance(quotient, arb) else None
        if power is not None and isinstance(base, fmpq) and abs(power) * base.height_bits() <= EXACT_BITS:
            return fmpq(power) if base ** int(power) == args[0] else quotient
        return quotient

    def _elementary(self, name: str, value: arb | acb) -> Value:
        """Return trigonometric, hyperbolic and exponential functions, and their inverses."""
        if name in ("arcsec", "arccsc"):
            value, name = 1 / value, "arccos" if name == "arcsec" else "arcsin"
        if name in ("arcsin", "arccos") and isinstance(value, arb):
            if abs(value) > 1:
                raise UndefinedError
            # Arb's function has no value for a ball that reaches beyond 1
            side = (1 - value * value).nonnegative_part().sqrt()
            return arb.atan2(value, side) if name == "arcsin" else arb.atan2(side, value)
        if name == "arccot":
            return (1 / value).atan()
        if isinstance(value, arb) and ((name == "arcosh" and value < 1) or (name == "artanh" and abs(value) >= 1)):
            raise UndefinedError
        if name not in _ELEMENTARY:
            raise UnclearError
        if name in ("tanh", "coth"):  # these come very close to 1
            self.spread += 3 * int(abs(value).upper().min(arb(MOST_BITS)).ceil().unique_fmpz() or MOST_BITS)
        return getattr(value, _ELEMENTARY[name])()


_ELEMENTARY = {name: name for name in word_set("sin cos tan cot sec csc exp sinh cosh tanh coth sech csch")} | {
    "arctan": "atan", "arcsin": "asin", "arccos": "acos", "arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh",
}  # fmt: skip
"""Names of functions and of their methods in python-flint."""


class Residues:
    """Evaluator of long rational numbers modulo a number; ``order``: exponents may be reduced by it.

    Two numbers with different residues are different.
    """

    def __init__(self, modulus: int, order: int | None = None) -> None:
        self._modulus = modulus
        self._order = order

    def value(self, tree: Expr, point: Point) -> int:
        """Return the residue of a formula of whole numbers, their quotients and powers.

        Raises:
            UnclearError: The formula is another one, or a denominator has no inverse.
        """
        try:
            return self._value(tree, point) % self._modulus
        except ValueError as error:
            raise UnclearError from error

    def _value(self, tree: Expr, point: Point) -> int:
        if tree.op in ("add", "mul", "neg", "div"):
            args = [self._value(part, point) for part in tree.args]
            if tree.op == "neg":
                return -args[0]
            if tree.op == "div":
                return args[0] * pow(args[1], -1, self._modulus)
            if tree.op == "add":
                return sum(args)
            return reduce(lambda one, other: one * other % self._modulus, args)
        if tree.op == "pow":
            # exponents are exact, not modulo the primes
            exponent = _whole(Enclosure(_SHORT, real=True).value(tree.args[1], point))
            if self._order is not None:
                exponent %= self._order
            elif exponent.bit_length() > _LONG_EXPONENT:
                raise UnclearError
            return pow(self._value(tree.args[0], point), exponent, self._modulus)
        if tree.op == "fn" and tree.name == "factorial":
            count = _whole(Enclosure(_SHORT, real=True).value(tree.args[0], point))
            if 0 <= count <= _MOST_FACTORIAL:
                return int(fmpz.fac_ui(fmpz(count)) % self._modulus)
        exact = Enclosure(_SHORT, real=True).value(tree, point)
        if not isinstance(exact, fmpq):
            raise UnclearError
        # a quotient is a product with the inverse
        return int(exact.numerator % self._modulus) * pow(int(exact.denominator), -1, self._modulus)


def _number(value: Value, real: bool) -> arb | acb:
    """Return ``value`` as a real or complex ball."""
    if isinstance(value, acb):
        return value
    return arb(value) if real else acb(value)


def _over(one: Value, other: Value) -> Value:
    if other == 0:
        raise UndefinedError
    return one / other


def _whole(value: Value) -> int:
    if not isinstance(value, fmpq):
        raise UnclearError
    if value.denominator != 1:
        raise UndefinedError
    return int(value.numerator)


def _as_whole(value: Value) -> int | None:
    return int(value.numerator) if isinstance(value, fmpq) and value.denominator == 1 else None


def _extreme(name: str, args: list[Value]) -> Value:
    exact = [arg for arg in args if isinstance(arg, fmpq)]
    if len(exact) == len(args):
        return max(exact) if name == "max" else min(exact)
    balls = [arb(arg) for arg in args if not isinstance(arg, acb)]
    # complex numbers have no order
    if len(balls) < len(args):
        raise UndefinedError
    return reduce(arb.max if name == "max" else arb.min, balls)


def _rounded(name: str, value: Value) -> fmpq:
    if isinstance(value, acb):
        raise UndefinedError
    found = value.floor() if name == "floor" else value.ceil()
    whole = found.unique_fmpz() if isinstance(found, arb) else found
    if whole is None:
        raise UnclearError  # the ball contains a whole number
    return fmpq(whole)
