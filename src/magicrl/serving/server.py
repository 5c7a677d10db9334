"""The Tinker API over HTTP, for one client at a time.

A request that computes returns an id at once, and the client polls for the result (``retrieve_future``). Requests run
one after the other, in the order in which they arrive, in a thread. So a client that disconnects changes nothing of
what runs, and a request that it sends twice, with one ``seq_id``, runs once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from magicrl.config.model_schema import DType, LoraConfig
from magicrl.environments.packages import package
from magicrl.models.loading import resolve_device
from magicrl.serving.messages import read_loss_request
from magicrl.serving.sampler import Prompt, Sampler
from magicrl.serving.trainer import ServedTrainer, lora_of, read_header

web: Any = package("aiohttp.web", "serve")
_log = logging.getLogger(__name__)

SILENCE = 30.0
"""Seconds without a heartbeat after which a client counts as gone. It sends one every 10 seconds."""
RETRY = 60.0
"""Seconds after which a save that failed is tried again."""
_POLL = 20.0  # seconds that a request for a result waits; the client's own limit is 45
_RESULTS = 2048  # results that are kept, for a client that polls again
_LARGEST = 256 << 20  # bytes of a request
_HOSTS = ("127.0.0.1", "localhost")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")

Answer: TypeAlias = bytes | dict[str, Any]
"""Result of a request: a protocol buffer, or JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """A request to run: ``run``, or ``prompt`` for the sampler ``sampler``, together with its neighbours."""

    id: str
    run: Callable[[], Answer] | None = None
    sampler: str = ""
    prompt: Prompt | None = None


class _NotFoundError(ValueError):
    """The request names something that is not here."""


