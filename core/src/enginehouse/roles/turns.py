"""Actor and rollout on the same devices, in turns (`rollout.placement: shared`). Where none are, nothing is done.

What lies on the devices in each turn:

* *drawing*: the rollout is awake, and the training roles' state is in host memory;
* *training*: the training roles' state is there, and the rollout sleeps, without weights and caches.

A step begins in the first and goes over to the second by `train`. It comes back by the weight update, in which both
sides hold their weights and nothing else: `wake_weights` and `hand_over` are parts of it.

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


class Turns:
    """Who has the devices. All but `catch_up` is called by the loop's thread.

    Args:
        training: the workers that give way, by role; none where nothing is shared.
        rollout: the replicas that do; None where nothing is shared.
    """

    _sync: WeightSync

    def __init__(self, training: Mapping[str, WorkerGroup], rollout: RolloutFleet | None):
        self._training, self._rollout = training, rollout
        self._drawing = False  # whose turn it is: the training roles', which are started first
        self._metrics: dict[str, float] = {}

    @classmethod
    def of(
        cls, roles: Mapping[str, RolePlan], groups: Mapping[str, WorkerGroup], fleets: Mapping[str, RolloutFleet]
    ) -> Turns:
        """Those of a plan's roles, given what plays them."""
        for name, role in roles.items():
            if (host := role.devices_of) is not None:
                there = {one: group for one, group in groups.items() if host in (one, roles[one].shares)}
                return cls(there, fleets[name])
        return cls({}, None)

    def start(self) -> None:
        """Have the rollout's engines started while the devices are free. Then it is the training roles' turn."""
        if self._rollout is not None:
            self._offload()
            self._rollout.launch()
            self._drawing = True
            self.train()

    def have_part_in(self, sync: WeightSync) -> None:
        """Hand over within its updates, and when it brings weights to a replica that came back."""
        self._sync = sync
        if self._rollout is not None:
            sync.make_room, sync.hand_over = self.wake_weights, self.hand_over
            self._rollout.catch_up = self.catch_up

    @property
    def taken(self) -> bool:
        """True if devices are shared, so that state may have to wait for the rollout."""
        return self._rollout is not None

    # The turns of a step

    def train(self) -> None:
        """Have the rollout sleep, and bring the training roles' state back, unless it is their turn."""
        if self._rollout is not None and self._drawing:
            self._rollout.allow_launches(False)
            self._sleep(ALL)
            self._drawing = False
            self._onload()

    def wake_weights(self) -> None:
        """Before a weight update: leave nothing but weights on the devices, of both sides.

        Raises:
            ReplicasLost: no replica lives, or comes back.
        """
        if self._rollout is None:
            return
        self.train()
        self._offload(("grads", "optimizer"))
        self._wake_up(WEIGHTS)
        if not self._rollout.lives:
            self._start_engines()
        self._rollout.allow_launches(False, alone=True)  # beside weights alone, if all of them die in the update

    def _start_engines(self) -> None:
        """Where no replica lives in the training roles' turn: have one start its engine, on devices that are free."""
        assert self._rollout is not None
        self._offload(PARAMS)
        self._rollout.allow_launches(True)
        self._rollout.members()
        self._rollout.allow_launches(False)
        self._sleep(ALL)
        self._onload(PARAMS)
        self._wake_up(WEIGHTS)

    def hand_over(self) -> None:
        """Within a weight update, once the trainer is not needed any more: it is the rollout's turn."""
        if self._rollout is not None:
            self._offload()
            self._wake_up(CACHE)
            self._drawing = True
            self._rollout.allow_launches(True)

    # What comes between

    @contextmanager
    def on_devices(self, tags: tuple[str, ...] = ALL) -> Iterator[None]:
        """Within, state of the training roles is on the devices, whoever's turn it is: the rollout keeps its weights
        and lets go of its caches. What it draws ends first, and what else it is asked for waits.

        Args:
            tags: which state; see `OffloadsState`.
        """
        if self._rollout is None or not self._drawing:
            yield
            return
        self._rollout.allow_launches(False)
        self._sleep(CACHE)
        self._onload(tags)
        yield
        self.hand_over()

    def end(self, until: float | None = None) -> None:
        """The run ends because of an error, in whatever turn, or within one: bring the training roles' state back, to
        be saved. May be called again.

        Args:
            until: no longer than then, by `time.monotonic()`; None: each call has its own limit.
        """
        if self._rollout is None:
            return

        def let_go() -> None:
            assert self._rollout is not None
            self._rollout.abort(seconds_left(until))
            self._rollout.allow_launches(False, until)
            self._sleep(ALL, seconds_left(until))

        for free in (let_go, lambda: self._onload(timeout=seconds_left(until))):
            try:
                free()
            except ControllerError as error:  # what ended the run may be just that
                log.info("at the end of the run: %s", first_line(error))

    def catch_up(self, returned: Members) -> None:
        """Bring the weights that are served to replicas that came back, where nobody else draws; as
        `WeightSync.catch_up`, in another thread.

        Raises:
            WeightSyncError: others draw, with caches where the actor's weights would lie; or it failed.
        """
        assert self._rollout is not None
        with self._sync.trainer_in_use():
            if self._rollout.serves:
                raise WeightSyncError("others draw meanwhile, on the devices that the actor's weights would need")
            try:
                with self.on_devices(PARAMS):
                    self._sync.catch_up(returned)
            except Exception:  # the run goes on, and it is still the rollout's turn
                self.hand_over()
                raise

    def metrics(self) -> dict[str, float]:
        """Figures since they were last asked for: `time/turns`, seconds of going over from one turn to the other; and
        `turns/ROLE/freed_mib`, the most that the role's processes gave back at once, together, where it can be told."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    # Calls

    def _offload(self, tags: tuple[str, ...] = ALL) -> None:
        with self._timed():
            for name, group in self._training.items():
                self._note_freed(name, group.call("offload", tags))

    def _onload(self, tags: tuple[str, ...] = ALL, timeout: float | None = None) -> None:
        with self._timed():
            for group in self._training.values():
                group.call("onload", tags, timeout=timeout)

    def _sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> None:
        assert self._rollout is not None
        with self._timed():
            self._note_freed(self._rollout.name, self._rollout.sleep(tags, timeout))

    def _wake_up(self, tags: tuple[str, ...]) -> None:
        assert self._rollout is not None
        with self._timed():
            self._rollout.wake_up(tags)

    def _note_freed(self, role: str, each: list[int | None]) -> None:
        name, mib = f"turns/{role}/freed_mib", sum(nbytes or 0 for nbytes in each) / 2**20
        if any(nbytes is not None for nbytes in each):
            self._metrics[name] = max(self._metrics.get(name, 0.0), mib)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._metrics["time/turns"] = self._metrics.get("time/turns", 0.0) + time.monotonic() - begun
