"""Tasks of reasoning-gym (an extra: ``pip install 'magicrl[gym]'``) as problems with one right answer.

A task whose library judges with code of its own (a puzzle with many solutions) is refused: a problem names one of
magicrl's verifiers, and equality with one of many right answers would be wrong.
"""

from __future__ import annotations

import difflib
from typing import Any

from magicrl.config.errors import RecipeError
from magicrl.records import Problem

PREFIX = "reasoning_gym/"
SEED = 0
COUNT = 100
"""Problems of a task where no limit is given."""


def gym_problems(task: str, count: int | None, *, stem: str) -> list[Problem]:
    """The first ``count`` problems of a task, generated with a fixed seed.

    Raises:
        RecipeError: the extra is not installed, or there is no such task, or its answers are judged by its own code.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
        from reasoning_gym.dataset import ProceduralDataset  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RecipeError(
            f"--benchmark {PREFIX}{task}: {error}; reasoning-gym is an extra: pip install 'magicrl[gym]'"
        ) from None
    usable: list[str] = sorted(
        name for name, (kind, _) in DATASETS.items() if kind.score_answer is ProceduralDataset.score_answer
    )
    if task not in usable:
        near = difflib.get_close_matches(task, usable, n=1)
        why = "judges answers with code of its own" if task in DATASETS else "no such task"
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"--benchmark {PREFIX}{task}: {why}; {hint}Usable: {', '.join(usable)}")
    size = count or COUNT
    made: Any = reasoning_gym.create_dataset(task, size=size, seed=SEED)
    return [
        Problem(
            id=f"{task}-{index}",
            prompt=str(made[index]["question"]).strip(),
            golds=(str(made[index]["answer"]).strip(),),
            verifier="exact",
            source=stem,
        )
        for index in range(size)
    ]