class TinkerServer:
    """The server's state: one session, one model in training, its samplers, and results of requests.

    Args:
        model: Model folder or hub name.
        name: The model's name for clients.
        checkpoints: Folder of the checkpoints and models that clients save.
        full_weights: Train all weights instead of the adapters that a client requests.
        dtype: Precision of training and sampling.
        seed: Seed of requests to sample that name none.
        report: Receives each message for the user of the server.

    Raises:
        ValueError: The model cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        name: str,
        checkpoints: Path,
        full_weights: bool = False,
        dtype: DType = "float32",
        seed: int = 0,
        report: Callable[[str], None],
    ) -> None:
        self._model, self._name, self._checkpoints, self._report = model, name, checkpoints, report
        device = resolve_device("auto")
        self._full_weights = full_weights
        self._make_trainer = partial(ServedTrainer, model, dtype=dtype, device=device)
        self._sampler = Sampler(model, dtype=dtype, device=device, seed=seed)
        self._trainer: ServedTrainer | None = None
        self._model_id = self._session = ""
        self._heard = -SILENCE
        self._unsaved_because = ""  # error of the last save that failed
        self._results: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "tinker")

    @property
    def unsaved(self) -> bool:
        """Whether the model in training has steps that were not saved."""
        return self._trainer is not None and self._trainer.unsaved

    def app(self) -> Any:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=_LARGEST, middlewares=[self._errors])
        app.cleanup_ctx.append(self._running)
        posts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            # Chunks of one forward_backward arrive in order then, and the requests' order is the client's.
            "client/config": lambda _: {"parallel_fwdbwd_chunks": False},
            "client/dynamic_config": lambda _: {},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": lambda _: {},  # the samples are thrown away when they are there
        }
        app.add_routes([web.post(f"/api/v1/{path}", partial(_json, answer)) for path, answer in posts.items()])
        app.add_routes(
            [
                web.get("/api/v1/healthz", partial(_json, lambda _: {"status": "ok"})),
                web.get("/api/v1/get_server_capabilities", partial(_json, self._capabilities)),
                web.get("/api/v1/samplers/{id}", self._get_sampler),
                web.post("/api/v1/sessions/{id}/finish", self._finish),
                web.post("/api/v1/forward_backward", self._forward_backward),
                web.post("/api/v1/retrieve_future", self._retrieve),
            ]
        )
        return app

    @web.middleware
    async def _errors(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Turn errors into the API's JSON, and refuse a page of another site that a browser shows (DNS rebinding)."""
        try:
            if request.host.rpartition(":")[0] not in _HOSTS:
                raise web.HTTPForbidden(text=f"host {request.host} is not this machine")
            return await handler(request)
        except _NotFoundError as error:
            return web.json_response({"detail": str(error)}, status=404)
        except ConnectionResetError:
            self._report(f"the client disconnected while it sent {request.path}; nothing of that request was run")
            return web.Response(status=400)
        except KeyError as error:
            return web.json_response({"detail": f"{request.path}: the request lacks {error}"}, status=400)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # also of JSON of another form
            return web.json_response({"detail": str(error)}, status=400)
        except web.HTTPException as error:
            text = f"this server has no {request.method} {request.path}" if error.status == 404 else error.text
            return web.json_response({"detail": text}, status=error.status)

    # the thread that computes

    async def _running(self, _: Any) -> AsyncIterator[None]:
        """Run requests and look after the client while the server is up. At its end, save what no client saved."""
        tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._watch())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._try_to_save, "the server stops")

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._jobs:
                self._arrived.clear()
                await self._arrived.wait()
            jobs = [self._jobs.popleft()]
            # Neighbours with the same weights are sampled together.
            while jobs[0].prompt and self._jobs and self._jobs[0].sampler == jobs[0].sampler:
                jobs.append(self._jobs.popleft())
            answers = await loop.run_in_executor(self._thread, self._answers, jobs)
            for job, answer in zip(jobs, answers, strict=True):
                self._results[job.id].set_result(answer)

    def _answers(self, jobs: Sequence[_Job]) -> Sequence[Answer]:
        try:
            if jobs[0].run is not None:
                return [jobs[0].run()]
            prompts = [job.prompt for job in jobs if job.prompt is not None]
            found = self._sampler.sample(jobs[0].sampler, prompts)
            return [_failure(answer) if isinstance(answer, ValueError) else answer for answer in found]
        except Exception as error:  # noqa: BLE001 - whatever a request does, the next ones are served
            if not isinstance(error, ValueError):
                _log.exception("request %s failed", jobs[0].id)
            return [_failure(error)] * len(jobs)

    def _submit(self, job: _Job) -> dict[str, Any]:
        """Queue a request, unless it is one that the client sends again because it missed the first answer."""
        if job.id not in self._results:
            self._results[job.id] = asyncio.get_running_loop().create_future()
            for old in list(self._results)[:-_RESULTS]:
                if self._results[old].done():
                    del self._results[old]
            self._jobs.append(job)
            self._arrived.set()
        return {"request_id": job.id}

    async def _retrieve(self, request: Any) -> Any:
        name = (await request.json())["request_id"]
        self._heard = time.monotonic()
        if name not in self._results:
            return web.json_response({"detail": f"request {name} is not known here, or too old"}, status=410)
        done, _ = await asyncio.wait([self._results[name]], timeout=_POLL)
        if not done:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"}, status=408)
        answer = self._results[name].result()
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="application/x-protobuf")
        return web.json_response(answer)

    # the session

    def _create_session(self, _: dict[str, Any]) -> dict[str, Any]:
        silent = time.monotonic() - self._heard
        if silent < SILENCE:
            message = (
                f"this server serves one client at a time, and session {self._session} was heard {silent:.0f} s ago; "
                f"end that client, and wait {SILENCE:.0f} s if it was killed"
            )
            self._report(f"a second client was refused: {message}")
            raise web.HTTPConflict(text=message)
        self._session, self._heard = uuid.uuid4().hex[:12], time.monotonic()
        self._report(f"session {self._session} begins")
        return {"type": "create_session", "session_id": self._session}

    def _heartbeat(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_session(request["session_id"])
        self._heard = time.monotonic()
        return {"type": "session_heartbeat"}

    def _check_session(self, name: str) -> None:
        if name != self._session:
            raise web.HTTPGone(text=f"session {name} has ended; the server serves {self._session or 'no client'} now")

    def _telemetry(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read that the client's session ends, and nothing else."""
        if any(event.get("event") == "SESSION_END" for event in request.get("events", ())):
            self._leave(request.get("session_id", ""))
        return {"status": "accepted"}

    async def _finish(self, request: Any) -> Any:
        self._leave(request.match_info["id"])
        return web.json_response({})

    def _leave(self, session: str) -> None:
        """Let another client begin."""
        if session == self._session:
            self._heard = -SILENCE

    async def _watch(self) -> None:
        """Save the weights of a client that is gone."""
        while True:
            await asyncio.sleep(1)
            trainer = self._trainer  # another client may replace it meanwhile
            if trainer is not None and trainer.unsaved and time.monotonic() - self._heard > SILENCE:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._try_to_save, f"session {self._session} is gone")
                await asyncio.sleep(RETRY if trainer.unsaved else 0)

    def _try_to_save(self, why: str) -> None:
        """Save the weights, or report once for each cause why not: a full disk may have space later."""
        try:
            self._save_unsaved(why)
        except Exception as error:  # noqa: BLE001 - whatever a disk does, requests are served and it is tried again
            cause = f"{type(error).__name__}: {error}"
            if cause != self._unsaved_because:
                self._report(f"{why}: {self._model_id} could not be saved in {self._checkpoints} ({cause})")
            self._unsaved_because = cause

    def _save_unsaved(self, why: str) -> None:
        if self._trainer is None or not self._trainer.unsaved:
            return
        place = f"tinker://{self._model_id}/weights/unsaved-{self._trainer.steps:06d}"
        self._trainer.save(self._state_file(place))
        self._report(
            f"{why}: {self._model_id} was not saved after step {self._trainer.steps}; continue with "
            f"create_training_client_from_state_with_optimizer({place!r})"
        )

    # the model in training

    def _create_model(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_session(request["session_id"])
        self._check_name(request["base_model"])
        kind = (request.get("optimizer_config") or {}).get("type", "adamw")
        if kind != "adamw":
            raise ValueError(f"optimizer {kind!r} is not served; use adamw")
        lora = None if self._full_weights else lora_of(request.get("lora_config"))
        if lora is not None and request["lora_config"].get("seed") is not None:
            self._report("the seed of lora_config has no effect here: new adapters are the same with every seed")
        model = f"{request['session_id']}:train:{request['model_seq_id']}"
        return self._submit(_Job(id=f"{model}:create", run=partial(self._make, model, lora)))

    def _make(self, model: str, lora: LoraConfig | None) -> Answer:
        self._save_unsaved(f"{model} replaces it")
        self._trainer = None  # before the next one, so that both are never in memory
        self._trainer = self._make_trainer(lora)
        self._model_id = model
        kind = "all weights" if lora is None else f"LoRA of rank {lora.rank}, without the unembedding"
        self._report(f"{model}: {kind}")
        return {"type": "create_model", "model_id": model}

    def _load_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        model = request.get("model_id") or f"{request['session_id']}:train:{request['model_seq_id']}"
        file, optimizer = self._state_file(request["path"]), request["optimizer"]
        if not file.is_file():
            raise _NotFoundError(f"{request['path']} is not in {self._checkpoints}")
        load = partial(self._load, model, file, request["path"], optimizer)
        return self._submit(_Job(id=f"{model}:{request.get('seq_id', 'load')}", run=load))

    def _load(self, model: str, file: Path, path: str, optimizer: bool) -> Answer:
        header = read_header(file)
        if header["model"] != self._model:
            raise ValueError(f"{path} belongs to {header['model']}, and this server has {self._model}")
        if model != self._model_id:
            self._make(model, None if header["lora"] is None else LoraConfig(**header["lora"]))
        self._training(model).restore(file, optimizer=optimizer)
        self._report(f"{model} continues {path}, after step {self._training(model).steps}")
        return {"type": "load_weights", "path": path, "model_id": model}

    def _training(self, model: str) -> ServedTrainer:
        if self._trainer is None or model != self._model_id:
            raise _NotFoundError(
                f"model {model} is not in training; this server trains {self._model_id or 'none yet'}, the last one "
                "that was created"
            )
        return self._trainer

    def _train(self, request: Mapping[str, Any], work: Callable[[ServedTrainer], Answer]) -> dict[str, Any]:
        model = request["model_id"]
        self._training(model)
        return self._submit(_Job(id=f"{model}:{request['seq_id']}", run=lambda: work(self._training(model))))

    async def _forward_backward(self, request: Any) -> Any:
        read = read_loss_request(await request.read())
        sent = {"model_id": read.model_id, "seq_id": read.seq_id}
        return web.json_response(self._train(sent, lambda trainer: trainer.forward_backward(read)))

    def _optim_step(self, request: dict[str, Any]) -> dict[str, Any]:
        params = request.get("adam_params")
        if params is None:
            raise ValueError("optim_step needs adam_params; this server has no other optimizer")
        return self._train(request, lambda trainer: {"metrics": trainer.step(params)})

    def _save_weights(self, request: dict[str, Any]) -> dict[str, Any]:
        def save(trainer: ServedTrainer) -> Answer:
            place = f"tinker://{request['model_id']}/weights/{request.get('path') or f'step-{trainer.steps:06d}'}"
            file = self._state_file(place)
            if file.exists() and not request.get("overwrite"):
                raise ValueError(f"{place} exists; choose another name, or overwrite it")
            trainer.save(file)
            return {"type": "save_weights", "path": place}

        return self._train(request, save)

    def _save_for_sampler(self, request: dict[str, Any]) -> dict[str, Any]:
        if (kind := request.get("kind") or "snapshot") != "snapshot":
            raise ValueError(f"this server has no samplers of kind {kind!r}, whose weights change; save a snapshot")

        def save(trainer: ServedTrainer) -> Answer:
            if request.get("path") is None:
                sampler = f"{self._session}:sample:{request['sampling_session_seq_id']}"
                self._sampler.open(sampler, trainer.weights())
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler}
            place = f"tinker://{request['model_id']}/sampler_weights/{request['path']}"
            folder = self._folder(place, "sampler_weights")
            if folder.exists():  # earlier samplers read their weights there
                raise ValueError(f"{place} exists, and its samplers keep its weights; choose another name")
            trainer.save_model(folder)
            return {"type": "save_weights_for_sampler", "path": place}

        return self._train(request, save)

    def _get_info(self, request: dict[str, Any]) -> dict[str, Any]:
        lora, name = self._training(request["model_id"]).lora, self._name
        return {
            "type": "get_info",
            "model_data": {"model_name": name, "tokenizer_id": name},
            "model_id": request["model_id"],
            "model_name": name,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
        }

    # sampling

    def _create_sampler(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_session(request["session_id"])
        name = f"{self._session}:sample:{request['sampling_session_seq_id']}"
        source = self._model
        if request.get("model_path"):
            folder = self._folder(request["model_path"], "sampler_weights")
            if not folder.is_dir():
                raise _NotFoundError(f"{request['model_path']} is not in {self._checkpoints}")
            source = str(folder)
        else:
            self._check_name(request["base_model"])
        self._sampler.open(name, source)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def _get_sampler(self, request: Any) -> Any:
        return web.json_response({"sampler_id": request.match_info["id"], "base_model": self._name})

    def _sample(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["sampling_session_id"]
        prompt = self._sampler.read(name, request)
        job = _Job(id=f"{name}:{request['seq_id']}", sampler=name, prompt=prompt)
        return {
            **self._submit(job),
            "sample_sequence_ids": [f"{job.id}:{index}" for index in range(prompt.request.group_size)],
        }

    # names

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise _NotFoundError(f"this server has {self._name}, not {name}; see --name of magicrl serve")

    def _folder(self, path: str, kind: str) -> Path:
        """Return where a ``tinker://MODEL/KIND/NAME`` is stored."""
        parts = path.removeprefix("tinker://").split("/")
        if len(parts) != 3 or parts[1] != kind or not all(_NAME.fullmatch(part) for part in parts):
            raise ValueError(f"{path!r} is not tinker://MODEL/{kind}/NAME, with letters, digits and . _ - in the names")
        return self._checkpoints.joinpath(*parts)

    def _state_file(self, path: str) -> Path:
        folder = self._folder(path, "weights")
        return folder.with_name(f"{folder.name}.safetensors")

    def _capabilities(self, _: dict[str, Any]) -> dict[str, Any]:
        model = {"model_name": self._name, "max_context_length": self._sampler.max_context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}


def _failure(error: Exception) -> dict[str, Any]:
    """Return the result of a request that failed, as the client expects it."""
    text = str(error) or type(error).__name__
    return {"error": text, "category": "user" if isinstance(error, ValueError) else "server"}


async def _json(answer: Callable[[dict[str, Any]], dict[str, Any]], request: Any) -> Any:
    return web.json_response(answer(await request.json() if request.can_read_body else {}))
