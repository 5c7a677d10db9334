"""OpenAI-compatible servers: settings, time limits and retries, what a model replied, and answers kept on disk."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, BinaryIO, Literal, cast

import httpx2

from magicrl_verifiers.secrets import without_secrets


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """An OpenAI-compatible server and how to use it. Holds no secret but what the URL holds.

    Attributes:
        base_url: as ``http://localhost:8000/v1``; a URL without a path gets ``/v1``. ``https://user:password@host``
            is basic authentication instead of a key.
        mode: ``completions`` sends the prompt as magicrl made it; ``chat`` sends the problem's text as a user message,
            to which the server applies its own template.
        dialect: ``vllm`` sends and gets token ids and switches the model's recommended top-k, min-p and penalties off,
            ``openai`` keeps to what every such server takes; ``auto`` asks the server's model list.
        key_variable: environment variable with the key; it may be unset when it is the default one.
        max_tokens_field: name of the limit's field; newer models of OpenAI want ``max_completion_tokens``.
        processed_logprobs: the server's log-probs are those at the requested temperature (vLLM started with
            ``--logprobs-mode processed_logprobs``). Otherwise they are kept at temperature 1 and 0 only.
        extra: further fields of every request, as the server's own; a field of value None is not sent.
    """

    base_url: str
    model: str = ""  # the name the server knows the model by; empty: the only one it serves
    mode: Literal["completions", "chat"] = "completions"
    dialect: Literal["auto", "vllm", "openai"] = "auto"
    key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 32  # most requests in flight
    attempts: int = 6  # tries of a request before its error is raised
    attempt_seconds: float = 1800.0  # longest one attempt
    total_seconds: float = 7200.0  # longest all attempts of a request with the waits between them
    max_context: int | None = None  # most prompt + response tokens; None: what the server says, else no limit here
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    logprobs: bool | None = None  # request log-probs; None: only from vLLM, since others refuse or charge
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
        """Return the URL of ``path`` (``/models``) below ``base_url``, its query kept."""
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
        """Return the URL as a message may show it: without credentials and query."""
        url = self.endpoint(path)
        port = f":{url.port}" if url.port is not None else ""
        return f"{url.scheme}://{url.host}{port}{url.path}"


@dataclass(kw_only=True, slots=True)
class ServerUsage:
    """Requests to a server so far."""

    requests: int = 0  # answers that arrived and were used
    retries: int = 0  # attempts beyond the first
    prompt_tokens: int = 0  # as the server counted them, once a request; cached ones included
    completion_tokens: int = 0  # likewise
    unreported: int = 0  # answers without token counts, which are missing above

    def add(self, answer: dict[str, Any]) -> None:
        """Count an answer that is used."""
        counted = usage_of(answer)
        self.requests += 1
        self.unreported += counted is None
        self.prompt_tokens += counted[0] if counted else 0
        self.completion_tokens += counted[1] if counted else 0


_CONNECT_SECONDS = 30.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0  # seconds of the exponential back-off
_AGAIN = frozenset({408, 409, 425, 429})
_NEVER = frozenset({501, 505})
_TOO_LONG = re.compile(
    r"context.?length|context window|maximum context|max_model_len|too many tokens|(prompt|input) is too long", re.I
)
_WRONG_REQUEST = re.compile(r"invalid|not_?found|bad_?request|authentication|permission|context_length|quota", re.I)
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]  # a long answer is silent until it is whole


class ServerError(RuntimeError):
    """A request that failed. The text is complete: URL without credentials, status, remedy."""

    def __init__(
        self, text: str, *, status: int | None = None, retryable: bool = True, wait: float | None = None
    ) -> None:
        super().__init__(text)
        self.status = status  # of HTTP; None where no answer arrived or it could not be read
        self.retryable = retryable  # whether the same request may succeed later
        self.wait = wait  # seconds that the server asked to wait, if it did


class Transport:
    """Sends JSON and reads JSON. Everything but the constructor belongs to one event loop."""

    def __init__(self, settings: ServerSettings, usage: ServerUsage) -> None:
        self._settings = settings
        self._usage = usage
        self._key = os.environ.get(settings.key_variable, "").strip()
        if not self._key and settings.key_variable != "OPENAI_API_KEY":
            raise ValueError(f"the environment variable {settings.key_variable} (key_variable) is not set")
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(f"the value of {settings.key_variable} holds characters that no key has; set it anew")
        self._client: httpx2.AsyncClient | None = None
        # a separate generator: training and evaluation must not depend on these random numbers
        self._jitter = random.Random()
        self.served: list[str] = []  # names of the model list, for the error about an unknown one

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        attempts: int | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Return the answer's JSON object; once ``stopped`` says True, nothing is tried again.

        Raises:
            ServerError: refused for good, or not answered within the attempts and the time.
        """
        settings, attempt = self._settings, 1
        attempts = attempts or settings.attempts
        end = time.monotonic() + settings.total_seconds
        while True:
            limit = min(settings.attempt_seconds, end - time.monotonic())
            try:
                return await self._attempt(method, path, body, limit)
            except ServerError as error:
                # the wait that the server states, else doubling; a little more, at random
                wait = error.wait if error.wait is not None else min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT)
                # requests that failed together do not come back together
                wait *= 1 + 0.5 * self._jitter.random()
                late = time.monotonic() + wait >= end
                if not error.retryable or (stopped is not None and stopped()):
                    raise
                if attempt >= attempts or late:
                    reason = f"the limit of {settings.total_seconds:g} s is reached" if late else "gave up"
                    raise ServerError(
                        f"{error} ({reason} after {attempt} attempts)", status=error.status, wait=error.wait
                    ) from error
            attempt += 1
            self._usage.retries += 1
            await asyncio.sleep(wait)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def clean(self, text: str) -> str:
        """Return ``text`` without the key and other secrets: servers quote what they refuse."""
        if self._key:
            text = text.replace(self._key, f"***{self._settings.key_variable}***")
        return without_secrets(text)

    def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            url = self._settings.endpoint("")
            headers = {"User-Agent": "magicrl"}
            # a password in the URL takes the place of the key
            if self._key and not url.userinfo:
                headers["Authorization"] = f"Bearer {self._key}"
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._settings.concurrency)
            timeout = httpx2.Timeout(self._settings.attempt_seconds, connect=_CONNECT_SECONDS, pool=None)
            # with a custom transport httpx would not read a proxy, and its exceptions, from the environment
            proxied = any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ)
            direct = None if proxied else httpx2.AsyncHTTPTransport(limits=limits, socket_options=_KEEP_ALIVE)
            self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits, transport=direct)
        return self._client

    async def _attempt(self, method: str, path: str, body: Any, limit: float) -> dict[str, Any]:
        where = f"{method} {self._settings.shown(path)}"
        try:
            # httpx's limits are between bytes; this one is for the whole answer
            async with asyncio.timeout(limit):
                response = await self._connected().request(method, self._settings.endpoint(path), json=body)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise ServerError(
                f"{where}: no answer within {limit:.3g} s ({type(error).__name__}); raise attempt_seconds, or lower "
                "max_tokens or concurrency"
            ) from None
        except httpx2.RequestError as error:
            reason = self.clean(str(error)) or type(error).__name__
            raise ServerError(
                f"{where}: cannot reach the server ({reason}); is it running, and is base_url right?",
                retryable=not isinstance(error, httpx2.UnsupportedProtocol),
            ) from None
        if not response.is_success:
            raise self._refusal(where, response)
        try:
            content: Any = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            start = self.clean(response.text[:80]).strip()
            raise ServerError(
                f"{where}: status {response.status_code}, but no JSON object was answered ({start!r}); "
                "is base_url the address of an OpenAI-compatible server?",
                status=response.status_code,
            )
        answer = cast("dict[str, Any]", content)
        # gateways put the error of the server behind them into an answer of their own
        if (answer.get("error") or answer.get("object") == "error") and not answer.get("choices"):
            raise self._refusal(where, response)
        return answer

    def _refusal(self, where: str, response: httpx2.Response) -> ServerError:
        status = response.status_code
        code, message = _error_of(response)
        said, stated = self.clean(message)[:400], f"status {status}"
        if response.is_success:
            stated += f" with the error {self.clean(code)[:80]}".rstrip() if code else " with an error"
            # without a status of its own: a wrong request if the code says so, else trouble that may pass
            status = int(code) if re.fullmatch("[45][0-9]{2}", code) else 400 if _WRONG_REQUEST.search(code) else 500
        retryable = (status in _AGAIN or status >= 500) and status not in _NEVER and code != "insufficient_quota"
        return ServerError(
            f"{where}: {stated}{': ' + said if said else ''}; {self._remedy(status, code, message, response)}",
            status=status,
            retryable=retryable,
            wait=_asked_wait(response.headers) if retryable else None,
        )

    def _remedy(self, status: int, code: str, message: str, response: httpx2.Response) -> str:
        settings = self._settings
        if response.is_redirect:
            target = httpx2.URL(response.headers.get("location", ""))
            return f"give the address it redirects to ({self.clean(str(target.copy_with(query=None)))}) as base_url"
        if status in (401, 403):
            if self._key:
                return f"the key in {settings.key_variable} is not accepted; set the right one"
            return f"it wants a key: set {settings.key_variable}, or name the variable that holds it (key_variable)"
        if status in (400, 413, 422) and (code == "context_length_exceeded" or _TOO_LONG.search(message)):
            return "prompt and max_tokens exceed the server's context; lower max_tokens, or drop the problem"
        if status == 404 or code == "model_not_found" or (status == 400 and "pinned to" in message):
            names = ", ".join(self.served[:8])
            if "model" in message.lower() or code == "model_not_found" or "pinned to" in message:
                return f"model {settings.model!r} is not served" + (f"; served: {names}" if names else "")
            return "wrong address? base_url mostly ends in /v1, and not every server has both completions and chat"
        if code == "insufficient_quota":
            return "the account has no quota left"
        if status == 429:
            return "the server limits the rate; lower concurrency"
        if status in (400, 405, 413, 422):
            return "a field it does not take is left out with extra = {name: None}; dialect and mode may fit it better"
        return "see the server's log"


