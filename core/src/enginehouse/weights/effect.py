"""Decides from the logprobs of a few tokens, the *probe*, if a replica computes with the weights that it was sent.

A dropped update is too small to be measured as a difference of logprobs. At a learning rate of 1e-6, the logprobs of
old and new weights differ less than the logprobs of two engines that round differently. So the check looks for a
*change*. It takes the trainer's logprobs T and the replica's logprobs R, each before and after an update:

    moved = T after - T before,    followed = R after - R before

Constant differences between the engines cancel. `followed` equals `moved` if the replica took the update, and is 0 if
the replica dropped it. The replica is nearer to the new weights than to the old weights on tokens where

    |followed - moved| < |followed|

`share_taken` sums |moved| over these tokens, and divides by the sum of |moved| over all tokens. The result is near 1 or
near 0. A projection of `followed` on `moved` would decide in the same way, but a single token could outweigh all
others, because a mixture of experts may route a token elsewhere at any update. Here no token counts for more than its
own |moved|.

Rounding errors change with the weights, and look like a change of the logprobs. They are at most as large as T - R
before the update. The check decides nothing until the trainer's change is `CLEARLY` times as large as the rounding
errors. Rounding then misjudges about a tenth of the tokens, but a wrong decision would need half of them. Until then
the check keeps the scores `before`. The trainer's changes add up over several updates, but the logprobs of a replica
that drops updates do not change.

One case is decided at once (`stands_still`), because an engine computes bitwise equal logprobs from equal weights. A
replica has dropped the update if none of its logprobs changed since the last check, while most of the trainer's
logprobs did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLEARLY = 4.0
"""Smallest change of the trainer's logprobs at which a replica is judged, as a multiple of the rounding errors."""

WHOLE = 0.9
"""Fraction of the trainer's change below which a warning is logged. A replica that drops a part of each update, such as
the MLP of a layer, shows more than half of the change, but less than a replica that takes the whole update."""

TOLERANCES = {"float32": 0.02, "bfloat16": 0.2}
"""Largest accepted mean difference between the logprobs of two engines, in nats, by dtype. The measured differences
were 0.05 to 0.08 in bfloat16, and less than 1e-4 in float32, on CPU with random models, which are sensitive to rounding
(hidden 256 to 512, 4 to 12 layers, dense and with experts). Kernels that multiply in TF32 round an eighth as much as in
bfloat16."""

QUANTIZED_TOLERANCE = 1.5
"""As `TOLERANCES`, for an engine that serves the weights and activations of linear layers in 8 bits. The measured
differences were ten times as large as in bfloat16: 0.3 to 0.9 nats with the same random models. Models with other
random weights were 2.5 nats apart."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs that the trainer and a replica compute for the probe with the same weights, float64 `(tokens,)`."""

    trainer: np.ndarray
    replica: np.ndarray


def scored_tokens(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the logprobs of all sequences, concatenated, without the first token of each, which has no logprob."""
    return np.array([float(logprob) for row in rows for logprob in row[1:]])


def mean_difference(expected: Sequence[Sequence[float]], scored: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference of `scored_tokens`; NaN if the lengths of the rows differ."""
    if [len(row) for row in expected] != [len(row) for row in scored]:
        return float("nan")
    return float(np.abs(scored_tokens(expected) - scored_tokens(scored)).mean())


def stands_still(last: Scores, now: Scores) -> bool:
    """Return True if no logprob of a replica has changed, although most of the trainer's logprobs have changed. The
    replica has then dropped the update.

    Args:
        now: scores with other weights than `last`. Scores with the same weights decide nothing, because a trainer that
            is not reproducible may then have other logprobs too.
    """
    moved = np.count_nonzero(now.trainer != last.trainer)
    return bool(2 * moved >= len(now.trainer) and np.array_equal(now.replica, last.replica))


def share_taken(before: Scores, after: Scores, rounding: float) -> float | None:
    """Return the fraction of the trainer's change that a replica shows. Less than half means a dropped update.

    Args:
        before: scores at the time when the trainer and the replica last had the same weights.
        after: scores after one or several later updates.
        rounding: smallest rounding error to assume, in nats per token: the epsilon of the dtype.

    Returns:
        A number from 0 to 1, or None if the change is still too small to be distinguished from rounding.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    if far.sum() <= CLEARLY * _bound_noise(before, rounding):
        return None
    return float(far[np.abs(followed - moved) < np.abs(followed)].sum() / far.sum())


def share_shown(before: Scores, after: Scores, rounding: float) -> float:
    """Return the largest fraction of the trainer's change that a replica can have taken, 0 to 1.

    Call this function only if `share_taken`, which explains the arguments, is not None. A token counts with the amount
    of change that the replica shows, and not, as in `share_taken`, with all of its change or none. Change that rounding
    may have hidden is added.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    shown = np.clip(followed * np.sign(moved), 0.0, far).sum() + _bound_noise(before, rounding)
    return float(min(shown / far.sum(), 1.0))


def _bound_noise(before: Scores, rounding: float) -> float:
    return float(max(np.abs(before.trainer - before.replica).sum(), rounding * len(before.trainer)))
