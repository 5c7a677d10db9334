"""The ``magicrl`` command. A command's module is imported only when it is used, so that ``--help`` is instant."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal
import sys
import sysconfig
import traceback
from io import TextIOWrapper
from pathlib import Path

from cyclopts import App, CycloptsError, MissingArgumentError, UnusedCliTokensError
from rich.console import Console

import magicrl
import magicrl_verifiers
from magicrl.config.errors import RecipeError
from magicrl.files import NO_ROOM
from magicrl.reporting.wording import print_prose, visible
from magicrl_verifiers import references
from magicrl_verifiers.secrets import without_secrets

COMMANDS = {
    "train": (
        "train:command",
        "Train with MAGIC: optional SFT, evaluation, reinforcement learning in stages, evaluation, report.",
    ),
    "init": (
        "init:command",
        "Sample your model on a few of your problems for about a minute, and write a recipe that can learn from them.",
    ),
    "sft": (
        "train:sft",
        "Make an initial model by supervised fine-tuning on demonstrations of generated tasks.",
    ),
    "eval": (
        "eval:command",
        "Evaluate a model on benchmarks: avg@k, pass@k, maj@k, length and truncation with intervals, resumable.",
    ),
    "recipes": (
        "recipes:recipes",
        "List the shipped recipes; with a name, print that recipe, as a template for your own.",
    ),
    "report": (
        "report:report",
        "Write a report: one self-contained HTML page of a run, or one that compares runs and evaluations.",
    ),
    "watch": (
        "watch:watch",
        "Show a run of another process until it ends; Ctrl-C does not stop the run.",
    ),
    "preflight": (
        "preflight:command",
        "Check a run before you spend compute on it: signal, reward, chat template, learning rate, time and memory.",
    ),
    "explain": (
        "explain:command",
        "Find the notable steps of a run; with --step, repeat that step bit for bit and show what it changed.",
    ),
    "plan": (
        "plan:command",
        "Predict memory, step time and hours of a recipe on given accelerators, and the effect of more accelerators.",
    ),
    "runs": (
        "runs:runs",
        "List runs: recipe, status, steps, best and last validation, test score, start time and changed settings.",
    ),
    "serve": (
        "serve:serve",
        "Serve the Tinker API for one client on this machine, which trains and samples the model.",
    ),
    "push": (
        "push:push",
        "Push a run's model with its card to a repository of the Hugging Face Hub, in one commit.",
    ),
    "doctor": (
        "doctor:doctor",
        "Check this machine: cores, memory, GPU, sandbox, packages, extras, browser, disk, each with a fix.",
    ),
    "selfcheck": (
        "selfcheck:selfcheck",
        "Prove the main promises on this machine, with these versions: loss, resume, verifiers and more. Some minutes.",
    ),
    "verify": (
        "verify:verify_app",
        "Judge answers: JSON Lines in, JSON Lines out.",
    ),
    "data": (
        "data:data_app",
        "Build a training mixture from raw sources: import, clean, dedup, decontaminate, ...",
    ),
    "cluster": (
        "doctor:cluster_app",
        "Check a Ray cluster before a run.",
    ),
}
"""Function or group of each command, in the modules of this package, and its line in ``magicrl --help``."""


def make_app(*, listing: bool) -> App:
    """Return the command line.

    Args:
        listing: Show the lines of the table above as help, which imports no command. Without it, the help of a command
            is its docstring.
    """
    app = App(
        name="magicrl",
        help="Reinforcement-learning post-training of reasoning models: the MAGIC recipe.",
        version_flags=["--version"],
        help_format="plaintext" if listing else None,  # without importing a Markdown renderer
        suppress_keyboard_interrupt=False,  # `main` prints how to continue
    )
    app.register_install_completion_command(help="Install completion with Tab for this shell (bash, zsh, fish).")
    for name, (place, line) in COMMANDS.items():
        app.command(f"magicrl.commands.{place}", name=name, **({"help": line} if listing else {}))
    return app


app = make_app(listing=False)


def main(command: App | None = None) -> None:
    """Entry point: exit 0 done, 1 failed while working, 2 wrong input; every error says what to do."""
    closed = _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a run
    errors = Console(emoji=False, stderr=True, highlight=False)
    try:
        if closed:
            raise ValueError("standard output is closed; redirect it to a file, or to /dev/null")
        words = sys.argv[1:]
        command = command or make_app(listing=not words or words[0] in ("-h", "--help"))
        status = command(result_action="return_value", print_error=False, exit_on_error=False)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()  # an output that cannot be written is an error of the command
    except CycloptsError as error:
        print_prose(errors, usage_error(error))
        sys.exit(2)
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would put a traceback into this message
        _print_stopped(errors, "interrupted")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # and ends at once what the exit waits for
        sys.exit(128 + getattr(error, "signal_number", signal.SIGINT))
    except (Exception, SystemExit) as error:
        # rich ends a command whose output nobody reads. `magicrl runs | head` wants no message.
        if sys.argv[1:2] == ["train"] and isinstance(error.__context__, BrokenPipeError):
            _print_stopped(errors, "stopped, since the program that reads the output has ended")
            raise
        frames = custom_frames(error)
        expected = isinstance(error, ValueError | FloatingPointError | RuntimeError | OSError | MemoryError)
        if not expected and not frames:
            raise  # a bug of magicrl, or the command line's own exit
        # The message of an expected failure explains it. A traceback would hide the message.
        if os.environ.get("MAGICRL_TRACEBACK"):
            errors.print(without_secrets(traceback.format_exc()), markup=False, soft_wrap=True, end="")
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        again = "run the same command again" + " with --resume" * (sys.argv[1:2] == ["train"])
        if isinstance(error, MemoryError):
            text = f"out of memory: {text or 'an allocation failed'}; free memory, or raise its limit, and {again}"
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            text = f"standard output: {error.strerror}" if not error.filename and _cannot_be_written() else text
            text += f"; free disk space and {again}"
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            text += "; name a place that can be written"
        try:
            here = str(Path.cwd())
        except FileNotFoundError:
            here = "\0"  # in no path
            text += "; the current folder no longer exists: change to one that does"
        # paths as a user would type them here
        text = re.sub(rf"{re.escape(here)}(?![\w.-])", ".", without_secrets(text).replace(f"{here}{os.sep}", ""))
        if frames and not isinstance(error, RecipeError):
            part = references.part_of(frames[0].filename)
            text = f"{part}{type(error).__name__}: {text}\n{''.join(traceback.format_list(frames)).rstrip()}"
            text = without_secrets(text.replace(f"{here}{os.sep}", ""))
        for line in visible(f"magicrl: {text}").splitlines():
            print_prose(errors, line)
        # These mean that the command line, the recipe, the data, the model or a folder cannot be used. Whatever custom
        # code raises is a failure of that code.
        unusable = isinstance(error, ValueError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
        sys.exit(2 if isinstance(error, RecipeError) or (unusable and not frames) else 1)
    sys.exit(status or 0)


def _fill_closed_streams() -> bool:
    """Open /dev/null in place of closed standard streams. Return whether standard output was closed.

    The next file of the run would get the number of a closed stream, and what a library or a child process prints
    would be written into that file.
    """
    closed = sys.stdout is None
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        stream or open(number, "w", closefd=False)  # noqa: SIM115 - as long as the process
        for number, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    return closed


def _cannot_be_written() -> bool:
    """Return whether standard output cannot be written. Its unwritten text is then dropped, or the exit would fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _print_stopped(errors: Console, why: str) -> None:
    """Print why the command ended early, and for a training the command that continues it."""
    trains = sys.argv[1:2] == ["train"] and "--dry-run" not in sys.argv
    print_prose(errors, f"{why}{'; finished work is kept. To continue:' if trains else ''}")
    if trains:
        again = [*sys.argv[1:], *(() if "--resume" in sys.argv else ("--resume",))]
        errors.print(without_secrets(f"magicrl {shlex.join(again)}"), markup=False, soft_wrap=True)


