"""The API with the client that its users have: results, errors, a client that disconnects, a server that is killed."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import tinker
import torch
from tinker import types
from tinker_server import Served
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.commands.serve import serve
from magicrl.models.small_models import make_miniature
from magicrl.serving import sampler as sampler_module
from magicrl.serving import server as module
from magicrl.serving.trainer import ServedTrainer

PROMPT = list(b"Two and two is")
ADAM = types.AdamParams(learning_rate=3e-3)


def training(client: tinker.ServiceClient, rank: int = 4) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model="org/tiny", rank=rank).result()


def text(tokens: list[int]) -> types.Datum:
    weights = [1.0] * (len(tokens) - 1)
    inputs: Any = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        table = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(table[i, token]) for i, token in enumerate(tokens[1:])]


def plain(folder: str | Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def learn(trained: tinker.TrainingClient, steps: int) -> float:
    """Make steps on one text, and return the last loss."""
    for _ in range(steps):
        loss = trained.forward_backward([text(PROMPT)], "cross_entropy")
        step = trained.optim_step(ADAM)
        step.result()
    return loss.result().metrics["loss:sum"]


def post(address: str, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", f"/api/v1/{path}", content, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_training_lowers_the_loss_and_samplers_keep_their_weights(client: Any, model: str, tmp_path: Path) -> None:
    trained = training(client)
    assert (trained.get_info().is_lora, trained.get_info().lora_rank) == (True, 4)
    first = trained.forward([text(PROMPT)], "cross_entropy").result()
    expected = logprobs(plain(model), PROMPT)
    assert first.loss_fn_outputs[0]["logprobs"].data == pytest.approx(expected, abs=2e-4)
    assert first.metrics["loss:sum"] == pytest.approx(-sum(expected), abs=1e-3)
    before = trained.save_weights_and_get_sampling_client().result()
    assert learn(trained, 8) < 0.9 * first.metrics["loss:sum"]
    saved = trained.save_weights_for_sampler("named").result().path
    assert saved == f"tinker://{trained.model_id}/sampler_weights/named"
    after = client.create_sampling_client(model_path=saved).result()
    folder = tmp_path / "checkpoints" / trained.model_id / "sampler_weights" / "named"
    prompt = types.ModelInput.from_ints(PROMPT)
    for sampler, weights in ((before, model), (after, folder), (before, model)):
        reference = plain(weights)
        found = sampler.sample(prompt, 3, types.SamplingParams(max_tokens=6)).result()
        for sequence in found.sequences:
            whole = [*PROMPT, *sequence.tokens]
            assert sequence.logprobs == pytest.approx(logprobs(reference, whole)[len(PROMPT) - 1 :], abs=2e-4)
        assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(logprobs(reference, PROMPT), abs=2e-4)


def test_a_loss_of_the_client_is_trained_through_the_server(client: Any) -> None:
    trained = training(client)

    def custom(data: Any, values: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (values[0] ** 2).sum(), {}

    before = trained.forward_backward_custom([text(PROMPT)], custom).result().metrics["loss:sum"]
    trained.optim_step(ADAM).result()
    assert trained.forward_backward_custom([text(PROMPT)], custom).result().metrics["loss:sum"] < before


def test_seeds_stops_and_lengths_of_samples(client: Any, model: str) -> None:
    sampler = client.create_sampling_client(base_model="org/tiny").result()
    prompt = types.ModelInput.from_ints(PROMPT)

    def sample(**params: Any) -> list[tuple[list[int], str]]:
        found = sampler.sample(prompt, 4, types.SamplingParams(max_tokens=20, **params)).result().sequences
        return [(list(sequence.tokens), sequence.stop_reason) for sequence in found]

    seeded = sample(seed=3)
    assert sample(seed=3) == seeded
    assert sample(seed=4) != seeded
    assert sample() != sample()
    tokens = seeded[0][0]
    assert len({tuple(one) for one, _ in seeded}) == 4
    stop = tokens[7]
    cut = tokens[: tokens.index(stop) + 1]
    assert sample(seed=3, stop=[stop])[0] == (cut, "stop")
    decode = AutoTokenizer.from_pretrained(model).decode
    piece = decode(tokens[3:6])
    shorter = sample(seed=3, stop=[piece])[0][0]
    assert piece in decode(shorter)
    assert piece not in decode(shorter[:-1])
    assert shorter == tokens[: len(shorter)]
    assert {reason for one, reason in seeded if len(one) == 20} == {"length"}


def test_without_a_limit_a_sample_gets_what_the_cache_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count 2 layers x 2 heads x (32 + 32) values x 4 bytes = 1024 bytes per token: 1 MiB holds 1024 tokens of 4096."""
    sizes = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = str(make_miniature(sizes, tmp_path / "long", max_context=4096))
    monkeypatch.setattr(sampler_module, "_CACHE_MB", 1)
    sampler = sampler_module.Sampler(folder, dtype="float32", device=torch.device("cpu"), seed=0)
    sampler.open("s", folder)

    def read(**params: Any) -> sampler_module.Prompt:
        chunk = {"type": "encoded_text", "tokens": PROMPT}
        return sampler.read("s", {"seq_id": 0, "sampling_params": params, "prompt": {"chunks": [chunk]}})

    prompt = read()
    assert prompt.request.sampling.max_tokens == 1024 - len(PROMPT)
    assert isinstance(sampler.sample("s", [prompt])[0], bytes)
    with pytest.raises(ValueError, match=r"need 1025 tokens, and the server's cache of 1 MiB holds 1024 of one sample"):
        read(max_tokens=1025 - len(PROMPT))


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"sampling_params": {"top_p": 0.5, "top_k": 3}}, "this server has no top_k, top_p"),
        ({"sampling_params": {"stop": []}}, "this server has no sampling past the end"),
        ({"topk_prompt_logprobs": 2}, "this server has no topk_prompt_logprobs"),
        ({"record_stability_info": True}, "this server has no record_stability_info"),
        ({"sampling_session_id": "x"}, "sampler x has no weights here"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature must be >= 0, got -1.0"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be >= 1, got 0"),
        ({"sampling_params": {"stop": [""]}}, "stop has an empty text, which would end every sample at once"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "this server has no image or audio chunks"),
        ({"seq_id": None, "num_samples": 1, "prompt": {}}, "the request lacks 'chunks'"),
    ],
)
def test_what_sampling_lacks_is_named(client: Any, address: str, further: dict[str, Any], message: str) -> None:
    sampler = client.create_sampling_client(base_model="org/tiny").result()
    request = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 9,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 2},
        **further,
    }
    status, answer = post(address, "asample", request)
    assert (status, message in answer["detail"]) == (400, True), answer


