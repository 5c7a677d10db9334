"""The command line, reports, live displays and pipeline steps without a model import no torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

LIGHT = """config.loader records commands.main reporting.display commands.watch training.diagnosis training.health
    training.recorder commands.train commands.training commands.run_folder commands.verify commands.plan
    commands.eval commands.preflight commands.explain reporting.scores reporting.run_page
    reporting.comparison_page pipeline.build pipeline.clean_step
    pipeline.dedup_step pipeline.decontaminate_step pipeline.judge_step pipeline.mix_step"""
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"magicrl.{name}")
    assert "torch" not in sys.modules, f"magicrl.{name} imports torch"
"""


def test_no_torch_is_needed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *LIGHT.split()], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
