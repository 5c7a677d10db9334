r"""Parser of formulas: recursive descent over tokens, strict and limited in depth.

Tokens outside the grammar raise `NoFormulaError`; `parse` then returns no tree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from magicrl_verifiers.maths.answers import Expr, function, numeral, put, symbol
from magicrl_verifiers.maths.literals import word_set
from magicrl_verifiers.maths.notation import ELLIPSES, Token
from magicrl_verifiers.maths.sequences import indexed, series

_MAX_DEPTH = 40
_MAX_CHAIN = 40
_MAX_DIGITS = 400
_ACCENTS = word_set(
    "overrightarrow hat vec bar overline tilde dot ddot widehat widetilde mathcal mathbb mathfrak underline"
)
_SAME_ACCENT = {"overline": "bar", "overrightarrow": "vec", "widehat": "hat", "widetilde": "tilde"}
_EXTREMES = frozenset(("max", "min", "gcd", "lcm"))
_MARKS = word_set("angle triangle odot")
_FACTORS = _ACCENTS | _MARKS | _EXTREMES | word_set("frac sqrt cbrt binom exp sum prod")
"""Commands that a factor begins with."""
_FUNCTIONS = frozenset("fghO")
"""Letters that brackets apply to something; any other letter is multiplied by them."""
_INVERSES = {name: "arc" + name for name in ("sin", "cos", "tan", "cot", "sec", "csc")} | {
    name: "ar" + name for name in ("sinh", "cosh", "tanh")
}


class NoFormulaError(Exception):
    """The tokens are no formula of the grammar."""


def parse(tokens: Sequence[Token]) -> Expr | None:
    """Return the formula that all the tokens spell; None if they spell none."""
    reader = _Reader(tokens)
    try:
        tree = reader.sum(0)
    except NoFormulaError:
        return None
    # tokens after a formula are never skipped
    if reader.at != len(reader.tokens):
        return None
    return indexed(tree) if tree.holds("series") else tree


class _Reader:
    """Tokens of a formula, and the place ``at`` of the next one."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self._bars = 0

    def peek(self, kind: str, text: str | None = None) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        return token.kind == kind and (text is None or token.text == text)

    def take(self, kind: str, text: str | None = None) -> bool:
        found = self.peek(kind, text)
        self.at += found
        return found

    def need(self, kind: str, text: str | None = None) -> None:
        if not self.take(kind, text):
            raise NoFormulaError

    def next(self) -> Token:
        if self.at >= len(self.tokens):
            raise NoFormulaError
        self.at += 1
        return self.tokens[self.at - 1]

    def _operator(self, *marks: str) -> str | None:
        """Take the next operator if it is one of these."""
        if self.at < len(self.tokens) and self.tokens[self.at].kind == "op" and self.tokens[self.at].text in marks:
            return self.next().text
        return None

    # --- sums and products

    def sum(self, depth: int) -> Expr:
        if depth > _MAX_DEPTH:
            raise NoFormulaError
        total = self._signed_term(depth)
        while sign := self._operator("+", "-", "pm", "mp"):
            if sign == "+" and self._dots_ahead():
                total = self._dots("sum", total, depth)
                continue
            term = self._signed_term(depth)
            if sign in ("pm", "mp"):
                total = Expr(sign, (total, term))
            else:  # flat, so that a long sum does not become a deep tree
                before = total.args if total.op == "add" else (total,)
                total = Expr("add", (*before, term if sign == "+" else -term))
        if self.take("cmd", "choose"):
            return function("binomial", total, self.sum(depth + 1))
        return total

    def _dots_ahead(self) -> bool:
        return self.peek("cmd") and self.tokens[self.at].text in ELLIPSES

    def _dots(self, kind: str, before: Expr, depth: int) -> Expr:
        r"""Read ``a_1 + a_2 + \\cdots + a_n`` from the dots to the end; a product may have no signs."""
        self.next()
        if kind == "sum":
            self.need("op", "+")
        else:
            self.take("op", "*")
        last = self.term(depth) if kind == "sum" else self.factor(depth)
        shown = before.args if before.op == ("add" if kind == "sum" else "mul") else (before,)
        return series(kind, shown, last, f"#j{self.at}") or self.fail()

    def _signed_term(self, depth: int) -> Expr:
        if depth > _MAX_DEPTH:
            raise NoFormulaError
        sign = self._operator("+", "-", "pm", "mp")
        if sign is None:
            return self.term(depth)
        term = self._signed_term(depth + 1)
        return term if sign == "+" else Expr("neg" if sign == "-" else sign, (term,))

    def term(self, depth: int) -> Expr:
        total = self.factor(depth)
        divisions = 0
        while True:
            if op := self._operator("*", "/"):
                negative = self.take("op", "-")
                right = self.factor(depth)
                right = -right if negative else right
                divisions += op == "/"
                if divisions > _MAX_CHAIN:
                    raise NoFormulaError
                total = _times(total, right) if op == "*" else total / right
            elif self._dots_ahead() and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].kind != "op":
                total = self._dots("prod", total, depth)
            elif self.take("cmd", "bmod"):
                total = function("mod", total, self.factor(depth))
            elif self.starts_factor():
                # two adjacent numbers are a mixed number or an error, never a product
                two_numbers = self.peek("num") and self.tokens[self.at - 1].kind == "num"
                mixed = self._mixed(total) if two_numbers or self.peek("cmd", "frac") else None
                total = mixed or _times(total, self.factor(depth))
            else:
                return total

    def _mixed(self, whole: Expr) -> Expr | None:
        """Read ``1 1/2`` (a space, then a proper fraction) and ``1\\frac12``; None where the fraction is a factor."""
        start, slash = self.at, self.peek("num")
        if whole.op != "num" or whole.decimals or self.tokens[self.at - 1].kind != "num":
            return self.fail() if slash else None
        token = self.next()
        if slash and not token.spaced:
            raise NoFormulaError
        top = self.numeral(token.text) if slash else self.argument(0)
        if slash:
            self.need("op", "/")
        bottom = self.numeral(self.next().text) if slash and self.peek("num") else self.argument(0)
        numbers = top.op == bottom.op == "num"
        if numbers and 0 < top.value < bottom.value and not top.decimals and not bottom.decimals:
            return numeral(whole.value + top.value / bottom.value)
        if slash or (numbers and whole.value != 0):
            raise NoFormulaError  # 1 11/2 is a typing error, or a product in a form that nobody writes
        self.at = start
        return None

    def starts_factor(self) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        # inside |...| a bar closes and cannot begin a factor
        if token.kind == "bar":
            return self._bars == 0
        if token.kind == "word":
            # up to three italic letters are a product of names; upright or longer ones are words
            return not token.roman and len(token.text) <= 3
        if token.kind == "cmd":
            return token.text in _FACTORS
        return token.kind in ("num", "sym", "fn", "open", "lbrace")

    # --- factors and what follows them

    def factor(self, depth: int) -> Expr:
        base = self.base(depth + 1)
        start = self.at
        while self.at < len(self.tokens):
            if self.at - start > _MAX_CHAIN:
                raise NoFormulaError
            if self.take("unit", "degree"):
                base = base * symbol("pi") / numeral(180)
            elif mark := self._operator("^", "_", "!", "'"):
                base = self._postfix(mark, base, depth)
            else:
                return base
        return base

    def _postfix(self, mark: str, base: Expr, depth: int) -> Expr:
        if mark == "!":
            return function("factorial2" if self.take("op", "!") else "factorial", base)
        if mark == "'":
            return self._decorate(base, "'")
        if mark == "_":
            return self._decorate(base, "_" + self.script_text())
        # f^\prime and f^{\prime} are f'
        ahead = [token.text for token in self.tokens[self.at : self.at + 3]]
        if ahead[:1] == ["prime"] or ahead == ["{", "prime", "}"]:
            self.at += 1 if ahead[0] == "prime" else 3
            return self._decorate(base, "'")
        script = self.script(depth)
        counted = re.fullmatch(r"([CA])_(\d{1,4}|[nm])", base.name) if base.op == "sym" else None
        if counted and script.op in ("num", "sym"):
            return _chosen(counted[1], counted[2], script) or Expr("pow", (base, script))
        return Expr("pow", (base, script))

    def _decorate(self, base: Expr, mark: str) -> Expr:
        """Add a subscript or a prime to a symbol, also when its power was written first."""
        if base.op == "sym" or (base.op == "const" and base.name in ("e", "i")):
            return Expr("sym", name=base.name + mark)
        if base.op == "pow":
            return Expr("pow", (self._decorate(base.args[0], mark), base.args[1]))
        raise NoFormulaError

    def script(self, depth: int) -> Expr:
        if self.take("op", "-"):
            return -(self.script(depth + 1) if depth < _MAX_DEPTH else self.fail())
        return symbol(self.next().text) if self.peek("sym") else self.base(depth + 1)

    def script_text(self) -> str:
        """Return the tokens of a subscript as one text, whatever they would mean as a formula."""
        if not self.take("lbrace"):
            return self.next().text
        words: list[str] = []
        open_braces = 1
        while True:
            token = self.next()
            open_braces += (token.kind == "lbrace") - (token.kind == "rbrace")
            if open_braces == 0:
                return "".join(words)
            if token.kind not in ("lbrace", "rbrace"):
                words.append(token.text)

    def base(self, depth: int) -> Expr:
        if depth > _MAX_DEPTH:
            raise NoFormulaError
        if self.peek("op", "_") or self.peek("op", "^"):
            return self._counted_before(depth)
        token = self.next()
        if token.kind == "num":
            return self.numeral(token.text)
        if token.kind == "sym":
            if token.text == "Delta" and self.peek("sym"):  # a difference is one name, not a product
                return symbol("Delta:" + self.next().text)
            return self._applied(token.text, depth) or symbol(token.text)
        if token.kind == "word" and not token.roman and len(token.text) <= 3:
            letters = [Token("sym", letter) for letter in token.text]
            # the letters replace the word, so that scripts and brackets apply to the last one
            self.tokens = [*self.tokens[: self.at - 1], *letters, *self.tokens[self.at :]]
            return symbol(letters[0].text)
        if token.kind == "lbrace" and self.peek("rbrace") and self.at + 1 < len(self.tokens):
            self.at += 1
            return self._counted_before(depth)
        if token.kind == "lbrace":
            inner = self.sum(depth + 1)
            self.need("rbrace")
            return inner
        if token.kind == "open" and token.text != "<":
            inner = self.sum(depth + 1)
            self.need("close", token.text)
            return inner if token.text in "([{" else function({"|": "abs"}.get(token.text, token.text), inner)
        if token.kind == "bar" and token.text == "|" and self._bars < 8:
            self._bars += 1
            inner = self.sum(depth + 1)
            self.need("bar", "|")
            self._bars -= 1
            return function("abs", inner)
        if token.kind == "fn":
            return self._function(token.text, depth)
        if token.kind == "cmd":
            return self._command(token.text, depth)
        raise NoFormulaError

    def numeral(self, text: str) -> Expr:
        if len(text) > _MAX_DIGITS:
            raise NoFormulaError
        return numeral(Fraction(text), len(text.partition(".")[2]))

    def fail(self) -> Expr:
        raise NoFormulaError

    # --- what is applied to arguments

    def _counted_before(self, depth: int) -> Expr:
        """Read ``{}_{10}C_3`` and ``^nC_2``, where the number of things comes before the letter."""
        if self._operator("_", "^") is None:
            raise NoFormulaError
        first = self.script(depth + 1)
        letter = self.next().text
        if letter not in ("C", "P") or self._operator("_", "^") is None:
            raise NoFormulaError
        return _choices(letter, first, self.script(depth + 1))

    def _applied(self, name: str, depth: int) -> Expr | None:
        """Read ``f(2)`` and ``y'(0)``: a function of its arguments, not a product."""
        at = self.at
        while self.take("op", "'"):
            pass
        primes = self.at - at
        known = not primes and name in ("Gamma", "zeta")
        if not self.peek("open", "(") or not (primes or known or name in _FUNCTIONS):
            self.at = at
            return None
        args = self._listed(depth)
        if not known:
            return Expr("apply", tuple(args), name + "'" * primes)
        if len(args) > 1:
            raise NoFormulaError
        # Gamma(x) is (x - 1)!
        shifted = args[0] + numeral(-1)
        return function("zeta", args[0]) if name == "zeta" else function("factorial", shifted)

    def _listed(self, depth: int) -> list[Expr]:
        """Read arguments in brackets, separated by commas."""
        opening = self.next()
        if opening.kind != "open" or opening.text not in "({":
            raise NoFormulaError
        found = [self.sum(depth + 1)]
        while self.take("sep", ","):
            found.append(self.sum(depth + 1))
        self.need("close", opening.text)
        return found

    def argument(self, depth: int) -> Expr:
        """Read an argument of a command: a group, or one character."""
        if self.peek("num") and "." not in self.tokens[self.at].text:
            digits = self.next().text
            # TeX takes one character: \frac12 is 1/2, \frac123 is 1/2 times 3
            if len(digits) > 1:
                self.tokens = [*self.tokens[: self.at], Token("num", digits[1:]), *self.tokens[self.at :]]
            return self.numeral(digits[0])
        return self.base(depth + 1)

    def _command(self, name: str, depth: int) -> Expr:
        if name == "frac":
            return self.argument(depth) / self.argument(depth)
        if name in ("sum", "prod"):
            return self._series(name, depth)
        if name == "binom":
            return function("binomial", self.argument(depth), self.argument(depth))
        if name in ("sqrt", "cbrt"):
            root = numeral(2 if name == "sqrt" else 3)
            if self.take("open", "["):
                root = self.sum(depth + 1)
                self.need("close", "[")
            return function("root", self.argument(depth), root)
        if name in _EXTREMES:
            return function(name, *self._listed(depth))
        if name in _ACCENTS or name in _MARKS:
            content = self.script_text() if self.peek("lbrace") else self.next().text
            return symbol(f"{_SAME_ACCENT.get(name, name)}:{content}")
        raise NoFormulaError

    def _series(self, name: str, depth: int) -> Expr:
        r"""Read ``\\sum_{k=1}^{n} k^2`` with whole bounds; the bound letter gets a name that no answer can spell."""
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
        # a term, since a sum ends at the next plus sign
        body = self.term(depth + 1)
        # infinite bounds have no value to compute; with an operator after the term the end of the body is unclear
        if letter.kind != "sym" or low.holds("const", "inf") or high.holds("const", "inf") or self.peek("op"):
            raise NoFormulaError
        if any(letter.text in other.partition("_")[2] for other in body.symbols):
            raise NoFormulaError  # a_k: the terms are not known
        place = f"#{letter.text}{depth}"
        return Expr("series", (low, high, put(body, symbol(letter.text), Expr("sym", name=place))), f"{name} {place}")

    def _function(self, name: str, depth: int) -> Expr:
        power: Expr | None = None
        base: Expr | None = None
        while mark := self._operator("^", "_"):
            if mark == "^":
                power = self.script(depth)
            else:  # of log_10 x all digits count
                base = self.numeral(self.next().text) if self.peek("num") else self.argument(depth)
        arg = self._function_argument(depth)
        if name == "cis":
            turned = function("cos", arg) + symbol("i") * function("sin", arg)
            return turned if power is None and base is None else self.fail()
        if base is not None and name not in ("log", "lg"):
            raise NoFormulaError
        applied = function(name, arg) if base is None else function("logb", arg, base)
        # \sin^{-1} is the inverse function; other powers are those of the value
        if power == -numeral(1):
            return function(_INVERSES[name], arg) if name in _INVERSES else self.fail()
        return applied if power is None else Expr("pow", (applied, power))

    def _function_argument(self, depth: int) -> Expr:
        if self.peek("open", "(") or self.peek("open", "[") or self.peek("fn"):
            return self.base(depth + 1)
        if self.peek("lbrace"):
            return self.factor(depth + 1)
        total = self.factor(depth + 1)
        # without brackets the argument ends where another function or factor begins: \sin x \cos y, \sin x e^{-t}
        while self.starts_factor() and not (
            self.tokens[self.at].kind in ("fn", "open", "bar") or self.peek("sym", "e")
        ):
            total = total * self.factor(depth + 1)
        return total


def _times(left: Expr, right: Expr) -> Expr:
    """Multiply without nesting, so that a long product does not become a deep tree."""
    return Expr("mul", (*left.args, right) if left.op == "mul" else (left, right))


def _choices(letter: str, total: Expr, chosen: Expr) -> Expr:
    """Return the number of choices (C) or of arrangements (A, P)."""
    choices = function("binomial", total, chosen)
    return choices if letter == "C" else choices * function("factorial", chosen)


def _chosen(letter: str, subscript: str, script: Expr) -> Expr | None:
    """Read ``C_n^k`` as choices and ``A_5^2`` as arrangements; None where it is a power."""
    top = numeral(int(subscript)) if subscript.isdigit() else symbol(subscript)
    numbers = top.op == script.op == "num"
    # nobody chooses 12 of 5 things, so C_5^{12} is a power; so is A_n^2, where A is a name
    power = script.value > top.value if numbers else letter == "A"
    return None if power else _choices(letter, top, script)
