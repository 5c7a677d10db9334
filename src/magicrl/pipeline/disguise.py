"""Keys of a problem that other names of its variables and people, or chat text around it, do not change.

Variables and names are labels: renamed one to one, in the order of their first places, they leave the problem as it is.
What stands around a problem is taken off sentence by sentence while it says nothing mathematical; what is left must
then be another text as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from magicrl.pipeline.canonical import POLES, STRICT, WORDS, listed, tokens_of

_GREEK = WORDS.greek
_PRICE = r"(?!\s?\d[^$\\]*\s(?:[a-z]{3,}|to|or|an?|is|of|in|at|by)\s)"
_MATHS = re.compile(
    rf"(?<!\\)\$\$.+?\$\$|(?<!\\)\${_PRICE}.+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\]|\[asy\].+?\[/asy\]"
    r"|\\begin\{(align|equation|array|gather)\*?\}.+?\\end\{\1\*?\}",
    re.DOTALL,
)
_BARE = re.compile(r"(\\[dt]?frac)\s*([0-9A-Za-z])\s*([0-9A-Za-z])|(\\sqrt)\s*([A-Za-z])")
_IN_MATHS = re.compile(
    r"\\(?:(?:text|math)[a-z]+|text|mbox|emph|operatorname|end)\s*\{[^}]*\}|\\begin\s*\{[^}]*\}(?:\{[^}]*\})?"
    r"|\^\s*\{?\\circ\}?\s*[A-Z]?|\\([A-Za-z]+)|([A-Za-zα-ωΑ-Ω])"
)
_OUTSIDE = re.compile(
    r"(?<![A-Za-z\\'’])(?<!\d )([A-Za-zα-ωΑ-Ω])(?![A-Za-z'’]|:\s)|(?<![A-Za-z\\])([A-Z]{2,4})(?![A-Za-z])"
)
_TERM = re.compile(r"[-+*/^=<>(]\s?[aAI](?![A-Za-z'’])|(?<![A-Za-z\\'’])[aAI]\s?[-+*/^=<>)]")
_INDEX = re.compile(r"_\{?i\b|\bi\s*=")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+\b")
# control tokens of chat templates, and a greeting
_TURN = re.compile(r"<\|[a-z_]+\|>|</?[a-z_]{2,}>|\[/?INST\]|^\s*(?:[Hh]i|[Hh]ey|[Hh]ello|[Dd]ear)\b[^,.!?\n]{0,30},\s")
_SENTENCE_END = re.compile(r"(?<=[.?!:>])[\"')\]$]*\s+|(?<=[$\]}])\s+(?=[A-Z][a-z])|\s*\n\s*|\s[-–—]+\s|(?<=>)(?=\S)")
_PRONOUNS = listed("he she him his her hers himself herself")
_SIGNS = listed("+ * / ^ = < > <= >= != % sqrt !")
_ADDRESS = WORDS.address
_SPEAKER = listed("i me my please help anyone someone ideas idea")
_READER = listed("you your following below above here")
_TASKS = listed("find determine compute calculate evaluate")
_PEOPLE = listed("he they their them")
_NEGATION = POLES["not"][0][0]
_CALENDAR = {word for axis in WORDS.axes if axis[0] in ("monday", "january") for word in axis}
_LABELS = listed("problem example exercise question ex no q task")
_LEAST = 3
"""Tokens of what is left when the text around is gone."""
_MOST = 4
"""Sentences that are taken off at each end."""


def keys_of(text: str) -> tuple[list[int], list[int]]:
    """64-bit keys of the text itself (its own first; none of a text of a word or two) and of what it may wrap.

    A text is another one in disguise if one of its keys, of either list, is among the other's first list.

    Example:
        >>> own, inside = keys_of("Hi, please help me. Let $x + 3y = 5$ and $x > y$. Find $y$.")
        >>> keys_of("Let $a + 3b = 5$ and $a > b$. Find $b$.")[0][0] in own + inside
        True
        >>> keys_of("Let $a + 3b = 5$ and $a > b$. Find $a$.")[0][0] in own + inside
        False
    """
    parts = _sentences(_TURN.sub("\n", text))
    tokens = _tokens(parts)
    # two words are no problem, and would be equal to many
    if sum(map(len, tokens)) < _LEAST:
        return [], []
    front = _around(parts, tokens)
    back = _around(parts[::-1], tokens[::-1])
    own = [_key(tokens)]
    inside: list[int] = []
    addressed = [sum(1 for _ in takewhile(bool, ends)) for ends in (front, back)]
    # every way to take sentences off both ends: which of them are the frame cannot be known
    for first in range(len(front) + 1):
        for last in range(len(back) + 1):
            left = tokens[first : len(tokens) - last]
            if (first or last) and sum(map(len, left)) >= _LEAST:
                # what only speaks to a reader is no part of the problem, so that two wrapped copies meet
                (own if [first, last] == addressed else inside).append(_key(left))
    return own, inside


def _sentences(text: str) -> list[str]:
    """The text cut at ends of sentences, lines, colons and dashes, formulas whole."""
    spans = [match.span() for match in _MATHS.finditer(text)]
    parts: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        # a full stop within a formula ends no sentence
        if any(first < match.end() < last for first, last in spans):
            continue
        parts.append(text[start : match.end()])
        start = match.end()
    return [part for part in (*parts, text[start:]) if part.strip()]


def _tokens(parts: Sequence[str]) -> list[list[str]]:
    """Canonical tokens of each part; a variable's or a name's begins with ``qz``."""
    whole = "\n".join(parts)
    index = _INDEX.search(whole) is not None
    exponential = "e^" in whole
    names = {name for name in _NAME.findall(whole) if name.lower() not in _CALENDAR}
    letters: set[str] = set()

    def variable(letter: str) -> str:
        # i that is no index, e where it is raised, and pi are constants: nobody renames them
        if (letter == "i" and not index) or (letter == "e" and exponential) or letter == "π":
            return letter
        letters.add(letter)
        return f" qz{ord(letter):x}z ".translate(_SPELLED)

    def formula(match: re.Match[str]) -> str:
        if match[1]:
            return f" qzg{match[1]} " if match[1] in _GREEK else match[0]
        return variable(match[2]) if match[2] else match[0]

    def word(match: re.Match[str]) -> str:
        if match[2]:
            # AB is two points only where A and B are variables elsewhere; else an abbreviation
            return "".join(map(variable, match[2])) if letters.issuperset(match[2]) else match[0]
        # articles and the pronoun: variables only beside an operator
        if match[1] in "aAI" and not _TERM.search(match.string[max(0, match.start() - 2) : match.end() + 2]):
            return match[0]
        return variable(match[1])

    def marked(part: str) -> str:
        found: list[str] = []
        start = 0
        for match in _MATHS.finditer(part):
            inner = match[0] if match[0].startswith("[asy]") else _IN_MATHS.sub(formula, _BARE.sub(_braced, match[0]))
            found += [outside(part[start : match.start()]), inner]
            start = match.end()
        return "".join([*found, outside(part[start:])])

    def outside(piece: str) -> str:
        for name in names:
            if name in piece:
                piece = re.sub(rf"\b{name}\b", f" qzn{name.lower()} ", piece)
        return _OUTSIDE.sub(word, piece)

    return [["he" if t in _PRONOUNS else t for t in tokens_of(marked(part))] for part in parts]


def _braced(match: re.Match[str]) -> str:
    return f"{match[1]}{{{match[2]}}}{{{match[3]}}}" if match[1] else f"{match[4]}{{{match[5]}}}"


_SPELLED = str.maketrans("0123456789", "ghijklmnop")


def _around(parts: Sequence[str], tokens: Sequence[Sequence[str]]) -> list[bool]:
    """Of the first sentences that may stand around a problem, whether each speaks to a reader."""
    found: list[bool] = []
    for part, words in zip(parts[:_MOST], tokens[:_MOST], strict=True):
        labelled = len(words) > 1 and words[0] in _LABELS and words[1][0].isdigit()
        told = set(words[2:] if labelled else words)
        speaks = labelled or not _ADDRESS.isdisjoint(told)
        # a number, a variable or a formula: this sentence belongs to the problem, and so do those behind it
        if any(t[0].isdigit() or t.startswith("qz") for t in told) or told & _SIGNS or _asks(part, told, speaks):
            break
        found.append(speaks)
    return found


def _asks(part: str, told: set[str], speaks: bool) -> bool:
    """Whether a sentence without numbers and formulas may nevertheless be the problem's question or a condition."""
    axes = {axis for word in told for axis, _ in POLES.get(word) or POLES.get(word.removesuffix("s"), ())}
    deciding = {axis for axis in axes if axis < 2 or axis >= STRICT} - {_NEGATION}  # the first: most, sign
    if deciding or {"many", "much"} & told:
        return True
    if part.rstrip().endswith("?"):
        return _SPEAKER.isdisjoint(told)
    return bool(_TASKS & told and not (_SPEAKER | _READER) & told) or not (speaks or (not axes and not _PEOPLE & told))


def _key(parts: Sequence[Sequence[str]]) -> int:
    """A hash of the tokens, variables and names numbered by their first places."""
    numbers: dict[str, str] = {}
    told = (numbers.setdefault(t, f"qz{len(numbers)}") if t.startswith("qz") else t for part in parts for t in part)
    return int.from_bytes(blake2b(" ".join(told).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
