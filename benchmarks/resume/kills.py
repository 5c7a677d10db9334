"""Kill a run many times, at random times and during everything it writes, and compare the result.

python -m benchmarks.resume.kills tiny --kills 50 --output benchmarks/results/kills-tiny.json

One run is not disturbed. Then the same recipe is started, killed with SIGKILL and resumed, as often as requested; in
half of the lives a verifier worker is killed as well. Half of the kills come at a random time; the others hit a chosen
place (`FATES`): that life wraps one function of magicrl so that it dies there. Nothing else differs from `magicrl train
RECIPE --resume`. A run that ends before enough kills is compared, and another one begins. Afterwards metrics, weights,
optimizer moments and every other state, evaluations, rollouts, filter and events must equal the undisturbed run, and no
process and no half-written file may remain. The newest checkpoint of each killed run shows what it had to restore: c,
removed problems, visits, a pending convergence test, work in flight. While one of the first four is missing, up to
twice as many kills follow; then the command fails. Which problems a run solves depends on the CPU's arithmetic: if the
undisturbed run removes none, the next seed of the run is taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# imported before the first fork, which saves each life seconds of imports
from benchmarks.shared import parser_of, write_figure
from magicrl.config.loader import load_train_recipe
from magicrl.config.paths import find_recipe
from magicrl.config.schema import TrainConfig
from magicrl.models import loading
from magicrl.rollout import recording
from magicrl.selfcheck.resume import run_contents, run_differences, to_restore
from magicrl.training import checkpoint, learner, recorder, rollout_queue, session
from magicrl.training.recorder import NullObserver, RunFolder, environment_facts

MARK = "MAGICRL_KILLS"
BLIND = "no kill came where there was {}: take a recipe in which it happens, or more kills"
REMEDY = "a killed run differs from the one that was left alone, or something of it lives on"
FATES = (
    "supervised start",
    "difficulty filter",
    "test before",
    "generating",
    "verifying",
    "learning",
    "between gradient and update",
    "after the update",
    "validating",
    "in the middle of a metrics line",
    "writing rollouts",
    "writing tensors",
    "checkpoint written, not renamed",
    "checkpoint renamed, old ones not yet removed",
    "removing an old checkpoint",
    "test after",
    "test written, not told",
    "saving the model",  # the last three come once in a run
)


class Place:
    """Progress of a life, in memory that outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 64)

    def write(self, text: str) -> None:
        self._memory[:] = text.encode()[:64].ljust(64)

    def read(self) -> str:
        return self._memory[:].decode("utf-8", "ignore").strip("\0 ")


WORDS = {"rollout": "generating", "train": "learning", "validation": "validating"}


