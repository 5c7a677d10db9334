r"""What a formula applies: functions and their arguments, commands, sums and products over whole numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

from magicrl.verifiers.maths.counting import counted
from magicrl.verifiers.maths.cursor import Cursor, NoFormulaError
from magicrl.verifiers.maths.expression import Expr, function, number, put, symbol
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.words import word_set

MAX_DEPTH = 40
_MAX_DIGITS = 400

ACCENTS = word_set(
    "overrightarrow hat vec bar overline tilde dot ddot widehat widetilde mathcal mathbb mathfrak underline"
)
_SAME_ACCENT = {"overline": "bar", "overrightarrow": "vec", "widehat": "hat", "widetilde": "tilde"}
EXTREMES = frozenset(("max", "min", "gcd", "lcm"))
_FUNCTIONS = frozenset("fghO")
_INVERSES = {name: "arc" + name for name in ("sin", "cos", "tan", "cot", "sec", "csc")} | {
    name: "ar" + name for name in ("sinh", "cosh", "tanh")
}
MARKS = word_set("angle triangle odot")


def _turned(angle: Expr) -> Expr:
    """The complex number of size one at an angle."""
    return Expr("add", (function("cos", angle), Expr("mul", (symbol("i"), function("sin", angle)))))


class Applications(Cursor, ABC):
    """The part of the grammar that stands between names of functions and the formulas that they are applied to."""

    @abstractmethod
    def sum(self, depth: int) -> Expr: ...

    @abstractmethod
    def term(self, depth: int) -> Expr: ...

    @abstractmethod
    def factor(self, depth: int) -> Expr: ...

    @abstractmethod
    def base(self, depth: int) -> Expr: ...

    @abstractmethod
    def script(self, depth: int) -> Expr: ...

    @abstractmethod
    def script_text(self) -> str: ...

    @abstractmethod
    def starts_factor(self) -> bool: ...

    def fail(self) -> Expr:
        raise NoFormulaError

    def counted_before(self, depth: int) -> Expr:
        """``{}_{10}C_3`` and ``^nC_2``: of how many things stands before the letter."""
        if not (self.take("op", "_") or self.take("op", "^")):
            raise NoFormulaError
        first = self.script(depth + 1)
        letter = self.next()
        if letter.text not in ("C", "P") or not (self.take("op", "_") or self.take("op", "^")):
            raise NoFormulaError
        return counted(letter.text, first, self.script(depth + 1))

    def applied(self, token: Token, depth: int) -> Expr | None:
        """``f(2)`` and ``y'(0)``: a function of its arguments, not a product."""
        at = self.at
        while self.peek("op", "'"):
            self.at += 1
        primes = self.at - at
        if not primes and token.text == "Gamma" and self.peek("open", "("):
            arg, *rest = self.listed(depth)
            if rest:
                raise NoFormulaError
            return function("factorial", Expr("add", (arg, number(-1))))
        if not primes and token.text == "zeta" and self.peek("open", "("):
            return function("zeta", *self.listed(depth))
        if not primes and token.text in ("C", "P") and self.peek("open", "("):
            chosen_of = self._arguments(depth)
            if chosen_of is not None and len(chosen_of) == 2:
                return counted(token.text, chosen_of[0], chosen_of[1])
        if not self.peek("open", "(") or not (primes or token.text in _FUNCTIONS):
            self.at = at
            return None
        return Expr("apply", tuple(self.listed(depth)), token.text + "'" * primes)

    def _arguments(self, depth: int) -> list[Expr] | None:
        """Several formulas in brackets; None, and nothing taken, where there are none."""
        at, tokens = self.at, self.tokens
        try:
            return self.listed(depth)
        except NoFormulaError:
            self.at, self.tokens = at, tokens
            return None

    def number(self, text: str) -> Expr:
        if len(text) > _MAX_DIGITS:
            raise NoFormulaError
        return number(Fraction("0" + text if text.startswith(".") else text), len(text.partition(".")[2]))

    def command(self, name: str, depth: int) -> Expr:
        if name == "frac":
            return Expr("div", (self.argument(depth), self.argument(depth)))
        if name in ("sum", "prod"):
            return self._series(name, depth)
        if name == "binom":
            return function("binomial", self.argument(depth), self.argument(depth))
        if name in ("sqrt", "cbrt"):
            root = number(2 if name == "sqrt" else 3)
            if self.take("open", "["):
                root = self.sum(depth + 1)
                self.need("close", "[")
            arg = self.base(depth + 1) if self.peek("open", "(") else self.argument(depth)
            return function("root", arg, root)
        if name in EXTREMES:
            return function(name, *self.listed(depth))
        if name == "angle" and self._phasor():
            degrees = Expr("div", (Expr("mul", (self.number(self.next().text), symbol("pi"))), number(180)))
            self.need("unit", "degree")
            return _turned(degrees)
        if name in ACCENTS or name in MARKS:
            content = self.script_text() if self.peek("lbrace") else self.next().text
            return symbol(f"{_SAME_ACCENT.get(name, name)}:{content}")
        raise NoFormulaError

    def _phasor(self) -> bool:
        r"""Whether ``2 \\angle 60^\\circ`` is meant: a size before, degrees after."""
        ahead = self.tokens[self.at : self.at + 2]
        sized = self.at > 1 and self.tokens[self.at - 2].kind in ("num", "rbrace")
        return sized and [token.kind for token in ahead] == ["num", "unit"]

    def _series(self, name: str, depth: int) -> Expr:
        r"""``\\sum_{k=1}^{n} k^2``, with whole bounds; the letter becomes one that nothing else can be called."""
        high = self.script(depth + 1) if self.take("op", "^") else None
        self.need("op", "_")
        self.need("lbrace")
        letter = self.next()
        self.need("rel", "=")
        low = self.sum(depth + 1)
        self.need("rbrace")
        if high is None:
            self.need("op", "^")
            high = self.script(depth + 1)
        body = self.term(depth + 1)
        if letter.kind != "sym" or low.holds("const", "inf") or high.holds("const", "inf") or self.peek("op"):
            raise NoFormulaError
        if any(letter.text in other.partition("_")[2] for other in body.symbols):
            raise NoFormulaError  # a_k: the terms are not known
        place = f"#{letter.text}{depth}"
        return Expr("series", (low, high, put(body, symbol(letter.text), Expr("sym", name=place))), f"{name} {place}")

    def listed(self, depth: int) -> list[Expr]:
        """The arguments in brackets, with commas between."""
        opening = self.next()
        if opening.kind != "open" or opening.text not in "({":
            raise NoFormulaError
        found = [self.sum(depth + 1)]
        while self.take("sep", ","):
            found.append(self.sum(depth + 1))
        self.need("close", opening.text)
        return found

    def argument(self, depth: int) -> Expr:
        """An argument of a command: a group, or one character."""
        if self.peek("num") and "." not in self.tokens[self.at].text:
            digits = self.next().text
            if len(digits) > 1:
                left = Token("num", digits[1:])
                self.tokens = [*self.tokens[: self.at], left, *self.tokens[self.at :]]
            return self.number(digits[0])
        return self.base(depth + 1)

    def function(self, name: str, depth: int) -> Expr:
        power: Expr | None = None
        base: Expr | None = None
        while self.peek("op", "^") or self.peek("op", "_"):
            if self.next().text == "^":
                power = self.script(depth)
            else:
                base = self._argument_of_log(depth)
        arg = self._function_argument(depth)
        if name == "cis":
            return _turned(arg) if power is None and base is None else self.fail()
        if name in ("log", "lg") and base is not None:
            applied = function("logb", arg, base)
        elif base is not None:
            raise NoFormulaError
        else:
            applied = function(name, arg)
        if power is None:
            return applied
        if power == Expr("neg", (number(1),)):
            if name not in _INVERSES:
                raise NoFormulaError
            return function(_INVERSES[name], arg)
        return Expr("pow", (applied, power))

    def _ends_argument(self) -> bool:
        r"""What is no more part of an argument without brackets: ``\sin x \cos y``, ``\sin x e^{-t}``."""
        return self.peek("fn") or self.peek("open") or self.peek("bar") or self.peek("sym", "e")

    def _argument_of_log(self, depth: int) -> Expr:
        if self.peek("num"):
            return self.number(self.next().text)
        return self.argument(depth)

    def _function_argument(self, depth: int) -> Expr:
        if self.peek("open", "(") or self.peek("open", "["):
            return self.base(depth + 1)
        if self.peek("lbrace"):
            return self.factor(depth + 1)
        if self.peek("fn"):
            return self.base(depth + 1)
        total = self.factor(depth + 1)
        while self.starts_factor() and not self._ends_argument():
            total = Expr("mul", (total, self.factor(depth + 1)))
        return total
