"""A run on three simulated nodes that loses an engine, a learner rank, a verifier, a node and its head, in turn.

    python tests/helpers/cluster_chaos.py --output F                 # SmolLM2, a quarter of an hour
    python tests/helpers/cluster_chaos.py --model tiny --output F    # minutes, without vLLM: for `make test-slow`
    python tests/helpers/cluster_chaos.py --model tiny-direct --output F    # weights directly into vLLM, and hangs
    python tests/helpers/cluster_chaos.py --model tiny-cut --output F    # a node loses its network; needs root

Three Ray nodes are processes of this machine, all addresses on loopback: the head without CPUs for actors, and two
workers. `magicrl train` runs there with the recipe of one machine and a ``[cluster]`` section: FSDP2 over two ranks on
gloo, two replicas (for SmolLM2 of vLLM's CPU build), a verifier pool on every node. Processes are killed from outside
with SIGKILL while a step is under way. With direct weight copies they are also stopped with SIGSTOP: a replica hangs
while it generates and in a copy, a rank in an update and in a copy. In ``tiny-cut`` the second worker has a network
namespace of its own, as another machine, and only its network is lost: packets vanish without an error. Finally the
run's own process and all of Ray die, Ray is started again, and `--resume` continues. The same recipe also runs
undisturbed on one machine with one engine. Then every prompt is accounted for: draws without a gap, each sample of each
draw once, the same prompts as on the single machine, every step recorded once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

# a loaded machine starts Ray's processes slowly; Ray reads this variable at import
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
REMEDY = "a prompt was lost or counted twice, or the run did not survive; see runs under --work"
LOSSES = ("cluster/replicas/lost", "cluster/learner/lost", "cluster/verifiers/lost")
EVERY = 3  # steps between checkpoints
HANG = 40  # seconds after which a process that does not answer counts as lost
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "src" / "magicrl" / "recipes"
REPLICA, RANK, JUDGE = "ray::Replica", "ray::_RankActor", "ray::JudgeActor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its recipe."""

    recipe: str  # recipe of the single machine
    overrides: tuple[str, ...]  # settings of both runs: fewer and shorter steps
    store: int  # size of each node's object store in bytes: two versions of the weights
    engine: str
    cache_mb: int  # size of the engine's cache
    start: tuple[str, ...] = ()  # settings of the supervised start
    placement: tuple[str, ...] = ()  # further settings of the run on the cluster
    apart: bool = False  # whether the second worker has a network of its own, and loses it


NO_TESTS = (
    f"checkpoint.every={EVERY}",
    "data.test={}",
    "data.validation=[]",
    "evaluation.every=0",
    'entropy.estimator="sampled"',
)  # also on the single machine, since vLLM reports no entropies
DIRECT = (
    'cluster.rollout.weight_copy="direct"',
    *(f"cluster.timeouts.{wait}={HANG}" for wait in ("generate", "load_weights", "learner")),
)
CASES = {
    "tiny": Case(
        recipe="tiny.toml",
        overrides=(
            'stages=[{max_tokens=24, rollout_batch=16, group_size=8, max_steps=18, transition={rule="fixed"}}]',
            "data.train.0.count=40",
        ),
        store=80 << 20,
        engine="in_process",
        cache_mb=32,
    ),
    "tiny-direct": Case(
        recipe="tiny.toml",
        overrides=(
            'stages=[{max_tokens=24, rollout_batch=16, group_size=8, max_steps=24, transition={rule="fixed"}}]',
            "data.train.0.count=40",
            "run.threads=1",
        ),
        store=80 << 20,
        engine="vllm",
        cache_mb=32,
        start=("model.tiny.heads=1",),  # vLLM's kernels on CPUs need heads of 32
        placement=DIRECT,
    ),
    "smollm2": Case(
        recipe="smollm2.toml",
        overrides=(
            'stages=[{max_tokens=32, rollout_batch=4, group_size=4, max_steps=12, transition={rule="fixed"}}]',
            "data.train.0.count=60",
            "run.threads=1",
        ),
        store=1300 << 20,
        engine="vllm",
        cache_mb=256,
    ),
}
CASES["tiny-cut"] = replace(CASES["tiny-direct"], apart=True)


