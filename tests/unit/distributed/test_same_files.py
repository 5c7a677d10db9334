"""Files that decide results: a node that has other ones than the process of the run is refused by name."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from builders import problem

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.schema import TrainConfig
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.distributed.cluster_parts import make_replica_engine
from magicrl.distributed.learner.launchers import RankGroup, answer_call
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.distributed.same_files import Digests, check_digests, digests_of
from magicrl.distributed.verifier_nodes import JudgeActor
from magicrl.models.loading import load_shell
from magicrl.training.objective import LearnerSettings


class EditedBefore(RankGroup):
    """Two ranks of this process. A file is edited before the second one looks at its files."""

    def __init__(self, edit: Callable[[], object]) -> None:
        self._grace, self._edit, self._ranks = 0.0, edit, [LearnerRank("a"), LearnerRank("b")]

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        return self

    def stop(self) -> None:
        pass

    def _send(self, process: int, method: str, arguments: tuple[Any, ...]) -> Any:
        assert method == "check_files", "before anything else"
        if process == 1:
            self._edit()
        return answer_call(self._ranks[process], method, arguments), process

    def _ready(self, calls: list[Any], seconds: float) -> Any:
        return calls

    def _receive(self, process: int, call: Any) -> Any:
        return call[0]


@pytest.fixture
def model(start_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(start_model, tmp_path / "model"))


def refused(name: object) -> str:
    return rf"{name} on node {socket.gethostname()} is another one \(SHA-256 \w{{8}}\) than that of the run"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_with_another_file_is_another_one(model: Path, file: str) -> None:
    digests = digests_of(["maths", "module:reward"], [str(model)])
    check_digests(digests)
    (model / file).write_bytes((model / file).read_bytes() + b" ")
    with pytest.raises(ValueError, match=refused(model)):
        check_digests(digests)
    shutil.rmtree(model)
    with pytest.raises(ValueError, match=r"cannot be read \(.*copy the run's files to every node"):
        check_digests(digests)


@pytest.mark.parametrize("part", ["loss", "model"])
def test_ranks_that_read_other_files_do_not_start(model: Path, tmp_path: Path, part: str) -> None:
    row = tmp_path / "row.py"
    row.write_text("from magicrl.algorithms.losses import LOSSES\n\nROW = LOSSES['grpo']\n")
    edited = {"loss": row, "model": model / "config.json"}[part]
    group = EditedBefore(lambda: edited.write_text(edited.read_text() + "\n"))
    learning = LearnerSettings(algorithm=AlgorithmConfig.model_validate({"loss": f"{row}:ROW"}))
    with pytest.raises(ValueError, match=refused(f"{row}:ROW" if part == "loss" else model)):
        DistributedLearner(load_shell(model), learning, launcher=group, placement=LearnerPlacement(ranks=2))


def test_a_node_with_another_reward_judges_nothing(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(problem, response):\n    return 1.0\n")
    name, actor = f"{file}:score", JudgeActor(VerifierConfig(workers=1))
    digests = digests_of([name])
    file.write_text("def score(problem, response):\n    return 0.0\n")
    with pytest.raises(ValueError, match=refused(name)):
        actor.warm_up((name,), digests)
    with pytest.raises(ValueError, match=refused(name)):
        actor.judge(problem(verifier=name), "1", digests)


def test_a_replica_of_another_model_does_not_start(make_recipe: Callable[..., TrainConfig], model: Path) -> None:
    digests: Digests = ((str(model), "another"),)
    with pytest.raises(ValueError, match=refused(model)):
        make_replica_engine(make_recipe({}), str(model), 1, digests)
