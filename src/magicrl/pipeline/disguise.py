"""Keys of a problem that do not depend on the names of variables and people, or on chat text around the problem.

Variables and names are labels, numbered by their first occurrence. Sentences around a problem are removed while they
say nothing mathematical. The rest must then equal another text as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

from magicrl.pipeline.canonical import ESCAPED, NEUTRAL, POLES, STRICT, WORDS, listed, meaning_of, poles_of, tokens_of

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
_TERM = re.compile(r"[-+*/^=<>]\s?[aAI](?![A-Za-z'’])|\([aAI]\s?[-+*/^=<>,)]|(?<![A-Za-z\\'’])[aAI]\s?[-+*/^=<>)]")
_INDEX = re.compile(r"_\{?i\b|\bi\s*=")
_AXIS = re.compile(r"[xyz]\$?-(?:axis|axes|coordinate|intercept)")
# inside a sentence, or the owner of something; at the start of a sentence every word has a capital
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+\b|\b[A-Z][a-z]+(?=['’]s\b| and [A-Z][a-z])")
# text that never belongs to a problem: control tokens of chat templates, roles, a greeting, a label in front, points,
# time limits, a placeholder for the answer
_LABEL = (
    r"(?i:question|problem|exercise|example|task|quiz|exam|test|homework|hw|item|puzzle|challenge|section|chapter|part"
    r"|level|round|ex|q|no)"
)
_TURN = re.compile(
    r"<(answer|result|final|output)>[^<>]{0,40}</\1>|<[|｜][A-Za-z_▁]+[|｜]>(?:system|user|assistant)?"
    r"|</?[a-z_]{2,}>(?:system|user|assistant|model)?(?=\W|\Z)|\[/?INST\]|(?<!\S)/(?:no_)?think\b"
    r"|```[a-z]*\n[^`]{0,120}```|\{\s*\"[^{}\n]{0,120}\}"
    r"|^\s*You are (?:an? |the )?[^.\n\d]{0,60}"
    r"\b(?:assistant|expert|mathematician|tutor|teacher|professor|instructor|coach|AI|solver|model)\b"
    r"[^.\n\d]{0,60}(?:\d+ years[^.\n\d]{0,60})?[.\n]"
    r"|^\s*(?:[Hh]i|[Hh]ey|[Hh]ello|[Dd]ear)\b[^,.!?\n]{0,30},\s|[(\[]\d+ (?:points?|marks?|pts)[)\]]"
    r"|(?i:[(\[]?time (?:limit|allowed|allotted|left|remaining)\W{1,3}\d+\s?"
    r"(?:s|sec|seconds?|min|minutes?|h|hours?)\b(?:[;,][^()\n]{0,20})?[.;,)\]]*)"
    r"|^\s*(?i:you have \d+ (?:seconds|minutes)(?: (?:to|for) [^.:\n]{0,40})?[.:!]"
    r"(?![\s\S]*\b(?:minute|second|hour|time)))"
    r"|^(?:\s*(?i:difficulty|topic|subject|source|date|today's date|category|tags?|id|grade|unit|lesson|total):"
    r"\s[^.\n$:]{1,40}[.\n;])+"
    r"|^\s*[(\[][A-Z][^()\[\]\n$=]{0,40}\b(?:19|20)\d\d[)\]]\s|\s[(\[][A-Z][^()\[\]\n$=]{0,40}\b(?:19|20)\d\d[)\]]\s*\Z"
    r"|^\s*\[[^\[\]\n$=]{0,60}\]\s*\n|^\s*[A-Z][A-Za-z ]{0,40}#\s?\d+\s*[:.)\]-]+\s"
    rf"|^\W*(?:[A-Za-z][A-Za-z ]{{0,30}},\s)?(?:{_LABEL}\W{{0,3}}(?:(?i:id|no|nr|number)\W{{0,2}})?"
    r"\d[\d.]*[a-z]?(?:\s?(?:of|/)\s?\d+)?[\s,;]*)+"
    r"(?:[(\[]\d+ (?:points?|marks?|pts)[)\]])?(?:[.):\]]+\s|\n)|^\s*\(?\d{1,4}[.)]\s+(?=[A-Z$\\])"
    r"|(?:^|(?<=[.:?!\n]\s))(?i:please|kindly|your (?:task|job|goal) is to|(?:can|could|would) you(?: please)?"
    r"|we (?:want|need|wish|would like|are asked) to)\s"
    r"|(?m:^)\W*(?i:system|user|human|assistant|instruction|response|question|problem|answer|solution|a|q)"
    r"(?:\W*(?m:$)|: |\W?\d*\W*\Z)|(?m:^)\W*(?i:question|problem|statement|exercise)[.:][*_]{1,3}\s"
)
# tags of a form for the answer, inside a sentence
_TAG = re.compile(r"</?(?:think|answer|reasoning|result|solution|final|output)>(?=\s*(?:<|and\b|tags?\b|for\b))")
_BOX = re.compile(
    r"(?:\$+|\\[(\[])?(?<![\w}+*/^_-])\\boxed\s*\{[^{}$]{0,30}\}(?:\$+|\\[)\]])?|\$(?=(?:ANSWER|Answer)\b)"
)
_SENTENCE_END = re.compile(
    r"(?<=[.?!:>])[\"')\]$]*\s+|(?<=[$\]}])\s+(?=[A-Z][a-z])|(?<=\\\))\s+(?=[A-Z][a-z])|\s*\n\s*|\s[-–—]+\s|(?<=>)(?=\S)"
    r"|\s+(?=[(\[][^()\[\]\n$]{3,60}[)\]]\s*$)"
)
_EXAMPLE = re.compile(r"[(,]?\s*(?<=[\s(])(?:e\.g\.|for (?:example|instance))[,:]?\s*[$\d/.,]*\d\$?(?=\W*\Z)")
"""Number at the end of a text that shows the form of the answer."""
_BLANKS = str.maketrans(dict.fromkeys("0123456789\n.,:;!?()[]{}<>|*#/_'\"$\\-", " "))
_ENDS = 100  # characters at either end that are searched for surrounding text
_PRONOUNS = listed("he she him his her hers himself herself")
_SIGNS = listed("+ * / ^ = < > <= >= != % sqrt !")
_ADDRESS = WORDS.address
_SPEAKER = listed("i me my please help anyone someone ideas idea hint hints tip tips suggestions thoughts")
_READER = listed("you your following below above here")
_TASKS = listed("find determine compute calculate evaluate")
_PEOPLE = listed("he they their them")
_SAME = dict.fromkeys(_PRONOUNS, "he") | dict.fromkeys(_TASKS, "find")
_SMALL = {word for word in NEUTRAL - WORDS.counted if word.isalpha()}
_ASKED = listed("you your please me us let assistant")
_ROUNDED = listed("round rounded nearest place places significant degrees radians base")
_REPLIES = listed("answer answers solution reasoning explanation response reply")
_HARMLESS = {axis for word in ("hour", "before", "first", "total") for axis, _ in POLES[word]}
_BELONGING = _SIGNS | listed("many much")
_NEGATION = POLES["not"][0][0]
_CALENDAR = {word for axis in WORDS.axes if axis[0] in ("monday", "january") for word in axis}
_NO_REMARK = _SIGNS | _TASKS | _ROUNDED
_NO_NAMES = _CALENDAR | WORDS.remarks | listed("user system let it that there here what who where he she how")
_FRAME = _ADDRESS | NEUTRAL | WORDS.remarks | WORDS.remark_fillers
_CERTAIN = WORDS.remarks | listed("please help thanks thx explain hint")
_NOTICED = _CERTAIN | listed("q ex inst kindly hi hey hello dear system user")
_ITEM = re.compile(r"\s*(?:\d{1,2}[.)]|[-*•])\s+(?:[A-Z][^$\\]*)?")
"""Start of an item of a list."""
_RULES = listed("all calculator calculators allowed one only")
_INTRODUCING = listed(
    "teacher teachers student students pupil tutor professor instructor mentor i my me us our please you your explain"
)
_POINTING = listed("this these following one below")
_DECIDING = WORDS.counted | listed("how many much which what who whose where when why")
_CIRCUMSTANCES = re.compile(
    r"\b\d+[- ](?:years?|minutes?|mins?|seconds?|hours?|marks?|points?)\b|\b(?:grade|class|year|level)\s?\d+"
)
"""Numbers of people and examinations rather than of the problem."""
_SURE = 40
"""A text longer than this has at least ``_LEAST`` tokens."""
_LEAST = 3
"""Fewest tokens of a problem without its surrounding text."""
_MOST_REMARKS = 6
"""Largest number of remarks that are removed at each end. Templates of some datasets are this long."""
_MOST = 4
"""Largest number of sentences that are removed at each end."""


def problem_of(text: str) -> str:
    r"""Return the text without labels and remarks on how to answer at its ends.

    A remark may hold numbers if all its words are typical of remarks. A text that is only remarks is returned
    unchanged.

    Example:
        >>> problem_of("Question 14: Find $x$ if $x + 3 = 5$. Put the final answer in $\\boxed{ANSWER}$.")
        'Find $x$ if $x + 3 = 5$.'
    """
    text = _EXAMPLE.sub(" answer", text)
    ends = text if len(text) <= 2 * _ENDS else f"{text[:_ENDS]} {text[-_ENDS:]}"
    seen = _may_speak(ends) or "<|" in text or "#" in ends or ":" in ends or text.startswith(("[", "(", "You have "))
    seen = seen or text.rstrip()[-1:] in (")", "]")
    if not seen and not text.lstrip("( ")[:1].isdigit():
        return text
    if "\\" in text:
        text = ESCAPED.sub("\n", text)
    bare = _TURN.sub("\n", _TAG.sub(" ", text) if "<" in text else text)
    parts = _sentences(_BOX.sub(" boxed ", bare) if "\\boxed" in bare or "$A" in bare else bare)
    for place in range(len(parts) - 2, -1, -1):
        if _ITEM.fullmatch(parts[place]):
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
    last = sum(1 for _ in takewhile(_says_nothing, parts[: -_MOST_REMARKS - 1 : -1]))
    first = sum(1 for _ in takewhile(lambda part: _says_nothing(part) or _introduces(part), parts[:_MOST_REMARKS]))
    left = "".join(parts[first : len(parts) - last]).strip()
    return left if first + last < len(parts) and (len(left) > _SURE or len(tokens_of(left)) >= _LEAST) else text


def _says_nothing(part: str) -> bool:
    """Return whether a sentence is a remark for certain."""
    if _ITEM.match(part):
        # an item of a list of rules needs no word that marks it as a remark, but no other words either
        told = set(_tokens([part])[0])
        words = {token for token in told if token[0].isalpha()}
        return (
            bool(words) and words <= _FRAME | _RULES and told.isdisjoint(_NO_REMARK) and not part.rstrip().endswith("?")
        )
    return _may_speak(part) and _is_remark(part, set(_tokens([part])[0]))


def _introduces(part: str) -> bool:
    """Return whether words to or about a reader lead with a colon to the problem: *A student asks their teacher:*.

    Words that only point to it must be ones that decide nothing, unlike *Which of these is even:*.
    """
    bare = _CIRCUMSTANCES.sub("", part)
    if not part.rstrip().endswith(":") or any(sign.isdigit() for sign in bare):
        return False
    told = set(_tokens([bare])[0])
    if told & _SIGNS or any(token.startswith("qz") for token in told):
        return False
    points = not _POINTING.isdisjoint(told) and not any(token in _DECIDING or poles_of(token) for token in told)
    return not _INTRODUCING.isdisjoint(told) or (points and {token for token in told if token.isalpha()} <= _FRAME)


def _may_speak(text: str) -> bool:
    """Return whether a text has words of remarks, or no words at all."""
    words = text.lower().translate(_BLANKS).split()
    return not (words and _NOTICED.isdisjoint(words))


def keys_of(text: str) -> list[int]:
    """Return 64-bit keys: that of the whole text, then those without sentences at its ends. Empty for one or two words.

    Two texts are the same problem in disguise if the first key of one is among the keys of the other. Remarks should be
    removed before (`problem_of`).

    Example:
        >>> wrapped = keys_of("I am stuck here. Let $x + 3y = 5$ and $x > y$. Find $y$.")
        >>> keys_of("Let $a + 3b = 5$ and $a > b$. Find $b$.")[0] in wrapped
        True
        >>> keys_of("Let $a + 3b = 5$ and $a > b$. Find $a$.")[0] in wrapped
        False
    """
    parts = _sentences(text)
    tokens = _tokens(parts)
    # two words are not a problem, and many texts would share them
    if sum(map(len, tokens)) < _LEAST:
        return []
    front, back = (
        sum(1 for _ in takewhile(lambda end: _may_be_around(*end), zip(ends[:_MOST], words, strict=False)))
        for ends, words in ((parts, tokens), (parts[::-1], tokens[::-1]))
    )
    # all ways to remove sentences at both ends, because it is unknown which of them surround the problem
    ways = (tokens[first : len(tokens) - last] for first in range(front + 1) for last in range(back + 1))
    return [_key(left) for left in ways if sum(map(len, left)) >= _LEAST]


def _sentences(text: str) -> list[str]:
    """Split a text at the ends of sentences and lines, colons and dashes, but not inside formulas."""
    spans = [match.span() for match in _MATHS.finditer(text)]
    parts: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        # a full stop in a formula does not end a sentence
        if any(first < match.end() < last for first, last in spans):
            continue
        parts.append(text[start : match.end()])
        start = match.end()
    return [part for part in (*parts, text[start:]) if part.strip()]


def _tokens(parts: Sequence[str]) -> list[list[str]]:
    """Return the canonical tokens of each part. Tokens of variables and names begin with ``qz``."""
    whole = "\n".join(parts)
    index = _INDEX.search(whole) is not None
    exponential, axes = "e^" in whole, _AXIS.search(whole) is not None
    names = {name for name in _NAME.findall(whole) if name.lower() not in _NO_NAMES}
    letters: set[str] = set()

    def variable(letter: str) -> str:
        # i (unless an index), e (if raised to a power), pi, and letters of axes are constants and never renamed
        if (
            (letter == "i" and not index)
            or (letter == "e" and exponential)
            or letter == "π"
            or (letter in "xyz" and axes)
        ):
            return letter
        letters.add(letter)
        return f" qz{ord(letter):x}z ".translate(_SPELLED)

    def formula(match: re.Match[str]) -> str:
        if match[1]:
            return f" qzg{match[1]} " if match[1] in _GREEK else match[0]
        return variable(match[2]) if match[2] else match[0]

    def word(match: re.Match[str]) -> str:
        if match[2]:
            # AB is two points if A and B are variables elsewhere, otherwise an abbreviation
            return "".join(map(variable, match[2])) if letters.issuperset(match[2]) else match[0]
        # the articles a and A and the pronoun I are variables only next to an operator
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

    return [[_SAME.get(t, t) for t in tokens_of(marked(part))] for part in parts]


def _braced(match: re.Match[str]) -> str:
    return f"{match[1]}{{{match[2]}}}{{{match[3]}}}" if match[1] else f"{match[4]}{{{match[5]}}}"


_SPELLED = str.maketrans("0123456789", "ghijklmnop")


def _is_remark(part: str, told: set[str]) -> bool:
    """Return whether a sentence is certainly a label or a remark on how to answer."""
    if _CERTAIN.isdisjoint(told):
        return not any(t[0].isalnum() for t in told)  # a line of dashes
    if part.rstrip().endswith("?") or told & _NO_REMARK:
        return False
    words = {t for t in told if t[0].isalpha() and not (t.startswith("qz") and "boxed" in told)}
    if words <= _FRAME:
        return not WORDS.remarks.isdisjoint(words)
    # a remark with an unknown word must address the reader and hold no formulas or people
    if any(
        t.startswith("qz") or t in _PEOPLE or not _HARMLESS.issuperset(axis for axis, _ in poles_of(t)) for t in told
    ):
        return False
    if any(t[0].isdigit() for t in told):
        return "your" in told and not _REPLIES.isdisjoint(told)
    return not _ASKED.isdisjoint(told)


def _may_be_around(part: str, words: Sequence[str]) -> bool:
    """Return whether a sentence at an end may not belong to the problem."""
    told = set(words)
    if _is_remark(part, told):
        return True
    # a sentence with a number, a variable or a formula belongs to the problem, and so do those after it
    if any((t[0].isdigit() and t != "1") or t.startswith("qz") for t in told) or told & _BELONGING:
        return False
    axes = {axis for word in told for axis, _ in poles_of(word)}
    if any(axis < 2 or axis >= STRICT for axis in axes - {_NEGATION}):  # the first: most, sign
        return False
    if part.rstrip().endswith("?"):
        return not _SPEAKER.isdisjoint(told)
    if _TASKS & told and not (_SPEAKER | _READER) & told:
        return False
    return not _ADDRESS.isdisjoint(told) or not (axes or _PEOPLE & told)


def _key(parts: Sequence[Sequence[str]]) -> int:
    """Return a hash of the tokens, with variables and names numbered by their first occurrence."""
    numbers: dict[str, str] = {}
    told = [t for part in parts for t in part]
    said = [t for t in told if t not in _SMALL]
    said = said if len(said) >= _LEAST else told
    text = " ".join(numbers.setdefault(t, f"qz{len(numbers)}") if t.startswith("qz") else meaning_of(t) for t in said)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
