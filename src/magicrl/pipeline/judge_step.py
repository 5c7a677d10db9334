"""The judging step: votes of judges on every problem; a problem with too few votes for it is dropped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from magicrl.files import write_atomically
from magicrl.pipeline.entry import Document, Entry
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, Step, by_entry
from magicrl.pipeline.judge_report import as_text, estimated_cost, flawed_figures, report_of
from magicrl.pipeline.judge_votes import TEXTS, Judgement, judge_problems, votes_missing
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.pipeline_schema import JudgeStep
from magicrl_verifiers.code import kernel

FLAWED = tuple(Document(id=f"flawed/{name}", text=text) for name, text in TEXTS.flawed.items())
"""Problems known to be flawed, as the report found them behind its difficulty filter."""
_LOOK_SECONDS = 0.5
_STOP_SECONDS = 20.0


@contextmanager
def served(settings: JudgeStep, context: Context, log: Path) -> Generator[None]:
    """Run ``settings.serve`` for the length of the block, once it answers; nothing where there is no command.

    Raises:
        ValueError: it ends or does not answer in time; says where its output is.
    """
    if not settings.serve:
        yield
        return
    model = ""
    if settings.serve_gguf_package is not None:
        from magicrl.models.small_models import prepare_gguf_package  # torch: only where such a package is named

        folder = context.output / "models" / settings.serve_gguf_package
        model = str(prepare_gguf_package(settings.serve_gguf_package, folder))
    words = [word.replace("{model}", model).replace("{python}", sys.executable) for word in settings.serve]
    # programs of this environment are found though it may not be activated
    beside = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        with log.open("wb") as output:
            server = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=beside,
                # a session of its own: `_stop` ends with it whatever the server started
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
    except OSError as error:
        raise ValueError(f"the judge's server {words[0]!r} cannot be started: {error.strerror}") from None
    try:
        _wait(server, settings, log)
        yield
    finally:
        _stop(server)


def _die_with_parent() -> None:
    """A killed run leaves no server behind."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(server: subprocess.Popen[bytes], settings: JudgeStep, log: Path) -> None:
    address = settings.settings.judges[0].base_url.rstrip("/") + "/models"
    until = time.monotonic() + settings.serve_seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ValueError(f"the judge's server ended with status {server.returncode}; its output is in {log}")
        try:
            # any answer will do: a server that wants a key, too, is up
            if httpx2.get(address, timeout=5).status_code < 500:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(_LOOK_SECONDS)
    raise ValueError(f"the judge's server did not answer at {address} in {settings.serve_seconds:g} s; see {log}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it started: it leads a session of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        # even if the server has ended: what it started may be left
        with suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)


_FREE = {
    *("concurrency", "requests_per_minute", "attempts", "attempt_seconds", "key_variable", "base_url"),
    *("dollars_per_million_input", "dollars_per_million_output"),
}
"""Settings of a judge that decide no vote."""


class Judge(Step[JudgeStep]):
    """Asks first; votes are kept one by one, so that nothing is asked for twice. Then rows are dropped by id."""

    use = "judge"

    def identity(self, context: Context) -> Any:
        known = self._settings.settings.model_dump(mode="json", exclude={"judges": {"__all__": _FREE}})
        return known | {"flawed": self._settings.flawed}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        settings = self._settings.settings
        total = sum(read_part(part.path, ["id"]).num_rows for part in parts)
        # told before anything is asked: the votes cost money
        missing = votes_missing(_problems(parts), settings, folder=folder.work)
        length = sum(len(problem.text) for problem in _problems(parts)) / max(1, total)
        for name, cost in estimated_cost(settings, missing, length).items():
            context.watcher.note(
                f"judge {name}: {cost['votes']} votes to ask for, {cost['prompt_tokens']} tokens in, at most "
                f"{cost['most_completion_tokens']} out, at most {cost['most_dollars']:.2f} dollars"
            )
        lines: list[str] = []

        def judged() -> Iterator[Judgement]:
            for judgement in judge_problems(_problems(parts), settings, folder=folder.work):
                lines.append(json.dumps(_line(judgement)) + "\n")
                context.watcher.progress(self.use, len(lines), total, "problems")
                yield judgement

        # no server is started for votes that are all on disk
        serve = any(missing.values()) or self._settings.flawed
        with served(self._settings, context, folder.work / "server.log") if serve else nullcontext():
            told = report_of(judged(), settings)
            if self._settings.flawed:
                known = judge_problems(FLAWED, settings, folder=folder.work)
                told["flawed"] = flawed_figures(known, [problem.id for problem in FLAWED])
        text = as_text(told)
        if "flawed" in told:
            flawed = told["flawed"]
            text += f"of {flawed['judged']} problems known to be flawed the judges drop {flawed['found_by_judges']}\n"
        write_atomically(folder.work / "judging.json", json.dumps(told, indent=1))
        write_atomically(folder.work / "judging.txt", text)
        write_atomically(folder.work / "judgements.jsonl", "".join(lines))

    def decide(self, folder: StepFolder) -> Decide:
        with (folder.work / "judgements.jsonl").open(encoding="utf-8") as file:
            judgements: dict[str, dict[str, Any]] = {row["problem"]: row for row in map(json.loads, file)}

        def one(entry: Entry) -> Decision:
            row = judgements[entry.id]
            if not row["keep"]:
                return Drop(
                    "judged flawed", f"{row['keeps']} of {row['valid']} readable votes for it. {row['reasons']}"
                )
            return replace(entry, notes={**entry.notes, "judge": [row["keeps"], row["valid"]]})

        return by_entry(one)

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        context.watcher.note((folder.work / "judging.txt").read_text(encoding="utf-8").rstrip())


def _problems(parts: Sequence[Part]) -> Iterator[Document]:
    for part in parts:
        for row in read_part(part.path, ["id", "problem"]).to_pylist():
            yield Document(id=row["id"], text=row["problem"])


def _line(judgement: Judgement) -> dict[str, Any]:
    """What is kept of a judgement beside its votes: the counts, and why the first judge against it was."""
    against = next((vote.reasons for vote in judgement.votes if vote.keep is False), "")
    return {
        "problem": judgement.problem,
        "keep": judgement.keep,
        "keeps": judgement.keeps,
        "valid": judgement.valid,
        "reasons": against[:500],
    }
