"""Objects named by text: a built-in name, an entry point, ``module:attribute`` or ``file.py:attribute``.

A reference, never what it resolves to, is what goes to another process: each process resolves it for itself. The one
exception is `live`: an object that was given in Python, which only this process has.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

Builtins = Mapping[str, str]
"""Built-in names of a kind, each with its reference ``module:attribute``."""
_NONE: Builtins = MappingProxyType({})

LIVE = "live:"
"""How a reference begins that means an object of this process."""


_live: dict[str, tuple[Any, str | None]] = {}
"""Objects that were given in Python, and a text that distinguishes each from others, or None."""
_resolved: dict[str, str] = {}


def live(thing: Any, name: str | None = None, text: str | None = None) -> str:
    """Return a reference to ``thing``, ``live:NAME@DIGEST``, which only this process can resolve.

    The digest is of ``text``; default: the source text of a function or class, and the numbers and texts that a
    function reads from around it. ``live:NAME@unknown`` where no text can be had.

    Example:
        >>> live(len)
        'live:len@unknown'
    """
    around = "" if text is not None else _values_around(thing)
    text = source_text(thing) if text is None else text
    found = name or getattr(thing, "__name__", type(thing).__name__)
    word = re.sub(r"\W+", "_", found).strip("_") or "given"
    mark = "unknown" if text is None else hashlib.sha256((text + around).encode()).hexdigest()[:8]
    reference = f"{LIVE}{word}@{mark}"
    _live[reference] = (thing, text)
    return reference


def live_text(reference: str) -> str | None:
    """Return the text that distinguishes this live object from others; None if there is none."""
    return _live[reference][1] if reference in _live else None


def source_text(thing: Any) -> str | None:
    """Return the source of a function, a class or an object's class; None if it cannot be read."""
    thing = inspect.unwrap(getattr(thing, "func", thing))  # of functools.partial
    try:
        described = inspect.isroutine(thing) or inspect.isclass(thing)
        return textwrap.dedent(inspect.getsource(thing if described else type(thing))).strip()
    except (OSError, TypeError):  # typed at a prompt, or written in C
        return None


def _values_around(thing: Any) -> str:
    """Return numbers and texts that a function finds in its closure, globals, defaults or `functools.partial`; "" if
    there are none. Lists, dicts and objects are left out, because they may change while it runs.
    """
    found: list[tuple[str, Any]] = []
    if isinstance(thing, functools.partial):
        found += [*((str(place), value) for place, value in enumerate(thing.args)), *thing.keywords.items()]
    function = inspect.unwrap(getattr(thing, "func", thing))
    if inspect.isfunction(function):
        found += [("default", value) for value in function.__defaults__ or ()]
        found += (function.__kwdefaults__ or {}).items()
        with contextlib.suppress(ValueError):  # a closure that is not filled yet
            around = inspect.getclosurevars(function)
            found += sorted({**around.globals, **around.nonlocals}.items())
    found = [(name, value) for name, value in found if isinstance(value, int | float | str)]
    return repr(found) if found else ""


def known_names(kind: str, builtins: Builtins = _NONE) -> tuple[str, ...]:
    """Return the built-in names of this kind and those of installed packages, in alphabetical order."""
    return tuple(sorted({*builtins, *entry_points(group=f"magicrl.{kind}").names}))


def check_reference(kind: str, reference: str, builtins: Builtins = _NONE) -> str:
    """Return ``reference`` if it names something that exists, without running custom code.

    Raises:
        ValueError: an unknown name (says the nearest known one), a file or a module that is not there.
    """
    _checked(kind, reference, builtins)
    return reference


