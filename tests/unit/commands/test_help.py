"""Help of every command: an example that parses, few imports, and completion."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cyclopts import App, CoercionError
from rich.console import Console

import magicrl
from magicrl.commands.main import COMMANDS, app, custom_frames, main, make_app


def leaves(command: App, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the words of every command that does something."""
    names = [name for name in command if not name.startswith("-")]
    if not names:
        yield words
    for name in names:
        yield from leaves(command[name], (*words, name))


@pytest.mark.parametrize("words", list(leaves(app)), ids=" ".join)
def test_every_help_has_an_example_that_parses(words: tuple[str, ...]) -> None:
    command = app
    for word in words:
        command = command[word]
    examples = re.findall(r"Example: (.+)", command.help)
    assert examples
    for example in examples:
        name, *given = shlex.split(example.partition(" > ")[0])
        assert name == "magicrl"
        assert tuple(given[: len(words)]) == words
        app.parse_args(given, exit_on_error=False, print_error=False)  # raises if it does not parse


@pytest.mark.parametrize("text", ["2.5", "two"])
def test_a_number_is_not_rounded(text: str) -> None:
    given = ["eval", "--benchmark", "aime24", "--limit"]
    with pytest.raises(CoercionError, match=f"Invalid value for --limit: give a whole number, got {text}"):
        app.parse_args([*given, text], exit_on_error=False, print_error=False)
    assert app.parse_args([*given, "2"], exit_on_error=False, print_error=False)[1].kwargs["limit"] == 2


@pytest.mark.parametrize("words", list(leaves(app)), ids=" ".join)
def test_no_whole_number_is_rounded(words: tuple[str, ...]) -> None:
    command = app
    for word in words:
        command = command[word]
    options = [one for one in command.assemble_argument_collection() if one.hint in (int, int | None)]
    assert [one.name for one in options if one.parameter.converter is None] == []


@pytest.mark.parametrize("words", list(leaves(app)), ids=" ".join)
def test_help_shows_every_word_of_its_text(words: tuple[str, ...]) -> None:
    command = app
    for word in words:
        command = command[word]
    printed = io.StringIO()
    app.help_print(list(words), console=Console(file=printed, width=2000))
    written = [
        re.sub(r"^ *(\w+|-+|Args:)$|^ {4}\w+:", "", command.help, flags=re.MULTILINE)
    ]  # without the names of options
    assert "--progress" not in printed.getvalue()
    for name in re.findall(r"--([a-z][a-z-]+)", printed.getvalue()):
        assert re.search(rf"--{name}\b.*?  \w", printed.getvalue()), f"--{name} is not described"
    # the help is Markdown: a tag or an emphasis outside backticks would disappear
    assert not set(" ".join(written).replace("`", "").split()) - set(printed.getvalue().split())


def test_the_list_of_commands_says_what_their_help_says() -> None:
    listed = make_app(listing=True)
    for name in COMMANDS:
        # as `--help` of all commands prints it, which imports none of them
        assert listed[name].help == (app[name].help or "").partition("\n\n")[0].replace("\n", " "), name


