"""Comparison of the files that decide results, which each node of a cluster reads by their path."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable
from typing import TypeAlias

from magicrl.models.model_files import files_fingerprint, find_model, weights_fingerprint
from magicrl_verifiers.references import file_fingerprint

Digests: TypeAlias = tuple[tuple[str, str], ...]
"""Name of a custom part (``file.py:name``) or of a model, and the digest of its files in the process of the run."""


def digests_of(references: Iterable[str], models: Iterable[str] = ()) -> Digests:
    """Return the digests of the files that these references name and of these models (folders or hub names)."""
    files = [(name, file_fingerprint(name)) for name in references]
    return (*((name, found) for name, found in files if found), *((name, _of_model(name)) for name in models))


def check_digests(digests: Digests) -> None:
    """Raise ``ValueError`` if files on this node differ from those of the process of the run."""
    for name, expected in digests:
        try:
            found = file_fingerprint(name) or _of_model(name)
        except (OSError, ValueError) as error:
            found, why = None, f"cannot be read ({error})"
        else:
            why = f"is another one (SHA-256 {found[:8]}) than that of the run ({expected[:8]})"
        if found != expected:
            raise ValueError(
                f"{name} on node {socket.gethostname()} {why}; copy the run's files to every node, to the same path, "
                "or keep them on a file system that all nodes see"
            )


def _of_model(name: str) -> str:
    folder = find_model(name)
    return hashlib.sha256((weights_fingerprint(folder) + files_fingerprint(folder)).encode()).hexdigest()