class Cable:
    """A virtual cable to a network namespace, which is cut by wrong addresses at both ends: packets vanish."""

    here, there, space = "10.99.0.1", "10.99.0.2", "magicrl-chaos"

    def __init__(self) -> None:
        self.remove()
        self._ip("netns", "add", self.space)
        self._ip("link", "add", "chaos0", "type", "veth", "peer", "name", "chaos1", "netns", self.space)
        for inside, device, address in ((), "chaos0", self.here), (("-n", self.space), "chaos1", self.there):
            self._ip(*inside, "addr", "add", f"{address}/24", "dev", device)
            self._ip(*inside, "link", "set", device, "up")
        self._ip("-n", self.space, "link", "set", "lo", "up")

    @staticmethod
    def _ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)

    def cut(self) -> None:
        nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        self._ip("neigh", "replace", self.there, "dev", "chaos0", *nobody)
        self._ip("-n", self.space, "neigh", "replace", self.here, "dev", "chaos1", *nobody)

    def mend(self) -> None:
        self._ip("neigh", "del", self.there, "dev", "chaos0")
        self._ip("-n", self.space, "neigh", "del", self.here, "dev", "chaos1")

    def remove(self) -> None:
        self._ip("netns", "del", self.space, check=False)  # the cable goes with it


class Nodes:
    """Three Ray nodes in processes of this machine."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.cable = Cable() if case.apart else None
        self.start()

    def start(self) -> None:
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": self._case.store, "include_dashboard": False}
        self._own = {} if self.cable is None else {"node_ip_address": self.cable.here}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head | self._own)
        self._workers: list[Any] = []
        self.add()
        self.add_apart()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        self._workers.append(self._cluster.add_node(num_cpus=2, object_store_memory=self._case.store, **self._own))

    def add_apart(self) -> None:
        """Add a node behind the cable, or one like the others where there is none."""
        if self.cable is None:
            self.add()
            return
        command = ["ip", "netns", "exec", self.cable.space, str(Path(sys.executable).with_name("ray")), "start"]
        command += ["--address", self.address, "--node-ip-address", self.cable.there, "--num-cpus", "2"]
        command += ["--object-store-memory", str(self._case.store), "--block"]
        self._apart = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 300
        while sum(node["Alive"] for node in self._cluster.global_state.node_table()) < 3:
            if time.monotonic() > end or self._apart.poll() is not None:
                raise SystemExit("the node in the network namespace did not join the cluster")
            time.sleep(1)

    def lose_one(self) -> None:
        """Kill the node's process, and with it its actors, without notice."""
        self._cluster.remove_node(self._workers.pop(0), allow_graceful=False)

    def stop(self) -> None:
        self._cluster.shutdown()
        if self.cable is not None:
            self._apart.kill()
            self.cable.remove()


class Run:
    """One `magicrl train` of this case in a separate process."""

    def __init__(self, recipe: Path, output: Path, settings: list[str]) -> None:
        self.output = output
        self._command = [sys.executable, "-m", "magicrl", "train", str(recipe), "--output", str(output), "--resume"]
        self._command += [part for item in settings for part in ("--set", item)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *further: str) -> None:
        self.log = self.output.with_name(f"{self.output.name}.log")
        extra = [part for item in further for part in ("--set", item)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, *extra],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"},
                start_new_session=True,
            )

    @property
    def steps(self) -> int:
        file = self.output / "metrics.jsonl"
        return len(self.rows()) if file.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, ready: Callable[[], bool], what: str, seconds: float = 900.0) -> None:
        """Wait until ``ready``. Raise an error with the log's end if the run ends before, or is silent for long."""
        end = time.monotonic() + seconds
        while not ready():
            assert self.process is not None
            if self.process.poll() is not None and not ready():
                raise SystemExit(f"the run ended (status {self.process.returncode}) before {what}: {self.tail()}")
            if time.monotonic() > end:
                raise SystemExit(f"waited {seconds:g} s for {what}: {self.tail()}")
            time.sleep(0.05)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None