def test_a_prompt_that_does_not_fit_fails_and_its_neighbours_do_not(client: Any) -> None:
    sampler = client.create_sampling_client(base_model="org/tiny").result()
    params = types.SamplingParams(max_tokens=100)
    prompts = [types.ModelInput.from_ints(PROMPT * times) for times in (1, 3, 1)]
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    assert len(futures[0].result().sequences) == len(futures[2].result().sequences) == 1
    with pytest.raises(tinker.RequestFailedError, match=r"prompt of 42 tokens \+ max_tokens 100 exceeds the context"):
        futures[1].result()


def test_the_weights_of_old_samplers_are_dropped(client: Any) -> None:
    trained = training(client)
    samplers = [trained.save_weights_and_get_sampling_client().result() for _ in range(5)]
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1)
    assert samplers[1].sample(prompt, 1, params).result()
    with pytest.raises(tinker.BadRequestError, match="the server keeps those of the last 4 samplers without a name"):
        samplers[0].sample(prompt, 1, params).result()


def test_the_weights_of_a_named_sampler_are_not_replaced(client: Any) -> None:
    trained = training(client)
    saved = trained.save_weights_for_sampler("named").result().path
    sampler = client.create_sampling_client(model_path=saved).result()
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6, seed=1)
    before = sampler.sample(prompt, 1, params).result().sequences[0].logprobs
    learn(trained, 2)
    with pytest.raises(tinker.RequestFailedError, match="sampler_weights/named exists"):
        trained.save_weights_for_sampler("named").result()
    trained.save_weights_for_sampler("other").result()
    client.create_sampling_client(base_model="org/tiny").result().sample(prompt, 1, params).result()
    assert sampler.sample(prompt, 1, params).result().sequences[0].logprobs == before


