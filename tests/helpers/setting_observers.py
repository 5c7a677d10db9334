"""Observers of `tests/unit/config/test_every_setting.py`: each returns the effects of a recipe as a flat dictionary.

Effects are figures and files of a run, problems, requests, and arguments that are passed to vLLM, Ray or FSDP. The
recipe itself, a copy or a checksum of it, times and paths are left out. Two calls with one recipe return equal
dictionaries.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import torch
from json_server import Asked, Reply, json_server
from safetensors.torch import load_file
from scripted import said
from setting_files import ENVIRONMENT, FILES, SFT, TRAIN
from setting_rows import LEFT_OUT, Row
from tomli_w import dumps

from magicrl.config.model_schema import LoraConfig, ModelConfig, TinyModelConfig
from magicrl.config.schema import TrainConfig
from magicrl.config.sft_schema import SftConfig
from magicrl.records import Problem

Seen = dict[str, Any]
CLOCKED = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
SHOWN_OF_RUN = ("threads", "data", "dropped_overlong", "dropped_in_test", "dropped_conflicting", "devices", "steps")
WORDS = ("what", "is", "?", "+", "so", "it", "0", "1", "2", "3", "4", "5")
"""A small vocabulary, so that an untrained model sometimes ends a response, and sometimes with an accepted answer."""
LISTS = {"[]": 0, "*": "held_out"}
"""Entry of each list or table of the schema that a row changes."""


def place_of(setting: str) -> list[str | int]:
    """Return the keys of a setting in the base recipe: ``stages[].reuse`` is ``["stages", 0, "reuse"]``."""
    keys: list[str | int] = []
    for part in setting.split("."):
        name, listed, _ = part.partition("[]")
        keys += [LISTS["*"]] if part == "*" else [name, LISTS["[]"]] if listed else [name]
    return keys


def changed(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the recipe with ``changes`` by the schema's names. ``LEFT_OUT`` removes a key."""
    found: dict[str, Any] = copy.deepcopy(dict(tree))
    for setting, value in changes.items():
        *path, last = place_of(setting)
        node: Any = found
        for key in path:
            node = node[key] if isinstance(key, int) else node.setdefault(key, {})
        if value is not LEFT_OUT:
            node[last] = copy.deepcopy(value)
        elif not isinstance(node, list):
            node.pop(last, None)
    return found


