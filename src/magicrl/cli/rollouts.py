"""``magicrl rollouts``: search what the policy wrote while it learned."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from magicrl.config.errors import RecipeError

if TYPE_CHECKING:
    from magicrl.reporting.rollout_search import Found

_COLOURS = {"correct": "green", "wrong": "red"}


def rollouts(
    run: Path,
    /,
    *,
    grep: str = "",
    step: Annotated[list[int] | None, Parameter(negative=())] = None,
    outcome: Annotated[
        list[Literal["correct", "wrong", "not_judged", "truncated"]] | None, Parameter(negative=())
    ] = None,
    problem: str | None = None,
    limit: int = 20,
    whole: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Search the recorded responses of a run, all steps of it: each with its step, problem, verdict and reward.

    Exit status: 0 something was found; 1 nothing.

    Example: magicrl rollouts runs/quickstart --grep "wait|hmm" --outcome correct

    Parameters
    ----------
    run
        The run folder.
    grep
        A regular expression that the response holds; (?i) before it ignores case.
    step
        Only of this training step (repeatable).
    outcome
        Only correct, wrong, not_judged or truncated ones (repeatable).
    problem
        Only of the problem with this id.
    limit
        Most responses that are shown.
    whole
        The whole response, not what stands around the find.
    json
        JSON Lines instead of text, every column but the tokens.
    """
    from magicrl.reporting.rollout_search import search_rollouts

    if limit < 1:
        raise RecipeError(f"--limit must be at least 1, got {limit}")
    console = Console(highlight=False)
    found = search_rollouts(run, grep, steps=step or (), outcomes=outcome or (), problem=problem)
    shown = 0
    for item in islice(found, limit):
        shown += 1
        if json:
            console.print(json_text.dumps(item.row), markup=False, soft_wrap=True)
        else:
            console.print(_told(item, whole=whole), soft_wrap=True)
    _say_rest(found, shown, console if not json else Console(stderr=True))
    return 0 if shown else 1


def _told(item: Found, *, whole: bool) -> Text:
    from magicrl.reporting.wording import number, visible

    row = item.row
    outcome = str(row["outcome"] or "not_judged")
    cut = ", cut" if row["finish_reason"] == "length" else ""
    head = Text.assemble(
        (f"step {row['step']}, {visible(row['problem_id'])}, draw {row['draw']}.{row['sample']}: ", "bold"),
        (outcome + cut, _COLOURS.get(outcome, "yellow")),
        f", reward {number(row['reward'])}\n",
    )
    first, last = item.span
    text = str(row["text"])
    before, hit, after = (text[:first], text[first:last], text[last:]) if whole else item.excerpt
    body = Text.assemble(visible(before), (visible(hit), "reverse"), visible(after))
    if not whole:
        body = Text(" ").join(body.split("\n"))
    return head + Text("  ") + body


def _say_rest(found: Iterable[Found], shown: int, console: Console) -> None:
    rest = sum(1 for _ in found)
    if not shown:
        console.print("nothing found")
    elif rest:
        console.print(f"{rest} more; --limit {shown + rest} shows them all", style="dim")