def test_errors_reach_the_client_and_training_goes_on(client: Any) -> None:
    with pytest.raises(tinker.NotFoundError, match="this server has org/tiny, not org/large"):
        client.create_lora_training_client(base_model="org/large").result()
    trained = training(client)
    with pytest.raises(tinker.RequestFailedError, match="'ppo' reads") as error:
        trained.forward_backward([text(PROMPT)], "ppo").result()
    assert error.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no step, since a forward_backward before it failed"):
        trained.optim_step(ADAM).result()
    wrong: Any = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2]})
    half = [trained.forward_backward([one], "cross_entropy") for one in (text(PROMPT), wrong)]
    step = trained.optim_step(ADAM)
    half[0].result()
    with pytest.raises(tinker.RequestFailedError, match=r"target_tokens has shape \[1\], and its input has 2 tokens"):
        half[1].result()
    with pytest.raises(tinker.RequestFailedError, match="no step, since a forward_backward before it failed"):
        step.result()
    assert learn(trained, 1) > 0
    trained.save_state("a").result()
    with pytest.raises(tinker.RequestFailedError, match=r"File name too long: '.*/weights/aaa"):
        trained.save_state("a" * 300).result()
    with pytest.raises(tinker.RequestFailedError, match=r"weights/a exists; choose another name, or overwrite it"):
        trained.save_state("a").result()
    for path, message in (("nothing", "is not in"), ("..", "is not tinker://MODEL/weights/NAME")):
        place = f"tinker://{trained.model_id}/weights/{path}"
        with pytest.raises(tinker.APIStatusError, match=message):
            client.create_training_client_from_state(place).result()
    later = training(client)
    with pytest.raises(tinker.NotFoundError, match=f"this server trains {later.model_id}, the last one"):
        trained.optim_step(ADAM).result()


def test_a_request_that_is_sent_twice_runs_once(client: Any, address: str) -> None:
    trained = training(client)
    trained.forward_backward([text(PROMPT)], "cross_entropy").result()
    request = {"model_id": trained.model_id, "seq_id": 50, "adam_params": {"learning_rate": 1e-3}}
    results: list[tuple[int, dict[str, Any]]] = []
    for _ in range(2):
        _, future = post(address, "optim_step", request)
        results.append(post(address, "retrieve_future", future))
    assert results[0] == results[1]
    assert results[0][0] == 200
    assert math.isfinite(results[0][1]["metrics"]["grad_norm"])


