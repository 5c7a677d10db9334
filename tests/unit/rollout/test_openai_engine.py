"""The client of OpenAI-compatible servers with a real, scripted HTTP server, including faults."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import builders
import json_server
import pytest
from builders import problem
from json_server import Asked
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from magicrl.evaluation.job import SamplingPlan, run_job
from magicrl.evaluation.samples import SampleRow
from magicrl.records import Message, Problem, RolloutGroup, RolloutRequest, SamplingParams, TokenArray, frozen_tokens
from magicrl.rollout.openai_engine import UNKNOWN_TOKEN, OpenAIEngine
from magicrl.rollout.requests import sample_seed
from magicrl_verifiers.served import ServerError, ServerSettings
from magicrl_verifiers.service import VerifierPool


@dataclass(kw_only=True)
class Reply(json_server.Reply):
    """A reply. ``hold`` is waited for before it is sent."""

    hold: threading.Event | None = None


class ScriptedServer:
    """A server. ``answer`` maps a request to its reply, and every request is kept in ``asked``."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.url = ""
        self.answer = answer
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def handle(self, asked: Asked) -> Reply:
        with self._lock:
            self.asked.append(asked)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            reply = self.answer(asked)
            if reply.hold is not None:
                reply.hold.wait(600)
            return reply
        finally:
            with self._lock:
                self._now -= 1

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.body is not None]


def models(*names: str, **fields: Any) -> Reply:
    return Reply(body={"object": "list", "data": [{"id": name, "object": "model", **fields} for name in names]})


def completion(
    text: str = "4", *, reason: str = "stop", tokens: int = 2, hold: threading.Event | None = None, **fields: Any
) -> Reply:
    return Reply(
        hold=hold,
        body={
            "choices": [{"index": 0, "text": text, "finish_reason": reason, **fields}],
            "usage": {"prompt_tokens": 3, "completion_tokens": tokens},
        },
    )


@contextmanager
def scripted(answer: Callable[[Asked], Reply]) -> Generator[ScriptedServer]:
    """Start a server on a free port. ``answer`` replies to posts, and the model list holds ``tiny`` by default."""

    server = ScriptedServer(answer)
    with json_server.json_server(server.handle) as server.url:
        yield server


PROBLEM_TEXT = "What is 2 + 2?"


def request(draw: int = 0, *, prompt: Sequence[int] = (), group_size: int = 3, **changes: Any) -> RolloutRequest:
    given = {"temperature": 0.7, "seed": 5, "asked": problem(f"p{draw}", PROBLEM_TEXT, "4")} | changes
    return builders.request(draw, prompt, size=group_size, **given)


@contextmanager
def engine_on(server: ScriptedServer, *, tokenizer: Any = None, **settings: Any) -> Generator[OpenAIEngine]:
    engine = OpenAIEngine(ServerSettings(**{"base_url": server.url, "model": "tiny"} | settings), tokenizer=tokenizer)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magicrl_verifiers.served._FIRST_WAIT", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def listing(answer: Callable[[Asked], Reply], **fields: Any) -> Callable[[Asked], Reply]:
    """Return an answer to the model list; other requests go to ``answer``."""
    return lambda asked: models("tiny", **fields) if asked.body is None else answer(asked)


def test_every_sample_is_asked_for_once_with_its_own_repeatable_seed() -> None:
    with (
        scripted(listing(lambda asked: completion(text=str(asked.body["seed"])))) as server,
        engine_on(server) as engine,
    ):
        engine.submit([request(0), request(1, samples=(1,))])
        first = {(s.request.draw, s.index): s.completion.text for s in engine.finished_samples()}
        engine.submit([request(1), request(0, samples=(0, 2))])
        again = {(g.request.draw, i): c.text for g in engine.finished() for i, c in indexed(g)}
        assert engine.usage.requests == 9
        assert (engine.usage.prompt_tokens, engine.usage.completion_tokens) == (27, 18)
    assert set(first) == {(0, 0), (0, 1), (0, 2), (1, 1)}
    assert set(again) == {(1, 0), (1, 1), (1, 2), (0, 0), (0, 2)}
    assert len(set(first.values())) == 4
    assert all(again[key] == first[key] for key in again.keys() & first.keys())
    sent = server.posts[0].body
    assert server.posts[0].path == "/v1/completions"
    assert (sent["prompt"], sent["temperature"], sent["top_p"], sent["max_tokens"]) == (PROBLEM_TEXT, 0.7, 1.0, 8)
    assert not {"top_k", "return_token_ids", "logprobs"} & sent.keys()  # other servers reject unknown fields


