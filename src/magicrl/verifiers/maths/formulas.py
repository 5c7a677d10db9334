r"""Reading formulas: recursive descent over tokens, strict and limited in depth.

The grammar is what answers are made of; sums, integrals, ellipses and words are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from magicrl.verifiers.maths.applications import ACCENTS, EXTREMES, MARKS, MAX_DEPTH, Applications
from magicrl.verifiers.maths.counting import chosen, mixed_value, times
from magicrl.verifiers.maths.cursor import NoFormulaError
from magicrl.verifiers.maths.dotted import indexed, series
from magicrl.verifiers.maths.expression import Expr, function, number, symbol
from magicrl.verifiers.maths.lexer import ELLIPSES, Token
from magicrl.verifiers.maths.words import word_set

_MAX_CHAIN = 40
_FACTORS = ACCENTS | MARKS | EXTREMES | word_set("frac sqrt cbrt binom exp sum prod")
_CLOSERS = {"(": "(", "[": "[", "{": "{", "floor": "floor", "ceil": "ceil", "|": "|"}


def parse(tokens: Sequence[Token]) -> Expr | None:
    """The formula that the tokens spell from the first to the last, or None."""
    if not tokens:
        return None
    reader = _Reader(tokens)
    try:
        tree = reader.sum(0)
    except NoFormulaError:
        return None
    if reader.at != len(reader.tokens):
        return None
    return indexed(tree) if tree.holds("series") else tree


class _Reader(Applications):
    """Recursive descent, depth-limited."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        super().__init__(tokens)
        self._bars = 0

    def sum(self, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise NoFormulaError
        total = self._signed_term(depth)
        while self.peek("op") and self.tokens[self.at].text in ("+", "-", "pm", "mp"):
            sign = self.next().text
            if sign == "+" and self._dots_ahead():
                total = self._going_on("sum", total, depth)
                continue
            term = self.term(depth) if not self._sign_ahead() else self._signed_term(depth)
            if sign in ("pm", "mp"):
                total = Expr(sign, (total, term))
            else:
                # flat, so that a long sum is no deep tree
                before = total.args if total.op == "add" else (total,)
                total = Expr("add", (*before, term if sign == "+" else Expr("neg", (term,))))
        if self.take("cmd", "choose"):
            return function("binomial", total, self.sum(depth + 1))
        return total

    def _dots_ahead(self) -> bool:
        return self.peek("cmd") and self.tokens[self.at].text in ELLIPSES

    def _going_on(self, kind: str, before: Expr, depth: int) -> Expr:
        r"""``a_1 + a_2 + \\cdots + a_n``, from the dots on; a product may have no signs."""
        self.next()
        if kind == "sum":
            self.need("op", "+")
        else:
            self.take("op", "*")
        last = self.term(depth) if kind == "sum" else self.factor(depth)
        shown = before.args if before.op == ("add" if kind == "sum" else "mul") else (before,)
        return series(kind, shown, last, f"#j{self.at}") or self.fail()

    def _sign_ahead(self) -> bool:
        return self.peek("op", "-") or self.peek("op", "+")

    def _signed_term(self, depth: int) -> Expr:
        if self.peek("op") and self.tokens[self.at].text in ("+", "-", "pm", "mp"):
            if depth > MAX_DEPTH:
                raise NoFormulaError
            sign = self.next().text
            term = self._signed_term(depth + 1)
            return {"+": term}.get(sign) or Expr("neg" if sign == "-" else sign, (term,))
        return self.term(depth)

    def term(self, depth: int) -> Expr:
        total = self.factor(depth)
        divisions = 0
        while True:
            if self.peek("op") and self.tokens[self.at].text in ("*", "/"):
                op = self.next().text
                if op == "*" and self._dots_ahead():
                    total = self._going_on("prod", total, depth)
                    continue
                negative = self.take("op", "-")
                right = self.factor(depth)
                right = Expr("neg", (right,)) if negative else right
                divisions += op == "/"
                if divisions > _MAX_CHAIN:
                    raise NoFormulaError
                total = times(total, right) if op == "*" else Expr("div", (total, right))
            elif self._dots_ahead() and self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].kind != "op":
                total = self._going_on("prod", total, depth)
            elif depth > 1 and self.peek("cmd", "pmod"):  # inside a formula it is a remainder, else a class of numbers
                self.next()
                total = function("mod", total, self.base(depth + 1))
            elif self.take("cmd", "bmod"):
                total = function("mod", total, self.factor(depth))
            elif self.starts_factor():
                if self.peek("num") and self.tokens[self.at - 1].kind == "num":
                    total = self._mixed(total)
                    continue
                mixed = self._mixed_frac(total) if self.peek("cmd", "frac") else None
                total = mixed or times(total, self.factor(depth))
            else:
                return total

    def _mixed(self, whole: Expr) -> Expr:
        """``1 1/2``: a space, then a proper fraction."""
        if not (whole.op == "num" and whole.value.denominator == 1 and self.tokens[self.at].spaced):
            raise NoFormulaError
        top = self.number(self.next().text)
        self.need("op", "/")
        if not self.peek("num"):
            raise NoFormulaError
        bottom = self.number(self.next().text)
        return mixed_value(whole, top, bottom) or self.fail()

    def _mixed_frac(self, whole: Expr) -> Expr | None:
        before = self.tokens[self.at - 1]
        if not (whole.op == "num" and before.kind == "num" and whole.value.denominator == 1 and not whole.decimals):
            return None
        start = self.at
        self.next()
        top, bottom = self.argument(0), self.argument(0)
        mixed = mixed_value(whole, top, bottom)
        if mixed is None and top.op == bottom.op == "num" and whole.value != 0:
            raise NoFormulaError  # 1 11/2: a slip of the pen, or a product that nobody writes so
        if mixed is None:
            self.at = start
        return mixed

    def starts_factor(self) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        if token.kind == "bar":
            return self._bars == 0
        if token.kind == "word":
            return not token.roman and len(token.text) <= 3
        if token.kind == "cmd":
            return (
                token.text in ("frac", "sqrt", "cbrt", "binom", "exp", "sum", "prod")
                or token.text in ACCENTS | MARKS | EXTREMES
            )
        return token.kind in ("num", "sym", "fn", "open", "lbrace")

    def factor(self, depth: int) -> Expr:
        base = self.base(depth + 1)
        start = self.at
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if self.at - start > _MAX_CHAIN:
                raise NoFormulaError
            if token.kind == "unit" and token.text == "degree":
                self.at += 1
                base = Expr("div", (Expr("mul", (base, symbol("pi"))), number(180)))
            elif token.kind != "op" or token.text not in ("^", "_", "!", "'"):
                return base
            else:
                self.at += 1
                base = self._postfix(token.text, base, depth)
        return base

    def _postfix(self, mark: str, base: Expr, depth: int) -> Expr:
        if mark == "!":
            return function("factorial2" if self.take("op", "!") else "factorial", base)
        if mark == "'":
            return self._decorate(base, "'")
        if mark == "_":
            return self._decorate(base, "_" + self.script_text())
        if self.peek("sym", "prime") or self._braced_prime():
            self.at += 1 if self.peek("sym", "prime") else 3
            return self._decorate(base, "'")
        script = self.script(depth)
        counted = re.fullmatch(r"([CA])_(\d{1,4}|[nm])", base.name) if base.op == "sym" else None
        if counted and script.op in ("num", "sym"):
            return chosen(counted[1], counted[2], script) or Expr("pow", (base, script))
        return Expr("pow", (base, script))

    def _braced_prime(self) -> bool:
        ahead = self.tokens[self.at : self.at + 3]
        return [t.text for t in ahead] == ["{", "prime", "}"]

    def _decorate(self, base: Expr, mark: str) -> Expr:
        """A subscript or a prime belongs to the symbol, also when its power was written first."""
        if base.op == "sym":
            return symbol(base.name + mark) if base.name + mark else base
        if base.op == "const" and base.name in ("e", "i"):
            return Expr("sym", name=base.name + mark)
        if base.op == "pow":
            return Expr("pow", (self._decorate(base.args[0], mark), base.args[1]))
        raise NoFormulaError

    def script(self, depth: int) -> Expr:
        if self.peek("lbrace") or self.peek("open", "("):
            return self.base(depth + 1)
        if self.take("op", "-"):
            return Expr("neg", (self.script(depth + 1) if depth < MAX_DEPTH else self.fail(),))
        token = self.next()
        if token.kind == "num":
            return self.number(token.text)
        if token.kind == "sym":
            return symbol(token.text)
        self.at -= 1
        return self.base(depth + 1)

    def script_text(self) -> str:
        """A subscript is part of a name: its tokens, whatever they would mean as a formula."""
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
        if depth > MAX_DEPTH:
            raise NoFormulaError
        if self.peek("op", "_") or self.peek("op", "^"):
            return self.counted_before(depth)
        token = self.next()
        if token.kind == "num":
            return self.number(token.text)
        if token.kind == "sym":
            applied = self.applied(token, depth)
            if applied is not None:
                return applied
            if token.text == "Delta" and self.peek("sym"):  # a difference is one name, not a product
                return symbol("Delta:" + self.next().text)
            return symbol(token.text)
        if token.kind == "word" and not token.roman and len(token.text) <= 3:
            letters = [Token("sym", letter) for letter in token.text]
            self.tokens = [*self.tokens[: self.at - 1], *letters, *self.tokens[self.at :]]
            return symbol(letters[0].text)
        if token.kind == "lbrace" and self.peek("rbrace") and self.at + 1 < len(self.tokens):
            self.at += 1
            return self.counted_before(depth)
        if token.kind == "lbrace":
            inner = self.sum(depth + 1)
            self.need("rbrace")
            return inner
        if token.kind == "open" and token.text in _CLOSERS:
            inner = self.sum(depth + 1)
            self.need("close", _CLOSERS[token.text])
            return inner if token.text in "([{" else function({"|": "abs"}.get(token.text, token.text), inner)
        if token.kind == "bar" and token.text == "|" and self._bars < 8:
            self._bars += 1
            inner = self.sum(depth + 1)
            self.need("bar", "|")
            self._bars -= 1
            return function("abs", inner)
        if token.kind == "fn":
            return self.function(token.text, depth)
        if token.kind == "cmd":
            return self.command(token.text, depth)
        raise NoFormulaError
