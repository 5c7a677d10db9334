"""A checksum of a set of problems, for provenance: what exactly did this run train or test on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from magicrl.records import Problem


def fingerprint(problems: Iterable[Problem]) -> str:
    """SHA-256 (hex) over id, prompt, golds, verifier, source, level and context of every problem, in order.

    ``extra`` is left out: it never reaches the model or the verifier.
    """
    digest = hashlib.sha256()
    for p in problems:
        fields: list[Any] = [p.id, p.prompt, list(p.golds), p.verifier, p.source, p.level]
        if p.context:
            fields.append([[message.role, message.content] for message in p.context])
        line = json.dumps(fields, ensure_ascii=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
