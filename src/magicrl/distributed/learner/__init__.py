"""The learner over many devices: FSDP2 ranks behind the calls of ``training.protocols.Learner``."""

from magicrl.distributed.learner.launchers import Launcher, LearnerLost, LocalLauncher, RankGroup, RayLauncher
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.sharding import LearnerTimeouts

__all__ = [
    "DistributedLearner",
    "Launcher",
    "LearnerLost",
    "LearnerTimeouts",
    "LocalLauncher",
    "RankGroup",
    "RayLauncher",
]
