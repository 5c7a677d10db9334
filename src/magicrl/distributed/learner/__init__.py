"""The learner over many devices: FSDP2 ranks behind the calls of ``training.protocols.Learner``."""

from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.local_ranks import LocalLauncher
from magicrl.distributed.learner.ranks import Launcher, LearnerLost, RankGroup
from magicrl.distributed.learner.ray_ranks import RayLauncher
from magicrl.distributed.learner.settings import LearnerTimeouts

__all__ = [
    "DistributedLearner",
    "Launcher",
    "LearnerLost",
    "LearnerTimeouts",
    "LocalLauncher",
    "RankGroup",
    "RayLauncher",
]
