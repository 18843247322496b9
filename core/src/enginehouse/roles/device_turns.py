"""Lets actor and rollout take turns on the same devices (`rollout.placement: shared`). It does nothing in other
placements.

State on the devices in each turn:

* the rollout's turn: the rollout is awake, and the state of the training roles is in host memory;
* the training roles' turn: their state is on the devices, and the rollout sleeps, without weights and caches.

A step begins in the rollout's turn, and `train` begins the training roles' turn. The weight update ends that turn.
During the update, both sides hold only their weights on the devices, and the actor scores a few tokens, to check the
update's effect. `wake_weights` and `hand_over` are parts of the update.

    generate | sleep, onload | score, update | wake weights, sync, offload, wake cache | generate
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginehouse.controller.deadlines import seconds_left
from enginehouse.controller.errors import ControllerError
from enginehouse.engines.train import ALL
from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import first_line

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup
    from enginehouse.controller.members import Members
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse.roles.role_plan import RolePlan
    from enginehouse.weights.sync import WeightSync

log = logging.getLogger(__name__)

PARAMS = ("params",)
WEIGHTS, CACHE = ("weights",), ("kv_cache",)


class DeviceTurns:
    """Turns of training roles and rollout on devices. The loop's thread calls all methods but `catch_up`.

    Args:
        training: workers of the training roles on the devices, by role; empty if no device is shared.
        rollout: the rollout on the devices; None if no device is shared.
    """

    _sync: WeightSync

    def __init__(self, training: Mapping[str, WorkerGroup], rollout: RolloutFleet | None):
        self._training, self._rollout = training, rollout
        self._drawing = False  # the training roles start first, and have the first turn
        self._metrics: dict[str, float] = {}

    @classmethod
    def from_roles(
        cls, roles: Mapping[str, RolePlan], groups: Mapping[str, WorkerGroup], fleets: Mapping[str, RolloutFleet]
    ) -> DeviceTurns:
        """Return the turns of a plan's roles, from their groups and fleets."""
        for name, role in roles.items():
            if (host := role.devices_of) is not None:
                training = {each: group for each, group in groups.items() if host in (each, roles[each].shares)}
                return cls(training, fleets[name])
        return cls({}, None)

    def start(self) -> None:
        """Start the rollout's engines on free devices, then begin the training roles' turn."""
        if self.is_shared:
            self._offload()
            self._fleet.launch()
            self._drawing = True
            self.train()

    def take_part(self, sync: WeightSync) -> None:
        """Let `sync` change turns during weight updates, and let the fleet change turns when restarted replicas get
        weights."""
        self._sync = sync
        if self.is_shared:
            sync.make_room, sync.hand_over = self.wake_weights, self.hand_over
            self._fleet.catch_up = self.catch_up

    @property
    def is_shared(self) -> bool:
        """True if devices are shared."""
        return self._rollout is not None

    @property
    def _fleet(self) -> RolloutFleet:
        assert self._rollout is not None
        return self._rollout

    def train(self) -> None:
        """Begin the training roles' turn: let the rollout sleep, and load the training roles' state."""
        if self.is_shared and self._drawing:
            self._fleet.allow_launches(False)
            self._sleep(ALL)
            self._drawing = False
            self._onload()

    def wake_weights(self) -> None:
        """Keep only the weights of both sides on the devices, for a weight update. Raises `ReplicasLost` if no replica
        lives, and none is being restarted."""
        if not self.is_shared:
            return
        self.train()
        self._offload(("grads", "optimizer"))
        self._wake_up(WEIGHTS)
        if not self._fleet.has_living:
            self._start_engine()
        self._fleet.allow_launches(False, alone=True)  # one may start beside weights if none lives

    def _start_engine(self) -> None:
        """Let a replica start its engine on free devices, because no replica lives in the training roles' turn."""
        self._offload(PARAMS)
        self._fleet.allow_launches(True)
        self._fleet.members()
        self._fleet.allow_launches(False)
        self._sleep(ALL)
        self._onload(PARAMS)
        self._wake_up(WEIGHTS)

    def hand_over(self) -> None:
        """Begin the rollout's turn, once a weight update does not need the trainer any more."""
        if self.is_shared:
            self._offload()
            self._wake_up(CACHE)
            self._drawing = True
            self._fleet.allow_launches(True)

    @contextmanager
    def on_devices(self, tags: tuple[str, ...] = ALL) -> Iterator[None]:
        """Hold state of the training roles on the devices within the context, in any turn.

        The rollout keeps its weights and frees its caches. Requests in progress end first, and new requests wait.

        Args:
            tags: kinds of state; see `OffloadsState`.
        """
        if not (self.is_shared and self._drawing):
            yield
            return
        self._fleet.allow_launches(False)
        self._sleep(CACHE)
        self._onload(tags)
        yield
        self.hand_over()

    def end(self, until: float | None = None) -> None:
        """Load the training roles' state, to save it after an error in any turn. May be called again.

        Args:
            until: end of all waits, by `time.monotonic()`; None: each call has its own limit.
        """
        if self._rollout is None:
            return

        def free_devices() -> None:
            self._fleet.abort(seconds_left(until))
            self._fleet.allow_launches(False, until)
            self._sleep(ALL, seconds_left(until))

        for bring_back in (free_devices, lambda: self._onload(timeout=seconds_left(until))):
            try:
                bring_back()
            except ControllerError as error:  # this error may have ended the run
                log.info("at the end of the run: %s", first_line(error))

    def catch_up(self, returned: Members) -> None:
        """Send the served weights to restarted replicas, as `WeightSync.catch_up` does. Runs in another thread. Raises
        `WeightSyncError` if the update failed, or if other replicas generate, because their caches then use the memory
        that the actor's weights need."""
        with self._sync.trainer_in_use():
            if self._fleet.has_serving:
                raise WeightSyncError("other replicas generate now, and use the memory that the actor's weights need")
            try:
                with self.on_devices(PARAMS):
                    self._sync.catch_up(returned)
            except Exception:  # the run continues in the rollout's turn
                self.hand_over()
                raise

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. `time/turns` is the total time of all changes of turn in seconds.
        `turns/ROLE/freed_mib` is the most memory that one offload or sleep freed, summed over the role's processes."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _offload(self, tags: tuple[str, ...] = ALL) -> None:
        with self._timed():
            for name, group in self._training.items():
                self._note_freed(name, group.call("offload", tags))

    def _onload(self, tags: tuple[str, ...] = ALL, timeout: float | None = None) -> None:
        with self._timed():
            for group in self._training.values():
                group.call("onload", tags, timeout=timeout)

    def _sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> None:
        with self._timed():
            self._note_freed(self._fleet.name, self._fleet.sleep(tags, timeout))

    def _wake_up(self, tags: tuple[str, ...]) -> None:
        with self._timed():
            self._fleet.wake_up(tags)

    def _note_freed(self, role: str, freed: list[int | None]) -> None:
        name, mib = f"turns/{role}/freed_mib", sum(nbytes or 0 for nbytes in freed) / 2**20
        if any(nbytes is not None for nbytes in freed):
            self._metrics[name] = max(self._metrics.get(name, 0.0), mib)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._metrics["time/turns"] = self._metrics.get("time/turns", 0.0) + time.monotonic() - begun
