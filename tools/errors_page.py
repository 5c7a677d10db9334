"""Write ``docs/reference/errors.md`` from the command's real messages: ``python -m tools.errors_page``."""

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
INTRODUCTION = """# Error messages

Every error is one message on standard error that names the file, line or setting, and the remedy. The exit status is 2
if the command line, the recipe, the data, the model or a folder cannot be used, and 1 if the work failed: training
stopped, a server did not answer, a disk is full, or your own code raised an error. `MAGICRL_TRACEBACK=1` prints the
traceback before the message, with secrets masked. A `magicrl train` that finished and learned nothing has exit status
3 and gives the reason in its last lines ([did it learn?](../guides/runs.md#did-it-learn)).

The messages below are real: `tests/unit/errors/test_errors.py` makes each mistake and compares, and `python -m
tools.errors_page` writes this page. The recipe is `recipe.toml`, its model folder `start`, its data file
`problems.jsonl`, its run folder `run`.
"""
STATED = """## Not an error

- **A training prompt over `data.max_prompt_tokens`** with `data.overlong_prompts = "drop"` is dropped and counted in
  `run.json` (`dropped_overlong`), also if held out. Prompts of a validation or test set are never dropped.
- **A training problem that is also in a validation or test set** (same prompt apart from case and spacing) is dropped
  from training with a warning, and counted in `run.json` (`dropped_in_test`).
- **Rows without an answer, and code problems without usable tests**, are skipped with a warning that counts them and
  names the first. A file with no other rows is an error.
- **A step whose groups were all rejected** makes no update and is recorded as `groups/all_rejected`. After
  `algorithm.stop_after_empty_steps` such steps in a row the run stops. `algorithm.refill` samples more instead.
- **A model without a chat template** gets plain prompts; `run.json` has `prompt_format`.
- **Weights in a model's files that its config does not use** give a warning that counts them.
- **Resuming on another machine, thread count or version** gives a warning; the run continues, not bit for bit.

## Secrets

No environment variable is written into a run folder. In messages, and in their copies in a run folder, the credentials
of a URL become `***`, and so does the value of every environment variable whose name ends in `KEY`, `TOKEN`, `SECRET`,
`PASSWORD`, `PASSWD` or `CREDENTIALS`.
"""


def entry(case: Case, status: int, text: str) -> str:
    """Return the page's entry of one mistake."""
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
