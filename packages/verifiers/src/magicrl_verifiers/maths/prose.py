r"""Final answer in running text without a box (extraction ``lenient``).

The rules depend only on the text, and choose one candidate: the value after an announcement ("the answer is"), else the
last value of the last sentence that has one. Values that their clause denies or doubts do not count (`clauses`), and a
number in a formula means the formula. Two candidates joined by "or" are both taken, which is wrong.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import combinations

from magicrl_verifiers.maths.clauses import DENIED, DOUBTED, LATER, LATEX, MATH, read_clauses
from magicrl_verifiers.maths.literals import MORE_SCALES, SCALE_PREFIX, leading_number, part_of_one
from magicrl_verifiers.maths.notation import canonical_notation, plain_mathematics
from magicrl_verifiers.maths.quantities import UNITS
from magicrl_verifiers.maths.reading import read
from magicrl_verifiers.maths.relations import restates

_ANSWER = (
    "答案", "正确答案", "正確答案", "答え", "正解", "정답", "답", "réponse", "reponse", "respuesta", "resposta",
    "risposta", "antwort", "ответ", "відповідь", "उत्तर", "الجواب", "الإجابة", "إجابة", "odpowiedź", "odpověď", "cevap",
    "svar", "svaret", "vastaus", "antwoord", "jawaban", "đáp án", "câu trả lời", "válasz", "คำตอบ", "উত্তর",
    # Chinese: hence choose, the correct option
    "故选", "故選", "正确选项", "正確選項",
)  # fmt: skip
_ANSWER_WORDS = r"(?:final\s+)?answers?|results?|solutions?|correct\s+(?:option|choice|letter)|" + "|".join(_ANSWER)
_ANNOUNCING = ("answer", "result", "solution", "correct", *_ANSWER)
_IS = (
    r"[\"']?\s*(?:\*\*)?\s*(?:(?:is|are|was|would\s+be|will\s+be|be|est|es|é|è|ist|lautet|является|это|هي|"
    r"هو|है|to|jest|je|är|er|on|adalah|là)(?![^\W\d_])|[是為为は은는])?"
    r"(?:\s*[:：=】]|\s+therefore|\s+thus|\s+indeed)?\s*(?:\*\*)?\s*[:：]?\s*"
)
_UNSPACED = r"\u3040-\u30ff\u4e00-\u9fff"
"""Characters of Chinese and Japanese, which have no space around a word."""
_ANCHOR = re.compile(
    rf"(?<![^\W_{_UNSPACED}])(?:{_ANSWER_WORDS})(?:(?<=[{_UNSPACED}])|(?![A-Za-z])){_IS}", re.IGNORECASE
)
_STRONG = re.compile(
    r"(?:[:：=】选選]|\bis\b|\bare\b|\best\b|\bes\b|\bist\b|\blautet\b|[éè是為为は은는]|هي|هو|है|это|\bà\b|\blà\b)\W*$",
    re.IGNORECASE,
)
_NEXT_TURN = re.compile(
    r"(?<=\S)(?<!\|>)\s*<\|(?:im_end|im_start|endoftext|end_of_text|eot_id|eom_id|end|return|user|assistant|system)\|>.*",
    re.DOTALL,
)
_CONTROL = re.compile(  # not 0<|r|<1
    r"<\|[A-Za-z_]{3,30}\|>|^[ \t]*```\w*[ \t]*$|(?:\\\(|\$) ?\\(?:blacksquare|square|qed|Box) ?(?:\\\)|\$)|[∎■]",
    re.MULTILINE,
)
_HOPE = re.compile(r"I hope (?:it|this) is correct\.?\s*$|Let me know if .{0,80}$", re.IGNORECASE)
_MAX_HOPE = 120
_CLOSING = re.compile(r"^[ \t]*####[ \t]+(?P<value>\S[^\n]{0,80})\s*\Z", re.MULTILINE)  # GSM8K's last line
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|pct\b)", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]{1,120})\*\*")
_NUMBER_BODY = (
    r"\d{1,3}(?:\.\d{3}){2,}|"
    r"\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w)|\d+ \d+/\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?!\d)|"
    r"\d+[.,]\d+|\.\d+|\d+"
)
_NUMBER = re.compile(
    rf"(?<![A-Za-z\d.,_^\\{{])(?:-\s?)?(?:\\?[$€£¥₹])?\s?(?:{_NUMBER_BODY})(?!\d*-[a-z]{{2}})(?:\s?[/:]\s?\d+)*(?:\s*(?:\\?%|percent\b|pct\b|[ap]\.m\.|[ap]m\b))?",
    re.IGNORECASE,
)
_LONG_NAMES = sorted((name for name in UNITS if re.fullmatch("[a-z]{3,}|[€£¥₹¢]", name)), key=len, reverse=True)
_UNIT_NAMES = (
    r"(?:(?:square|cubic|sq\.?|cu\.?) )?(?:[cmk]m|mm|kg|mg|m[lL]|ft|lbs?|oz|mph|km/hr?|m/s|mi|"
    rf"{'|'.join(_LONG_NAMES)}|degrees?|units?|dozen|score|hundred(?:th)?s?|thousand(?:th)?s?|(?:m|b|tr)illion(?:th)?s?)"
)
_SCALE_WORDS = "|".join(sorted((word for word in MORE_SCALES if word[0] < "\u3000"), key=len, reverse=True))
_SCALE_NAMES = rf"(?i:{_SCALE_WORDS})(?!\w)|[百千万萬]?[万萬亿億]|{SCALE_PREFIX}"
_RAISED = r"(?:\^\{?[23]\}?|[²³])"
_UNIT_AFTER = re.compile(
    rf"\s?(?P<unit>{_SCALE_NAMES}|{_UNIT_NAMES}|m(?={_RAISED})|[msgLNJWVKh](?=\s*(?:[.,;)]|$)))(?P<power>{_RAISED})?"
    r"(?P<per>\s?(?:/|per )\s?(?:s|h|hr|min|second|minute|hour|day)\b)?(?![A-Za-z\d^])"
)
_ASSIGNED = re.compile(
    r"(?<![A-Za-z\d])(?:[A-Za-z](?:\([a-z]\))?|[A-Za-z]_\w)\s*=\s*(?P<value>[^=,;$]{1,60}?)\s*\.?\s*$"
)
_GIVEN_FIRST = re.compile(
    rf"\W*(?P<value>-?(?:{_NUMBER_BODY})(?: [a-z]+){{0,2}}?),? "
    r"(?:for|with|at|when|where|if|since|because|attained|from)\b"
)
"""A number that an announcement gives before it mentions a formula: *5, with equality at $x=y$*."""
_UPRIGHT = re.compile(r"\\(?:text|textbf|mathrm|operatorname)\s*\{[^{}]{0,60}\}")
_NEXT_FIELD = re.compile(r"[,;]\s*[\"']?[A-Za-z_]{2,}[\"']?\s*[=:]")  # answer=6; check=5
_JSON_TEXT = re.compile(r'"([^"\n]{1,200})"\s*[,}\n]')  # {"answer": "10"}
_NAME = re.compile(r"^[A-Za-z]\s*=(?=[^=]*$)\s*")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_WORDS_OF_FORMULAS = frozenset(("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi", "or", "and"))
_SENTENCE = re.compile(r"\s(?:(?<=[.!?].)|(?<=[.!?]\$.)|(?<=[.!?]\$\$.)|(?<=[.!?]\\\].))\s*|[。！？\n]+", re.DOTALL)
_REASON = re.compile(r",? \b(?:since|because|as|whereas|while|given that)\b.*", re.DOTALL)
_LISTED = re.compile(
    r"\b(?:roots|solutions|zeros|zeroes|answers|values|numbers|possibilities|lösungen|nullstellen|soluciones|raíces|racines|"
    r"soluzioni|radici|soluções|raízes)\b.*\b(?:are|sind|son|sont|sono|são)\b",
    re.IGNORECASE,
)
_OR_WORDS = "or|oder|ou|o|или|lub|veya|atau|hoặc|eller|tai|或者?|または|또는|أو"
_CONNECTED = re.compile(rf"\s*(?:(?:,\s*)?(?:and(?: also)?|und|et|y|e|и|和|と|{_OR_WORDS})|[,、，])\s*", re.IGNORECASE)
_DENIED = re.compile(r"\s*(?:\*\*)?(?:not|never|neither)\b|n[o'’]t\b", re.IGNORECASE)
_EITHER = re.compile(rf"\s*(?:,\s*)?(?:{_OR_WORDS})\s*", re.IGNORECASE)
_EITHER_BRACKET = re.compile(rf"{_EITHER.pattern}[(\[{{]?", re.IGNORECASE)
_JOINED_BEFORE = re.compile(rf"\d[)\]}}]?\s*(?:,\s*)?\b(?:{_OR_WORDS})\s*\Z", re.IGNORECASE)
_DASH_AS_MINUS = re.compile(r"(?:(?<=[A-Za-z:=(] )|(?<=[:=(]))–(?=\d)")
_FOR_ALL = re.compile(r"\s*(?:,\s*)?for (?:all|any|every|each)\b[^$]*")
_YES_OR_NO = re.compile(r"\W*(?:yes|no)\b\**[,;:]", re.IGNORECASE)
_NEGATIVE_SPACE = re.compile(r"\\!\s*")
_MARKED = re.compile(f"[{DENIED}{DOUBTED}]")
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
_OPENING = r"(?:[.!?]\s|\n)\W*"
_CORRECTION = re.compile(rf"{_OPENING}(?:no[,.:!]|{LATER['correction']})", re.IGNORECASE)
_OBJECTION = re.compile(
    rf"{_OPENING}(?:(?:but|however|if)\b[^.!?\n]*\b{LATER['conclusion']}|well,|{LATER['objection']})", re.IGNORECASE
)
"""Later sentence that concludes another value: *But 0 counts too, so it is 6*."""
_RIVAL = re.compile(
    r"\s*(?:(?:\w+\s+){0,2}(?:and|or)|(?:parts?\s+)?in|[|→]|\.\.+|[,–-]\s*no,|"
    r"(?:for|when|if|in|with)\b[^.]*(?:\b(?:and|else|or)|;))\s*",
    re.IGNORECASE,
)
"""Text between an announced value and another one that makes it a part or a case: *7 in 9*, *7 for odd n and 8*."""
_ITEMS = re.compile(r"(?:\A|(?<=[.!?:;])\s|\n)\s*\(?(?P<number>\d{1,2})[.)]\s+(?=\S)")
_SAID_IN_WORDS = re.compile(
    r"(?:\b(?:is|are|equals|get|gives|makes)|\A\W*(?:so|thus|hence|therefore),?) "
    r"(?P<value>[a-z]+(?:[ -][a-z]+){0,5})\W*\Z",
    re.IGNORECASE,
)
_NAMED_VALUE = re.compile(r"[A-Za-z](?:_\w)?\s*=[^=]*")
_OF_NAMES = re.compile(r"[^=]*[\w})]\s*(?:[-+*/]|\\cdot)[^=]*=[^=]*")
"""Equation of an expression, which behind named values is their result: *a = 40, b = 2 and a + b = 42*."""
_RELATION = r"(?:[<>]=?|!=|\\(?:leq?|geq?|neq?)(?![a-z]))"
_OPERATOR = rf"(?:{_RELATION}|[-+*/×÷·–]|\^(?!\s*\{{?\\circ)|\\(?:cdot|times|div|pm)(?![a-z]))"
_OPERANDS = re.compile(
    rf"(?:(?:\A|\s){_RELATION}\s*|(?:\$[^$]{{1,40}}\$|(?<![\w.$])(?:\d[\d.,]*[a-z]?|\\?[A-Za-z]|\\[a-z]+))\s*{_OPERATOR}\s*)+\Z"
)
_OPERATED = re.compile(
    rf"(?:\s*{_OPERATOR}\s*(?:\$[^$]{{1,40}}\$|\d[\d.,]*\b|[A-Za-z]\b|\\[a-z]+|\()|[a-z](?![A-Za-z\d])|\+(?!\S))+"
)
_NO_MORE = r"\W*(?:[A-Za-z][^\d$\\]*)?\Z"
_TUPLE = re.compile(
    r"(?<![\w)])(?<!\),)(?<!\), )(?<!\) and )(?P<value>(?:[(\[][^()\[\]A-Za-z\n]{1,60},[^()\[\]A-Za-z\n]{1,60}[)\]]"
    rf"(?:,? and |, ?|(?={_NO_MORE})))+|"
    rf"(?:[A-Za-z] ?= ?-?[\d./]+(?:,? and |,? or |, ))+[A-Za-z] ?= ?-?[\d./]*\d){_NO_MORE}"
)
_BOUND = r"(?:[-+\d./^* ]|\\(?:infty|pi|sqrt\{\d+\})(?![a-z])|\binf(?:inity|ty)?\b){1,40}"
_PART = rf"(?:[(\[]{_BOUND},{_BOUND}[)\]]|⟨{_BOUND}(?:,{_BOUND}){{1,5}}⟩|\\?\{{{_BOUND}(?:,{_BOUND}){{0,20}}\\?\}})"
_FUNCTION = r"\\?(?:sqrt|ln|log(?:_\{?\d{1,3}\}?)?|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc)"
_IN_GROUP = rf"(?:[\d .,+*/^!|_{{}}-]|\\?(?:pi|cdot|times)(?![a-z])|{_FUNCTION}|[A-Za-z](?![A-Za-z]))"
_GROUP = rf"\((?:{_IN_GROUP}|\({_IN_GROUP}{{1,30}}\)){{1,40}}\)"
_LETTERS = r"(?:[xyz]{2,3}|[abc]{2,3}|mn|pq|[A-Za-z])(?![A-Za-z])(?:_\d)?"
_FACTOR = (
    rf"(?:(?<=\\pi) (?=[rRhxabnk]))?(?:\d++(?:[.,]\d++)*+(?:/\d++)?| ?\\?(?:pi|infty)(?![A-Za-z])|"
    rf" ?{_FUNCTION}(?: ?(?:{_GROUP}|\{{\d+\}}|\d++(?:\.\d++)?|\\?pi(?![a-z]))| [a-z](?![A-Za-z]))|{_LETTERS}|{_GROUP})"
    # an exclamation mark that goes on is a factorial, one that ends a sentence is none
    rf"(?:(?:(?<=\\pi) )?\^(?:-?\d+|[a-z](?![A-Za-z])|\{{[^{{}}]{{1,9}}\}}|{_GROUP})|!(?=[.,;:)^*/+-]| [a-z*/+-]))?"
)
_ATOM = rf"(?:{_FACTOR}){{1,5}}+(?![A-Za-z])"
_TERM = rf"-?{_ATOM}(?:(?: ?\\(?:times|cdot|div|pm) {{0,2}}| [-+*/] |(?:(?<=\\pi) )?[-+*/]){_ATOM}){{0,5}}+"
_BOUNDS = rf"{_TERM}(?: ?(?:[<>]=?|=|\\[lg]e ) ?{_TERM}){{1,2}}"
_SETS = rf"{MATH.pattern}|(?<![\w$\\^}}\]])(?P<plain>{_PART}(?:\s*(?:∪|\\cup|U)\s*{_PART}){{0,8}})(?![\w$^])"
_SPAN_OF_LATEX = re.compile(_SETS, re.DOTALL)
_SPAN = re.compile(
    rf"{_SETS}|(?<![^\s:*\"“])(?<![^*\s]\*)(?:(?P<bounds>{_BOUNDS}(?:,? (?:and|{_OR_WORDS}) {_BOUNDS}){{1,3}})|"
    rf"(?<!\d )(?P<term>(?:[A-Za-z](?:\([a-z]\))? = )?{_TERM}))"
    r"(?=[\s.,;:!?*\"”)]|\Z)(?! ?(?:[=<>^/+-]|\\(?!approx)|\*(?!\*)))",
    re.DOTALL,
)
"""A formula; an interval, a union of them, a set or a point; in plain text also joined inequalities, and a term."""
_NO_VALUES = re.compile(r".*?(?:[<>]|\\[lg]e)|(?!.* and ).*?= ?-?[\d./ +*-]*[a-z](?![A-Za-z])")
"""Joined relations that give no numbers: *x < 0 or x > 2*, *y = 2x or y = 3x*."""
_FORMULA = re.compile(
    r"(?=.*(?:\d|[a-z]{2}))"
    r"(?:.*(?:\\|[a-z]{2}|!|\^\{|\w\(|\)[\w(^]|\) ?[-+*/])|(?=.*[A-Za-z]).*(?:[\w)] ?[-+*/] ?[\w(]|\^))"
)
"""Terms that are more than a number with its unit: *25π*, *2 sqrt(3)*, *3x + 2*, *n(n+1)/2*, *5! ways*."""
_NO_POINT = re.compile(r"inf|[∪{⟨]|\\cup|U|\[[^\]]*\)|\([^)]*\]")
_COUNTED_IN = re.compile(
    r"(?P<count>(?<![\w.$])\d+|(?<!\\)\$\d+\$)(?P<noun>(?: (?!and\b|or\b|is\b|so\b|then\b)[a-z]+){1,3}) "
    r"(?:in|on|over|within|of|from)(?: the(?: \w+)? (?:interval|range|set|domain))? "
    r"(?P<dollar>\$?)\\?[(\[{][^$()\[\]{}]{1,60},[^$()\[\]{}]{1,60}\\?[)\]}](?P=dollar)(?![\w$])"
)
"""Things counted in an interval or a set: *3 solutions in [0, 2)*."""
_BASED = re.compile(
    r"(?P<dollar>(?<![\w.$\\{}^])\$?)(?P<digits>\d[\dA-F]*)(?:(?P=dollar),? (?:in |\()?base[- ]\$?|_\{?)"
    r"(?P<base>\d{1,2})\}?(?!\w)[$)]?"
)
"""A number in another base: *14 in base 5*, *14 (base 5)*, *14_5*."""
_ODDS = re.compile(r"(?P<head>\b(?:probability|chance)\b[^.\n\d]{1,60})(?P<part>\d+) (?:in|out of) (?P<whole>\d+)\b")
_RESTATED = re.compile(
    r"(?:(?<!\\)\$(?P<formula>[^$\n]{1,60})\$|\\\((?P<latex>[^$\n]{1,60}?)\\\)|"
    r"(?<![\w.,/^*$\\{(-])(?P<plain>-?(?:[\d()/^*]|\\pi ?|\\sqrt\{\d+\}|\bsqrt\(\d+\)| ?[-+] ?(?=[\d\\(])){1,60}))"
    r"[^\d$=\n.;()\\]{0,6}(?P<aside>\()?(?:[^\d$=\n.;()\\]|\\approx){1,40}\$?(?P<about>-?\d+\.\d{2,12})\$?"
    r"(?(aside)\)?)(?!\d|\.\d|\s?\\?%|\s?percent)"
)
"""A number and a decimal after it, which may give the same value: *1/3, or about 0.33*."""
_MAX_RESTATED = 1500
_MAX_SENTENCES = 6
_MAX_SEGMENT = 300

_LETTER = re.compile(r"(?<![A-Za-z\d\\$'’])[(\[（]?(?P<letter>[A-J])[)\]）]?(?![A-Za-zÀ-ɏ\u1e00-\u1eff\d'’])")
_FORMULA_LETTER = re.compile(r"\A\s*(?:option|choice|letter)?\s*\$([A-J])\$(?=\W*\Z)")
_FIRST_LETTER = re.compile(r"\W*(?P<letter>[A-J])(?:[).:,;。．、，：）]|\s*$|\s*\n|[^\x00-\x7f‘’]|\*)")
_CALLED_RIGHT = re.compile(
    r"(?<![A-Za-z\d])[(]?(?P<letter>[A-J])[)]?\s+(?:is|must be|est|es|ist)\s+(?:the\s+|la\s+|die\s+)?(?:only\s+)?"
    r"(?:correct|right|best|true|correcte?|bonne|correcta|richtig)"
)
_CALLED_WRONG = re.compile(
    r"[)]?\s+(?:is|are|est|es|ist)\s+(?:\w+\s+)?(?:not|wrong|incorrect|false|out\b|impossible|falsch)|\s*(?:isn|cannot)|"
    # Chinese: B, C and D are all wrong, not right, not as the problem says, not chosen, mistaken
    r"[)）]?(?:\s*[、，,和与與]\s*[A-J])*\s*(?:选项|選項|项|項)?[都均皆也是]*\s*"
    r"(?:错|錯|不正[确確]|不[对對]|不符|不成立|不[选選]|不可能|不[满滿]足|有误|有誤)"
)
_NEGATED = re.compile(
    r"(?:\bnot|n['’]t(?:\s+be)?|\bcannot be|\bneither|\bnor|\bexclude|\beliminate|\brule out|\bnicht|\bkein|\bno es|"
    # Chinese: is not, by no means, not chosen, apart from, ruled out, also before a list of letters
    r"(?:不是|并非|並非|不选|不選|除了?|排除)(?:[A-J]\s*[、，,和与與]\s*)*|n['’]est pas|\bnon è|\bnão é|\bне|नहीं|ليس|"
    r"\binstead of|\brather than|\bexcept|\b(?:anything|everything|all) but|\bother than|\bapart from)"
    r"\s*(?:the\s+)?(?:option|choice|answer)?\s*[\"'(*]*$",
    re.IGNORECASE,
)


_CONCLUDED = re.compile(r"therefore|so |thus|hence|因此|所以|donc|also", re.IGNORECASE)


def final_answer(text: str, *, choice: bool) -> str | None:
    """Return the text of the final answer; None if none was found.

    It is empty if the text only denies or doubts values, or gives bounds.

    Args:
        choice: Whether the answer is a multiple-choice letter.

    Example:
        >>> final_answer("We get 3 + 4 = 7. So the answer is 7 apples.", choice=False)
        '7'
    """
    # models write control tokens and a polite sentence after their answer; gpt-oss writes its reasoning before them
    text = _CONTROL.sub("", _NEXT_TURN.sub("", text.rpartition("<|message|>")[2])).strip()
    text = (text[:-_MAX_HOPE] + _HOPE.sub("", text[-_MAX_HOPE:])).strip()
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() and char > "\x7f" else char for char in text)
    if choice:
        return " or ".join(dict.fromkeys(_choice(text))) or None
    text = _STRUCK.sub("", text) if "~~" in text else text
    items = [int(item["number"]) for item in _ITEMS.finditer(text)]
    if len(items) > 1 and items == list(range(1, len(items) + 1)):  # the numbers of a list are no values
        text = _ITEMS.sub("\n", text)
    span = _SPAN_OF_LATEX if "\\" in MATH.sub("", text) else _SPAN
    text = span.sub(_on_one_line, plain_mathematics(text))
    if text.find(".", -_MAX_RESTATED) >= 0:
        text = text[:-_MAX_RESTATED] + _RESTATED.sub(_as_chain, text[-_MAX_RESTATED:])
    text = _BASED.sub(r"$\g<digits>_{\g<base>}$", _ODDS.sub(r"\g<head>\g<part>/\g<whole>", text))
    text = _COUNTED_IN.sub(r"\g<count>\g<noun>", text)
    text = _DASH_AS_MINUS.sub("-", text) if "–" in text else text
    if "####" in text and (closing := _CLOSING.search(text)) and (value := _first_value(closing["value"])) is not None:
        return value
    anchored = _anchored(text)
    return anchored if anchored is not None else _last_value(text)


def _on_one_line(span: re.Match[str]) -> str:
    """Return a formula without marks that look like the end of a sentence; intervals and sets become formulas."""
    text = " ".join(span[0].split())
    if span.lastgroup == "plain":
        text = re.sub(r"(?<![\\\w])\{([^{}]*)\}", r"\\{\1\\}", text).replace("∪", r"\cup").replace("U", r"\cup")
        return _as_formula(text, span.string) if _NO_POINT.search(span[0]) else span[0]
    if span.lastgroup == "bounds":
        joined = re.sub(rf",? (?:(?P<both>and)|{_OR_WORDS}) ", lambda word: f" {word['both'] or 'or'} ", text)
        if _NO_VALUES.match(text):
            return _as_formula(joined, span.string)
        parts = re.split(" (and|or) ", joined)
        if not any(_FORMULA.match(part.rpartition("=")[2]) for part in parts[::2]):
            return span[0]
        parts[::2] = [_as_formula(part, span.string) for part in parts[::2]]
        return " ".join(parts)
    if span.lastgroup == "term":
        number = re.match(r"-?[\d.,/]+", text)
        unit = _UNIT_AFTER.match(text, number.end()) if number else None
        value = re.sub(r"\\(?:times|cdot|div) ?", "*", text.rpartition("=")[2])
        plain = (unit is not None and unit.end() == len(text)) or not _FORMULA.match(value)
        return span[0] if plain else _as_formula(text, span.string)
    text = _NEGATIVE_SPACE.sub("", text) if "\\!" in text else text
    return text.replace(". ", ".\\,").replace("! ", "!\\,").replace("? ", "?\\,")


def _as_formula(text: str, whole: str) -> str:
    """Put delimiters around a formula that do not pair with the dollar signs of prices."""
    return rf"\({text}\)" if "$" in whole else f"${text}$"


def _as_chain(match: re.Match[str]) -> str:
    r"""Return ``$1/3 \approx 0.33$`` for a number that a decimal restates; else the text unchanged."""
    exact = match["formula"] or match["latex"] or match["plain"]
    value = read(canonical_notation(exact.rpartition("=")[2]), False)
    if re.fullmatch(r"-?[\d.]+", exact) or not restates(read(match["about"], False), value):
        return match[0]
    return rf"${exact} \approx {match['about']}$"


def _anchored(text: str) -> str | None:
    """Return the value after the last announcement, empty if its sentence doubts it; None if there is none."""
    low = text.casefold()
    if not any(word in low for word in _ANNOUNCING):
        return None
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        # "the answer" within a sentence announces nothing: a verb or a colon must follow
        if not _STRONG.search(anchor[0]):
            continue
        rest = text[anchor.end() : anchor.end() + _MAX_SEGMENT]
        segment = _SENTENCE.split(rest, maxsplit=1)[0] if not rest.startswith(("\\[", "$$")) else rest
        if field := _JSON_TEXT.match(rest):
            segment = field[1].replace(r"\\", "\\")
        behind = max(anchor.end() + len(segment) - 1, 0)
        if correction := _CORRECTION.search(text, behind):
            return _last_value(text[correction.start() :]) or ""
        if (objection := _OBJECTION.search(text, behind)) and (value := _last_value(text[objection.start() :])):
            return value
        before = _SENTENCE.split(text[max(0, anchor.start() - _MAX_SEGMENT) : anchor.start()])[-1] + anchor[0]
        read, bound = read_clauses(before + segment)
        segment = read[-len(segment) :] if segment else ""
        # "the answer is not blue but red"
        if _DENIED.match(segment) and not _MARKED.search(segment):
            _, turn, segment = segment.partition(" but ")
            if not turn:
                return anchor[0].split()[-1] + " not " + rest[: _MAX_SEGMENT // 10]  # a denial is no answer
        found = _first_value(segment) or bound
        if found is not None and _has_rival(segment):
            return ""
        if found is not None:
            return found
        if _YES_OR_NO.match(rest):
            return _SENTENCE.split(rest, maxsplit=1)[0]  # "no, because 2 is no square"
        if _MARKED.search(segment):
            return "" if DOUBTED in segment else None
        plain = segment.strip(" .*:")
        if plain and len(plain) <= 80:
            return plain
    return None


def _has_rival(segment: str) -> bool:
    """Return whether another number makes the announced one a part or a case of the answer: ``7 in 9``."""
    values = list(_NUMBER.finditer(segment := segment.replace("$", " ")))
    return any(
        _RIVAL.fullmatch(segment, value.end(), other.start())
        and not _CONNECTED.fullmatch(segment, value.end(), other.start())
        and value[0].strip() != other[0].strip()
        for value, other in combinations(values[:6], 2)
    )


def _first_value(segment: str) -> str | None:
    """Return the first value of a segment, with those joined to it by ``and``, ``or`` or a comma."""
    spans = list(MATH.finditer(segment))
    if spans and (number := _GIVEN_FIRST.match(segment, 0, spans[0].start())) is not None:
        segment, spans = number["value"], []  # "5, with equality at $x=y$"
    if spans:
        return _run([(span.start(), span.end(), _content(span, segment)) for span in spans], segment)
    segment = segment.replace("**", "")
    whole = _NAME.sub("", segment.strip().rstrip(".").strip())
    if _bare_formula(whole):
        return whole
    segment = _NEXT_FIELD.split(segment)[0]
    # the last side of "f(2) = 4 + 3 = 7"
    equals = segment.rfind("=")
    if equals >= 0:
        segment = segment[equals + 1 :]
        if segment.count(")") > segment.count("("):
            segment = segment[: segment.rfind(")")]
    latex = list(LATEX.finditer(segment))
    values = latex or list(_NUMBER.finditer(segment))
    if not values:
        return None
    if not latex and (formula := _formula_around(segment, values[0])) is not None:
        return formula
    whole = segment.strip().rstrip(".").strip()
    if not latex and re.fullmatch(r"[\d\s()\[\]{}+*/^|,.:;a-z\\-]{1,60}", whole) and re.search(r"[()\[\]^*|\\]", whole):
        return whole  # an interval, a tuple or a formula in plain text
    if len(values) == 1 and not latex:
        return _with_unit(segment, values[0])
    return _run([(value.start(), value.end(), value[0].strip()) for value in values], segment)


def _bare_formula(text: str) -> bool:
    """Return whether a segment is one formula, in LaTeX or plain, without words around it."""
    if not text.isascii() or "$" in text or "(=" in text or not re.search(r"\d|\\[a-z]", text):
        return False
    return (
        bool(re.search(r"[A-Za-z\\^_*/+()\[\]{}=,;]", text))
        and set(_WORD.findall(_UPRIGHT.sub("", text))) <= _WORDS_OF_FORMULAS
    )


def _run(values: list[tuple[int, int, str]], segment: str) -> str:
    """Return the first value with those joined to it, also a number before or after formulas: ``$7$ or 8``."""
    chosen = [values[0][2]]
    end = values[0][1]
    for start, stop, value in values[1:]:
        between = segment[end:start]
        if not _CONNECTED.fullmatch(between):
            break
        chosen.append(("or " if _EITHER.fullmatch(between) else ", ") + value)
        end = stop
    if (after := _NUMBER.search(segment, end)) and _EITHER_BRACKET.fullmatch(segment, end, after.start()):
        chosen.append("or " + after[0].strip())
    if (numbers := _NUMBER.findall(segment, 0, values[0][0])) and _JOINED_BEFORE.search(segment, 0, values[0][0]):
        chosen.insert(0, numbers[-1].strip() + " or")
    return " ".join(chosen)


def _content(span: re.Match[str], text: str) -> str:
    inner = next(part for part in span.groups() if part is not None)
    percent = _PERCENT.match(text, span.end())
    return inner + r"\%" if percent and "%" not in inner else inner


def _with_unit(part: str, value: re.Match[str]) -> str:
    """Return a number with the unit right after it."""
    unit = _UNIT_AFTER.match(part, value.end())
    if unit is None:
        word = re.match(r" ([a-z]+)", part[value.end() :])
        halves = rf"\text{{ {word[1]}}}" if word and part_of_one(word[1], alone=True) and word[1][-1] == "s" else ""
        return value[0].strip() + halves
    return rf"{value[0].strip()}\text{{ {unit['unit']}}}{unit['power'] or ''}" + (
        rf"\text{{{unit['per']}}}" if unit["per"] else ""
    )


def _assigned(sentence: str) -> str | None:
    """Return the formula at the end of a sentence: ``so f(x) = 2x + 1``; numbers follow the general rule."""
    match = _ASSIGNED.search(sentence)
    if match is None or not _bare_formula(match["value"]) or not re.search(r"[A-Za-z]", match["value"]):
        return None
    return match["value"]


def _last_value(text: str) -> str | None:
    """Return the last value of the last sentence that has one; empty if that sentence doubts its values."""
    displayed = list(MATH.finditer(text))
    sentences = [sentence for sentence in _SENTENCE.split(text) if sentence and sentence.strip()]
    denied = ""
    for sentence in reversed(sentences[-_MAX_SENTENCES:]):
        read, bound = read_clauses(sentence)
        found = _value_of(read)
        marked = _MARKED.search(read) is not None
        if found is not None and not (marked and len(found) == 1 and found.isalpha()):
            # "Is it 5? No, it isn't 5."
            return "" if f" {found}" in denied else found
        if bound is not None or DOUBTED in read:
            return bound or ""
        said = None if marked else _SAID_IN_WORDS.search(sentence)
        # read the clause with a digit in place of the words
        if said and _whole_number(said["value"]) and read_clauses(sentence[: said.start("value")] + "1")[0][-1] == "1":
            return said["value"]
        denied += sentence if marked else ""
    return "" if denied else _content(displayed[-1], text) if displayed else None


def _whole_number(text: str) -> bool:
    """Return whether words spell a number with or without a sign, and no ordinal."""
    words = text.casefold().removeprefix("minus ").removeprefix("negative ").split()
    number = leading_number(words)
    return number is not None and number[1] == len(words)


def _value_of(sentence: str) -> str | None:
    """Return the last value of a sentence whose clauses were read."""
    # bold print marks the result of a sentence
    bold = [found for found in _BOLD.finditer(sentence) if re.search(r"\d|\$", found[1])]
    listed = len(bold) > 1 and _CONNECTED.fullmatch(sentence, bold[-2].end(), bold[-1].start())
    part = sentence.replace("**", "") if listed else bold[-1][1] if bold else sentence
    spans = list(MATH.finditer(part))
    if not spans and (formula := _assigned(part)) is not None:
        return formula
    whole = part.lstrip(" *").rstrip(" .")
    # neither a truncated box nor a line of a display
    if re.search(r"[<>\\^_*/+]", whole) and not re.search("=|box|&", whole) and _bare_formula(whole):
        return whole
    if re.search(r"[^\W\d_]", part) and (ordered := _TUPLE.search(part, spans[-1].end() if spans else 0)):
        return ordered["value"]
    after = part[spans[-1].end() :] if spans else part
    # a value after the last formula counts: "with $n = 3$ we get 12"
    values = list(LATEX.finditer(after)) or list(_NUMBER.finditer(after))
    joined = spans and values and _EITHER.fullmatch(after, 0, values[0].start())
    if values and not joined and not (spans and _PERCENT.match(after)):
        return _plain_run(after, values)
    if spans:
        while len(spans) > 1 and _FOR_ALL.fullmatch(part, spans[-2].end(), spans[-1].start()):
            spans.pop()  # "$f(x) = 2x$ for all $x$"
        found = [(span.start(), span.end(), _content(span, part)) for span in spans]
        first, result = len(spans) - 1, _OF_NAMES.fullmatch(found[-1][2])
        while first and _CONNECTED.fullmatch(part, found[first - 1][1], found[first][0]):
            first -= 1
            if result and _NAMED_VALUE.fullmatch(found[first][2]):
                return found[-1][2]
        return _run(found[first:], part)
    return None


def _formula_around(part: str, value: re.Match[str]) -> str | None:
    """Return the formula around a number in plain text: ``x > 5``, ``9 * 2``, ``20-30``."""
    start, end = value.span()
    before = _OPERANDS.search(part[max(0, start - 60) : start])
    if before is None and value[0][0] == "-":  # a minus sign between two numbers
        before = _OPERANDS.search(part[max(0, start - 60) : start + 1])
    power = re.match(r"\)\s*(?:\^\s*\{?-?\w+\}?|!)", part[end:]) if part[start - 1 : start] == "(" else None
    if power is not None:
        return part[start - 1 : end + power.end()]  # (3/8)^2
    after = None if _UNIT_AFTER.match(part, end) else _OPERATED.match(part, end)
    if before is None and after is None:
        return None
    start -= len(before[0]) if before else 0
    return part[start : after.end() if after else end].replace("$", " ").strip()


def _plain_run(part: str, values: list[re.Match[str]]) -> str:
    """Return the last of some numbers, with those that ``or`` joins to it; all of a list without words."""
    if not re.search(r"[^\W\d_]", part) and "=" not in part and len(values) > 1:
        return part.strip(" .")
    first = len(values) - 1
    between = _CONNECTED if _LISTED.search(part) else _EITHER
    while first and between.fullmatch(part, values[first - 1].end(), values[first].start()):
        first -= 1
    if first == len(values) - 1:
        return _formula_around(part, values[first]) or _with_unit(part, values[first])
    return " or ".join(value[0].strip() for value in values[first:])


def _choice(text: str) -> list[str]:
    """Return the chosen letters: announced, else called right, else the first, else those of the last sentence."""
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        segment = _SENTENCE.split(text[anchor.end() : anchor.end() + _MAX_SEGMENT], maxsplit=1)[0]
        segment = _FORMULA_LETTER.sub(r"\1", segment)
        # without the reason: "B, because A is wrong" chooses one letter
        if letters := _letters(_REASON.sub("", segment)) or _letters(segment):
            return letters
    called = [match["letter"] for match in _CALLED_RIGHT.finditer(text) if not _NEGATED.search(text[: match.start()])]
    if called:
        return called
    if (first := _FIRST_LETTER.match(text)) and not _CALLED_WRONG.match(text, first.end("letter")):
        return _letters(_SENTENCE.split(text, maxsplit=1)[0]) or [first["letter"]]
    for sentence in reversed([part for part in _SENTENCE.split(text) if part and part.strip()][-_MAX_SENTENCES:]):
        if letters := _letters(_REASON.sub("", sentence)) or _letters(sentence):
            conclusion = _CONCLUDED.split(sentence)[1:]
            return _letters(_REASON.sub("", conclusion[-1])) or letters[-1:] if conclusion else letters
    return []


def _letters(part: str) -> list[str]:
    """Return the letters in a text, without articles and those that it rules out."""
    found: list[str] = []
    for match in _LETTER.finditer(part):
        after = part[match.end() : match.end() + 10]
        # "A" may be an article and "I" a pronoun if a word in small letters follows
        article = (
            match["letter"] in "AI"
            and match[0] == match["letter"]
            and re.match(r" (?!or\b|and\b|is\b|because\b|since\b|as\b)[a-z]", after)
        )
        wrong = _CALLED_WRONG.match(part, match.end())
        if not article and not wrong and not _NEGATED.search(part[: match.start()]):
            found.append(match["letter"])
    return found
