"""One maths verifier of others, in its own environment: JSON Lines of golds and responses in, booleans out.

Run by `verifier_study.py` with the Python of the environment it made; imports nothing of magicrl.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import sysconfig
import time
import types
from collections.abc import Callable
from pathlib import Path

logging.disable(logging.CRITICAL)
Judge = Callable[[str, str], bool]


def math_verify_steps() -> Judge:
    """The report's four steps on this environment's Math-Verify."""
    import math_verify

    def judge(gold: str, response: str) -> bool:
        parsed = math_verify.parse(response.split("</think>")[-1])
        if len(parsed) < 2:
            return False
        if parsed[1] == gold:
            return True
        return bool(math_verify.verify(math_verify.parse(f"\\boxed{{{gold}}}"), parsed))

    judge("1", "\\boxed{1}")
    return judge


def hendrycks() -> Judge:
    """The string normaliser of the MATH paper, as lm-eval ships it: last box, strip, compare."""
    for name in ("datasets", "lm_eval"):
        module = types.ModuleType(name)
        module.Dataset = object  # type: ignore[attr-defined]  # only named in annotations there
        sys.modules.setdefault(name, module)
    path = Path(sysconfig.get_path("purelib")) / "lm_eval" / "tasks" / "hendrycks_math" / "utils.py"
    spec = importlib.util.spec_from_file_location("hendrycks_math_utils", path)
    assert spec is not None
    assert spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)

    def judge(gold: str, response: str) -> bool:
        try:
            box = utils.last_boxed_only_string(response)
            return box is not None and bool(utils.is_equiv(utils.remove_boxed(box), gold))
        except (AssertionError, IndexError, ValueError, TypeError):
            return False  # its own asserts on boxes that it cannot cut open

    return judge


JUDGES: dict[str, Callable[[], Judge]] = {"math_verify": math_verify_steps, "hendrycks": hendrycks}


def main() -> None:
    judge = JUDGES[sys.argv[1]]()
    for line in sys.stdin:
        row = json.loads(line)
        start = time.process_time()
        correct = judge(row["gold"], row["response"])
        print(json.dumps({"correct": bool(correct), "seconds": time.process_time() - start}), flush=True)


if __name__ == "__main__":
    main()