def _checked(kind: str, reference: str, builtins: Builtins) -> tuple[str, str]:
    """Run `check_reference`; return the module or file and the attribute that it found."""
    if reference.startswith(LIVE):
        if reference not in _live:
            raise ValueError(
                f"{kind} {reference!r} was given in Python to another process, and this one does not have it; give the "
                f"same object again (its text, where it has one, is in run.json), or put it into a file and name "
                "it as file.py:name"
            )
        return LIVE, reference
    where, attribute = _split(kind, reference, builtins)
    # looked for, not imported: a recipe is checked without running what it names
    if where.endswith(".py"):
        if not Path(where).expanduser().is_file():
            several = (
                "; several are joined with ' + ', as 'a.py:f + b.py:g'" if kind == "reward" and "," in where else ""
            )
            raise ValueError(f"{kind} {reference!r}: there is no file {where}{several}")
    elif not _is_there(where):
        raise ValueError(f"{kind} {reference!r}: there is no module {where!r}; is its package installed?")
    if not attribute.isidentifier():
        raise ValueError(f"{kind} {reference!r}: {attribute!r} is no name of a function, a class or a value")
    return where, attribute


def resolve_reference(kind: str, reference: str, builtins: Builtins = _NONE) -> Any:
    """Import the module of ``reference`` and return the object that it names.

    Raises:
        ValueError: As `check_reference`; the module fails to import (its error is the cause), or has no such attribute.
    """
    where, attribute = _checked(kind, reference, builtins)
    if where == LIVE:
        return _live[reference][0]
    try:
        module = _module_of_file(Path(where).expanduser()) if where.endswith(".py") else importlib.import_module(where)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        what = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ValueError(f"{kind} {reference!r}: {where} cannot be imported: {what}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"{kind} {reference!r}: {where} has no {attribute!r}{did_you_mean(attribute, vars(module))}")
    if where.endswith(".py"):
        _resolved[str(Path(where).expanduser().resolve())] = f"{kind} {reference}"
    return getattr(module, attribute)


def place_of(error: BaseException, *packages: Path) -> str:
    """Return `` (own.py, line 3)``, the first line of a user's file in the traceback of ``error``; "" without one.

    The standard library, this package and ``packages`` are not the user's.
    """
    own = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, *packages))
    for frame in traceback.extract_tb(error.__traceback__):
        if not _is_pythons(frame.filename) and not frame.filename.startswith(own):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def part_of(file: str) -> str:
    """Return ``"loss my_loss.py:ROW: "`` for a file that a reference of this process named; else an empty text."""
    part = _resolved.get(str(Path(file).resolve()))
    return "" if part is None else f"{part}: "


def file_fingerprint(reference: str) -> str | None:
    """Return the SHA-256 of the file that ``file.py:attribute`` or ``module:attribute`` names and of the files of its
    folder that it imports, in 64 hex digits; None for installed modules and other references.
    """
    where = reference.rpartition(":")[0]
    path = Path(where).expanduser() if where.endswith(".py") else _own_file(where)
    if path is None:
        return None
    digest = hashlib.sha256(path.read_bytes())
    for imported in _imported_files(path):
        digest.update(imported.read_bytes())
    return digest.hexdigest()


def _imported_files(path: Path) -> list[Path]:
    """Return the files in the folder of ``path`` that it imports, directly or through each other, by their paths."""
    found: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # reported when it is imported
            continue
        for node in ast.walk(tree):
            folder, names = path.parent, list[str]()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                folder = file.parents[node.level - 1] if node.level else folder
                names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            for parts in (name.split(".") for name in names):
                places = [folder.joinpath(*parts[: count + 1]) for count in range(len(parts))]
                files = {each for place in places for each in (place.with_suffix(".py"), place / "__init__.py")}
                new = {each for each in files - found - {path} if each.is_file()}
                found |= new
                left += new
    return sorted(found)


