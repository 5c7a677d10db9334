"""``magicrl doctor``: every finding on this machine, findings on other machines, and the exit status."""

from __future__ import annotations

import json
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from magicrl.commands import doctor
from magicrl.commands.main import app
from magicrl.distributed.doctor import Finding
from magicrl.models import cpu_kernels
from magicrl.planning.memory import GIB
from magicrl_verifiers.code.sandbox import SandboxRefusal

ROOT = Path(__file__).resolve().parents[3]
Usage = namedtuple("Usage", "total used free")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = app(["doctor", "--json"], result_action="return_value")
    told = json.loads(capsys.readouterr().out)
    findings = {row["what"]: row for row in told["findings"]}
    assert status == (0 if told["healthy"] else 1)
    assert told["healthy"] == all(row["status"] != "trouble" for row in findings.values())
    assert findings.keys() >= {"Python", "cores", "memory", "torch", "GPU", "sandbox of programs", "browser", "disk"}
    assert "enough for" in findings["memory"]["text"]
    assert all(row["remedy"] for row in findings.values() if row["status"] in ("absent", "trouble"))


def test_every_extra_of_a_user_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert doctor.EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev", "bench", "docs"}


def test_what_computes_bfloat16_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(reason: str | None) -> Finding:
        monkeypatch.setattr(cpu_kernels, "missing", lambda: reason)
        return next(found for found in doctor._torch() if found.what == "kernels on the CPU")

    assert told(None).text == "magicrl's own kernels"
    assert told("the processor lacks avx512f").status == "ok"
    lacking = told("there is no C++ compiler (g++ or clang++)")
    assert (lacking.status, lacking.remedy) == ("warning", "apt install g++")
    assert lacking.text.startswith("torch's only, which are slower, because there is no")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("numpy>=1", []),
        ("numpy>=99", ["is not >=99"]),
        ("no-such-package>=1", ["no-such-package is not installed"]),
        ("math-verify[antlr4-13-2]>=0.9", []),
        ("math-verify[antlr4-9-3]>=0.9", ["is not"]),  # packages required by a requirement's extra count, too
    ],
)
def test_versions_outside_their_range(wanted: str, told: list[str]) -> None:
    found = doctor.faults([Requirement(wanted)])
    assert len(found) == len(told)
    assert all(part in fault for part, fault in zip(told, found, strict=True))


@pytest.mark.parametrize(("speed", "status"), [(2.1, "ok"), (0.5, "warning")])
def test_bfloat16_that_is_slower_than_float32_is_told(
    speed: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "bfloat16_speeds", lambda: (speed, speed / 2))
    found = next(found for found in doctor._torch() if found.what == "bfloat16 on the CPU")
    assert (found.status, f"{speed} with 64 rows (decoding), {speed / 2:.2g} with" in found.text) == (status, True)
    assert ("float32" in found.remedy) == (status == "warning")


@pytest.mark.parametrize(
    ("maps", "known", "told", "remedy"),
    [
        ("7f00 r-xp /usr/lib/libtcmalloc_minimal.so.4.5\n", None, "tcmalloc", ""),
        ("7f00 r-xp /usr/lib/libc.so.6\n", "libtcmalloc_minimal.so.4", "the C library's", "LD_PRELOAD=libtcmalloc"),
        ("7f00 r-xp /usr/lib/libc.so.6\n", None, "the C library's", "apt install libtcmalloc-minimal4; LD_PRELOAD="),
    ],
)
def test_a_faster_allocator_is_advised(
    maps: str, known: str | None, told: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _: known)
    found = doctor.allocator(tmp_path / "maps")
    assert found.status == "ok"
    assert found.text.startswith(told)
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == bool(remedy)


def test_a_machine_that_is_too_small_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_memory", lambda: 0.6 * GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(10 * GIB, 9.5 * GIB, 0.5 * GIB))
    found = {finding.what: finding for finding in doctor.examine()}
    assert found["memory"].status == "trouble"
    assert "quickstart needs 0.7" in found["memory"].text
    assert "tiny" in found["memory"].text.partition(";")[2].partition("needs")[0]  # half a GiB suffices for it
    assert found["disk"].status == "trouble"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(10 * GIB, GIB, 9 * GIB))
    assert doctor._disk(Path.cwd()).status == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    closed = doctor._disk(Path.cwd())
    assert (closed.status, closed.text.endswith("; it cannot be written")) == ("trouble", True)


def test_a_sandbox_that_refuses_is_a_warning_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def __init__(self, _: object) -> None: ...
        def close(self) -> None: ...

        @property
        def tier(self) -> str:
            raise SandboxRefusal("the code sandbox did not start: neither namespaces nor Landlock")

    monkeypatch.setattr(doctor, "Sandbox", Refuses)
    found = next(finding for finding in doctor.examine() if finding.what == "sandbox of programs")
    assert found.status == "warning"
    assert "neither namespaces" in found.text
    assert "5.13" in found.remedy


def test_modules_that_judged_programs_import_are_named_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MODULES_OF_PROGRAMS", ("json", "no_such_a", "no_such_b"))
    found = next(finding for finding in doctor.examine() if finding.what == "modules of programs")
    assert (found.status, found.remedy) == ("warning", "pip install no_such_a no_such_b")
    assert found.text.startswith("not installed: no_such_a, no_such_b.")
    monkeypatch.setattr(doctor, "MODULES_OF_PROGRAMS", ("json",))
    assert all(finding.what != "modules of programs" for finding in doctor.examine())


def test_the_text_and_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Finding("a", "ok", "1"), Finding("b", "trouble", "[2]", "do this")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(rows))
    for words in (["doctor", "--json"], ["doctor"]):
        capsys.readouterr()
        assert app(words, result_action="return_value") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["ok      a: 1", "trouble b: [2]", "        -> do this"]
    monkeypatch.setattr(doctor, "examine", lambda: iter(rows[:1]))
    assert app(["doctor"], result_action="return_value") == 0