def test_top_k_is_refused_by_a_server_that_may_ignore_it() -> None:
    asked = request(0, group_size=1)
    asked = replace(asked, sampling=replace(asked.sampling, top_k=20))
    with (
        scripted(listing(lambda asked: completion())) as server,
        engine_on(server) as engine,
        pytest.raises(ValueError, match=r"top_k = 20: only vLLM's server surely applies it.*extra"),
    ):
        engine.submit([asked])
    assert not server.posts


def indexed(group: RolloutGroup) -> list[tuple[int, Any]]:
    return list(zip(group.request.indices, group.completions, strict=True))


def test_vllm_gets_token_ids_and_none_of_the_models_recommended_settings() -> None:
    reply = completion(text="w4", token_ids=[4, 0], logprobs={"token_logprobs": [-0.5, -0.25]})
    with scripted(listing(lambda asked: reply, owned_by="vllm", max_model_len=20)) as server:
        with engine_on(server) as engine:
            assert engine.takes_tokens
            assert engine.max_context == 20
            engine.submit([request(prompt=(5, 6), group_size=1, temperature=1.0)])
            (sample,) = engine.finished_samples()
            engine.submit([request(prompt=(5, 6), group_size=1, temperature=0.7)])
            (warm,) = engine.finished_samples()
            likely = request(prompt=(5, 6), group_size=1, temperature=1.0)
            engine.submit([replace(likely, sampling=replace(likely.sampling, top_p=0.9, top_k=20))])
            (truncated,) = engine.finished_samples()
            with pytest.raises(ValueError, match="exceeds the context of 20"):
                engine.submit([request(prompt=range(13))])
        with engine_on(server, processed_logprobs=True, max_context=12) as engine:
            assert engine.max_context == 12, "a limit of the user's own comes before the one that the server states"
            engine.submit([request(prompt=(5, 6), group_size=1, temperature=0.7)])
            (certain,) = engine.finished_samples()
    sent = server.posts[0].body
    assert sent["prompt"] == [5, 6]
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (0, 0.0, 1.0)
    assert (server.posts[2].body["top_p"], server.posts[2].body["top_k"]) == (0.9, 20)
    assert sample.completion.tokens.tolist() == [4, 0]
    assert sample.completion.sampler_logprobs.tolist() == [-0.5, -0.25]
    assert sample.completion.sampler_entropies is None
    assert len(warm.completion.sampler_logprobs) == 0, "raw log-probs are not those at temperature 0.7"
    assert len(truncated.completion.sampler_logprobs) == 0, "nor those of the likely tokens alone"
    assert certain.completion.sampler_logprobs.tolist() == [-0.5, -0.25]


