r"""Verifier of the tasks of reasoning-gym: the task's own ``score_answer`` decides.

A problem of the family ``reasoning_gym/TASK`` carries its entry (question, answer, metadata) as text in
``Problem.extra``. An answer is correct if ``score_answer`` gives it 1. Lower scores count as wrong: some tasks pay a
part for any answer of the right form, and a policy would learn that form.

The answer is the last ``\boxed{}``, else the last ``<answer>...</answer>``, the form in which reasoning-gym asks. Else,
with ``extract = "lenient"``, it is the end of the response: as many words as the reference answer has, without
punctuation around them, or as many lines.

Some ``score_answer`` evaluate the answer as Python. Here none does: an audit hook refuses it, and the tasks that must,
those of expressions, are given plain arithmetic only.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from magicrl_verifiers.extraction import answer_part, last_box
from magicrl_verifiers.isolated import IsolatedProtocol, Progress
from magicrl_verifiers.records import JudgeOptions, Problem, Verdict, make_verdict
from magicrl_verifiers.workers import Item

NAME = "reasoning_gym"
"""Name of the verifier and of the family, and key of ``Problem.extra``."""
EXTRA = "reasoning-gym is an extra: pip install 'magicrl[gym]'"
_OPEN, _CLOSE = "<answer>", "</answer>"
_PUNCTUATION = ".,;:!?\"'*`"
_TUPLE, _PAIRS = "__tuple__", "__pairs__"
_OF_ENTRY = frozenset({"bitwise_arithmetic", "number_sorting"})
"""Tasks whose ``score_answer`` evaluates a text of the entry, never the answer."""
_OF_ANSWER = frozenset(
    {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
)
"""Tasks whose ``score_answer`` evaluates the answer, an expression, with sympy's ``parse_expr``."""
_FUNCTIONS = frozenset({"pi", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "asin", "acos", "atan"})
"""Longer names that an expression may hold."""
_scores: ContextVar[str | None] = ContextVar("_scores", default=None)
"""Task whose ``score_answer`` runs."""


