"""Checks that replicas compute with the weights that they serve.

The trainer and each replica compute the logprobs of a few fixed token sequences, the *probe*. The check compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from enginehouse.controller.members import Member, Members
from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.effect import (
    WHOLE,
    Scores,
    mean_difference,
    scored_tokens,
    share_shown,
    share_taken,
    stands_still,
)

log = logging.getLogger(__name__)


class EffectCheck:
    """Compares the logprobs that a replica computes for the probe with the logprobs that the trainer computes for it.

    It also compares how much the logprobs of both have changed since the replica last took weights
    (`enginehouse.weights.effect`).

    Args:
        every: number of updates from one check to the next. The first update of a connection and the first update that
            changes weights are checked too. If a replica cannot read all its weights back, every update that changes
            weights is checked. 0 disables all checks.
        tolerance: largest accepted mean absolute difference between the logprobs of a replica and of the trainer, in
            nats.
        probe: token sequences. Sequences of less than two tokens are left out.

    Attributes:
        reads_all: False if a replica of this connection could not read all its weights back when it last switched.
    """

    def __init__(self, every: int, tolerance: float, probe: Sequence[Sequence[int]]):
        self.every, self._tolerance = every, tolerance
        self.probe = [list(sequence) for sequence in probe if len(sequence) > 1]
        # Scores and checksums of each replica: `_agreed` when it last took weights, `_scored` at the last check. Under
        # the role's name, `_agreed` has the scores of the role's first check.
        self._agreed: dict[Member | str, tuple[Scores, Mapping[str, str]]] = {}
        self._scored: dict[Member, tuple[Scores, Mapping[str, str]]] = {}
        self._least_taken: dict[Member, float] = {}  # by replica
        self.begin_connection()

    @property
    def least_taken(self) -> float | None:
        """Smallest fraction that any replica has shown of a change in the trainer's logprobs; None before a replica was
        judged."""
        return min(self._least_taken.values(), default=None)

    def begin_connection(self) -> None:
        """Start a new connection, whose first update is checked."""
        self._updates, self._change_seen, self.reads_all = 0, False, True

    def note_update(self, changed: bool, checked: bool) -> None:
        """Count a successful update.

        Args:
            changed: as in `is_due`.
            checked: True if the update's effect was checked.
        """
        self._updates += 1
        self._change_seen = self._change_seen or (changed and checked)

    def is_due(self, changed: bool) -> bool:
        """Return True if an update's effect must be checked.

        Args:
            changed: True if the update's weights differ from the served weights.
        """
        if not (self.every and self.probe):
            return False
        return self._updates % self.every == 0 or (changed and not (self.reads_all and self._change_seen))

    def compare(
        self,
        version: int,
        replicas: Members,
        sums: Mapping[str, str],
        expected: Sequence[Sequence[float]],
        scored: Sequence[Sequence[Sequence[float]] | None],
        rounding: float,
    ) -> tuple[float, float | None]:
        """Compare the trainer's logprobs with the logprobs of replicas that serve a version.

        Args:
            sums: checksums of the version's parameters.
            expected: the trainer's logprobs of the probe.
            scored: each replica's logprobs; None for a lost replica.

        Returns:
            The largest mean absolute difference between the logprobs of a replica and of the trainer, and the smallest
            `share_taken` of a replica. The second value is None if no replica was judged.

        Raises:
            WeightSyncError: a replica computes with other weights than it was sent.
        """
        differences, shares = [0.0], []
        for place, rows in enumerate(scored):
            if rows is None:
                continue
            difference = mean_difference(expected, rows)
            if not difference <= self._tolerance:  # a NaN is not within tolerance
                raise WeightSyncError(
                    f"{replicas.name_of(place)} holds the weights of version {version}, but does not compute with "
                    f"them: its logprobs differ from the trainer's by {difference:.4g} nats on average "
                    f"(weights.effect_tolerance is {self._tolerance:g}). So it is not allowed to answer requests."
                )
            differences.append(difference)
            now = Scores(scored_tokens(expected), scored_tokens(rows))
            if (share := self._share_taken(version, replicas, place, now, sums, rounding)) is not None:
                shares.append(share)
        return max(differences), min(shares, default=None)

    def _share_taken(
        self, version: int, replicas: Members, place: int, now: Scores, sums: Mapping[str, str], rounding: float
    ) -> float | None:
        """Return the `share_taken` of a replica since it last took weights.

        A restarted replica is compared with the scores of the first update, because it started with those weights.
        Earlier scores are compared only if their weights had other checksums than `sums`. With equal weights, the
        logprobs of a trainer that is not reproducible change although its weights do not.
        """
        role, key = replicas.name, replicas.members[place]
        agreed = self._agreed.get(key) or self._agreed.get(role)
        if agreed is None:
            self._agreed[role] = self._agreed[key] = self._scored[key] = now, sums
            return None
        earlier = [scores for scores, of_sums in (self._scored.get(key, agreed), agreed) if of_sums != sums]
        still = [scores for scores in earlier if stands_still(scores, now)]
        before = still[0] if still else agreed[0]
        share = 0.0 if still else share_taken(before, now, rounding) if agreed[1] != sums else None
        if share is not None and share < 0.5:
            moved = float(abs(now.trainer - before.trainer).mean())
            raise WeightSyncError(
                f"{replicas.name_of(place)} says that it serves version {version}, but computes as before: the "
                f"trainer's logprobs of {len(now.trainer)} tokens have changed by {moved:.3g} nats on average, and the "
                f"replica shows {share:.0%} of that change. So the replica dropped the update, or a large part of it. "
                "It is not allowed to answer requests."
            )
        self._scored[key] = now, sums
        if share is not None:
            self._agreed[key] = now, sums
            shown, least = share_shown(before, now, rounding), self._least_taken.get(key, 1.0)
            self._least_taken[key] = min(shown, least)
            if shown < WHOLE <= least:
                log.warning(
                    "%s serves version %d, and shows at most %.0f%% of the change in the trainer's logprobs "
                    "of %d tokens: it may drop a part of each update, such as a weight that it never loads "
                    "(metric weights/least_taken)",
                    *(replicas.name_of(place), version, 100 * shown, len(now.trainer)),
                )
        return share


def rounding_of(parameters: Sequence[ParamMeta]) -> float:
    """Return the epsilon of the coarsest floating-point dtype of the weights."""
    import torch

    dtypes = {getattr(torch, parameter.dtype) for parameter in parameters}
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
