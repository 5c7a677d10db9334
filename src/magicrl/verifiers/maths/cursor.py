"""A place in a run of tokens, and how a reader moves on from it."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.lexer import Token


class NoFormulaError(Exception):
    """The tokens are no formula of the grammar."""


class Cursor:
    """Tokens and the place of the next one, ``at``."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self, kind: str, text: str | None = None) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        return token.kind == kind and (text is None or token.text == text)

    def take(self, kind: str, text: str | None = None) -> bool:
        if self.peek(kind, text):
            self.at += 1
            return True
        return False

    def need(self, kind: str, text: str | None = None) -> None:
        if not self.take(kind, text):
            raise NoFormulaError

    def next(self) -> Token:
        if self.at >= len(self.tokens):
            raise NoFormulaError
        self.at += 1
        return self.tokens[self.at - 1]
