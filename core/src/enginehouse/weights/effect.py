"""Whether a replica computes with the weights it was sent, by the logprobs of a few tokens (the *probe*) alone.

Bytes and version are what an engine is told; what it computes with is seen in its logprobs. A dropped update is too
small to be seen as a distance: at a learning rate of 1e-6 the logprobs of old and new weights are closer to each other
than two engines that round differently are. So it is looked for as a *change*. With the trainer's logprobs T and the
replica's R, each before and after an update,

    moved = T after - T before,    followed = R after - R before

what sets the two engines apart without changing is in neither, and `followed` is `moved` where the replica took the
update, and 0 where it did not. For a token the replica is nearer to the new weights than to the old ones where

    |followed - moved| < |followed|

and `share_taken` is the part of the trainer's whole change, the sum of |moved|, that lies on such tokens: near 1 or
near 0. It is the projection of `followed` on `moved`, held against one half, but for one thing: no single token, of
which a mixture of experts may send one elsewhere at any update, counts for more than its own |moved|.

Rounding is not the same before and after, as weights are not, and looks like a change. How much of it there is shows in
T - R before, which is all of it and what sets the engines apart besides. Nothing is decided before the trainer has
moved `CLEARLY` times as far: then rounding as large as that turns about a tenth of the tokens, and it takes half. Until
then `before` stays what it is, so that the change adds up over updates and that of a replica which drops them does not.

One thing needs no such wait: an engine computes the same from the same weights, to the last bit, and not from others.
A replica none of whose logprobs has changed at all since it was last looked at, while most of the trainer's have, has
dropped the update (`stands_still`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CLEARLY = 4.0
"""How many times as far as rounding the trainer's logprobs must have moved for a replica to be judged by it."""

WHOLE = 0.9
"""Share of the trainer's change below which a replica is warned of: one that drops a part of each update, as a layer's
MLP, shows more than half of the change, and less of it than one that takes all."""

TOLERANCES = {"float32": 0.02, "bfloat16": 0.2}
"""By dtype, how far two engines' logprobs may be apart on average, in nats. On CPU two ways of computing in bfloat16
were 0.05 to 0.08 apart, of random models, which answer rounding strongly (hidden 256 to 512, 4 to 12 layers; dense and
with experts), and in float32 less than 1e-4; kernels that multiply in TF32 round an eighth as much as in bfloat16."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The probe's logprobs by the same weights, float64 `(tokens,)`.

    Attributes:
        trainer: the trainer's.
        replica: a replica's.
    """

    trainer: np.ndarray
    replica: np.ndarray


def scored_tokens(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """The logprobs of all tokens but each sequence's first, which has none, end to end."""
    return np.array([float(one) for row in rows for one in row[1:]])


def mean_difference(expected: Sequence[Sequence[float]], scored: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference of logprobs over all tokens but each sequence's first, which has none.

    NaN where the two are not of the same lengths.
    """
    if [len(row) for row in expected] != [len(row) for row in scored]:
        return float("nan")
    return float(np.abs(scored_tokens(expected) - scored_tokens(scored)).mean())


def stands_still(last: Scores, now: Scores) -> bool:
    """Whether no logprob of a replica has changed at all, while most of the trainer's have: it dropped the update.

    Args:
        last: when it was last looked at.
        now: by other weights. A trainer that is not reproducible moves by the same weights too.
    """
    moved = np.count_nonzero(now.trainer != last.trainer)
    return bool(2 * moved >= len(now.trainer) and np.array_equal(now.replica, last.replica))


def share_taken(before: Scores, after: Scores, rounding: float) -> float | None:
    """How much of the trainer's change a replica shows, 0 to 1: less than one half says that it dropped an update.

    Args:
        before: when both were last seen to have the same weights.
        after: now, by other weights.
        rounding: the least that rounding is taken for, in nats a token: the dtype's epsilon.

    Returns:
        None where the change is too small, so far, to be told from rounding.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    if far.sum() <= CLEARLY * _noise(before, rounding):
        return None
    return float(far[np.abs(followed - moved) < np.abs(followed)].sum() / far.sum())


def share_shown(before: Scores, after: Scores, rounding: float) -> float:
    """Return the most of the trainer's change that a replica can have taken, 0 to 1, where `share_taken` judges it.

    A token's change counts as far as the replica shows it, where `share_taken` counts it whole from one half on; what
    rounding may have hidden is added. Arguments as of `share_taken`.
    """
    moved, followed = after.trainer - before.trainer, after.replica - before.replica
    far = np.abs(moved)
    shown = np.clip(followed * np.sign(moved), 0.0, far).sum() + _noise(before, rounding)
    return float(min(shown / far.sum(), 1.0))


def _noise(before: Scores, rounding: float) -> float:
    return float(max(np.abs(before.trainer - before.replica).sum(), rounding * len(before.trainer)))