def processes(title: str) -> list[psutil.Process]:
    """Return this cluster's processes with that title. Ray's own processes are children of this one."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith(title):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.pid)


def cpu_of(found: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in found)


class Chaos:
    """Killer of one process after another during the run, with a record of the times.

    Args:
        run: The run on the cluster.
        cluster: Its nodes.
        seed: Seed of the choice among several processes.
    """

    def __init__(self, run: Run, cluster: Nodes, seed: int) -> None:
        self._run, self._cluster = run, cluster
        self._rng = random.Random(seed)
        self.notes: list[dict[str, Any]] = []

    def _note(self, what: str, when: str) -> None:
        self.notes.append({"killed": what, "when": when, "after_step": self._run.steps, "clock": time.monotonic()})
        sys.stdout.write(f"after step {self._run.steps}: {what}, {when}\n")

    def _busy(self, title: str, seconds: float, what: str) -> list[psutil.Process]:
        """Return the processes of that title, after they have worked for ``seconds`` more."""
        self._run.wait(lambda: bool(processes(title)), f"{what} to be there")
        before = cpu_of(processes(title))
        self._run.wait(lambda: cpu_of(processes(title)) > before + seconds, f"{what} to work")
        return processes(title)

    def all_losses(self, case: Case) -> None:
        """Lose everything that this case loses, one after the other."""
        if case.apart:
            self.lose_the_network(REPLICA, "while replicas generate", 0.2)
            self.lose_a_node(0.2)  # what was on it moves behind the cable
            self.lose_the_network(RANK, "while ranks learn", 0.3)
            return
        self.kill(REPLICA, "a rollout replica", "while it generates", 0.2, LOSSES[0])
        self.kill(RANK, "a learner rank", "while it learns", 0.3, LOSSES[1])
        self.kill(JUDGE, "a verifier pool", "while it judges", 0.01, LOSSES[2])
        if case.placement:
            self.kill(REPLICA, "a rollout replica", "while it generates", 0.2, LOSSES[0], hangs_after=REPLICA)
            self.kill(REPLICA, "a rollout replica", "before a copy", 0.3, LOSSES[0], hangs_after=RANK)
            self.kill(RANK, "a learner rank", "while it learns", 0.3, LOSSES[1], hangs_after=RANK)
            self.kill(RANK, "a learner rank", "before a copy", 0.2, LOSSES[1], hangs_after=REPLICA)
        self.lose_a_node(0.2)
        self.lose_the_head(0.2)

    def kill(self, title: str, what: str, when: str, work: float, counter: str, *, hangs_after: str = "") -> None:
        """Kill one process of ``title`` after it has worked for a while, and wait until the run reports the loss.

        With ``hangs_after`` it is stopped instead, after the processes of that title have worked for a while.
        """
        self._busy(hangs_after or title, work, what)
        victim = self._rng.choice(processes(title))
        end, how = (victim.suspend, ", stopped") if hangs_after else (victim.kill, "")
        self._lose(f"{what} (process {victim.pid}{how})", when, end, counter)

    def lose_a_node(self, work: float) -> None:
        """Kill a node with all its actors, and start another in its place once the run has reported the loss."""
        self._busy(REPLICA, work, "a replica")
        self._lose("a node", "while replicas generate", self._cluster.lose_one, *LOSSES)
        self._cluster.add()

    def lose_the_network(self, title: str, when: str, work: float) -> None:
        """Cut a node off. Once the run has reported the loss, mend the cable and start the node again."""
        assert self._cluster.cable is not None
        self._busy(title, work, title)
        self._lose("the network of a node", when, self._cluster.cable.cut, *LOSSES)
        self._cluster.cable.mend()
        self._cluster.add_apart()

    def _lose(self, what: str, when: str, end: Callable[[], None], *counters: str) -> None:
        before = self._losses(counters)
        self._note(what, when)
        end()
        self._next_step()
        note = self.notes[-1]
        self._run.wait(lambda: self._losses(counters) > before, f"the run to tell that it lost {what}")
        note["told_after_step"] = self._run.steps
        note["losses"] = {name: self._losses((name,)) for name in (*LOSSES, "cluster/replicas/detours")}

    def _losses(self, counters: tuple[str, ...]) -> float:
        rows = self._run.rows()
        return sum(rows[-1]["values"].get(name, 0.0) for name in counters) if rows else 0.0

    def lose_the_head(self, work: float) -> None:
        """Kill the run's process and all of Ray, a step after a checkpoint. Then start Ray and the command again."""
        self._run.wait(lambda: self._run.steps % EVERY == 1, "a step without a checkpoint")
        self._busy(REPLICA, work, "a replica")
        assert self._run.process is not None
        self._note("the run's process and all of Ray", "while replicas generate")
        os.killpg(self._run.process.pid, signal.SIGKILL)
        self._run.process.wait()
        self._cluster.stop()
        self._cluster.start()
        self._run.start(f"cluster.address={json.dumps(self._cluster.address)}")
        self._next_step()

    def _next_step(self) -> None:
        note = self.notes[-1]
        self._run.wait(lambda: self._run.steps > note["after_step"], f"the step after {note['killed']}")
        note["seconds_to_end_of_step"] = round(time.monotonic() - note.pop("clock"), 1)