def test_a_conversation_is_sent_turn_by_turn_and_never_as_bare_text() -> None:
    def answer(asked: Asked) -> Reply:
        message = {"role": "assistant", "content": "4"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        return Reply(body={"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    asked = request(0, group_size=1)
    talk = replace(asked.problem, context=(Message("system", "Be brief."),))
    asked = replace(asked, problem=talk, prompt_tokens=frozen_tokens([]))
    with scripted(listing(answer)) as server, engine_on(server, mode="chat") as engine:
        engine.submit([asked])
        list(engine.finished_samples())
    assert server.posts[0].body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": PROBLEM_TEXT},
    ]
    says = r"its prompt is a conversation.*use mode = 'chat'"
    with scripted(listing(answer)) as server, engine_on(server, mode="completions") as engine:  # noqa: SIM117
        with pytest.raises(ValueError, match=says):
            engine.submit([asked])


def test_chat_sends_the_problem_and_puts_cut_out_reasoning_back() -> None:
    def answer(asked: Asked) -> Reply:
        message = {"role": "assistant", "content": "so 4", "reasoning_content": "2 + 2"}
        if asked.body["max_tokens"] == 1:
            message = {"role": "assistant", "content": None, "reasoning": "2 +"}
        reason = "length" if asked.body["max_tokens"] == 1 else "stop"
        usage = {"prompt_tokens": 9, "completion_tokens": 1 if reason == "length" else 6}
        return Reply(body={"choices": [{"message": message, "finish_reason": reason}], "usage": usage})

    with scripted(listing(answer)) as server, engine_on(server, mode="chat") as engine:
        engine.submit([request(0, group_size=1), request(1, group_size=1, limit=1)])
        whole, cut = sorted(engine.finished_samples(), key=lambda s: s.request.draw)
    assert server.posts[0].path == "/v1/chat/completions"
    assert server.posts[0].body["messages"] == [{"role": "user", "content": PROBLEM_TEXT}]
    assert whole.completion.text == "<think>\n2 + 2\n</think>\n\nso 4"
    assert whole.completion.tokens.tolist() == [UNKNOWN_TOKEN] * 6
    assert cut.completion.truncated
    assert cut.completion.text == "<think>\n2 +"


@pytest.mark.parametrize(("tokens", "truncated"), [(7, False), (8, True)])
def test_without_a_stated_reason_a_response_as_long_as_the_limit_is_truncated(tokens: int, truncated: bool) -> None:
    reply = Reply(body={"choices": [{"text": "4"}], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    with scripted(listing(lambda asked: reply)) as server, engine_on(server) as engine:
        engine.submit([request(group_size=1)])
        (sample,) = engine.finished_samples()
    assert sample.completion.truncated == truncated


def test_fields_are_added_left_out_and_renamed() -> None:
    with (
        scripted(listing(lambda asked: completion())) as server,
        engine_on(server, max_tokens_field="max_completion_tokens", extra={"seed": None, "top_k": 5}) as engine,
    ):
        engine.submit([request(group_size=1)])
        list(engine.finished())
    sent = server.posts[0].body
    assert sent["max_completion_tokens"] == 8
    assert sent["top_k"] == 5
    assert not {"seed", "max_tokens"} & sent.keys()


def test_trouble_that_passes_is_tried_again() -> None:
    """Try 429 with and without a wait, 5xx, a truncated answer, errors within a 200, a closed connection, a timeout."""
    never = threading.Event()
    troubles = iter(
        [
            Reply(status=429, body={"error": {"message": "slow down", "code": "rate_limit_exceeded"}}),
            Reply(status=429, body="", headers={"retry-after": "0"}),
            Reply(status=429, body="", headers={"retry-after-ms": "100"}),
            Reply(status=503, body="<html><body>loading</body></html>"),
            Reply(status=200, body='{"choices": [{"te'),
            Reply(body={"error": {"message": "busy", "code": 429}}),
            Reply(body={"error": {"message": "busy", "code": "rate_limit_exceeded"}}),
            Reply(body={"error": "no worker"}),
            Reply(status=200, body="{}", headers={"content-length": "50", "connection": "close"}),
            Reply(body={}, hold=never),
        ]
    )
    state = random.getstate()
    with (
        scripted(listing(lambda asked: next(troubles, completion()))) as server,
        engine_on(server, attempt_seconds=0.5, attempts=11, total_seconds=99) as engine,
    ):
        engine.submit([request(group_size=1)])
        (sample,) = engine.finished_samples()
        assert sample.completion.text == "4"
        assert (engine.usage.requests, engine.usage.retries) == (1, 10)
        never.set()
    assert random.getstate() == state, "a retry changes no random number of the run"
    assert len({asked.body["seed"] for asked in server.posts}) == 1


def test_the_wait_a_server_asks_for_is_kept_to_or_refused() -> None:
    reply = Reply(status=429, body={"error": {"message": "later"}}, headers={"retry-after": "3600"})
    with scripted(listing(lambda asked: reply)) as server, engine_on(server, total_seconds=60) as engine:
        engine.submit([request(group_size=1)])
        with pytest.raises(ServerError, match=r"429: later; .*lower concurrency \(the limit of 60 s"):
            list(engine.finished())
    assert len(server.posts) == 1


def test_the_total_time_holds_for_a_server_that_drips() -> None:
    never = threading.Event()
    with (
        scripted(listing(lambda asked: Reply(body={}, hold=never))) as server,
        engine_on(server, attempt_seconds=0.2, total_seconds=0.5, attempts=99) as engine,
    ):
        engine.submit([request(group_size=1)])
        with pytest.raises(ServerError, match=r"no answer within .* s .*the limit of 0\.5 s is reached"):
            list(engine.finished())
        never.set()
    assert 1 < len(server.posts) < 10


REFUSALS = {
    "wrong key": (
        Reply(status=401, body={"error": {"message": "bad key sk-private-1", "code": "invalid_api_key"}}),
        r"status 401: bad key \*\*\*OPENAI_API_KEY\*\*\*; the key in OPENAI_API_KEY is not accepted",
    ),
    "unknown model": (
        Reply(status=404, body={"error": {"message": "The model `tiny` does not exist", "code": "model_not_found"}}),
        "model 'tiny' is not served; served: small, large",
    ),
    "no such endpoint": (Reply(status=404, body={"detail": "Not Found"}), "status 404: Not Found; wrong address"),
    "too long": (
        Reply(status=400, body={"error": {"message": "This model's maximum context length is 4096 tokens."}}),
        "lower max_tokens, or drop the problem",
    ),
    "unknown field": (
        Reply(status=400, body={"error": {"message": "Unrecognized request argument: seed"}}),
        r"left out with extra = \{name: None\}",
    ),
    "no quota": (
        Reply(status=429, body={"error": {"message": "pay", "code": "insufficient_quota"}}),
        "the account has no quota left",
    ),
    "moved": (
        Reply(status=308, body="", headers={"location": "https://new.example/v1/completions?key=1"}),
        r"it redirects to \(https://new\.example/v1/completions\)",
    ),
    "an error within a 200": (
        Reply(body={"error": {"message": "no such model", "code": 404}}),
        "status 200 with the error 404: no such model; model 'tiny' is not served; served: small, large",
    ),
    "a coded error within a 200": (
        Reply(body={"error": {"message": "bad temperature", "type": "invalid_request_error"}}),
        "status 200 with the error invalid_request_error: bad temperature; a field it does not take",
    ),
    "log-prob without a value": (
        completion(logprobs={"token_logprobs": [-1.0, float("nan")]}),
        "the answer cannot be used: the log-prob of token 2 is nan",
    ),
    "log-prob above 0": (
        completion(logprobs={"token_logprobs": [0.5, -1.0]}),
        "the answer cannot be used: the log-prob of token 1 is 0.5",
    ),
    "token id beyond 32 bits": (
        completion(token_ids=[5, 2**31]),
        "the answer cannot be used: the id of token 2 is 2147483648",
    ),
    "no choice": (Reply(body={"choices": []}), "the answer cannot be used: no choices"),
    "strange end": (completion(reason="boredom"), "finish_reason is 'boredom'"),
    "uncounted": (Reply(body={"choices": [{"text": "4", "finish_reason": "stop"}]}), "name the model's tokenizer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_not_repeated_and_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-private-1")
    reply, text = REFUSALS[name]
    with scripted(lambda asked: models("small", "large") if asked.body is None else reply) as server:
        with engine_on(server) as engine:
            engine.submit([request(group_size=1, temperature=1.0)])
            with pytest.raises(ServerError, match=text) as caught:
                list(engine.finished())
        assert f"problem 'p0', sample 0: POST {server.url}/completions" in str(caught.value)
        assert "sk-private-1" not in str(caught.value)
    assert len(server.posts) == 1
    assert server.posts[0].headers["authorization"] == "Bearer sk-private-1"


def test_a_key_that_a_server_quotes_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "letmein")

    def answer(asked: Any) -> Reply:
        return Reply(status=400, body={"error": {"message": f"no use for {asked.headers['authorization']}"}})

    with scripted(lambda asked: models("small", "large") if asked.body is None else answer(asked)) as server:
        with engine_on(server) as engine:
            engine.submit([request(group_size=1)])
            with pytest.raises(ServerError, match=r"\*\*\*OPENAI_API_KEY\*\*\*") as caught:
                list(engine.finished())
        assert "letmein" not in str(caught.value)


def test_a_wrong_address_or_key_is_found_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda asked: Reply(status=401, body={"detail": "who?"})) as server:
        with pytest.raises(ServerError, match="wants a key: set OPENAI_API_KEY"), engine_on(server):
            pass
        secret = server.url.replace("://", "://ann:hunter22@")
        with pytest.raises(ServerError, match=f"GET {server.url}/models") as caught, engine_on(server, base_url=secret):
            pass
        assert "hunter22" not in str(caught.value)
        assert server.asked[-1].headers["authorization"].startswith("Basic ")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-service")
        with pytest.raises(ServerError, match="status 401"), engine_on(server, base_url=secret):
            pass
        assert server.asked[-1].headers["authorization"].startswith("Basic ")
        monkeypatch.delenv("OPENAI_API_KEY")
        gone = server.url
    with pytest.raises(ServerError, match=r"cannot reach the server .*gave up after 3 attempts"):
        OpenAIEngine(ServerSettings(base_url=gone, model="tiny"))
    with (
        scripted(lambda asked: Reply(body="<html>hello</html>")) as server,
        pytest.raises(ServerError, match="no JSON object was answered"),
        engine_on(server),
    ):
        pass
    with scripted(lambda asked: models("small", "large")) as server:
        with pytest.raises(ValueError, match=r"say which model \(served: small, large\)"), engine_on(server, model=""):
            pass
        monkeypatch.delenv("MY_KEY", raising=False)
        with pytest.raises(ValueError, match="MY_KEY"), engine_on(server, key_variable="MY_KEY"):
            pass
    for url in ("localhost:8000", "ftp://host/v1", "http://host/v1/chat/completions"):
        with pytest.raises(ValueError, match="base_url"):
            ServerSettings(base_url=url)
    assert ServerSettings(base_url="http://host:81").shown("/models") == "http://host:81/v1/models"


def test_as_many_requests_are_under_way_as_allowed_and_no_more() -> None:
    three = threading.Barrier(3)

    def answer(asked: Asked) -> Reply:
        three.wait(timeout=600)
        return completion()

    with scripted(listing(answer)) as server, engine_on(server, concurrency=3) as engine:
        engine.submit([request(draw) for draw in range(5)])
        assert len(list(engine.finished_samples())) == 15
    assert server.most_at_once == 3


def test_after_an_error_what_is_paid_for_arrives_and_the_rest_can_go_on() -> None:
    bad = sample_seed(5, 1, 0, bits=31)
    broken = threading.Event()
    arrived = threading.Semaphore(0)

    def answer(asked: Asked) -> Reply:
        if asked.body["seed"] == bad and not broken.is_set():
            arrived.acquire(timeout=600)  # the other one of the two is under way
            broken.set()
            return Reply(status=400, body={"error": {"message": "no"}})
        arrived.release()
        return completion(text=str(asked.body["seed"]), hold=broken)

    with scripted(listing(answer)) as server, engine_on(server, concurrency=2) as engine:
        engine.submit([request(1), request(2)])
        got: list[tuple[int, int]] = []
        with pytest.raises(ServerError, match="problem 'p1', sample 0"):
            collect(engine, got)
        assert (1, 1) in got
        rest = [(s.request.draw, s.index) for s in engine.finished_samples()]
    assert sorted([*got, *rest]) == [(draw, index) for draw in (1, 2) for index in range(3)]


def collect(engine: OpenAIEngine, got: list[tuple[int, int]]) -> None:
    for sample in engine.finished_samples():
        got.append((sample.request.draw, sample.index))


def test_after_an_interrupt_the_unfinished_are_returned_and_the_engine_goes_on() -> None:
    never = threading.Event()
    first = sample_seed(5, 0, 0, bits=31)
    with scripted(listing(lambda asked: completion(hold=None if asked.body["seed"] == first else never))) as server:
        with engine_on(server) as engine:
            engine.submit([request(0, group_size=1), request(1), request(2)])
            samples = engine.finished_samples()
            assert next(samples).request.draw == 0
            assert [r.draw for r in engine.interrupt()] == [1, 2]
            never.set()
            engine.submit([request(3)])
            assert [g.request.draw for g in engine.finished()] == [3]
        engine.close()


def test_a_servers_weights_are_its_own() -> None:
    with scripted(listing(lambda asked: completion())) as server, engine_on(server) as engine:
        engine.load_weights({}, 0)
        with pytest.raises(ValueError, match="cannot load the weights of version 1"):
            engine.load_weights({}, 1)


def test_a_prompt_that_text_would_change_is_refused(tmp_path: Path) -> None:
    words = {"<end>": 0, "<unk>": 1, "a": 2, "b": 3}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    with scripted(listing(lambda asked: completion())) as server, engine_on(server, tokenizer=tokenizer) as engine:
        engine.submit([request(prompt=(2, 3, 2), group_size=1)])
        list(engine.finished())
        with pytest.raises(ValueError, match="'p0': its prompt would become other tokens"):
            engine.submit([request(prompt=(2, 9), group_size=1)])
        with engine_on(server) as other, pytest.raises(ValueError, match="name the tokenizer"):
            other.submit([request(prompt=(2, 3))])
    assert server.posts[0].body["prompt"] == "a b a"


def test_the_sampling_job_runs_on_a_server_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    problems = [problem(f"q{n}", f"what is {n}?", str(n)) for n in range(4)]
    plan = SamplingPlan(samples=3, sampling=SamplingParams(temperature=1.0, max_tokens=16, seed=3))

    def answer(asked: Asked) -> Reply:
        right = asked.body["prompt"].split()[-1].rstrip("?")
        return completion(text=right if asked.body["seed"] % 2 else "nothing")

    def nothing(problem: Problem) -> TokenArray:
        return frozen_tokens([])

    with scripted(listing(answer)) as server, VerifierPool(workers=1) as judge:
        whole: list[SampleRow] = []
        with engine_on(server) as engine:
            run_job(problems, plan, engine, judge, nothing, write=whole.append)
        kept = [row for row in whole if (row.problem, row.sample) not in {("q1", 2), ("q3", 0)}]
        added: list[SampleRow] = []
        with engine_on(server) as engine:
            run_job(problems, plan, engine, judge, nothing, write=added.append, done=kept)
            assert engine.usage.requests == 2

    def key(row: SampleRow) -> tuple[str, int, str, str]:
        return row.problem, row.sample, row.text, row.outcome

    assert sorted(map(key, [*kept, *added])) == sorted(map(key, whole))
    assert {row.outcome for row in whole} == {"correct", "wrong"}
    assert all(row.tokens == 2 and row.logprob is None and row.entropy is None for row in whole)


def test_what_had_arrived_is_judged_and_written_when_a_server_fails() -> None:
    problems = [problem(f"q{n}", f"what is {n}?", str(n), verifier="maths") for n in range(6)]

    def answer(asked: Asked) -> Reply:
        if asked.body["prompt"] == "what is 5?":
            return Reply(status=400, body={"error": {"message": "no"}})
        return completion(text=r"\boxed{3}")

    rows: list[SampleRow] = []
    plan = SamplingPlan(samples=1, sampling=SamplingParams(temperature=1.0, max_tokens=16, seed=3))
    # the verifier's worker is still starting when the last request is rejected
    with (
        scripted(listing(answer)) as server,
        VerifierPool() as judge,
        engine_on(server, concurrency=1) as engine,
        pytest.raises(ServerError, match="problem 'q5'"),
    ):
        run_job(problems, plan, engine, judge, lambda problem: frozen_tokens([]), write=rows.append)
    assert [row.outcome for row in rows] == ["wrong", "wrong", "wrong", "correct", "wrong"]
