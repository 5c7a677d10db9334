"""The common way to name custom parts."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from magicrl import registry
from magicrl.registry import BUILTINS, check, names, resolve
from magicrl_verifiers.references import did_you_mean, file_fingerprint


def test_every_built_in_is_where_the_table_says() -> None:
    for kind, rows in BUILTINS.items():
        for name, reference in rows.items():
            check(kind, name)
            assert registry.is_builtin(kind, name)
            assert reference.count(":") == 1, (kind, name)


def test_a_file_is_imported_once_and_anew_when_its_text_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    mine = tmp_path / "mine.py"
    mine.write_text("from helper_beside import TWO\ncounted = [TWO]\n")
    (tmp_path / "helper_beside.py").write_text("TWO = 2\n")
    first = resolve("loss", f"{mine}:counted")
    assert first == [2]
    assert resolve("loss", f"{mine}:counted") is first
    before = file_fingerprint(f"{mine}:counted")
    mine.write_text("counted = [3]\n")
    assert resolve("loss", f"{mine}:counted") == [3]
    assert file_fingerprint(f"{mine}:counted") != before


def test_a_changed_neighbour_is_imported_again(tmp_path: Path) -> None:
    mine, helper = tmp_path / "mine.py", tmp_path / "helper_that_changes.py"
    mine.write_text("import between\ncounted = [between.TWO]\n")
    (tmp_path / "between.py").write_text("from helper_that_changes import TWO\n")
    helper.write_text("TWO = 2\n")
    assert resolve("loss", f"{mine}:counted") == [2]
    helper.write_text("TWO = 1 + 3\n")
    assert resolve("loss", f"{mine}:counted") == [4]


def test_neighbours_of_one_name_in_two_folders_are_refused(tmp_path: Path) -> None:
    for folder, line in (("a", "import shared_name"), ("b", "def late():\n    import shared_name")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"{line}\nFOLDER = {folder!r}\n")
        (tmp_path / folder / "shared_name.py").write_text(f"FOLDER = {folder!r}\n")
    assert resolve("loss", f"{tmp_path}/a/mine.py:FOLDER") == "a"
    with pytest.raises(ValueError, match=r"a/shared_name\.py, .* and not .*b/shared_name\.py; rename one") as error:
        resolve("advantage", f"{tmp_path}/b/mine.py:FOLDER")
    assert str(error.value).startswith(f"advantage '{tmp_path}/b/mine.py:FOLDER': ")


def test_a_fingerprint_covers_the_files_that_the_file_imports(tmp_path: Path) -> None:
    mine, package = tmp_path / "mine.py", tmp_path / "parts"
    package.mkdir()
    files = {
        mine: "import json\nimport words\nfrom parts import inner\n",
        tmp_path / "words.py": "import deeper\n",
        tmp_path / "deeper.py": "import mine\n",
        package / "__init__.py": "",
        package / "inner.py": "from . import beside\nfrom .far import value\n",
        package / "beside.py": "",
        package / "far.py": "value = 1\n",
    }
    other = tmp_path / "other.py"
    for file, text in {**files, other: ""}.items():
        file.write_text(text)
    seen = {file_fingerprint(f"{mine}:f")}
    other.write_text("changed = 1\n")
    assert {file_fingerprint(f"{mine}:f")} == seen, "nothing imports it"
    for file, text in files.items():
        file.write_text(text + "# changed\n")
        seen.add(file_fingerprint(f"{mine}:f"))
    assert len(seen) == 1 + len(files)
    # without imports of its folder it is the checksum of the file
    assert file_fingerprint(f"{other}:f") == hashlib.sha256(other.read_bytes()).hexdigest()
    written = mine.stat().st_mtime_ns
    mine.write_text("counted = [4]\n")
    os.utime(mine, ns=(written, written))
    assert resolve("loss", f"{mine}:counted") == [4], "no bytecode of a text of the same length and time"


def test_a_file_next_to_it_never_takes_a_packages_place(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("ONE = 1\n")
    (tmp_path / "colorsys.py").write_text("")
    assert resolve("loss", f"{mine}:ONE") == 1
    found = PathFinder.find_spec("colorsys")
    assert found is not None
    assert found.origin != str(tmp_path / "colorsys.py")


def test_a_file_that_failed_is_read_again(tmp_path: Path) -> None:
    mine, ready = tmp_path / "mine.py", tmp_path / "ready"
    mine.write_text(f"from pathlib import Path\nassert Path({str(ready)!r}).exists()\nLATE = 1\n")
    with pytest.raises(ValueError, match="AssertionError"):
        resolve("loss", f"{mine}:LATE")
    ready.touch()
    assert resolve("loss", f"{mine}:LATE") == 1


def test_a_module_is_named_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("reward", "math:floor")(1.5) == 1
    for installed in ("math:floor", "json.decoder:JSONDecoder", "numpy:mean", "no such:module", "nowhere.at.all:f"):
        assert file_fingerprint(installed) is None
    (tmp_path / "my_rewards_module.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = file_fingerprint("my_rewards_module:one")
    assert before is not None
    (tmp_path / "my_rewards_module.py").write_text("one = 2\n")
    assert file_fingerprint("my_rewards_module:one") not in (None, before)


def test_an_entry_point_of_an_installed_package_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "brought-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[magicrl.loss]\nceiling = math:ceil\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "ceiling" in names("loss")
    assert resolve("loss", "ceiling")(1.5) == 2


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SMOLLM", "SmolLM2-135M"),  # the beginning of a name, in another case
        ("a100", "A100-80G"),
        ("row", "rows"),  # in the same case before ROW
        ("H1O0-80G", "H100-80G"),
        ("llama", None),
    ],
)
def test_a_name_that_was_meant_is_proposed(name: str, meant: str | None) -> None:
    known = ("Qwen2.5-7B", "SmolLM2-135M", "H100-80G", "A100-80G", "ROW", "rows")
    assert did_you_mean(name, known) == (f"; did you mean {meant!r}?" if meant else ".")


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (
            "tensorbord",
            "unknown tracker 'tensorbord'; did you mean 'tensorboard'? Known: mlflow, tensorboard, trackio, wandb",
        ),
        (
            "quite_other",
            "unknown tracker 'quite_other'. Known: mlflow, tensorboard, trackio, wandb; or your own as file.py:name",
        ),
        ("nowhere.py:Tracker", "there is no file nowhere.py"),
        ("no_such_package.module:Tracker", "there is no module 'no_such_package.module'"),
        ("math:two words", "'two words' is no name"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_runs(reference: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".*") as error:
        check("tracker", reference)
    assert told in str(error.value)


def test_what_fails_to_import_names_the_file_and_its_error(tmp_path: Path) -> None:
    mine = tmp_path / "broken.py"
    mine.write_text("\nimport no_such_thing_at_all\n")
    with pytest.raises(
        ValueError, match=r"broken\.py cannot be imported: ModuleNotFoundError.* \(broken\.py, line 2\)"
    ):
        resolve("loss", f"{mine}:ROW")
    mine.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"broken\.py cannot be imported: SystemExit: 0 \(broken\.py, line 2\)"):
        resolve("loss", f"{mine}:ROW")
    mine.write_text("ROWS = 1\n")
    with pytest.raises(ValueError, match=r"has no 'ROW'; did you mean 'ROWS'\?"):
        resolve("loss", f"{mine}:ROW")