def test_help_loads_nothing_heavy() -> None:
    heavy = "torch numpy pandas pydantic jinja2 pyarrow datasets transformers rich.markdown"
    program = (
        "import sys; from magicrl.commands.main import make_app; sys.stdout = sys.stderr; "
        "make_app(listing=True)('--help', result_action='return_value'); sys.stdout = sys.__stdout__; "
        f"print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["plan", "preflight", "explain"])
def test_a_command_draws_pages_with_what_only_its_page_imports(name: str) -> None:
    heavy = "torch pydantic jinja2 pyarrow"
    program = f"import sys, magicrl.commands.{name}; print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_completion_is_installed_and_completes(tmp_path: Path) -> None:
    home = os.environ | {"HOME": str(tmp_path)}
    words = [sys.executable, "-m", "magicrl", "--install-completion", "--shell", "bash"]
    subprocess.run(words, check=True, capture_output=True, env=home)
    ask = '. ~/.bashrc; COMP_WORDS=(magicrl {}); COMP_CWORD={}; _magicrl; echo "${{COMPREPLY[@]}}"'
    for given, wanted in (("wat", "watch"), ("verify ma", "math"), ("train quickstart --dr", "--dry-run")):
        line = ask.format(given, len(given.split()))
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=home, check=False)
        assert done.stdout.split() == [wanted], done.stderr


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "eval runs/sums",
            "magicrl eval: runs/sums belongs to no option; magicrl eval --help shows the options",
        ),
        ("plan tiny", "magicrl plan: --gpu is missing; magicrl plan --help shows the options"),
        ("preflight", "magicrl preflight: RECIPE is missing; magicrl preflight --help shows the options"),
        ("plan tiny --gpu", "magicrl plan: --gpu has no value; magicrl plan --help shows the options"),
        ("eval --fields x", "magicrl eval: Unknown option: --fields. Did you mean --field?"),
        (
            "verify maths",
            'magicrl verify: Unknown command "maths". Did you mean "math"? Available commands: math, reward, code, '
            "checkers, disagreements, judge.",
        ),
        ("eval --samples x", "magicrl eval: Invalid value for --samples: give a whole number, got x"),
    ],
)
def test_an_error_of_the_command_line_is_one_sentence(
    words: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["magicrl", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_a_full_disk_is_failed_work_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "runs/a/model"))
    with pytest.raises(SystemExit) as ended:
        main(full)
    assert ended.value.code == 1
    wanted = "magicrl: runs/a/model: No space left on device; free disk space and run the same command again\n"
    assert capsys.readouterr().err == wanted


def test_an_output_on_a_full_disk_or_a_read_only_one_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "magicrl", "recipes", "tiny"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    wanted = "magicrl: standard output: No space left on device; free disk space and run the same command again\n"
    assert (done.returncode, done.stderr) == (1, wanted)
    with pytest.raises(SystemExit):
        main(Mock(side_effect=OSError(errno.EROFS, "Read-only file system", "a")))
    assert capfd.readouterr().err == "magicrl: a: Read-only file system; name a place that can be written\n"


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_what_is_printed_never_reaches_a_file_of_the_run(closed: str, tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, magicrl.commands.main as m\n"
        "def command(**_):\n"
        "    with open('kept', 'w') as file:\n"
        "        subprocess.run(['sh', '-c', 'echo stray >&2'], close_fds=False)\n"
        "        print('stray', file=sys.stderr)\n"
        "    print(file.name)\n"
        "m.main(command)\n"
    )
    script = f'exec {sys.executable} -c "$PROGRAM" {closed}'
    found = subprocess.run(
        ["sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PROGRAM": program},
        check=False,
    )
    assert (found.returncode, found.stdout, (tmp_path / "kept").read_text()) == (0, "kept\n", "")


def test_a_closed_output_is_refused_before_any_work(tmp_path: Path) -> None:
    script = f"exec {sys.executable} -m magicrl train tiny --output run >&-"
    found = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    wanted = "magicrl: standard output is closed; redirect it to a file, or to /dev/null\n"
    assert (found.returncode, found.stderr, list(tmp_path.iterdir())) == (2, wanted, [])


def test_no_memory_is_failed_work_and_compiled_code_is_not_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    inside: dict[str, Any] = {}
    place = Path(magicrl.__file__).with_name("reads.py")  # as if magicrl called pyarrow
    exec(compile("import pyarrow\ndef reads(): pyarrow.array([1, 'a'])", place, "exec"), inside)
    with pytest.raises(ValueError, match="convert") as found:
        inside["reads"]()
    assert any(str(frame.path).endswith(".pxi") for frame in found.traceback)
    assert custom_frames(found.value) == []
    with pytest.raises(SystemExit) as ended:
        main(Mock(side_effect=MemoryError("malloc of size 64 failed")))
    wanted = (
        "magicrl: out of memory: malloc of size 64 failed; free memory, or raise its limit, and run the same command"
    )
    assert (ended.value.code, capsys.readouterr().err) == (1, f"{wanted} again\n")


def test_a_run_on_a_full_disk_continues_with_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["magicrl", "train", "tiny"])
    with pytest.raises(SystemExit):
        main(Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "a")))
    assert capsys.readouterr().err.endswith("run the same command again with --resume\n")


def test_an_error_shows_characters_that_a_terminal_would_act_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["magicrl", "data", "stats", "no\x1bc"])
    with pytest.raises(SystemExit):
        main()
    assert "no␛c" in capsys.readouterr().err