class Observers:
    """All observers, the files that recipes name, and a cache of the results.

    Args:
        root: An empty folder. It becomes the working folder, to which the recipes' paths are relative.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = itertools.count()
        self._seen: dict[str, Seen] = {}
        for name, text in FILES.items():
            (root / name).write_text(text, encoding="utf-8")
        self._make_models()

    def _make_models(self) -> None:
        from magicrl.data.families import make_family
        from magicrl.models.loading import load_policy, save_policy
        from magicrl.models.small_models import make_tiny
        from magicrl.training.learner import LocalLearner
        from magicrl.training.objective import LearnerSettings

        config = TinyModelConfig(hidden_size=16, layers=1, heads=2, intermediate_size=16, max_context=160)
        families = (make_family("running_sum", {}), make_family("guess_number", {}))
        wide = [*WORDS, "then", "</think>", *(word for family in families for word in family.vocabulary or ())]
        for name, seed, words in (("model", 0, WORDS), ("other-model", 1, WORDS), ("wide-model", 0, wide)):
            save_policy(*make_tiny(config, list(dict.fromkeys(words)), seed), self.root / name)
        # exact log-probs need heads that are at least 16 wide
        one_head = config.model_copy(update={"heads": 1})
        save_policy(*make_tiny(one_head, list(WORDS), 0), self.root / "one-head-model")
        for name in ("model", "wide-model"):
            policy = load_policy(name, dtype="float32")
            lora = LoraConfig(rank=2, alpha=8.0, target_modules=("q_proj", "v_proj"))
            learner = LocalLearner(policy.model, LearnerSettings(model=ModelConfig(dtype="float32", lora=lora)))
            adapters = learner._lora
            assert adapters is not None
            with torch.no_grad():
                for number, (key, parameter) in enumerate(sorted(adapters.model.named_parameters())):
                    if ".lora_" in key:
                        parameter.fill_(0.1 + 0.01 * number)
            adapters.write(self.root / name.replace("model", "adapters"))

    def tree_of(self, row: Row, value: Any) -> dict[str, Any]:
        """Return the recipe of a row with one of its two values."""
        base = {"train": TRAIN, "sft": SFT}[row.recipe]
        return changed(changed(base, row.base), {row.setting: value})

    def see(self, row: Row, value: Any) -> Seen:
        """Return the effects of a row's recipe with one of its two values; each recipe runs once."""
        tree = self.tree_of(row, value)
        key = json.dumps([row.observer, tree], sort_keys=True, default=str)
        if key not in self._seen:
            self._seen[key] = self.look(row.observer, row.recipe, tree)
        return self._seen[key]

    def look(self, observer: str, recipe: str, tree: dict[str, Any]) -> Seen:
        """Return the effects of a recipe. A rejection is the effect ``error``."""
        folder = self.root / f"look-{next(self._numbers)}"
        schema = TrainConfig if recipe == "train" else SftConfig
        try:
            found = getattr(self, f"see_{observer}")(schema.model_validate(tree), folder)
        except (ValueError, RuntimeError) as error:
            found = {"error": self._without_paths(str(error), folder)}
        finally:
            torch.set_num_threads(1)
        return found

    def _without_paths(self, text: str, folder: Path) -> str:
        return text.replace(str(folder), "FOLDER").replace(str(self.root), "ROOT")

    # training

    def see_run(self, config: TrainConfig, folder: Path) -> Seen:
        """Run a whole training in this process, and return its files and the calls of engine and learner."""
        from magicrl.training.recorder import NullObserver
        from magicrl.training.session import run_training

        output = folder / "run"
        if config.rollout.replay is not None:
            self._record(config, Path(config.rollout.replay))
        with _watched_calls() as seen:
            try:
                run_training(config, output, NullObserver(), resume=False)
            except (ValueError, RuntimeError, FloatingPointError) as error:
                seen["error"] = self._without_paths(str(error), folder)
        return seen | (self._of_folder(output) if output.is_dir() else {})

    def _record(self, config: TrainConfig, folder: Path) -> None:
        """Record rollouts of the recipe by one model or another, for an engine that replays them."""
        from magicrl.training.recorder import NullObserver
        from magicrl.training.session import run_training

        if not folder.exists():
            plain = config.rollout.model_copy(update={"engine": "in_process", "replay": None})
            start = config.start.model_copy(update={"model": "model" if folder.name.endswith("a") else "other-model"})
            made = self.root / f"made-{folder.name}"
            run_training(
                config.model_copy(update={"rollout": plain, "start": start}), made, NullObserver(), resume=False
            )
            (made / "rollouts").rename(folder)

    def _of_folder(self, output: Path) -> Seen:
        """Return the run folder's contents, by figure and file."""
        found: Seen = {}
        lines = [json.loads(line) for line in _lines(output / "metrics.jsonl")]
        for line in lines:
            for key, value in {**line["values"], "stage": line["stage"]}.items():
                if not key.startswith(CLOCKED):
                    found.setdefault(f"metrics/{key}", []).append(value)
        for event in (json.loads(line) for line in _lines(output / "events.jsonl")):
            found.setdefault(f"events/{event['kind']}", []).append(self._without_paths(event["message"], output))
        # a run that is rejected early leaves only some of its files
        run = json.loads((output / "run.json").read_text()) if (output / "run.json").exists() else {}
        found |= {f"run/{key}": run[key] for key in SHOWN_OF_RUN if key in run}
        found["rollouts"] = [
            row
            for file in sorted((output / "rollouts").glob("*.parquet"))
            for row in pq.read_table(file).drop_columns(["seconds"]).to_pylist()
        ]
        for file in sorted((output / "evaluations").glob("*.json")):
            found[f"evaluations/{file.stem}"] = _timeless(json.loads(file.read_text()))
        if (output / "difficulty.json").exists():
            found["difficulty"] = _timeless(json.loads((output / "difficulty.json").read_text()))
        for name in ("checkpoints", "rollouts"):
            found[f"files/{name}"] = sorted(path.name for path in (output / name).glob("*"))
        return found | _of_model(output / "model")

    def see_start(self, config: TrainConfig, folder: Path) -> Seen:
        """Return the model that a run starts from."""
        from magicrl.training.assemble import start_model_folder

        made = start_model_folder(config.start, folder / "models", lambda *_: None)
        return _of_model(Path(made))

    def see_problems(self, config: TrainConfig, folder: Path) -> Seen:
        """Return every set of problems after the start checks, and the calls of the hub's library."""
        from magicrl.models.loading import load_shell
        from magicrl.models.prompts import PromptEncoder
        from magicrl.training.start_checks import load_data

        asked: list[Any] = []
        with patch("datasets.load_dataset", _hub(asked)):
            encoder = PromptEncoder(load_shell("wide-model").tokenizer, config.data.max_prompt_tokens)
            data = load_data(config, encoder)
        sets = {"train": data.train, "validation": data.validation, **data.test}
        found: Seen = {name: [asdict(problem) for problem in problems] for name, problems in sets.items()}
        return found | {"hub": asked, "dropped_overlong": data.dropped_overlong}

    def see_checks(self, config: TrainConfig, folder: Path) -> Seen:
        """Return whether the start checks of a machine without a GPU reject the run."""
        from magicrl.training.start_checks import check_run

        with patch("torch.cuda.is_available", lambda: False):
            check_run(config, folder / "run", resume=False)
        return {"error": None}

    def see_schedule(self, config: TrainConfig, folder: Path) -> Seen:
        """Return when and why the stages end, on a synthetic curve that levels off, with falling truncation."""
        from magicrl.training.curriculum import StageSchedule

        schedule, ends = StageSchedule(config.stages), []
        for step in range(200):
            if schedule.stage is None:
                break
            schedule.observe_accuracy(0.5 - 0.4 * 0.9**step + 0.01 * (-1) ** step, 0.01)
            schedule.observe_truncation(0.9 * 0.95**step)
            if (end := schedule.finish_step()) is not None:
                ends.append(end)
        return {"ends": ends, "steps": [steps for _, steps, _ in ends]}

    def see_compiled(self, config: TrainConfig | SftConfig, folder: Path) -> Seen:
        """Return how often a learner calls the compiler, which is replaced: compiling takes half a minute."""
        from magicrl.models.loading import load_policy
        from magicrl.training import assemble, sft

        asked: list[str] = []
        with (
            patch("magicrl.models.scorer.compile_layers", lambda model: asked.append(type(model).__name__)),
            patch("magicrl.models.scorer.check_compiler", lambda device: None),
        ):
            policy = load_policy("model", dtype="float32")
            if isinstance(config, TrainConfig):
                assemble.make_learner(config, policy)
            else:
                # make the learner before a checkpoint is looked for
                with (
                    patch.object(sft, "load_latest", side_effect=InterruptedError),
                    contextlib.suppress(InterruptedError),
                ):
                    sft._train(config, policy, folder, MagicMock(), None)
        return {"compiled": asked}

    # the command line

    def see_command(self, config: TrainConfig | SftConfig, folder: Path) -> Seen:
        """Run `magicrl train` or `magicrl sft` in an empty folder; return output folders and trackers' input."""
        from magicrl.commands.train import command, sft

        folder.mkdir()
        tree = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        for name in (*FILES, "model"):
            (folder / name).symlink_to(self.root / name)
        recipe = folder / "recipe.toml"
        recipe.write_text(dumps(tree))
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            if isinstance(config, TrainConfig):
                command(recipe)
            else:
                sft(recipe)
        written = [*folder.rglob("run.json"), *folder.rglob("sft.json")]
        tracked = folder / "tracked.json"
        return {
            "folders": sorted(str(path.parent.relative_to(folder)) for path in written),
            "tracked": json.loads(tracked.read_text()) if tracked.exists() else None,
        }

    def see_minutes(self, config: TrainConfig | SftConfig, folder: Path) -> Seen:
        """Return the duration of a shipped recipe, as `magicrl train` and `magicrl recipes` print it."""
        from magicrl.commands.recipes import recipes
        from magicrl.commands.train import minutes_needed
        from magicrl.config.paths import find_recipe

        if isinstance(config, TrainConfig):
            return {"said": minutes_needed(config, find_recipe(Path("tiny")), ())}
        folder.mkdir()
        (folder / "one.toml").write_text(dumps(config.model_dump(mode="json", exclude_none=True)))
        with (
            patch("magicrl.commands.recipes.shipped_recipes", lambda: {"one": folder / "one.toml"}),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            recipes()
        return {"said": " ".join(printed.getvalue().split())}

    # supervised fine-tuning

    def see_sft(self, config: SftConfig, folder: Path) -> Seen:
        """Return a supervised recipe's checks and its run: losses, learning rates, the model that it writes."""
        from magicrl.training.sft import run_sft
        from magicrl.training.start_checks import check_sft

        output = folder / "model"
        with _watched_calls() as seen:
            check_sft(config, output)
            for calls in seen.values():
                calls.clear()
            run_sft(config, output)
        record = json.loads((output / "sft.json").read_text())
        figures = {name: record[name] for name in ("losses", "tokens", "threads")}
        return {**seen, **figures, **_of_model(output)}

    def see_shown(self, config: SftConfig, folder: Path) -> Seen:
        """Return the demonstrations of the first phase: problems and responses as they are passed to the tokenizer."""
        from magicrl.models.loading import load_shell
        from magicrl.models.prompts import PromptEncoder
        from magicrl.records import frozen_tokens
        from magicrl.training.sft import demonstrations

        shown: list[Any] = []

        def prompt(self: Any, problem: Problem) -> Any:
            shown.append((problem.prompt, problem.environment))  # a chat template shows the environment's tools
            return frozen_tokens([1])

        def response(self: Any, text: str) -> Any:
            shown.append(text)
            return frozen_tokens([1])

        asked: list[Any] = []
        with (
            patch.object(PromptEncoder, "encode", prompt),
            patch.object(PromptEncoder, "fits", lambda self, problem: True),
            patch.object(PromptEncoder, "encode_response", response),
            patch.object(PromptEncoder, "observation", lambda self, _, text, *limit: response(self, text)),
            patch("datasets.load_dataset", _hub(asked)),
            patch("magicrl.training.sft.opens_reasoning", lambda *_: False),
        ):
            next(demonstrations(config, 0, load_shell("model")))
        return {"shown": shown, "hub": asked}

    def see_sft_start(self, config: SftConfig, folder: Path) -> Seen:
        """Return the model that supervised training starts from. The package of a GGUF file is named, not read."""
        from magicrl.training.sft import start_policy

        asked: list[str] = []

        def prepared(package: str, target: Path) -> Path:
            asked.append(package)
            return self.root / "model"

        with (
            patch("magicrl.training.sft.prepare_gguf_package", prepared),
            patch("torch.cuda.is_available", lambda: False),
        ):
            policy = start_policy(config, folder / "out")
        sizes = policy.model.config
        weights = torch.cat([p.detach().flatten() for p in policy.model.parameters()])
        return {
            "packages": asked,
            "hidden_size": sizes.hidden_size,
            "num_hidden_layers": sizes.num_hidden_layers,
            "num_attention_heads": sizes.num_attention_heads,
            "intermediate_size": sizes.intermediate_size,
            "max_context": policy.max_context,
            "weights": _digest(weights),
        }

    # judging and environments

    def see_verdicts(self, config: TrainConfig, folder: Path) -> Seen:
        """Return verdicts of the in-process verifier on fixed responses."""

        asked = Problem(id="p", prompt="", references=("3",), verifier="exact", source="table")
        responses = ["it is 3", r"\boxed{3}", "<think> it is 3", r"<think>so</think> \boxed{3}", r"<think> \boxed{3}"]
        with contextlib.closing(config.verifier.pool()) as pool:
            return {"verdicts": [verdict.correct for verdict in pool.judge(asked, responses)]}

    def see_workers(self, config: TrainConfig, folder: Path) -> Seen:
        """Return how worker processes of the maths verifier and of an environment would be started."""
        from magicrl.environments.pool import EnvironmentPool

        started: list[Any] = []
        maths = Problem(id="p", prompt="", references=("3",), verifier="maths", source="table")
        played = replace(maths, environment=ENVIRONMENT)
        lock = threading.Lock()

        class Slot:
            """Stand-in for a worker's process that records how it would be started."""

            def __init__(self, plan: Any, closing: Any) -> None:
                self.worker = None
                with lock:
                    hello = {name: value for name, value in plan.hello.items() if name != "path"}
                    started.append({"cpu_limit": plan.cpu_limit, **hello})

            def ready(self) -> Any:
                raise RuntimeError("no process is started")

            def drop(self) -> None: ...

        with patch("magicrl_verifiers.workers.WorkerSlot", Slot):
            judge = config.verifier.pool()
            with contextlib.suppress(RuntimeError):
                judge.warm_up(["maths"])
            judge.close()
            verifiers, started = started, []
        with patch("magicrl.environments.pool.WorkerSlot", Slot):
            environments = EnvironmentPool(config.environment)
            environments.begin(played)
            environments.close()
        return {
            "verifier/count": len(verifiers),
            "verifier/cpu_limit": verifiers[0]["cpu_limit"],
            "verifier/hello": verifiers[0],
            "environment/count": len(started),
            "environment/cpu_limit": started[0]["cpu_limit"],
            "environment/memory_limit_mb": started[0]["memory_limit_mb"],
        }

    def see_episodes(self, config: TrainConfig, folder: Path) -> Seen:
        """Run with an environment that takes part in responses, in this process."""
        from magicrl.environments import pool

        class Slot:
            """A worker without a process."""

            def __init__(self, plan: Any, closing: Any) -> None:
                hello = dict(plan.hello)
                self._handler: Any = None
                self._hello = hello
                self.worker: Any = None

            def ready(self) -> Any:
                if self.worker is None:
                    with patch.multiple(pool, limit_cpu=lambda *_: None, limit_memory=lambda *_: None):
                        handler = pool.EnvironmentHandler(self._hello, lambda *_: None)
                    self.worker = SimpleNamespace(ask=self._ask, interrupt=lambda: None)
                    self._handler = handler
                return self.worker

            def _ask(self, request: dict[str, Any]) -> Any:
                with patch.multiple(pool, limit_cpu=lambda *_: None):
                    return self._handler.handle(request)

            def drop(self) -> None: ...

        with patch("magicrl.environments.pool.WorkerSlot", Slot):
            return self.see_run(config, folder)

    def see_judge(self, config: TrainConfig, folder: Path) -> Seen:
        """Return requests to a served judge, and the verdicts that its replies give."""

        judge = config.verifier.judge
        assert judge is not None
        script = (judge.extra or {}).get("script", "score")
        asked = Problem(id="p", prompt="what is 1 + 2 ?", references=("3",), verifier="judge", source="table")
        replies = {
            "score": "fine\nScore: 0.6",
            "boxed": r"\boxed{0.6}",
            "unreadable": "I cannot tell",
            "both": "so it is \\boxed{0.9}\nScore: 0.6",
        }
        asked_for: list[Asked] = []
        under_way, most, lock = 0, 0, threading.Lock()

        def answer(request: Asked) -> Reply:
            nonlocal under_way, most
            with lock:
                asked_for.append(request)
                under_way += 1
                most = max(most, under_way)
            try:
                if script == "slow":
                    time.sleep(0.02)
                if script == "down":
                    return Reply(body={"error": "down"}, status=503, headers={"retry-after": "0"})
                if judge.endpoint == "classify":
                    return Reply(body={"data": [{"probs": [0.25]}]})
                if judge.endpoint == "pooling":
                    return Reply(body={"data": [{"data": [0.75]}]})
                return Reply(body=said(replies.get(script, replies["score"]))[1])
            finally:
                with lock:
                    under_way -= 1

        limits: list[Any] = []
        with (
            json_server(answer) as url,
            patch.dict(os.environ, {"TABLE_KEY": "table", "OPENAI_API_KEY": "", "XDG_CACHE_HOME": str(folder)}),
            _settings_of_servers(limits),
        ):
            url = url.removesuffix("/v1") + urlsplit(judge.base_url).path
            cache = None if judge.cache is None else str(folder / judge.cache)
            known = judge.model_copy(update={"base_url": url, "cache": cache})
            verifier = config.verifier.model_copy(update={"judge": known})
            count = 6 if script == "slow" else 2
            with contextlib.closing(verifier.pool()) as pool:
                verdicts = pool.judge(asked, [f"the answer is {number}" for number in range(count)])
                totals = pool.totals()
        bodies = sorted((request.body for request in asked_for), key=lambda body: json.dumps(body, sort_keys=True))
        return {
            "bodies": bodies,
            "count": len(bodies),
            "paths": sorted({request.path for request in asked_for}),
            "keys": sorted({str(request.headers.get("authorization")) for request in asked_for}),
            "most under way": most,
            "verdicts": [(verdict.outcome.name, verdict.score, verdict.correct) for verdict in verdicts],
            "failed": totals["judge/failed"],
            "limits": limits,
            "cache": sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jsonl")),
        }

    # vLLM

    def see_vllm(self, config: TrainConfig, folder: Path) -> Seen:
        """Return the arguments with which a vLLM engine is made, on a CPU and on a GPU."""
        found: Seen = {}
        for device, on_gpu in (("cpu", False), ("gpu", True)):
            try:
                options = self._vllm_options(config, on_gpu)
            except ValueError as error:
                options = {"refused": str(error)}
            found |= {f"{device}/{name}": value for name, value in options.items()}
        return found

    def _vllm_options(self, config: TrainConfig, on_gpu: bool) -> Seen:
        from magicrl.models.loading import load_shell
        from magicrl.models.prompts import PromptEncoder
        from magicrl.rollout import engines, vllm_engine
        from magicrl.rollout.engine_settings import EngineSettings
        from magicrl.training.assemble import make_training_engine

        seen: Seen = {}
        made = vllm_engine.VllmEngine.__init__

        class Handed(Exception):
            """Signal that the options have arrived."""

        def start(folder: str, options: dict[str, Any], **_: Any) -> Any:
            seen.update(options)
            raise Handed

        def make(self: Any, model: str, settings: EngineSettings, **further: Any) -> None:
            seen["keep_caches"] = settings.vllm.keep_caches
            made(self, model, settings, **further)

        with (
            patch("torch.cuda.is_available", lambda: on_gpu),
            patch.object(vllm_engine, "start_vllm", start),
            # This check imports vLLM, which the fast tests do not need.
            patch.object(engines, "check_engine_args", lambda vllm: None),  # pyright: ignore[reportUnknownLambdaType]
            patch.object(vllm_engine.VllmEngine, "__init__", make),
            contextlib.suppress(Handed),
        ):
            make_training_engine(config, "model", PromptEncoder(load_shell("model").tokenizer, 64))
        return seen

    # Ray and FSDP

    def see_cluster(self, config: TrainConfig, folder: Path) -> Seen:
        """Return calls of Ray by a run on a cluster: actors with their options and arguments, and time limits."""
        from scripted_ray import ScriptedRay

        return ScriptedRay().see(config, self.root)

    def see_fsdp(self, config: TrainConfig, folder: Path) -> Seen:
        """Return calls of FSDP2 by a learner rank, with the settings that the run sends to its ranks."""
        from scripted_ray import ScriptedRay, fsdp_calls

        ray = ScriptedRay()
        ray.see(config, self.root)
        return fsdp_calls(ray.rank_settings[0], len(ray.rank_settings), self.root)


@contextmanager
def _watched_calls() -> Generator[Seen]:
    """Record calls of engine, learner and model inside the context: requests, sizes of passes, learning rates."""
    from magicrl.models import head
    from magicrl.models.scorer import PolicyScorer
    from magicrl.rollout.in_process import InProcessEngine
    from magicrl.training.learner import LocalLearner

    seen: Seen = {"requests": [], "rows": [], "passes": [], "rates": [], "pieces": [], "layers": []}

    def watch(owner: Any, name: str, note: Callable[..., None]) -> Any:
        original = getattr(owner, name)

        def called(*args: Any, **further: Any) -> Any:
            found = original(*args, **further)
            note(found, *args, **further)
            return found

        return patch.object(owner, name, called)

    def submitted(_: Any, engine: Any, requests: Sequence[Any]) -> None:
        for request in requests:
            sampling = asdict(request.sampling)
            known = (request.problem.id, request.group_size, request.prompt_tokens.tolist())
            seen["requests"].append({"draw": request.draw, "known": known, **sampling})

    def passed(_: Any, scorer: Any, batch: Any, *args: Any, **further: Any) -> None:
        seen["passes"].append(int(batch.input_ids.shape[1]))

    def updated(_: Any, learner: Any, batch: Any, controls: Any) -> None:
        seen["rates"].append(controls.learning_rate)

    def advanced(_: Any, engine: Any) -> None:
        seen["rows"].append(engine.rows)

    original = head.pieces

    def pieces(*args: Any) -> Any:
        found = list(original(*args))
        seen["pieces"].append(sum(len(rows) for _, rows in found))
        return iter(found)

    def called(module: Any, _: Any) -> None:
        if type(module).__name__.endswith("MLP"):
            seen["layers"].append(type(module).__name__)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(called)
    try:
        with ExitStack() as stack:
            stack.enter_context(watch(InProcessEngine, "submit", submitted))
            stack.enter_context(watch(InProcessEngine, "_advance", advanced))
            stack.enter_context(watch(PolicyScorer, "forward", passed))
            stack.enter_context(watch(LocalLearner, "update", updated))
            stack.enter_context(patch.object(head, "pieces", pieces))
            yield seen
    finally:
        hook.remove()


@contextmanager
def _settings_of_servers(limits: list[Any]) -> Generator[None]:
    """Return waits and attempts of every request that the transport makes."""
    from magicrl_verifiers.served import Transport

    made = Transport.__init__

    def make(self: Any, settings: Any, usage: Any) -> None:
        limits.append({name: getattr(settings, name) for name in ("attempts", "attempt_seconds", "concurrency")})
        made(self, settings, usage)

    with patch.object(Transport, "__init__", make):
        yield


def _hub(asked: list[Any]) -> Callable[..., list[dict[str, Any]]]:
    """Replace ``datasets.load_dataset`` by three records. ``asked`` receives the arguments."""

    def load(name: str, subset: str | None, *, split: str, revision: str | None) -> list[dict[str, Any]]:
        asked.append((name, subset, split, revision))
        return [{"problem": f"what is {n} + {n} ?", "answer": str(n), "solution": f"so {n}"} for n in range(3)]

    return load


def _of_model(folder: Path) -> Seen:
    """Return a model folder's contents: weights, description, adapters."""
    if not folder.is_dir():
        return {}
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    adapter = folder / "adapter" / "adapter_model.safetensors"
    found: Seen = {
        "model/dtype": config.get("dtype", config.get("torch_dtype")),
        "model/weights": _digest(torch.cat([tensors[name].float().flatten() for name in sorted(tensors)])),
    }
    if adapter.exists():
        found["adapters"] = {name: tuple(tensor.shape) for name, tensor in load_file(adapter).items()}
    return found


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _timeless(value: Any) -> Any:
    """Return the document without times."""
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if "seconds" not in key and key != "time"}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value
