"""How an OpenAI-compatible server is reached and asked, and what asking it has cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

from magicrl.config.errors import without_secrets

Mode = Literal["completions", "chat"]
Dialect = Literal["auto", "vllm", "openai"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """An OpenAI-compatible server and how to use it. Holds no secret but what the URL holds.

    Attributes:
        base_url: as ``http://localhost:8000/v1``; a URL without a path gets ``/v1``. ``https://user:password@host``
            is basic authentication instead of a key.
        model: the name the server knows the model by; empty: the only one it serves.
        mode: ``completions`` sends the prompt as magicrl made it; ``chat`` sends the problem's text as a user message,
            to which the server applies its own template.
        dialect: ``vllm`` sends and gets token ids and switches the model's recommended top-k, min-p and penalties off,
            ``openai`` keeps to what every such server takes; ``auto`` asks the server's model list.
        key_variable: environment variable with the key; it may be unset when it is the default one.
        concurrency: most requests in flight.
        attempts: tries of a request before its error is raised.
        attempt_seconds: longest one attempt.
        total_seconds: longest all attempts of a request with the waits between them.
        max_context: most prompt + response tokens; None: what the server says, else no limit here.
        max_tokens_field: name of the limit's field; newer models of OpenAI want ``max_completion_tokens``.
        logprobs: ask for log-probs; None: of vLLM only, since others refuse or charge.
        processed_logprobs: the server's log-probs are those at the temperature asked for (vLLM started with
            ``--logprobs-mode processed_logprobs``). Otherwise they are kept at temperature 1 and 0 only.
        extra: further fields of every request, as the server's own; a field of value None is not sent.
    """

    base_url: str
    model: str = ""
    mode: Mode = "completions"
    dialect: Dialect = "auto"
    key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 32
    attempts: int = 6
    attempt_seconds: float = 1800.0
    total_seconds: float = 7200.0
    max_context: int | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    logprobs: bool | None = None
    processed_logprobs: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.endpoint("")
        for name in ("concurrency", "attempts", "attempt_seconds", "total_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")

    def endpoint(self, path: str) -> httpx2.URL:
        """The URL of ``path`` (``/models``) below ``base_url``, its query kept.

        Raises:
            ValueError: ``base_url`` is no http(s) URL.
        """
        shown = without_secrets(self.base_url)
        try:
            url = httpx2.URL(self.base_url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"base_url {shown!r} is no URL ({error}); give one as http://localhost:8000/v1") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url {shown!r} is no http(s) URL; give one as http://localhost:8000/v1")
        base = url.path.rstrip("/")
        if base.endswith(("/completions", "/models")):
            raise ValueError(f"base_url {shown} names one endpoint; give what comes before it, mostly ending in /v1")
        return url.copy_with(path=(base or "/v1") + path)

    def shown(self, path: str) -> str:
        """The URL as a message may show it: without credentials and query."""
        url = self.endpoint(path)
        port = f":{url.port}" if url.port is not None else ""
        return f"{url.scheme}://{url.host}{port}{url.path}"


@dataclass(kw_only=True, slots=True)
class ServerUsage:
    """What a server was asked for so far.

    Attributes:
        requests: answers that arrived and were used.
        retries: attempts beyond the first.
        prompt_tokens: as the server counted them, once a request; cached ones included.
        completion_tokens: likewise.
        unreported: answers without token counts, which are missing above.
    """

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unreported: int = 0
