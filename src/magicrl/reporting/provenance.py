"""Where a run comes from: its sessions, software, data and everything else that ``run.json`` tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from magicrl.reporting.run_folder import RecordedRun
from magicrl.reporting.wording import moment

_TOLD_APART = ("environments", "data", "schema_version")


def provenance(run: RecordedRun) -> dict[str, Any]:
    """The data of the provenance's template."""
    environments = [e for e in cast("list[Any]", run.run.get("environments") or []) if isinstance(e, Mapping)]
    rest = {key: value for key, value in run.run.items() if key not in _TOLD_APART}
    return {
        "sessions": [_session(cast("Mapping[str, Any]", e)) for e in environments],
        "software": _software([cast("Mapping[str, Any]", e) for e in environments]),
        "sets": _sets(run.run.get("data")),
        "facts": [(key.replace("_", " "), value) for key, value in flattened(rest) if value not in (None, "")],
        "folder": str(run.path),
    }


def _session(environment: Mapping[str, Any]) -> dict[str, str]:
    """One start or resumption: when, where, which commit."""
    known = {"started": moment(str(environment.get("started", ""))), "git": str(environment.get("git") or "")}
    machine = [str(environment[key]) for key in ("machine",) if environment.get(key)]
    machine += [f"{environment['threads']} threads"] if environment.get("threads") else []
    return known | {"machine": ", ".join(machine)}


def _software(environments: list[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Versions by package; where a resumption had another one, in order, with an arrow."""
    seen: dict[str, list[str]] = {}
    for environment in environments:
        versions: object = environment.get("versions")
        listed = cast("Mapping[str, Any]", versions) if isinstance(versions, Mapping) else {}
        for name, version in {"python": environment.get("python"), **listed}.items():
            history = seen.setdefault(name, [])
            if version is not None and (not history or history[-1] != str(version)):
                history.append(str(version))
    return [(name, " → ".join(history)) for name, history in seen.items() if history]


def _sets(data: object) -> list[dict[str, str]]:
    """The problem sets with their checksums."""
    if not isinstance(data, Mapping):
        return []
    rows: list[dict[str, str]] = []
    for name, facts in cast("Mapping[str, Any]", data).items():
        known = cast("Mapping[str, Any]", facts) if isinstance(facts, Mapping) else {"sha256": facts}
        problems = known.get("problems")
        if problems != 0:
            rows.append(
                {
                    "name": name.replace("/", ", "),
                    "problems": f"{problems:,}" if isinstance(problems, int) else "–",
                    "sha256": str(known.get("sha256", "")),
                    "rest": ", ".join(f"{k} {v}" for k, v in flattened(known) if k not in ("problems", "sha256")),
                }
            )
    return rows


def flattened(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables and lists as (dotted key, scalar), in order."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return [row for k, v in table.items() for row in flattened(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [row for i, v in enumerate(items) for row in flattened(v, f"{prefix}[{i}]")]
    return [(prefix, value)]
