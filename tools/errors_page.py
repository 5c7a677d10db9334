"""Write ``docs/reference/errors.md`` from what the command says: ``python -m tools.errors_page``."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "unit" / "errors"), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from error_making import Case, Desk, sections, seen  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "errors.md"
INTRODUCTION = """# What goes wrong, and what is said

Every error is one message on standard error that names the file, the line or the setting, and the remedy. The exit
status is 2 when the command line or the recipe is wrong, 1 when something else is. `MAGICRL_TRACEBACK=1` shows the
traceback before the message, secrets masked as everywhere. `magicrl train` that went to its end and learned nothing is
no error and no success: exit status 3, with the reason in its last lines ([did it learn?](runs.md#did-it-learn)).

The messages below are the real ones: `tests/unit/errors/test_errors.py` makes each mistake and compares, and
`python -m tools.errors_page` writes this page anew. The recipe is called `recipe.toml`, its model folder
`start`, its data file `problems.jsonl`, its run folder `run`.
"""
STATED = """## What is no error

- **A training prompt over `data.max_prompt_tokens`** with `data.overlong_prompts = "drop"`: left out, and counted in
  `run.json` (`dropped_overlong`). So are held-out ones; those of a validation or test set are never dropped.
- **A training problem that a validation or test set holds too** (same prompt but for case and spacing): left out of
  training with a warning, and counted in `run.json` (`dropped_in_test`).
- **Rows without an answer, and code problems without usable tests**: set aside with a warning that counts them and
  names the first; a file of nothing else is an error.
- **A step whose groups were all rejected**: no update, recorded as `groups/all_rejected`; after
  `algorithm.stop_after_empty_steps` such steps in a row the run stops (above). `algorithm.refill` samples more instead.
- **A model without a chat template**: prompts go to it as plain text; `run.json` says `prompt_format`.
- **Weights that a model's files hold and its config does not ask for**: a warning that counts them.
- **Resuming on another machine, thread count or version**: a warning; the run goes on, not bit for bit.

## Secrets

Nothing of the environment is written into a run folder. In messages, and in what a run folder keeps of them, the
credentials of a URL become `***`, and so does the value of every environment variable whose name ends in `KEY`,
`TOKEN`, `SECRET`, `PASSWORD`, `PASSWD` or `CREDENTIALS`.
"""


def entry(case: Case, status: int, text: str) -> str:
    """One mistake on the page."""
    return f"### {case.title}\n\n```text\n{text}\n```\n\nExit status {status}.\n"


def page(desk: Desk, root: Path) -> str:
    parts = [INTRODUCTION]
    for heading, cases in sections().items():
        parts.append(f"## {heading}\n")
        for case in cases:
            folder = root / case.title
            folder.mkdir()
            parts.append(entry(case, *seen(case, desk, folder)))
    return "\n".join([*parts, STATED])


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as made:
        cases = Path(made) / "cases"
        cases.mkdir()
        PAGE.write_text(page(Desk.prepare(Path(made)), cases))
