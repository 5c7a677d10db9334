"""Verdicts to rewards: the only place where a verifier's fact becomes a number to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magicrl.records import FinishReason, Outcome, RolloutGroup, ScoredGroup, Verdict, frozen_floats


def score_group(group: RolloutGroup, verdicts: Sequence[Verdict]) -> ScoredGroup:
    """Attach verdicts and binary rewards to a group (recipe, section 2).

    A completion scores 1 when it is correct and ended by itself; one cut at T scores 0 whatever the
    verifier says of its text. A completion that was not judged, or that was aborted before its end, is not
    counted: it takes no part in the group's statistics and must not become a training sample.

    Args:
        group: the rollouts, ``G`` completions.
        verdicts: ``G`` verdicts in the same order.

    Raises:
        ValueError: the numbers of completions and verdicts differ (a verifier lost an item).
    """
    if len(verdicts) != len(group.completions):
        raise ValueError(
            f"draw {group.request.draw}: {len(group.completions)} completions but {len(verdicts)} verdicts; "
            "a verifier must answer every item once, in order"
        )
    counted = np.array(
        [
            verdict.outcome is not Outcome.NOT_JUDGED and completion.finish_reason is not FinishReason.ABORTED
            for completion, verdict in zip(group.completions, verdicts, strict=True)
        ],
        dtype=np.bool_,
    )
    correct = np.array(
        [
            verdict.correct and not completion.truncated
            for completion, verdict in zip(group.completions, verdicts, strict=True)
        ],
        dtype=np.bool_,
    )
    counted.flags.writeable = False
    return ScoredGroup(
        group=group,
        verdicts=tuple(verdicts),
        rewards=frozen_floats((correct & counted).astype(np.float32)),
        counted=counted,
    )