def _error_of(response: httpx2.Response) -> tuple[str, str]:
    """Code and message of an error answer; servers write it in four ways."""
    try:
        content: Any = response.json()
    except ValueError:
        return "", " ".join(re.sub(r"<[^>]+>", " ", response.text).split())
    if not isinstance(content, dict):
        return "", str(content)
    fields = cast("dict[str, Any]", content)
    inner = fields.get("error", fields.get("detail", fields.get("message", fields)))
    if isinstance(inner, dict):
        error = cast("dict[str, Any]", inner)
        return str(error.get("code") or error.get("type") or ""), str(error.get("message") or error)
    return str(fields.get("code") or ""), str(inner)


def _asked_wait(headers: httpx2.Headers) -> float | None:
    """Seconds of ``retry-after-ms`` or ``retry-after`` (seconds or a date); None where there is none."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        asked = headers.get("retry-after", "")
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", asked):
            return float(asked)
        if not asked:
            return None
        date = parsedate_to_datetime(asked)
        return max(0.0, ((date if date.tzinfo else date.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def usage_of(answer: dict[str, Any]) -> tuple[int, int] | None:
    """Prompt and completion tokens as the server counted them; None where it did not."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    counts = [cast("dict[str, Any]", usage).get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        return None
    return cast("tuple[int, int]", tuple(counts))


