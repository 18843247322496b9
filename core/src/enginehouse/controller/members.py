"""Processes that are called as one: replicas of which each can be lost alone (`Members`), or ranks of one group.

A `WorkerGroup` of several ranks breaks as a whole when one dies, as it must where ranks work together (`GroupRanks`).
Replicas with a group each do not: what fails is one of them, and the others go on.
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
    """One process, from its start to its end; a restart makes another member, but of ranks that work together.

    Attributes:
        number: which replica it is.
        incarnation: counts the replica's processes.
        group: its group, which a restart keeps; of it alone, but for ranks that work together.
    """

    number: int
    incarnation: int
    group: WorkerGroup


class Members:
    """Some replicas at one moment. They stay the same: one that is lost, or was restarted, answers no more.

    Two are equal if the processes are the same.

    Args:
        name: the role, for messages.
        members: who they are.
        is_lost: asked with a member and, where a call of it failed, the error: whether that process is gone.
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
        """How many members there are."""
        return len(self.members)

    @property
    def nodes(self) -> list[str]:
        """The members' node addresses, in their order."""
        return [member.group.nodes[0] for member in self.members]

    @property
    def lost(self) -> list[Member]:
        """The members that are known to be gone."""
        return [member for member in self.members if self._is_lost(member, None)]

    def name_of(self, place: int) -> str:
        """Name the member at a place, for messages."""
        return f"{self.name} replica {self.members[place].number}"

    def call(
        self, method: str, *args: Any, timeout: float | None = None, leave_out_lost: bool = False, **kwargs: Any
    ) -> Future | Gathered:
        """Call a method, registered with the mode `one_to_all`, on each, without waiting.

        Args:
            method: its name.
            args: its arguments, the same for all.
            timeout: deadline in seconds.
            leave_out_lost: None stands for the result of one that is lost, unless all are; else that is an error.
            kwargs: its keyword arguments.
        """
        return self._call_each(method, [args] * len(self.members), timeout, leave_out_lost, **kwargs)

    def call_placed(self, method: str, *args: Any, timeout: float | None = None) -> Future | Gathered:
        """As `call`, with one more argument for each: its place among the members."""
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
        for member, given in zip(self.members, args, strict=True):
            if self._is_lost(member, None):
                why = f"{member.group.name} was lost"
                calls.append(GroupClosed(f"{member.group.name}.{method} cannot be called: {why}", why))
                continue
            try:
                calls.append(member.group.call(method, *given, timeout=timeout, blocking=False, **kwargs))
            except Exception as error:
                calls.append(error)
        return Gathered(self.members, calls, self._is_lost, leave_out_lost)


class GroupRanks(Members):
    """The ranks of one group: what ends one ends all, so none of them is lost alone.

    Args:
        group: of any size.
    """

    def __init__(self, group: WorkerGroup):
        ranks = [Member(rank, 0, group) for rank in range(group.world_size)]
        super().__init__(group.name, ranks, lambda member, error: False)
        self._group = group

    @property
    def nodes(self) -> list[str]:
        """See `Members`."""
        return self._group.nodes

    def call(
        self, method: str, *args: Any, timeout: float | None = None, leave_out_lost: bool = False, **kwargs: Any
    ) -> Future | Gathered:
        """See `Members`; a method of any mode."""
        return self._group.call(method, *args, timeout=timeout, blocking=False, **kwargs)

    def call_placed(self, method: str, *args: Any, timeout: float | None = None) -> Future | Gathered:
        """See `Members`; a rank takes its own number where it is given none."""
        return self.call(method, *args, timeout=timeout)


class Gathered:
    """The results of a call of several members, in their order; made by `Members`. Used like a `Future`."""

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
        self._aborted: Exception | None = None  # an error that says only that there is another one
        self._last_lost: Exception | None = None

    @property
    def calls(self) -> tuple[Future, ...]:
        """Those that were sent."""
        return tuple(call for call in self._calls if isinstance(call, Future))

    def done(self) -> bool:
        """Whether every call has ended."""
        return all(call.done() for call in self.calls)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all; an error of one is raised at once, though others still run.

        Raises:
            StillRunning: `timeout` seconds passed.
            WorkerError: a call failed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        places = {call: index for index, call in enumerate(self._calls) if isinstance(call, Future)}
        for index, call in enumerate(self._calls):
            if index not in self._values and (isinstance(call, Exception) or call.done()):
                with suppress(StillRunning):  # it has ended, and its value is on its way
                    self._settle(index, until)
        pending = [call for call in self.calls if places[call] not in self._values]
        if pending and timeout is not None and timeout <= 0:
            raise StillRunning(f"the call still runs at {self._members[places[pending[0]]].group.name}")
        for call in iterate_ended(pending, None if until is None else max(until - time.monotonic(), 0.0)):
            self._settle(places[call], until)
        return self._collected()

    def _settle(self, index: int, until: float | None) -> None:
        """Take a result that is there; raise an error, unless it is one that may be left out."""
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