def usage_error(error: CycloptsError) -> str:
    """Return an error of the command line as a sentence that names the command."""
    command = " ".join(("magicrl", *(error.command_chain or ())))
    if isinstance(error, UnusedCliTokensError):
        unused = shlex.join(error.unused_tokens or ())
        return f"{command}: {unused} belongs to no option; {command} --help shows the options"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        lacks = "is missing" if error.keyword is None else "has no value"
        return f"{command}: {error.keyword or error.argument.name} {lacks}; {command} --help shows the options"
    error.verbose = False
    return f"{command}: {error}"


def custom_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a user's own files that magicrl called, outermost first; none if it called none.

    Installed packages, the standard library and magicrl are not the user's. A script that calls magicrl is above its
    frames and not among those returned.
    """
    own = tuple(str(Path(package.__file__ or "").parent) for package in (magicrl, magicrl_verifiers))
    # Frames of Cython have names without a folder: pyarrow/table.pxi
    others = (*own, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")
    frames = traceback.extract_tb(error.__traceback__)
    first = next((place for place, frame in enumerate(frames) if frame.filename.startswith(own)), len(frames))
    compiled = (".pyx", ".pxi")
    found = (frame for frame in frames[first:] if not frame.filename.endswith(compiled))
    return [frame for frame in found if not frame.filename.startswith(others)]
