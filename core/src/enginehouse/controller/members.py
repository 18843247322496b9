"""Processes that are called together: replicas, or the ranks of one group.

If one rank of a group dies, the whole group breaks (`GroupRanks`). Each replica has its own group, so that the other
replicas continue if one fails (`Members`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from enginehouse.controller.errors import GroupClosed
from enginehouse.controller.future import Future, StillRunning, iterate_ended
from enginehouse.controller.group import WorkerGroup
from enginehouse.engines.weights import WeightUpdateAborted


@dataclass(frozen=True, slots=True)
class Member:
    """One process, from its start to its end.

    A restart of a replica makes a new member. A restart of a group's ranks does not.

    Attributes:
        number: number of the replica.
        incarnation: number of the replica's process, from 0.
        group: group of the replica, which a restart keeps.
    """

    number: int
    incarnation: int
    group: WorkerGroup


class Members:
    """The processes of some replicas at one moment. If a replica is lost or restarted later, its process here no longer
    answers.

    Args:
        name: the role, for messages.
        members: the processes. Two `Members` with the same processes are equal.
        is_lost: function that returns True for a lost member. It gets the member and the error of a failed call, or
            None.
    """

    def __init__(self, name: str, members: Sequence[Member], is_lost: Callable[[Member, Exception | None], bool]):
        self.name = name
        self.members = tuple(members)
        self._is_lost = is_lost

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and self.members == other.members

    def __hash__(self) -> int:
        return hash(self.members)

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def nodes(self) -> list[str]:
        """Node addresses, in the order of the members."""
        return [member.group.nodes[0] for member in self.members]

    @property
    def lost(self) -> list[Member]:
        return [member for member in self.members if self._is_lost(member, None)]

    def name_of(self, place: int) -> str:
        """Return the name, for messages, of the member at index `place`."""
        return f"{self.name} replica {self.members[place].number}"

    def call(
        self, method: str, *args: Any, timeout: float | None = None, leave_out_lost: bool = False, **kwargs: Any
    ) -> Future | Gathered:
        """Call a method, registered with the mode `one_to_all`, on each member without waiting.

        Args:
            timeout: deadline in seconds.
            leave_out_lost: return None for a lost member instead of raising. Even so, the call raises if all members
                are lost.
            kwargs: arguments of the method, and `patient` of `WorkerGroup.call`.
        """
        return self._call_each(method, [args] * len(self.members), timeout, leave_out_lost, **kwargs)

    def call_placed(self, method: str, *args: Any, timeout: float | None = None) -> Future | Gathered:
        """Call a method with an additional last argument: the index of the member among the members."""
        return self._call_each(method, [(*args, place) for place in range(len(self.members))], timeout)

    def _call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        timeout: float | None = None,
        leave_out_lost: bool = False,
        **kwargs: Any,
    ) -> Gathered:
        calls: list[Future | Exception] = []
        for member, own_args in zip(self.members, args, strict=True):
            if self._is_lost(member, None):
                why = f"{member.group.name} was lost"
                calls.append(GroupClosed(f"{member.group.name}.{method} cannot be called: {why}", why))
                continue
            try:
                calls.append(member.group.call(method, *own_args, timeout=timeout, blocking=False, **kwargs))
            except Exception as error:
                calls.append(error)
        return Gathered(self.members, calls, self._is_lost, leave_out_lost)


class GroupRanks(Members):
    """The ranks of one group. All ranks end together, so no rank is ever reported as lost while others live."""

    def __init__(self, group: WorkerGroup):
        ranks = [Member(rank, 0, group) for rank in range(group.world_size)]
        super().__init__(group.name, ranks, lambda member, error: False)
        self._group = group

    @property
    def nodes(self) -> list[str]:
        return self._group.nodes

    def call(
        self, method: str, *args: Any, timeout: float | None = None, leave_out_lost: bool = False, **kwargs: Any
    ) -> Future | Gathered:
        """Call a method of any mode."""
        return self._group.call(method, *args, timeout=timeout, blocking=False, **kwargs)

    def call_placed(self, method: str, *args: Any, timeout: float | None = None) -> Future | Gathered:
        """Call a method without the additional argument, because the index of a rank is the rank itself."""
        return self.call(method, *args, timeout=timeout)


class Gathered:
    """A call that was sent to several members. It behaves like a `Future`, and `Members` creates it.

    The result of the call is the list of the members' results, in the order of the members.
    """

    def __init__(
        self,
        members: Sequence[Member],
        calls: Sequence[Future | Exception],
        is_lost: Callable[[Member, Exception | None], bool],
        leave_out_lost: bool,
    ):
        self._members = members
        self._calls = list(calls)
        self._is_lost = is_lost
        self._leave_out_lost = leave_out_lost
        self._values: dict[int, Any] = {}
        self._aborted: Exception | None = None  # an error that another error caused
        self._last_lost: Exception | None = None

    @property
    def calls(self) -> tuple[Future, ...]:
        return tuple(call for call in self._calls if isinstance(call, Future))

    def done(self) -> bool:
        return all(call.done() for call in self.calls)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all members. An error of one call is raised at once, even if other calls still run.

        Raises:
            StillRunning: `timeout` seconds passed.
            WorkerError: a call failed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        places = {call: index for index, call in enumerate(self._calls) if isinstance(call, Future)}
        for index, call in enumerate(self._calls):
            if index not in self._values and (isinstance(call, Exception) or call.done()):
                with suppress(StillRunning):  # the call has ended, but its value has not arrived
                    self._settle(index, until)
        pending = [call for call in self.calls if places[call] not in self._values]
        if pending and timeout is not None and timeout <= 0:
            raise StillRunning(f"the call still runs at {self._members[places[pending[0]]].group.name}")
        for call in iterate_ended(pending, None if until is None else max(until - time.monotonic(), 0.0)):
            self._settle(places[call], until)
        return self._collected()

    def _settle(self, index: int, until: float | None) -> None:
        """Store a call's result, or raise its error unless the member may be left out."""
        call = self._calls[index]
        try:
            if isinstance(call, Exception):
                raise call
            (self._values[index],) = call.result(None if until is None else max(until - time.monotonic(), 0.0))
        except StillRunning:
            raise
        except Exception as error:
            lost = self._is_lost(self._members[index], error)
            if isinstance(getattr(error, "cause", error), WeightUpdateAborted):
                self._aborted = error
            elif lost and self._leave_out_lost:
                self._last_lost = error
            else:
                raise
            self._values[index] = None

    def _collected(self) -> list[Any]:
        if self._aborted is not None:
            raise self._aborted
        if self._last_lost is not None and all(self._is_lost(member, None) for member in self._members):
            raise self._last_lost
        return [self._values[index] for index in range(len(self._calls))]
