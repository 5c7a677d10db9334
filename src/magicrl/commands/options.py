"""Commands from Python functions, and option types that commands share.

A function of the Python API is a command, too: `as_command` gives it the options of a terminal. Only light imports, so
that ``--help`` is instant.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar

from cyclopts import Group, Parameter

from magicrl.config.errors import RecipeError
from magicrl_verifiers.cli import Whole

Flag = Annotated[bool, Parameter(negative=())]
_REPEATED = Parameter(negative=(), consume_multiple=False)
Overrides = Annotated[list[str] | None, Parameter(name="--set"), _REPEATED]
Several = Annotated[list[str] | None, _REPEATED]
Parameters = ParamSpec("Parameters")
Record = TypeVar("Record")
Returned = TypeVar("Returned")


_AS_TYPED: Mapping[str, Any] = {
    "Recipe": str,
    "Settings": Annotated[list[str], Parameter(name="--set"), _REPEATED],
    "Data": str,
    "Reward": Annotated[str, Parameter(name=("--reward", "--verifier"))],
    "PathText": str,
    "Counts": str,
    "Sequence[str]": Annotated[list[str], _REPEATED],
    "bool": Flag,
    "int": Whole,
}
"""Types of the Python API that a terminal gives as text."""


def taking(
    record: Callable[Parameters, Record],
) -> Callable[[Callable[[Record], Returned]], Callable[Parameters, Returned]]:
    """Return a decorator for a function of one record, which gives it the record's fields as arguments.

    The docstring of each field becomes its line in the function's ``Args``.
    """

    def decorated(function: Callable[[Record], Returned]) -> Callable[Parameters, Returned]:
        @functools.wraps(function)
        def called(*values: Parameters.args, **named: Parameters.kwargs) -> Returned:
            return function(record(*values, **named))

        # the function takes a record, which is not the signature that its callers see
        del called.__wrapped__
        called.__annotated_in__ = record.__module__  # type: ignore[attr-defined]
        returned = inspect.signature(function).return_annotation
        called.__signature__ = inspect.signature(record).replace(return_annotation=returned)  # type: ignore[attr-defined]
        described = "".join(f"    {name}: {text}\n" for name, text in field_docstrings(record).items())
        about, raises, errors = inspect.cleandoc(function.__doc__ or "").partition("Raises:\n")
        called.__doc__ = f"{about}Args:\n{described}\n{raises}{errors}"
        return called

    return decorated


def field_docstrings(record: Any) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[ast.unparse(before.target)] = " ".join(str(after.value.value).split())
    return found


def as_command(
    function: Callable[..., Any],
    present: Callable[..., int],
    *,
    typed: Mapping[str, Any] | None = None,
    optional: Collection[str] = (),
    keywords: Collection[str] = (),
    groups: Mapping[str, str] | None = None,
) -> Callable[..., int]:
    """Return the command of an API function.

    The command has the function's parameters, except ``progress``, and the keyword-only parameters of ``present``.
    Their documentation is the two docstrings.

    Args:
        function: function of the Python API.
        present: called with the function and its arguments as a `functools.partial`, and with its own keyword
            arguments. It calls the function, prints the result and returns the exit status.
        typed: types of parameters in a terminal, by name, where the table of this module has none.
        optional: parameters that the function requires and ``present`` can do without. They are options with the
            default None.
        keywords: required parameters that are options in a terminal, not arguments.
        groups: titles in ``--help``, each by the name of its first parameter.
    """
    original = inspect.unwrap(function)
    parameters: list[inspect.Parameter] = []
    group: list[Parameter] = []
    names = {one.name for one in inspect.signature(present).parameters.values() if one.kind is one.KEYWORD_ONLY}
    for source in (original, present):
        for one in inspect.signature(source).parameters.values():
            if one.name == "progress" or (source is present and one.name not in names):
                continue
            kind = (typed or {}).get(one.name) or _terminal_type(source, str(one.annotation))
            if one.name in optional:
                one, kind = one.replace(default=None, kind=one.KEYWORD_ONLY), kind | None
            elif one.kind is one.POSITIONAL_OR_KEYWORD:
                required = one.default is one.empty and one.name not in keywords
                first = source is original and not parameters and one.name not in keywords
                one = one.replace(kind=one.POSITIONAL_ONLY if required or first else one.KEYWORD_ONLY)
            # a flag that is off and an empty list are no defaults worth showing
            further = Parameter(show_default=one.default is not None and one.default is not False and one.default != ())
            if groups and one.name in groups:
                group = [Parameter(group=Group(groups[one.name], sort_key=[*groups].index(one.name)))]
            kind = Annotated[kind, further, *group]
            parameters.append(one.replace(annotation=kind))
    parameters.sort(key=lambda one: one.kind)

    def command(*values: Any, **named: Any) -> int:
        given = {name: value for name, value in named.items() if name not in names}
        work = functools.partial(original, *values, **given)
        return present(work, **{name: value for name, value in named.items() if name in names})

    command.__name__ = command.__qualname__ = original.__name__
    command.__doc__ = _documentation(original, present)
    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    return command


def check_read(mode: str, given: Mapping[str, Any], *, reads: Collection[str] = ()) -> None:
    """Raise ``RecipeError`` for an option that is given and that the option ``mode`` does not read.

    Args:
        mode: option that decides what the command does, ``--compare``.
        given: values of the other options by name.
        reads: names of those that ``mode`` reads.
    """
    for name, value in given.items():
        # zero is a value that was given
        if value is not None and value is not False and name not in reads:
            raise RecipeError(f"--{name.replace('_', '-')} has no effect with {mode}; leave one of the two out")


def _terminal_type(function: Callable[..., Any], annotation: str) -> Any:
    """Return the type that a parameter of ``function`` has in a terminal."""
    known = _AS_TYPED.get(annotation.removesuffix(" | None"))
    if known is None:
        # the text of an annotation in our own source; a function that a decorator made has other globals
        return eval(annotation, vars(sys.modules[getattr(function, "__annotated_in__", function.__module__)]))
    return known | None if annotation.endswith("| None") else known


def _documentation(function: Callable[..., Any], present: Callable[..., int]) -> str:
    """Join the description of a function with the arguments of both docstrings."""
    text, more = inspect.getdoc(function) or "", inspect.getdoc(present) or ""
    sections = re.split(r"^(Args|Returns|Raises|Example):+\n", text, flags=re.MULTILINE)
    described = dict(zip(sections[1::2], sections[2::2], strict=True))
    arguments = described.get("Args", "").rstrip() + "\n" + more.partition("Args:\n")[2].rstrip()
    arguments = re.sub(r"^ {4}progress: .*\n?(?: {5}.*\n?)*", "", arguments, flags=re.MULTILINE)
    about = more.partition("Args:\n")[0].partition("\n")[2].strip()
    return f"{sections[0].rstrip()}\n\n{about}\n\nArgs:\n{arguments.strip(chr(10))}\n"
