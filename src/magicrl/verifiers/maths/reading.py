r"""From tokens to the shape of an answer; None where the text is of no shape known here.

Every token must find its place: nothing is skipped to make the rest readable. The last way to read a text is as a
sentence with formulas in it (``circle with center (1,2) and radius 3``), compared word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

from magicrl.verifiers.maths.answers import (
    ALL_REALS,
    Answer,
    Domain,
    Family,
    Group,
    Named,
    Quantity,
    Ratio,
    RealSet,
    Sentence,
    Several,
    Text,
    Within,
)
from magicrl.verifiers.maths.brackets import (
    MAX_ITEMS,
    bracketed,
    cycles,
    dotted_list,
    goes_on,
    scaled_matrix,
    set_builder,
    transposed,
    vector,
)
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token, tokens_of
from magicrl.verifiers.maths.literals import plain_word, word_set
from magicrl.verifiers.maths.phrases import (
    Declared,
    based,
    clock_time,
    closed_phrase,
    counted,
    date_of,
    declaration,
    depths,
    described,
    in_symbols,
    labelled_parts,
    midday,
    number_domain,
    out_of,
    split,
    stated,
    without_clause,
    words_of,
)
from magicrl.verifiers.maths.quantities import counted_in_words, free_signs, quantity, singular
from magicrl.verifiers.maths.relations import (
    congruent,
    joined,
    name_of,
    point_label,
    related,
    united,
)

Read = Callable[[Sequence[Token]], "Answer | None"]
_UNSAID = word_set("a an the all any every of that is are it its this which at interval point")
_SPELLINGS = {"centre": "center", "centred": "centered", "colour": "color", "metre": "meter", "litre": "liter"}
_MOST_PARTS = 40


def sentence(tokens: Sequence[Token], read: Read) -> Sentence | None:
    """The words and formulas of a text that holds both; None where a formula in it cannot be read."""
    parts: list[str | Answer] = []
    levels = depths(tokens)
    if levels is None:
        return None
    for kind, run in groupby(zip(tokens, levels, strict=True), key=_kind):
        piece = [token for token, _ in run]
        if kind == "word":
            parts += [word for token in piece if (word := _plain(token.text)) not in _UNSAID]
        elif kind == "sep":
            parts += [token.text for token in piece if token.text not in ",;"]
        elif (read_part := read(piece)) is not None:
            parts.append(read_part)
        else:
            return None
    words = sum(isinstance(part, str) for part in parts)
    return Sentence(tuple(parts)) if 0 < words < len(parts) <= _MOST_PARTS else None


def same_sentence(gold: Sentence, answer: Sentence, same: Callable[[Answer, Answer], bool | None]) -> bool:
    """Word for word, formula for formula."""
    if len(gold.parts) != len(answer.parts):
        return False
    for left, right in zip(gold.parts, answer.parts, strict=True):
        if isinstance(left, str) or isinstance(right, str):
            if left != right:
                return False
        elif same(left, right) is not True:
            return False
    return True


def _kind(placed: tuple[Token, int]) -> str:
    token, level = placed
    if level:
        return "formula"
    if token.kind == "sep":
        return "sep"
    # a lone letter between words is an article or a name, and reads as a formula too
    return "word" if token.kind == "word" and (token.roman or len(token.text) > 1) else "formula"


def _plain(word: str) -> str:
    low = word.casefold().strip(".,")
    return singular(_SPELLINGS.get(low, low))


_MAX_DEPTH = 12
_ABOUT = frozenset(("both", "either", "approximately", "about", "around", "approx", "roughly", "exactly", "~", "="))
_EXCEPT = (["except"], ["except", "for"], ["excluding"], ["but"], ["other", "than"], ["without"])


@lru_cache(maxsize=4096)
def read(text: str, trusted: bool) -> Answer | None:
    """The shape of an answer in canonical notation; ``trusted`` is for golds."""
    tokens = tokens_of(text)
    if not tokens:
        return None
    tokens = in_symbols(tokens)
    found = _shape_of(tokens, trusted)
    if found is None and any(token.kind == "word" for token in tokens):
        return sentence(tokens, lambda part: _shape_of(part, trusted))
    return found


def _shape_of(tokens: Sequence[Token], trusted: bool) -> Answer | None:
    tokens = list(tokens)
    if not any(token.kind == "env" for token in tokens):  # lines that are no table's rows are a list
        tokens = [Token("sep", ",") if (token.kind, token.text) == ("cell", "row") else token for token in tokens]
    return _Reader(trusted).answer(tokens, 0)


class _Reader:
    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    def answer(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """A whole answer: items with separators between, perhaps a clause at the end."""
        levels = depths(tokens)
        if levels is None or depth > _MAX_DEPTH or not tokens:
            return None
        if tokens[0].text.casefold() in _ABOUT and len(tokens) > 1:
            tokens, levels = tokens[1:], levels[1:]
        whole = date_of(tokens) or self._labelled(tokens, levels, depth) or self._congruent(tokens, levels, depth)
        if whole is not None:
            return whole
        tokens = out_of(counted(described(tokens)))
        levels = depths(tokens) or levels
        without = self._except(tokens, depth)
        if without is not None:
            return without
        tokens, levels, declared = without_clause(tokens, levels)
        if not tokens:
            return None
        if tokens[0].kind == "sym" and len(tokens) > 3 and tokens[1].kind == "bar":
            built = set_builder(tokens, self, depth)  # {x | x > 1} with braces that show nothing
            if built is not None:
                return built
        pieces, separators = split(tokens, levels, "sep")
        if len(pieces) > MAX_ITEMS:
            return None
        if not separators:
            found = self.item(tokens, levels, depth)
        elif "," in separators and (";" in separators or _named_blocks(pieces, separators)):
            found = self._blocks(tokens, levels, depth)
        else:
            found, within = self._list(pieces, separators, depth)
            declared = Declared(declared.names | within.names, declared.domain or within.domain)
        if found is not None and declared:
            return Family(found, declared.names, declared.domain)
        return found

    def _labelled(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """``(a) 5 (b) 7``: answers to the parts of a question, in their order."""
        parts = labelled_parts(tokens, levels)
        items = [(label, self.answer(part, depth + 1)) for label, part in parts]
        named = [Named(f"part{label}", (), value) for label, value in items if value is not None]
        return Several(tuple(named)) if len(named) == len(items) > 1 else None

    def _congruent(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        if not any(token.kind == "cmd" and token.text == "pmod" for token in tokens):
            return None
        return congruent(tokens, levels, lambda part: self.part(part, depth))

    def _blocks(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """``p = 5, q = 2; p = 7, q = 2``: semicolons part what commas join."""
        blocks: list[list[Token]] = [[]]
        for token, level in zip(tokens, levels, strict=True):
            if token.kind == "sep" and token.text in (";", "or") and level == 0:
                blocks.append([])
            else:
                blocks[-1].append(token)
        items = [self.answer(block, depth + 1) for block in blocks if block]
        known = [item for item in items if item is not None]
        return Several(tuple(known)) if len(known) == len(items) > 1 else None

    def _list(self, pieces: list[Sequence[Token]], separators: list[str], depth: int) -> tuple[Answer | None, Declared]:
        names: frozenset[str] = frozenset()
        domain = ""
        if not pieces[-1] and separators[-1] in ",;":
            pieces, separators = pieces[:-1], separators[:-1]
        items: list[Answer] = []
        kept: list[str] = []
        for position, piece in enumerate(pieces):
            if not piece:
                # ", and": two separators are one
                if separators[position - 1 : position] == [","] and separators[position : position + 1] == ["and"]:
                    continue
                return None, Declared()
            if goes_on(piece):
                return (dotted_list(pieces, position) if not names else None), Declared()
            declared = declaration(piece)
            if declared and items:
                names, domain = names | declared.names, domain or declared.domain
                continue
            levels = depths(piece)
            item = self.item(piece, levels, depth + 1) if levels is not None else None
            if item is None:
                return None, Declared()
            items.append(item)
            kept.append(separators[position] if position < len(separators) else "")
        items = _given_names(items)
        return (joined(items, kept[:-1]) if items else None), Declared(names, domain)

    def part(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """One item, one level further down."""
        levels = depths(tokens)
        return self.item(tokens, levels, depth + 1) if levels is not None and tokens else None

    def item(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """One item: a relation, a set, a group, a ratio, words, or a quantity."""
        if depth > _MAX_DEPTH:
            return None
        phrase = closed_phrase(tokens) or number_domain(tokens)
        phrase = phrase or self._phrase(tokens, levels, depth)
        if phrase is not None:
            return phrase
        parts, operations = split(tokens, levels, "cup")
        if operations and all(any(token.kind == "rel" for token in part) for part in parts):
            return united([self.part(part, depth) for part in parts], operations)  # x < 1 or x > 2, with a cup
        parts, relations = split(tokens, levels, "rel")
        if relations:
            return related(parts, relations, lambda piece: self.part(piece, depth), self._trusted)
        tokens = _taken_away(tokens, levels)
        parts, operations = split(tokens, levels, "cup")
        if operations:
            return united([self.part(part, depth) for part in parts], operations)
        if any(token.kind == "cmd" and token.text == "mapsto" for token in tokens):
            return self._mapping(tokens, levels, depth)
        if any(token.kind == "colon" and level == 0 for token, level in zip(tokens, levels, strict=True)):
            return self._with_colon(tokens, levels, depth)
        return self._enclosed(tokens, levels, depth) or self._words_or_formula(tokens, levels)

    def _phrase(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """A statement in words that gives a value, or a set without some points."""
        if tokens[0].kind != "word":
            return None
        said = stated(tokens, levels)
        if said is not None:
            value = self.part(said[1], depth)
            return None if value is None else Named(" ".join(words_of(said[0])), (), value)
        words = [token.text.casefold() for token in tokens]
        if words[0] in ("all", "any", "every") and any(token.kind == "rel" for token in tokens):
            at = next(at for at, token in enumerate(tokens) if token.kind == "sym" or at == len(tokens) - 1)
            if set(words[1:at]) <= {"real", "reals", "number", "numbers", "values", "value", "of"}:
                return self.part(tokens[at:], depth)  # all real x > 2
            domain, bound = number_domain(tokens[:at]), self.part(tokens[at:], depth)
            if isinstance(domain, Domain) and isinstance(bound, RealSet):
                return Within(domain.name, bound)  # all integers n > 2
        return None

    def _except(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """``all real numbers except 1 and 2``."""
        words = [token.text.casefold() for token in tokens]
        for mark in _EXCEPT if tokens and tokens[0].kind in ("word", "cmd") else ():
            at = next((at for at in range(1, len(words) - 1) if words[at : at + len(mark)] == mark), None)
            whole = number_domain(tokens[:at]) if at is not None else None
            subject = tokens[at - 1].text if at and tokens[at - 1].kind == "sym" else ""
            if at == 2 and subject and words[0] in ("all", "any", "every"):
                whole = ALL_REALS  # all n except 2
            if at is not None and whole is not None:
                points = self.answer(tokens[at + len(mark) :], depth + 1)
                listed = points.items if isinstance(points, Several) else (points,)
                plain = tuple(point for point in listed if isinstance(point, Quantity))
                left = united([whole, Group("{", "{", plain)], ["setminus"])
                if len(plain) == len(listed):
                    return RealSet(left.spans, subject) if isinstance(left, RealSet) else left
        return None

    def _enclosed(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """What brackets hold, and what belongs to brackets: a point's name, a transposition, a factor."""
        found = cycles(tokens) or bracketed(tokens, levels, self, depth)
        if found is not None:
            return found
        label = point_label(tokens, levels)
        if label:
            point = self.part(tokens[label[1] :], depth)
            return None if point is None else Named(label[0], (), point)
        found = transposed(tokens, levels, self, depth) or scaled_matrix(tokens, levels, self, depth)
        return found or vector(tokens)

    def _words_or_formula(self, tokens: Sequence[Token], levels: list[int]) -> Answer | None:
        if (clock := midday(tokens)) is not None:
            return clock
        if all(token.kind == "word" or (token.kind == "op" and token.text == "-") for token in tokens):
            named = self._expression(tokens) if not plain_word(words_of(tokens)) else None
            return named or counted_in_words(tokens, trusted=self._trusted) or Text(words_of(tokens))
        if len(tokens) > 1 and tokens[0].text in ("a", "A") and all(token.kind == "word" for token in tokens[1:]):
            return Text(words_of(tokens))  # a circle: no product
        if _starts_in_words(tokens) and all(token.kind in ("word", "sym") for token in tokens):
            return Text(words_of(tokens))  # student B
        if _starts_in_words(tokens) and all(token.kind in ("word", "num") for token in tokens):
            return Text(words_of(tokens))  # June 20
        return based(tokens) or clock_time(tokens) or quantity(tokens, levels, trusted=self._trusted)

    def _mapping(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        r"""``f: x \mapsto x^2``."""
        at = next(at for at, token in enumerate(tokens) if token.kind == "cmd" and token.text == "mapsto")
        head = [token for token in tokens[:at] if token.kind != "colon"]
        value = self.part(tokens[at + 1 :], depth)
        if value is None or len(head) != 2 or any(token.kind != "sym" for token in head):
            return None
        name = name_of(head[:1])
        return None if name is None else Named(name[0], (head[1].text,), value, name[2])

    def _with_colon(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """A clock time, a ratio, or a label and its value."""
        clock = clock_time(tokens)
        if clock is not None:
            return clock
        parts, _ = split(tokens, levels, "colon")
        exprs = [parse(part) for part in parts]
        formulas = [expr for expr in exprs if expr is not None]
        if len(formulas) == len(exprs):
            return Ratio(tuple(formulas))
        if len(parts) == 2 and parts[0] and all(token.kind == "word" for token in parts[0]):
            value = self.part(parts[1], depth)
            return None if value is None else Named(" ".join(words_of(parts[0])), (), value)
        return None

    def _expression(self, tokens: Sequence[Token]) -> Answer | None:
        tree = parse(tokens)
        return None if tree is None else free_signs(tree, None)


def _given_names(items: list[Answer]) -> list[Answer]:
    """``a: 3, b: 5``: ratios of different letters to numbers are letters and their values."""
    pairs = [item.parts for item in items if isinstance(item, Ratio) and len(item.parts) == 2]
    names = {name.name for name, value in pairs if name.op == "sym" and not value.symbols}
    if len(items) < 2 or len(names) != len(items):
        return items
    return [Named(name.name, (), Quantity(value), name) for name, value in pairs]


def _taken_away(tokens: Sequence[Token], levels: list[int]) -> Sequence[Token]:
    r"""A minus sign before a set takes its members away: ``\mathbb{R} - \{0\}``."""
    taken = [
        at
        for at in range(1, len(tokens) - 1)
        if levels[at] == 0 and (tokens[at].kind, tokens[at].text) == ("op", "-") and tokens[at + 1].text == "{"
        and tokens[at + 1].kind == "open"
    ]  # fmt: skip
    return [Token("cup", "setminus") if at in taken else token for at, token in enumerate(tokens)] if taken else tokens


def _named_blocks(pieces: Sequence[Sequence[Token]], separators: Sequence[str]) -> bool:
    """``x = 2, y = 1 or x = 1, y = 2``: every piece gives a value to a name, ``or`` parts the solutions."""
    named = all(any(token.kind == "rel" and token.text == "=" for token in piece) for piece in pieces)
    return named and "or" in separators and separators.count(",") > separators.count("or")


def _starts_in_words(tokens: Sequence[Token]) -> bool:
    return tokens[0].kind == "word" and (tokens[0].roman or len(tokens[0].text) > 2)