def account(run: Run, single: Run) -> dict[str, Any]:
    """Check every prompt and sample of the run against the rules and against the single machine's run."""
    rows, theirs = rollouts(run), rollouts(single)
    seen = Counter((row["draw"], row["sample"]) for row in rows)
    draws = sorted({row["draw"] for row in rows})
    size = max(row["sample"] for row in rows) + 1
    missing = sorted(set(range(max(draws) + 1)) - set(draws))
    prompts = {row["draw"]: (row["problem_id"], row["seed"]) for row in rows}
    other = {row["draw"]: (row["problem_id"], row["seed"]) for row in theirs}
    steps = [row["step"] for row in run.rows()]
    judged = Counter(row["outcome"] for row in rows)
    first = {(r["draw"], r["sample"]): r["tokens"] for r in rows if r["step"] == 1}
    same = [first[place] == r["tokens"] for r in theirs if (place := (r["draw"], r["sample"])) in first]
    faults = {
        "draws_missing": missing,
        "samples_twice": sum(count - 1 for count in seen.values()),
        "samples_missing": len(draws) * size - len(seen),
        "prompts_other_than_on_one_machine": sum(other.get(draw, own) != own for draw, own in prompts.items()),
        "steps_out_of_order": steps != [row["step"] for row in single.rows()],
    }
    return {
        "whole": not any(faults.values()),
        **faults,
        "prompts": len(draws),
        "samples": len(seen),
        "verdicts": dict(sorted((str(key), count) for key, count in judged.items())),
        "first_step_samples_equal_to_one_machine": [sum(same), len(same)],
    }


def rollouts(run: Run) -> list[dict[str, Any]]:
    columns = ["step", "draw", "sample", "problem_id", "seed", "outcome", "tokens"]
    files = sorted((run.output / "rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def curve(run: Run) -> list[dict[str, float]]:
    names = ("train/accuracy/mean", "entropy/sampled/mean", "learner/sampler_gap_mean", "time/step")
    return [{name: row["values"][name] for name in names if name in row["values"]} for row in run.rows()]


def settings_of(case: Case, address: str) -> list[str]:
    return [
        f"cluster.address={json.dumps(address)}",
        "cluster.learner.ranks=2",
        "cluster.rollout.replicas=2",
        "cluster.verifier.workers_per_node=1",
        "cluster.timeouts.start=400",
        *case.placement,
    ]


def prepared(case: Case, work: Path, models: Path) -> Path:
    """Make the case's model, and return its recipe without the difficulty filter, which would decide the prompts."""
    whole = (RECIPES / case.recipe).read_text()
    kept = re.sub(r"\[data\.difficulty_filter\]\n(?:[^\[\n].*\n)*", "", whole)
    own = case.recipe.replace(".toml", "-sft.toml")
    start = models / own.replace("-sft.toml", f"-start{len(case.start) or ''}")
    if not start.exists():
        command = [sys.executable, "-m", "magicrl", "sft", str(RECIPES / own), "--output", str(start)]
        subprocess.run([*command, *(part for item in case.start for part in ("--set", item))], check=True)
    recipe = work / "recipe.toml"
    recipe.write_text(kept.replace(f'sft = "{own}"', f"model = {json.dumps(str(start.resolve()))}"))
    return recipe


def study(case: Case, work: Path, models: Path, seed: int) -> dict[str, Any]:
    """Run the single machine undisturbed, then the cluster with losses."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    recipe = prepared(case, work, models)
    engine = [f'rollout.engine="{case.engine}"', "rollout.max_rows=8", f"rollout.memory_limit_mb={case.cache_mb}"]
    shared = [*case.overrides, *NO_TESTS, *engine]
    single = Run(recipe, work / "single", shared)
    single.start()
    single.wait(single.ended, "its end", 1800)
    if single.process is None or single.process.returncode:
        raise SystemExit(f"the run on one machine failed: {single.tail()}")
    cluster = Nodes(case)
    run = Run(recipe, work / "cluster", [*shared, *settings_of(case, cluster.address)])
    started = time.monotonic()
    try:
        run.start()
        run.wait(lambda: run.steps >= 1, "the first step")
        chaos = Chaos(run, cluster, seed)
        chaos.all_losses(case)
        run.wait(run.ended, "its end")
        if run.process is None or run.process.returncode:
            raise SystemExit(f"the run on the cluster failed: {run.tail()}")
    finally:
        if run.process is not None and run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
        cluster.stop()
    events = [json.loads(line) for line in (run.output / "events.jsonl").read_text().splitlines()]
    return {
        "kills": chaos.notes,
        "accounted": account(run, single),
        "seconds": round(time.monotonic() - started, 1),
        "curve": {"cluster": curve(run), "single": curve(single)},
        "told": [
            [event["step"], event["message"].replace(str(work), "runs")]
            for event in events
            if event["kind"] in ("lost", "resume")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON")
    parser.add_argument("--model", choices=sorted(CASES), default="smollm2")
    parser.add_argument("--models", type=Path, default=ROOT / "runs" / "models", help="supervised starts made before")
    parser.add_argument("--work", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = study(CASES[arguments.model], arguments.work.resolve(), arguments.models.resolve(), arguments.seed)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result["accounted"], indent=1) + "\n")
    if not result["accounted"]["whole"]:
        raise SystemExit(REMEDY)


if __name__ == "__main__":
    main()
