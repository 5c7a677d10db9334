"""Checkpoints: the run's whole state, written atomically, without pickle.

A checkpoint is a folder ``step-000040`` with ``tensors.safetensors`` (weights and moments by parameter name) and
``state.json`` (everything else, and the tensors' checksum). It is written under another name, flushed to disk and
renamed, so that a folder of that name is always complete: a kill while writing, or a full disk, leaves the last good
one untouched. Training waits until the state is copied to the host's memory. The copy is written while the next step
runs, and the time of writing changes no result.

If ranks write the learner's tensors, these are in the folder ``learner`` under the same names, with one file per rank.
Each file's header lists which rows of which tensor it holds (the format of ``torch.distributed.checkpoint``), so that
one process, or an evaluation, can read them without ranks.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicrl.config.model_schema import LoraConfig
from magicrl.files import sha256_of
from magicrl.models.adapters import ADAPTER, LoraAdapters
from magicrl.models.loading import load_policy, save_policy
from magicrl.models.model_files import find_model, weights_fingerprint
from magicrl.training.protocols import TrainingStopped, WritesShards

SHARDS = "learner"
"""Folder of the learner's shards in a checkpoint."""
LEARNER = "learner"
"""Prefix of the learner's tensors."""
WEIGHTS = "weights/"
"""Prefix of the weights among the learner's tensors."""
SCHEMA_VERSION = 2
_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".writing-"


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The text names the folder and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: Number of training steps.
        tensors: Tensors by flat name.
        state: JSON-able state of everything that is not a tensor.
        owner: Hash of the configuration that may continue from it; None for any.
        folder: Folder it was read from, or None.
        shards: Result of the learner's ``begin_shards``; None where ``tensors`` holds everything.
    """

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    owner: str | None = None
    folder: Path | None = None
    shards: Mapping[str, Any] | None = None

    def learner_state(self) -> dict[str, Any]:
        """Return the input of the learner's ``restore``, with whole tensors, whatever wrote them.

        Raises:
            CheckpointError: The shards are damaged.
        """
        if self.shards is None:
            return join_state(LEARNER, self.tensors, self.state[LEARNER])
        assert self.folder is not None
        try:
            folder = self.folder / SHARDS
            files = self.shards["files"]
            # Each shard has its row offsets in the header.
            parts: dict[str, list[tuple[int, Tensor]]] = {}
            for name in sorted(files):
                with safe_open(folder / name, framework="pt") as opened:
                    described = (opened.metadata() or {}).get("DCP_SHARDING_INFO")
                    if described is None:
                        raise OSError(f"{name} does not say which rows it holds")
                    offsets: dict[str, Any] = json.loads(described)
                    for key in opened.keys():  # noqa: SIM118 - the file is no mapping
                        # A tensor without dimensions has no offset: row 0.
                        first_row = int((*offsets[key]["saved_offsets"], 0)[0])
                        parts.setdefault(key, []).append((first_row, opened.get_tensor(key)))
            ordered = {
                key: [rows for _, rows in sorted(found, key=lambda part: part[0])] for key, found in parts.items()
            }
            tensors = {key: rows[0] if len(rows) == 1 else torch.cat(rows) for key, rows in ordered.items()}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise _damaged(self.folder, error) from None
        return {**tensors, "meta": {name: value for name, value in self.shards.items() if name != "files"}}


class CheckpointWriter:
    """Writes checkpoints into ``root``, one at a time, in a background thread.

    The end of the block waits for the one in progress.

    Args:
        root: Folder of the checkpoints.
        ranks: The learner, if its ranks write its tensors themselves.
    """

    def __init__(self, root: Path, ranks: WritesShards | None = None) -> None:
        self._root, self._ranks = root, ranks
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[Path] | None = None
        self._shards: Future[Mapping[str, Any]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.wait()
        except RuntimeError:
            # The error that ended the block matters more, but a signal is not an error.
            if error is None or isinstance(error, KeyboardInterrupt):
                raise
        finally:
            if self._shards is not None:
                self._shards.cancel()  # A signal ended the wait: the thread must not wait for ranks for ever.

    def begin(
        self,
        checkpoint: Checkpoint,
        *,
        keep_last: int,
        keep: frozenset[int] = frozenset(),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy ``checkpoint`` and start writing ``root/step-NNNNNN``, after any checkpoint in progress.

        When it is complete, all but the last ``keep_last`` and those of the steps in ``keep`` are removed. ``settle``
        flushes files that must not be older than the checkpoint.

        Raises:
            TrainingStopped: The previous one could not be written, or this one not started. Older ones are untouched.
        """
        self.wait()
        name = f"step-{checkpoint.step:06d}"
        # A new name each time: the ranks of a killed run may still be writing into theirs.
        writing = self._root / f"{_UNFINISHED}{name}-{secrets.token_hex(4)}"
        self._shards = None
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._root)
            writing.mkdir()
            if self._ranks is not None:
                (writing / SHARDS).mkdir()
                self._shards = self._ranks.begin_shards(writing / SHARDS)
        except OSError as error:
            raise self._failed(name, writing, error) from None
        state = json.loads(json.dumps(checkpoint.state))
        copy, shards = replace(checkpoint, tensors=host_copy(checkpoint.tensors), state=state), self._shards

        def write() -> Path:
            try:
                save_file(dict(copy.tensors), writing / "tensors.safetensors")
                document = {
                    "schema_version": SCHEMA_VERSION,
                    "step": copy.step,
                    "owner": copy.owner,
                    "tensors_sha256": sha256_of(writing / "tensors.safetensors"),
                    "state": copy.state,
                    "shards": None if shards is None else shards.result(),
                }
                (writing / "state.json").write_text(json.dumps(document, indent=1))
                # The folder too: its entries, the file names, are flushed only with it.
                for path in (*writing.rglob("*"), writing):
                    _flush(path)
                settle()
                folder = self._root / name
                if folder.exists():
                    # The same step of the same run: both are identical, and this one is complete.
                    shutil.rmtree(writing)
                else:
                    writing.rename(folder)
                _flush(self._root)  # The rename must be on disk before an older one is removed.
                if self._ranks is not None:
                    self._ranks.shards_kept(folder / SHARDS)  # they drop the older one too
                remove_old(self._root, keep_last=keep_last, keep=keep)
            except (OSError, SafetensorError) as error:
                raise self._failed(name, writing, error) from None
            return self._root / name

        self._begun = self._thread.submit(write)

    def check(self) -> None:
        """Raise the ``TrainingStopped`` of a failed checkpoint. Does not wait."""
        if self._begun is not None and self._begun.done():
            self.wait()

    def wait(self) -> Path | None:
        """Wait for the checkpoint in progress and return its folder, None if there is none.

        Raises:
            TrainingStopped: It could not be written. Older ones are untouched.
        """
        begun = self._begun
        if begun is None:
            return None
        if self._ranks is not None:
            self._ranks.finish_shards()
        try:
            return begun.result()
        finally:
            if begun.done():  # a signal may end the wait
                self._begun = None

    def _failed(self, name: str, writing: Path, error: Exception) -> TrainingStopped:
        shutil.rmtree(writing, ignore_errors=True)  # The files of this checkpoint may occupy the missing space.
        last = _folders(self._root)
        remedy = f"the last good one is {last[-1].name}" if last else "there is none yet"
        return TrainingStopped(
            f"the checkpoint {self._root / name} could not be written: {error}; {remedy}. "
            "Free disk space (or fix the permissions) and continue with --resume"
        )


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the current values in the host's memory, sharing nothing with ``tensors``."""
    layout = torch.contiguous_format
    return {name: t.detach().to("cpu", copy=True, memory_format=layout) for name, t in tensors.items()}


