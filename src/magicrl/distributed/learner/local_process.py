"""A rank's process on this machine: ``python -m magicrl.distributed.learner.local_process FD RANK``."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

from magicrl.distributed.learner.rank import LearnerRank
from magicrl.distributed.learner.ranks import answered


def main(descriptor: int, rank: int) -> None:
    """Answer calls until the driver closes the pipe or is gone."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    target = LearnerRank(rank)
    while True:
        try:
            method, arguments = pipe.recv()
            pipe.send(answered(target, method, arguments))
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:3]))
