"""Retries without waiting."""

from __future__ import annotations

import pytest

from magicrl_verifiers import served as openai_http


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_http, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(openai_http, "_LONGEST_WAIT", 0.002)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
