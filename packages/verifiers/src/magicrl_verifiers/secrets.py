"""Text without credentials: for messages, logs and reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
SHORTEST_SECRET = 8
"""Shorter values of such variables ("1", "none") are no secrets and would blank out ordinary words."""


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with the credentials of URLs, and the values of secret environment variables, replaced.

    A variable is secret when its name ends in one of ``SECRET_NAMES``, as ``HF_TOKEN`` and ``WANDB_API_KEY`` do.

    Args:
        text: an error, or anything else that is shown or written.
        environment: default: this process's.

    Example:
        >>> without_secrets("cannot reach https://ann:hunter2@host/x", {})
        'cannot reach https://***@host/x'
        >>> without_secrets("401 for abcd1234", {"HF_TOKEN": "abcd1234"})
        '401 for ***HF_TOKEN***'
    """
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= SHORTEST_SECRET and name.upper().endswith(SECRET_NAMES):
            text = text.replace(value, f"***{name}***")
    # one slash too: pathlib makes https:/user of https://user
    return re.sub(r"(?<=[A-Za-z0-9]:)(//?)[^\s/'\"]+@", r"\1***@", text)