def test_a_client_that_disconnects_in_an_update_loses_nothing(
    served: Served, another: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE", 3.0)
    with served.running() as address:
        first = tinker.ServiceClient(base_url=address, api_key="tml-test")
        trained = training(first)
        learn(trained, 2)
        future = trained.forward_backward([text(PROMPT)], "cross_entropy")
        future.result()
        # Half of a request, then all of one whose answer nobody waits for; then no heartbeat any more.
        path = "/api/v1/optim_step"
        body = json.dumps({"model_id": trained.model_id, "seq_id": 90, "adam_params": {"learning_rate": 3e-3}}).encode()
        for content in (body[:20], body):
            connection = http.client.HTTPConnection(urlsplit(address).netloc)
            connection.putrequest("POST", path)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(content)
            connection.close()
        first.holder._session_heartbeat_task.cancel()
        place = f"tinker://{trained.model_id}/weights/unsaved-000003"
        deadline = time.monotonic() + 30
        while not any(place in message for message in served.messages):
            assert time.monotonic() < deadline, served.messages
            time.sleep(0.1)
        sent = "the client disconnected while it sent /api/v1/optim_step; nothing of that request was run"
        assert sent in served.messages
        (message,) = [message for message in served.messages if place in message]
        assert message.startswith(f"session {trained.model_id.split(':')[0]} is gone: {trained.model_id} was not saved")
        with tinker.ServiceClient(base_url=address, api_key="tml-test") as second:
            again = second.create_training_client_from_state_with_optimizer(place).result()
            loss = again.forward([text(PROMPT)], "cross_entropy").result().metrics["loss:sum"]
        first.holder.close()  # or its heartbeats write warnings into the log of later tests
    # A run of the same steps without a disconnect.
    with another().running() as address, tinker.ServiceClient(base_url=address, api_key="tml-test") as third:
        calm = training(third)
        learn(calm, 3)
        assert calm.forward([text(PROMPT)], "cross_entropy").result().metrics["loss:sum"] == loss


def test_a_second_client_waits_for_the_first(client: Any, address: str, served: Served) -> None:
    training(client)
    status, answer = post(address, "create_session", {"tags": []})
    assert status == 409
    assert "this server serves one client at a time" in answer["detail"]
    assert served.messages[-1].startswith("a second client was refused")
    client.close("success").result()
    status, answer = post(address, "create_session", {"tags": []})
    assert status == 200
    old = {"session_id": "0", "model_seq_id": 0, "base_model": "org/tiny"}
    status, answer = post(address, "create_model", old)
    assert (status, answer["detail"]) == (410, f"session 0 has ended; the server serves {served.server._session} now")


def test_a_server_that_stops_saves_what_the_client_did_not(served: Served) -> None:
    with served.running() as address, tinker.ServiceClient(base_url=address, api_key="tml-test") as client:
        learn(training(client), 1)
    assert served.messages[-1].startswith("the server stops: ")
    assert "weights/unsaved-000001" in served.messages[-1]


def test_a_place_that_cannot_be_written_is_refused_and_lost_steps_are_a_failure(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiohttp.web.run_app", Mock())
    for unsaved in (True, False):
        monkeypatch.setattr(module, "TinkerServer", Mock(return_value=Mock(unsaved=unsaved)))
        assert serve(model, checkpoints=tmp_path / "new") == unsaved
    monkeypatch.setattr("os.access", Mock(return_value=False))
    with pytest.raises(ValueError, match=r"--checkpoints .*new cannot be written; choose another folder"):
        serve(model, checkpoints=tmp_path / "new")


def test_a_server_that_stops_with_lost_steps_knows_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedTrainer, "save", Mock(side_effect=OSError("no space left")))
    assert not served.server.unsaved
    with served.running() as address, tinker.ServiceClient(base_url=address, api_key="tml-test") as client:
        learn(training(client), 1)
    assert served.server.unsaved


def test_a_failed_save_is_reported_once_and_tried_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE", 1.0)
    monkeypatch.setattr(module, "RETRY", 0.1)
    left, save = [3], ServedTrainer.save

    def full(trainer: ServedTrainer, file: Path) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("no space left")
        save(trainer, file)

    with served.running() as address:
        client = tinker.ServiceClient(base_url=address, api_key="tml-test")
        learn(training(client), 1)
        monkeypatch.setattr(ServedTrainer, "save", full)
        client.holder._session_heartbeat_task.cancel()
        deadline = time.monotonic() + 30
        while not any("weights/unsaved-000001" in message for message in served.messages):
            assert time.monotonic() < deadline, served.messages
            time.sleep(0.1)
        client.holder.close()
    (failed,) = [message for message in served.messages if "could not be saved" in message]
    assert "OSError: no space left" in failed


def test_what_a_model_lacks_is_named(client: Any, address: str, served: Served) -> None:
    client.create_lora_training_client(base_model="org/tiny", rank=4, seed=3).result()
    assert any("the seed of lora_config has no effect" in message for message in served.messages)
    request = {"model_id": training(client).model_id, "seq_id": 90, "sampling_session_seq_id": 1, "kind": "inflight"}
    status, answer = post(address, "save_weights_for_sampler", request)
    assert (status, answer["detail"]) == (
        400, "this server has no samplers of kind 'inflight', whose weights change; save a snapshot",
    )  # fmt: skip


def test_foreign_hosts_and_unknown_requests_are_refused(address: str) -> None:
    assert post(address, "telemetry", {}, Host="evil.example:80")[0] == 403
    assert post(address, "weights_info", {}) == (404, {"detail": "this server has no POST /api/v1/weights_info"})
    assert post(address, "forward_backward", b"\xff\xff")[0] == 400
    assert post(address, "optim_step", b"[]")[0] == 400
    status, answer = post(address, "retrieve_future", {"request_id": "x"})
    assert (status, answer["detail"]) == (410, "request x is not known here, or too old")


def test_all_weights_are_trained_where_the_server_says_so(another: Callable[..., Served], model: str) -> None:
    with (
        another(full_weights=True).running() as address,
        tinker.ServiceClient(base_url=address, api_key="tml-test") as client,
    ):
        trained = training(client)
        assert trained.get_info().is_lora is False
        sampler = trained.save_weights_and_get_sampling_client().result()
        learn(trained, 1)
        # The sampler keeps the weights that it was made with.
        found = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=6)).result()
        whole = [*PROMPT, *found.sequences[0].tokens]
        expected = logprobs(plain(model), whole)[len(PROMPT) - 1 :]
        assert found.sequences[0].logprobs == pytest.approx(expected, abs=2e-4)
        path = trained.save_state("a").result().path
        assert client.create_training_client_from_state(path).result().get_info().is_lora is False