def remove_leftovers(root: Path) -> None:
    """Delete folders that a killed run left incomplete."""
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_old(root: Path, *, keep_last: int, keep: frozenset[int]) -> None:
    """Remove all but the last ``keep_last`` checkpoints and those of the steps in ``keep``."""
    for folder in _folders(root)[:-keep_last]:
        if step_of(folder) not in keep:
            # Renamed first: a kill during the removal must not leave half a checkpoint under its name.
            doomed = root / f"{_UNFINISHED}old-{folder.name}"
            folder.rename(doomed)
            shutil.rmtree(doomed)


def load_latest(root: Path, *, owner: str | None = None) -> Checkpoint | None:
    """Return the newest checkpoint of a run, or None. One of another ``owner`` is refused.

    Raises:
        CheckpointError: The newest one is damaged, of another schema, or of another owner.
    """
    folders = _folders(root)
    if not folders:
        return None
    found = load_checkpoint(folders[-1])
    if owner is not None and found.owner is not None and found.owner != owner:
        raise CheckpointError(
            f"{found.folder} was written by another configuration (hash {found.owner}, this run's is {owner}); "
            "move that folder away, or start a new run with another --output"
        )
    return found


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint folder. Raises ``CheckpointError`` if it is damaged or of another schema."""
    try:
        # The small file first: another schema is refused before its tensors are read.
        document = json.loads((folder / "state.json").read_text())
        if document["schema_version"] != SCHEMA_VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint schema {document['schema_version']}, this magicrl reads {SCHEMA_VERSION}; "
                "resume it with the version that wrote it, or start a new run with another --output"
            )
        file = folder / "tensors.safetensors"
        if document["tensors_sha256"] != sha256_of(file):
            raise OSError(f"{file.name} does not have the checksum it was written with")
        return Checkpoint(
            step=int(document["step"]),
            tensors=load_file(file),
            state=document["state"],
            owner=document["owner"],
            folder=folder,
            shards=document["shards"],
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damaged(folder, error) from None


def _damaged(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder} is damaged ({error}); delete that folder to resume from the checkpoint before it")


def check_json(named: str, state: object) -> None:
    """Raise ``ValueError``, which begins with ``named``, if JSON cannot hold this state or would change it."""
    try:
        same = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"{named}: state() must return what JSON keeps as it is (no tuples, no NaN, no keys but texts), so that a "
            f"resumed run gets the same; got {state!r:.200}"
        )


def split_state(prefix: str, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of ``state`` under ``prefix/name``, and the rest as JSON."""
    tensors = {f"{prefix}/{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


def join_state(prefix: str, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that ``split_state`` split."""
    head = f"{prefix}/"
    return {**{k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}, **rest}


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def _folders(root: Path) -> list[Path]:
    found = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=step_of)


def _flush(path: Path) -> None:
    # A folder can only be opened for reading, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first.

    Raises:
        ValueError: ``run`` is not a run folder.
    """
    _read_run(run)
    return _folders(run / "checkpoints")


def run_status(run: Path) -> str:
    """Return ``running``, ``finished``, ``stopped`` or ``failed``, as the run last wrote it."""
    return str(_read_run(run).get("status", "unknown"))


def start_model_of(run: Path) -> str:
    """Return the folder or name of the run's initial model."""
    return str(_read_run(run)["start_model"])


def checkpoint_identity(run: Path, name: str) -> dict[str, str | None]:
    """Return what tells a checkpoint from another of its step: its run, and its content (None if it was removed)."""
    facts, state = _read_run(run), run / "checkpoints" / name / "state.json"
    try:
        content = sha256_of(state)
    except FileNotFoundError:
        content = None
    return {"run": f"{facts['config_hash']}, {facts['environments'][0]['started']}", "state_sha256": content}


def export_checkpoint(run: Path, checkpoint: Path, target: Path) -> Path:
    """Write the weights of a checkpoint as a model folder, in the run's compute precision.

    Configuration, tokenizer and chat template are those of the initial model. With LoRA the adapters are merged, and
    also written into the folder ``adapter``.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not fit the initial model.
        ValueError: The initial model cannot be loaded, or PEFT is missing.
    """
    tensors = load_checkpoint(checkpoint).learner_state()
    weights = {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    settings = config.get("model", {})
    start = start_model_of(run)
    policy = load_policy(start, dtype=settings.get("dtype", "float32"))
    # The checkpoint holds the adapters' values, whatever they started from.
    of = LoraConfig.model_validate(settings["lora"] | {"start": None}) if settings.get("lora") else None
    if of is not None:
        base = weights_fingerprint(find_model(start))
        if _read_run(run).get("start_weights", base) != base:
            raise CheckpointError(
                f"{checkpoint} holds adapters, and the weights of their base {start} changed since the run started; "
                "restore them"
            )
    lora = None if of is None else LoraAdapters(policy.model, of)
    model = policy.model if lora is None else lora.model
    trained = {name: p for name, p in model.named_parameters() if lora is None or ".lora_" in name}
    if weights.keys() != trained.keys():
        raise CheckpointError(
            f"{checkpoint} does not fit the run's initial model ({len(weights)} tensors for {len(trained)}): the "
            "folder of the initial model now holds another model"
        )
    for name, parameter in trained.items():
        parameter.data.copy_(weights[name])
    if lora is None:
        return save_policy(model, policy.tokenizer, target)
    return save_policy(lora.merged_model(), policy.tokenizer, target, extra_folders={ADAPTER: lora.write})


def _read_run(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{run} is not a run folder (no run.json); pass the --output of magicrl train") from None
    except ValueError as error:
        raise ValueError(f"{run / 'run.json'} is damaged: {error}") from None
