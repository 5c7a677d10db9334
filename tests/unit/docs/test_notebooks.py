"""The notebooks of `examples/notebooks` and the Python of the README run, and the last value of a cell has a display.

As in a kernel, the cells share one namespace, inside a running event loop and without a terminal. It is not Jupyter's
kernel: magics would not work here, and none is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = ROOT / "examples" / "notebooks"
IN_ORDER = ("own_reward", "finished_run")  # the second one reads the run of the first
KERNEL = """
import ast, asyncio, json, sys
from pathlib import Path

async def run(cells):
    space = {"__name__": "__main__"}
    for number, text in enumerate(cells):
        tree = ast.parse(text)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"<cell {number}>", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), space)
            show = getattr(value, "_repr_html_", None) or getattr(value, "_repr_svg_", None) or value.__repr__
            shown = show()
            print(f"cell {number}: {len(shown)} characters, {shown[:60]!r}")

asyncio.run(run([c for c in json.loads(Path(sys.argv[1]).read_text())]))
"""


def cells(name: str) -> list[str]:
    document = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert document["nbformat"] == 4
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def example(page: str) -> str:
    """Return the first block of Python on a page."""
    return (ROOT / page).read_text().split("```python\n")[1].split("```")[0]


def run(words: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_every_notebook_is_run_here_and_kept_without_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(IN_ORDER)
    for name in IN_ORDER:
        document = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in document["cells"])
        assert not any(line.startswith(("%", "!")) for text in cells(name) for line in text.splitlines())


def test_the_readme_and_the_page_show_one_example() -> None:
    assert example("README.md") == example("docs/guides/python.md")


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    told = run([sys.executable, "-c", example("README.md")], tmp_path)
    assert "it learned: " in told
    assert "Name: train/reward/mean" in told


@pytest.mark.slow
def test_notebooks_run(tmp_path: Path) -> None:
    for name in IN_ORDER:
        (tmp_path / f"{name}.json").write_text(json.dumps(cells(name)))
        told = run([sys.executable, "-c", KERNEL, f"{name}.json"], tmp_path)
        assert "<iframe srcdoc=" in told