def entry_text(task: str, config: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return a task's entry as text from which the verifier restores it.

    Args:
        task: Name of the task.
        config: Keyword arguments of its configuration, without seed and size.
        entry: The item of its data set.
    """
    return json.dumps(_packed({"task": task, "config": dict(config), "entry": dict(entry)}))


def _packed(value: Any) -> Any:
    """Return ``value`` as JSON values. Tuples and dicts without text keys are marked: JSON has neither."""
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value)
        if all(isinstance(key, str) for key in pairs):
            return {key: _packed(item) for key, item in pairs.items()}
        return {_PAIRS: [[_packed(key), _packed(item)] for key, item in pairs.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(item) for item in cast("tuple[Any, ...]", value)]}
    if isinstance(value, list):
        return [_packed(item) for item in cast("list[Any]", value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "tolist"):  # numpy
        return _packed(value.tolist())
    return str(value)


def restored(text: str) -> Any:
    """Return what `entry_text` wrote: task, config and entry."""

    def marked(found: dict[str, Any]) -> Any:
        if _TUPLE in found:
            return tuple(found[_TUPLE])
        return dict(found[_PAIRS]) if _PAIRS in found else found

    return json.loads(text, object_hook=marked)


def check_problem(problem: Problem) -> None:
    """Raise ValueError for a problem that no task of reasoning-gym made."""
    if not isinstance(problem.extra.get(NAME), str):
        raise ValueError(
            f"problem {problem.id!r}: the verifier {NAME} judges problems of the family {NAME}/TASK alone; use another "
            "verifier (data.train.N.verifier) for other data"
        )


class GymProtocol(IsolatedProtocol):
    """Answers to a task's problems, each judged in a worker process: ``score_answer`` may need long."""

    def __init__(self, options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> None:
        entry = {"question": "1 + 1", "answer": "2", "metadata": {}}
        super().__init__(
            f"{__name__}:GymVerifier",
            options,
            time_limit,
            memory_limit_mb,
            warm_up=(entry_text("chain_sum", {}, entry), r"\boxed{2}"),
        )

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        return super().request(item, repeat=repeat) | {"references": [item.problem.extra[NAME]]}


class GymVerifier:
    """Judges with ``score_answer``. A reference is the text that `entry_text` returned."""

    def __init__(self, options: JudgeOptions, progress: Progress | None = None) -> None:
        self._options = options

    def distrust(self, references: Sequence[str]) -> None:
        """Do nothing: no model wrote an entry."""

    def judge(self, references: Sequence[str], response: str) -> Verdict:
        """Return the verdict on a response; wrong if ``score_answer`` cannot read its answer."""
        kept = restored(references[0])
        answer = self._answer(response, kept["entry"].get("answer"))
        if not answer:
            return make_verdict("no_answer", reason="no answer was found", decided_by="extraction")
        try:
            score = _score(kept, answer)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a task's code may raise anything at a model's text
            reason = f"score_answer raised {type(error).__name__}"
            return make_verdict("unparsable", reason=reason, decided_by="score_answer", extracted=answer)
        status = "matched" if score >= 1.0 else "mismatch"
        return make_verdict(status, reason=f"score {score:g}", decided_by="score_answer", extracted=answer)

    def _answer(self, response: str, reference: str | None) -> str | None:
        text = answer_part(response, self._options.reasoning)
        if text is None:
            return None
        box = last_box(text)
        if box is not None:
            return box.strip()
        start = text.rfind(_OPEN)
        if start >= 0:
            return text[start + len(_OPEN) :].partition(_CLOSE)[0].strip()
        if self._options.extract == "box":
            return None
        text = text.strip()
        if reference is None:
            return text
        lines = reference.strip().count("\n")
        if lines:
            return "\n".join(text.rsplit("\n", lines + 1)[-lines - 1 :])
        words = len(reference.split())
        before = text.rsplit(maxsplit=words)
        # the text itself, not its words joined: a task may compare spaces
        end = text if len(before) <= words else text[len(before[0]) :].strip()
        # "It is his mother." ends with the word mother
        return end if reference.rstrip()[-1:] in _PUNCTUATION else end.strip(_PUNCTUATION)


def _score(kept: Mapping[str, Any], answer: str) -> float:
    """Return what the task's ``score_answer`` gives an answer, without evaluating the answer as Python."""
    if kept["task"] in _OF_ANSWER and not is_arithmetic(answer):
        raise ValueError("an answer that is more than arithmetic is not evaluated")
    dataset = _dataset(kept["task"], json.dumps(_packed(kept["config"])))
    _add_guard()
    token = _scores.set(kept["task"])
    try:
        return float(dataset.score_answer(answer, kept["entry"]))
    finally:
        _scores.reset(token)


def is_arithmetic(text: str) -> bool:
    """Return whether ``text`` has numbers, operators, parentheses, single letters and names of functions only.

    Without quotes, attributes, underscores and other names, evaluating it reaches nothing but sympy's numbers.
    """
    if not re.fullmatch(r"[0-9A-Za-z\s.+*/^()-]*", text, re.ASCII) or re.search(r"\.\s*[A-Za-z]", text):
        return False
    names = re.findall(r"[A-Za-z]\w*", text)
    # sympy's N, O, Q and S are functions
    return all(name in _FUNCTIONS or (len(name) == 1 and name not in "NOQS") for name in names)


@functools.cache
def _add_guard() -> None:
    sys.addaudithook(_refuse_evaluation)


def _refuse_evaluation(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise ValueError where a ``score_answer`` is about to run code that is in no file, as ``eval`` does."""
    if event != "exec" or (task := _scores.get()) is None or task in _OF_ENTRY | _OF_ANSWER:
        return
    if arguments[0].co_filename.startswith("<"):
        raise ValueError(f"score_answer of {task} would evaluate the answer")


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: str) -> Any:
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(task, size=1, seed=0, **restored(config))