def _split(kind: str, reference: str, builtins: Builtins) -> tuple[str, str]:
    """Split any reference into module or file, and attribute."""
    if reference in builtins:
        reference = builtins[reference]
    elif ":" not in reference:
        found = entry_points(group=f"magicrl.{kind}", name=reference)
        if not found:
            known = known_names(kind, builtins)
            raise ValueError(
                f"unknown {kind} {reference!r}{did_you_mean(reference, known)} Known: {', '.join(known)}; "
                "or your own as file.py:name or module:name"
            )
        reference = next(iter(found)).value
    where, _, attribute = reference.rpartition(":")
    return where, attribute


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about a wrong name: ``; did you mean 'exact'?``, or a full stop if none is near."""
    folded, word = {one.casefold(): one for one in known}, name.casefold()
    holding = [one for one in folded if len(word) > 2 and word in one]
    holding.sort(key=lambda one: (name not in folded[one], len(one)))  # in the same case first
    near = holding or difflib.get_close_matches(word, folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[near[0]]!r}?" if near else "."


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing, or the name is no name
        return False


def _module_of_file(path: Path) -> ModuleType:
    """Return the file as a module; the same object as long as its text and those of its neighbours are the same.

    Raises:
        ValueError: an import of a neighbour would give another user's file of that name.
    """
    path = path.resolve()
    known, texts = _modules.get(path, (None, {}))
    if known is not None and texts == _texts(texts):
        return known
    texts = _texts([path, *_imported_files(path)])
    # with a digest: two recipes may each name a file of this name, and a changed file is another module
    digest = hashlib.sha256(b"\0".join([bytes(path), *texts.values()])).hexdigest()[:8]
    name = f"magicrl_file_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported, and never in place of an installed package
    _prepare_neighbours(path.parent, {file: text for file, text in texts.items() if file != path})
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        # The loader would take bytecode of an earlier text: it compares only times, in seconds, and lengths.
        exec(compile(texts[path], path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        # half a module must not be found there the next time
        del sys.modules[name]
        raise
    _modules[path] = module, texts
    return module


_modules: dict[Path, tuple[ModuleType, dict[Path, bytes]]] = {}
"""Module of each file, with the texts that it was made from: its own and those of the neighbours that it imports."""
_neighbours: dict[str, bytes] = {}
"""Text of each neighbour by module name, except those that were imported before a file of a recipe needed them."""


def _texts(files: Iterable[Path]) -> dict[Path, bytes]:
    return {file: file.read_bytes() if file.is_file() else b"" for file in files}


def _prepare_neighbours(folder: Path, texts: Mapping[Path, bytes]) -> None:
    """Make the imports of neighbours give these files with these texts. Raise ``ValueError`` where they cannot."""
    importlib.invalidate_caches()  # a file may be newer than what Python knows of its folder
    names = {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
        for file in texts
        if file.is_relative_to(folder)
    }
    if any(name in _neighbours and _neighbours[name] != texts[file] for name, file in names.items()):
        # All of them, because one that did not change may hold values of one that did.
        for name in _neighbours.keys() & names.keys():
            sys.modules.pop(name, None)
    for name, file in names.items():
        if name in _neighbours or name not in sys.modules:
            _neighbours[name] = texts[file]
        origin = None if "." in name else _file_of(name)
        # The folder is last in the path, so that an installed package of that name is imported, as it is meant.
        installed = origin is None or "-packages" in str(origin) or _is_pythons(str(origin))
        if origin is not None and not installed and not any(origin.samefile(one) for one in texts):
            raise ValueError(
                f"its import of {name!r} would give {origin}, which another custom part or the program imports, "
                f"and not {file}; rename one of the two, or restart Python if the first is of an earlier run"
            )


def _file_of(name: str) -> Path | None:
    """Return the file that an import of this module gives; None for a module without a file."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    found = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec and spec.has_location else None)
    return Path(found) if found and Path(found).exists() else None


def _own_file(module: str) -> Path | None:
    """Return the file of a user's module; None if it is installed, of the standard library, or no module."""
    named = all(part.isidentifier() for part in module.split("."))
    file = _file_of(module) if named and _is_there(module) else None
    return None if file is None or "-packages" in str(file) or _is_pythons(str(file)) else file


def _is_pythons(filename: str) -> bool:
    """Return whether a file is of the standard library."""
    library = f"{sysconfig.get_path('stdlib')}{os.sep}"
    # Without a virtual environment, installed packages are in a folder of the standard library.
    return filename.startswith((library, "<frozen")) and "-packages" not in filename