class Watcher(NullObserver):
    """Observer that records the run's progress and dies where its fate says."""

    def __init__(self, place: Place, fate: str | None, passes: int) -> None:
        self._place = place
        self._fate = fate
        self._passes = passes

    def progress(self, phase: str, done: int, total: int) -> None:
        word = next((name for name in FATES if phase.startswith(name)), WORDS.get(phase, phase))
        self._place.write(word)
        if word == self._fate:
            self.meet()

    def meet(self) -> None:
        """Return the hook at the place of this life's fate: passed a few times, then deadly."""
        self._passes -= 1
        if self._passes < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call ``action`` with the arguments of every call of ``owner.name``, before the call."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def arrange(fate: str | None, watcher: Watcher, place: Place) -> None:
    """Wrap the function of this fate; progress reports the other places."""

    def here(*_args: Any, **_kwargs: Any) -> None:
        watcher.meet()

    def say(text: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: place.write(text)

    before(rollout_queue, "verdicts_of", say("verifying"))
    before(checkpoint.CheckpointWriter, "begin", say("checkpoint"))
    places: dict[str, tuple[Any, str]] = {
        "verifying": (rollout_queue, "verdicts_of"),
        "between gradient and update": (learner.MasterOptimizer, "step"),
        "checkpoint written, not renamed": (checkpoint, "_flush"),
        "checkpoint renamed, old ones not yet removed": (checkpoint, "remove_old"),
        "saving the model": (loading, "_put_in_place"),
    }
    if fate in places:
        before(*places[fate], here)
    elif fate == "after the update":
        before(session.Session, "_record", here)
    elif fate == "in the middle of a metrics line":
        original = recorder.RunFolder.step

        def torn(folder: RunFolder, metrics: Any) -> None:
            original(folder, metrics)
            lines = (folder.path / "metrics.jsonl").read_bytes()
            (folder.path / "metrics.jsonl").write_bytes(lines[:-40])
            watcher.meet()
            (folder.path / "metrics.jsonl").write_bytes(lines)

        recorder.RunFolder.step = torn
    elif fate == "writing rollouts":
        written = recording.pq.write_table

        def half_table(table: Any, file: Any, **options: Any) -> None:
            written(table, file, **options)
            file.flush()
            os.truncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
            watcher.meet()
            file.seek(0)
            file.truncate()
            written(table, file, **options)

        recording.pq.write_table = half_table
    elif fate == "writing tensors":
        save = checkpoint.save_file

        def half_tensors(tensors: Any, file: Path) -> None:
            save(tensors, file)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            watcher.meet()
            file.write_bytes(whole)

        checkpoint.save_file = half_tensors
    elif fate == "removing an old checkpoint":
        remove = shutil.rmtree

        def half_removed(path: Path, ignore_errors: bool = False) -> None:
            if Path(path).name.startswith(".writing-old-"):
                (Path(path) / "state.json").unlink(missing_ok=True)
                watcher.meet()
            remove(path, ignore_errors=ignore_errors)

        checkpoint.shutil.rmtree = half_removed
    elif fate == "test written, not told":
        tell = session.Session._report_evaluation

        def untold(self: Any, name: str, document: Any) -> None:
            watcher.meet()
            tell(self, name, document)

        session.Session._report_evaluation = untold


class Life:
    """One process of the run, forked from this one to save imports."""

    def __init__(self, config: TrainConfig, recipe: Path, output: Path, fate: str | None, passes: int) -> None:
        self.place = Place()
        self.output = output
        self.started = time.monotonic()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(config, recipe, fate, passes)

    def _live(self, config: TrainConfig, recipe: Path, fate: str | None, passes: int) -> None:
        status = 1
        try:
            os.setsid()
            os.environ[MARK] = str(self.output)  # the workers inherit it
            log = os.open(self.output.with_name("log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            watcher = Watcher(self.place, fate, passes)
            arrange(fate, watcher, self.place)
            session.run_training(config, self.output, watcher, resume=True)
            status = 0
        except BaseException:  # noqa: BLE001 - the border of a child process: its parent reads the log
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def wait(self, seconds: float | None, rng: random.Random | None, *, from_work: bool = False) -> int | None:
        """Wait up to ``seconds`` for the end; return the wait status or None. A worker may be killed meanwhile.

        With ``from_work`` the seconds count from the time when models are loaded and workers are warm.
        """
        worker_dies = None if rng is None or rng.random() < 0.5 else time.monotonic() + rng.uniform(0.2, 1.5)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            now = time.monotonic()
            if from_work and not self.place.read():
                self.started = now
            if seconds is not None and now - self.started > seconds:
                return None
            if worker_dies is not None and now > worker_dies:
                worker_dies = now + 0.3 if not self.kill_a_worker(rng) else None
            time.sleep(0.02)

    workers_killed = 0

    def kill_a_worker(self, rng: random.Random | None) -> bool:
        workers = [p for p in children_of(self.pid) if p.status() != psutil.STATUS_ZOMBIE and p.cpu_times().user > 0.1]
        if not workers or rng is None:
            return False
        rng.choice(workers).kill()
        Life.workers_killed += 1
        return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def survivors(output: Path, patience: float = 20.0) -> list[int]:
    """Return processes of the killed run that still live after ``patience`` seconds."""
    end = time.monotonic() + patience
    while True:
        found: list[int] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(output) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except psutil.Error:
                continue
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


class Study:
    """Kill runs until enough kills are counted."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.recipe = find_recipe(arguments.recipe)
        self.settings: list[str] = arguments.set or []
        self.config = load_train_recipe(self.recipe, self.settings)  # its seed is the first of several
        self.work: Path = arguments.work
        self.models: Path | None = arguments.models
        self.rng = random.Random(arguments.seed)
        self.kills: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.wanted: int = arguments.kills

    def run(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        whole, seconds = self._undisturbed()
        expected, asked = run_contents(whole), self.wanted
        while len(self.kills) < self.wanted:
            output = self._folder(f"killed-{len(self.runs)}")
            self._kill_until_the_end(output, seconds)
            different = run_differences(expected, output)
            self.runs.append({"kills": sum(k["run"] == output.parent.name for k in self.kills), "different": different})
            print(f"{output.parent.name}: {self.runs[-1]}", flush=True)
            # How far a life comes before a random time depends on the machine and its load.
            if len(self.kills) >= self.wanted and self.unmet() and self.wanted < 3 * asked:
                self.wanted += asked

    def _undisturbed(self) -> tuple[Path, float]:
        """Return an undisturbed run that removed a problem (one of eight seeds), and its seconds."""
        first = self.config.run.seed
        for seed in range(first, first + 8):
            self.config = load_train_recipe(self.recipe, [*self.settings, f"run.seed={seed}"])
            whole = self._folder(f"whole-{seed}")
            began = time.monotonic()
            self._finish(whole)
            if to_restore(whole)["problems removed"]:
                return whole, time.monotonic() - began
        raise SystemExit(BLIND.format("problems removed"))

    def restored(self) -> dict[str, int]:
        """Return the number of kills that left each kind of state to restore."""
        return {name: sum(k["to restore"][name] for k in self.kills) for name in to_restore(self.work)}

    def unmet(self) -> list[str]:
        """Return the states that no kill left, apart from work in flight, which only some recipes have."""
        return [name for name, kills in self.restored().items() if not kills and name != "work in flight"]

    def _folder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir(parents=True)
        if self.models is not None:
            (folder / "models").symlink_to(self.models.resolve())
        return folder / "run"

    def _finish(self, output: Path) -> None:
        life = Life(self.config, self.recipe, output, None, 0)
        if life.wait(None, None) != 0:
            raise SystemExit(f"the run failed by itself: {output.with_name('log.txt').read_text()[-2000:]}")

    def _kill_until_the_end(self, output: Path, seconds: float) -> None:
        start = ["difficulty filter", "test before"] if self.models else ["supervised start", *FATES[1:3]]
        middle = list(FATES[3:15])
        self.rng.shuffle(middle)
        chosen = [*start, *middle, *FATES[15:]]
        fates = [fate for place in chosen for fate in ([place, None] if self.rng.random() < 0.7 else [place])]
        if (more := self.wanted - len(self.kills)) < len(fates):
            fates = [fates[i] for i in sorted(self.rng.sample(range(len(fates)), more))]
        for fate in fates:
            if len(self.kills) >= self.wanted:
                break
            passes = 0 if fate in FATES[-3:] else self.rng.randrange(3)
            life = Life(self.config, self.recipe, output, fate, passes)
            limit = None if fate else self.rng.uniform(0.1, max(1.0, seconds / 12))
            status = life.wait(limit, self.rng, from_work=self.rng.random() < 0.8)
            if status == 0:
                continue  # it finished without reaching its fate, as the next lives would
            if status is None:
                life.kill()
            elif os.WTERMSIG(status) != signal.SIGKILL:
                raise SystemExit(f"a resumed run failed: {output.with_name('log.txt').read_text()[-2000:]}")
            steps = output / "metrics.jsonl"
            kill = {
                "run": output.parent.name,
                "where": fate or f"at a random time ({life.place.read() or 'starting'})",
                "step": steps.read_bytes().count(b"\n") if steps.exists() else 0,
                "survivors": len(survivors(output)),
                "to restore": to_restore(output),
            }
            self.kills.append(kill)
            print(kill, flush=True)
        self._finish(output)

    def document(self, arguments: argparse.Namespace) -> dict[str, Any]:
        return {
            "command": "python -m benchmarks.resume.kills " + " ".join(sys.argv[1:]),
            "environment": environment_facts(),
            "kills": len(self.kills),
            "workers_killed": Life.workers_killed,
            "runs": self.runs,
            "identical": all(not run["different"] for run in self.runs),
            "survivors": sum(kill["survivors"] for kill in self.kills),
            "to_restore": self.restored(),
            "where": dict(sorted(Counter(kill["where"] for kill in self.kills).items())),
            "settings": arguments.set or [],
            "seed_of_the_run": self.config.run.seed,
            "seed": arguments.seed,
        }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--set", action="append", help="as for magicrl train")
    parser.add_argument("--models", type=Path, help="folder of existing starting models (runs/models)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("runs/kills"))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    (study := Study(arguments)).run()
    document = study.document(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_figure(arguments.output, document)
    print(json.dumps({k: v for k, v in document.items() if k != "environment"}, indent=1))
    if not document["identical"] or document["survivors"]:
        raise SystemExit(REMEDY)
    if missing := study.unmet():
        raise SystemExit(BLIND.format(missing[0]))
    shutil.rmtree(study.work)


if __name__ == "__main__":
    main()
