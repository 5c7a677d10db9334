"""Generated task families. Importing this package registers those that ship."""

from magicrl.data.families import running_sum, word_problems
from magicrl.data.families.base import (
    FamilyOptions,
    OptionValue,
    Split,
    TaskFamily,
    make_family,
    read_options,
    register_family,
    unique_problems,
)

__all__ = [
    "FamilyOptions",
    "OptionValue",
    "Split",
    "TaskFamily",
    "make_family",
    "read_options",
    "register_family",
    "running_sum",
    "unique_problems",
    "word_problems",
]
