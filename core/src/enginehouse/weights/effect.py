"""Judges from the logprobs of a few tokens, the *probe*, whether a replica computes with the weights it was sent.

A dropped update is too small to be seen as a distance: at a learning rate of 1e-6, logprobs of old and new weights
differ less than those of two engines that round differently. So it is looked for as a *change*. With the trainer's
logprobs T and the replica's R, each before and after an update,

    moved = T after - T before,    followed = R after - R before

constant differences between the engines cancel: `followed` is `moved` if the replica took the update, and 0 if it did
not. The replica is nearer to the new weights than to the old ones on tokens where

    |followed - moved| < |followed|

and `share_taken` is the part of the trainer's whole change, the sum of |moved|, on such tokens: near 1 or near 0. This
is the projection of `followed` on `moved`, compared with one half, except that no token counts for more than its own
|moved|: a mixture of experts may send a token elsewhere at any update.

Rounding changes with the weights, and looks like a change. T - R before is at least as large as the rounding. Nothing
is decided until the trainer has moved `CLEARLY` times as far: such rounding turns about a tenth of the tokens, and half
would be needed. Until then `before` stays: the trainer's changes add up, and those of a replica that drops them do not.

One case needs no wait: an engine computes the same from the same weights, to the last bit. A replica with no changed
logprob since the last check, while most of the trainer's changed, has dropped the update (`stands_still`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLEARLY = 4.0
"""Least movement of the trainer's logprobs, in multiples of rounding, before a replica is judged."""

WHOLE = 0.9
"""Fraction of the trainer's change below which there is a warning. A replica that drops a part of each update, such as
the MLP of a layer, shows more than half of the change, and less than a replica that takes all of it."""

TOLERANCES = {"float32": 0.02, "bfloat16": 0.2}
"""By dtype, how far two engines' logprobs may differ on average, in nats. Measured on CPU with random models, which
answer rounding strongly (hidden 256 to 512, 4 to 12 layers, dense and with experts): 0.05 to 0.08 in bfloat16, and less
than 1e-4 in float32; kernels that multiply in TF32 round an eighth as much as in bfloat16."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The probe's logprobs by the same weights, of the trainer and of a replica, each float64 `(tokens,)`."""

    trainer: np.ndarray
    replica: np.ndarray


def scored_tokens(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the logprobs of all tokens, end to end, but for each sequence's first, which has none."""
    return np.array([float(logprob) for row in rows for logprob in row[1:]])


def mean_difference(expected: Sequence[Sequence[float]], scored: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference of `scored_tokens`; NaN if the lengths of the rows differ."""
    if [len(row) for row in expected] != [len(row) for row in scored]:
        return float("nan")
    return float(np.abs(scored_tokens(expected) - scored_tokens(scored)).mean())


def stands_still(last: Scores, now: Scores) -> bool:
    """Return True if no logprob of a replica has changed, while most of the trainer's have: it dropped the update.

    Args:
        last: scores at the last check.
        now: scores by other weights. A trainer that is not reproducible moves by the same weights too.
    """
    moved = np.count_nonzero(now.trainer != last.trainer)
    return bool(2 * moved >= len(now.trainer) and np.array_equal(now.replica, last.replica))


def share_taken(before: Scores, after: Scores, rounding: float) -> float | None:
    """Return how much of the trainer's change a replica shows, 0 to 1; less than half means a dropped update.

    Args:
        before: scores when both were last seen to have the same weights.
        after: scores by other weights.
        rounding: least rounding to assume, in nats a token: the dtype's epsilon.

    Returns:
        None if the change is still too small to be distinguished from rounding.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    if far.sum() <= CLEARLY * _bound_noise(before, rounding):
        return None
    return float(far[np.abs(followed - moved) < np.abs(followed)].sum() / far.sum())


def share_shown(before: Scores, after: Scores, rounding: float) -> float:
    """Return the most of the trainer's change that a replica can have taken, 0 to 1, if `share_taken` judges it.

    A token's change counts as far as the replica shows it, while `share_taken` counts it whole from one half on; the
    change that rounding may have hidden is added. For the arguments see `share_taken`.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    shown = np.clip(followed * np.sign(moved), 0.0, far).sum() + _bound_noise(before, rounding)
    return float(min(shown / far.sum(), 1.0))


def _bound_noise(before: Scores, rounding: float) -> float:
    return float(max(np.abs(before.trainer - before.replica).sum(), rounding * len(before.trainer)))