# --- What a model replied; hostile input ------------------------------------------------------------------------------

_MOST_BRACES = 1000  # of a hostile answer each one may begin something that is parsed to its end


class UnreadableAnswer(ValueError):
    """A reply that does not have the requested content."""


def content_of(answer: Any) -> str:
    """Return the text of a chat answer's first choice.

    Raises:
        UnreadableAnswer: there is none.
    """
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise UnreadableAnswer("the answer holds no message with text")
    return content


def after_reasoning(text: str) -> str:
    """Return the text after the last ``</think>``.

    Raises:
        UnreadableAnswer: the reasoning never ended.
    """
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        raise UnreadableAnswer("the answer ends within its reasoning")
    return said


def json_objects(text: str) -> list[dict[str, Any]]:
    """Return every JSON object in a text that is not within another one."""
    decoder, found, end = json.JSONDecoder(strict=False), list[dict[str, Any]](), 0
    for brace in islice(re.finditer("{", text), _MOST_BRACES):
        if brace.start() >= end:
            try:
                value, end = decoder.raw_decode(text, brace.start())
            except (ValueError, RecursionError):
                continue
            found.append(value)
    return found


# --- Answers on disk --------------------------------------------------------------------------------------------------


def key_of(decides: Any) -> bytes:
    """Return 12 bytes that identify what decides an answer, anything that JSON has a form for."""
    text = json.dumps(decides, sort_keys=True).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=12).digest()


class AnswerFile:
    """Rows by key in a file of JSON lines. Memory holds a key and a place a row, not the row.

    Several processes may append to one file; each knows what was there when it began, and what it wrote itself.

    Args:
        file: open for reading and appending.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._places: dict[bytes, int] = {}
        self._file = file
        with self._locked():
            self._file.seek(0)
            place = 0
            for line in self._file:
                if not line.endswith(b"\n"):
                    self._file.truncate(place)  # a kill or a full disk may have cut the last line short
                    break
                # one that cannot be read is of a process that was killed while another one wrote
                with suppress(ValueError, KeyError, TypeError):
                    self._places[bytes.fromhex(json.loads(line)["key"])] = place
                place += len(line)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, key: bytes) -> dict[str, Any]:
        """Return the row of a key that is there."""
        self._file.seek(self._places[key])
        row: dict[str, Any] = json.loads(self._file.readline())
        del row["key"]
        return row

    def put(self, key: bytes, row: Mapping[str, Any]) -> None:
        """Write a row; when this returns, it outlives the process.

        Raises:
            RuntimeError: it could not be written; says where.
        """
        with self._locked():
            place = self._file.seek(0, 2)
            try:
                self._file.write((json.dumps({"key": key.hex(), **row}) + "\n").encode())
                self._file.flush()
            except OSError as error:
                name = self._file.name
                remedy = "free disk space and run the same command again"
                raise RuntimeError(f"{name}: an answer could not be written ({error}); {remedy}") from error
        self._places[key] = place

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _locked(self) -> Generator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