def test_a_killed_server_continues_bit_for_bit(model: str, tmp_path: Path, another: Callable[..., Served]) -> None:
    port = 8600 + os.getpid() % 300
    command = [sys.executable, "-m", "magicrl", "serve", model, "--name", "org/tiny", "--port", str(port)]
    command += ["--checkpoints", str(tmp_path / "checkpoints")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                post(address, "client/config", {})
                break
            except OSError:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                assert process.poll() is None
                time.sleep(0.1)
        assert f"TINKER_BASE_URL={address}" in " ".join((tmp_path / "log").read_text().split())
        client = tinker.ServiceClient(base_url=address, api_key="tml-test")
        trained = training(client)
        learn(trained, 2)
        path = trained.save_state("a").result().path
        trained.forward_backward([text(PROMPT)], "cross_entropy").result()
        os.kill(process.pid, signal.SIGKILL)
        client.holder.close()  # or its heartbeats write warnings into the log of later tests
    finally:
        process.kill()
        process.wait()

    def losses(trained: tinker.TrainingClient, steps: int) -> list[float]:
        return [learn(trained, 1) for _ in range(steps)]

    with another().running() as address, tinker.ServiceClient(base_url=address, api_key="tml-test") as client:
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        found = losses(resumed, 3)
        whole = training(client)
        assert losses(whole, 5)[2:] == found


def test_the_event_loop_is_free_while_the_model_works(client: Any, address: str) -> None:
    trained = training(client)
    futures = [trained.forward_backward([text(PROMPT * 8)] * 40, "cross_entropy") for _ in range(3)]

    async def beat() -> tuple[int, dict[str, Any]]:
        session = {"session_id": trained.model_id.split(":")[0]}
        return await asyncio.to_thread(post, address, "session_heartbeat", session)

    assert asyncio.run(beat())[0] == 200
    assert all(math.isfinite(future.result().metrics["loss:sum"]) for future in futures)
