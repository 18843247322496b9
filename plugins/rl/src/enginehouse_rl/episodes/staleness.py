"""The staleness window decides which groups may begin and which groups a step takes. It only does bookkeeping.

A step may train on a group that began under weight version b while the trainer's version is at most b + `staleness`.
Each step trains on `groups` groups and produces the next version. A group that no step takes in time is lost. To lose
none, `choose` maintains a condition: after each step, for every number j, at most `j * groups` groups are due within
the next j steps. This is the schedulability condition of earliest deadline first (Liu & Layland 1973). Apart from this
condition, `choose` takes groups in the order in which they end.
"""

from __future__ import annotations


class StalenessWindow:
    """Tracks groups from their beginning to the step that trains on them.

    Args:
        groups: Number of groups that a step trains on.
        staleness: Maximum age of a group in versions, counted from the version under which the group began to the
            trainer's version. 0: the step that trains on a group also begins it.
        extra: Number of groups to begin in addition to the groups that are needed.
    """

    def __init__(self, groups: int, staleness: int = 0, extra: int = 0):
        self.groups, self.staleness, self.extra = groups, staleness, extra
        self._begun: dict[int, int] = {}  # version by serial number, of open groups
        self._ended: list[int] = []  # open groups that are complete, in order of arrival

    @property
    def open_groups(self) -> tuple[int, ...]:
        """Serial numbers of the groups that began and were neither taken nor given up, in ascending order."""
        return tuple(sorted(self._begun))

    def count_room(self, needed: int, remaining: int) -> int:
        """Return how many more groups may begin.

        Args:
            needed: Number of groups that the current step waits for; 0 between two steps.
            remaining: Number of groups to train on until the run ends, including the groups that the step waits for.
        """
        most = min(needed + self.staleness * self.groups, remaining)
        if most and (needed or self.staleness):
            most += self.extra
        return max(most - len(self._begun), 0)

    def begin(self, serial: int, version: int) -> None:
        """Record that a group begins while the rollout serves `version`."""
        self._begun[serial] = version

    def end(self, serial: int) -> None:
        """Record that a group is complete and scored, so that a step may train on it."""
        self._ended.append(serial)

    def give_up(self, serial: int) -> None:
        """Record that a group will not be trained on."""
        del self._begun[serial]
        if serial in self._ended:
            self._ended.remove(serial)

    def choose(self, version: int) -> list[int] | None:
        """Choose the groups that a step trains on, and stop tracking them.

        Args:
            version: Version of the trainer's weights in this step.

        Returns:
            The serial numbers of the chosen groups in ascending order, or None if the step must wait for more groups.
        """
        chosen: list[int] = []
        for ahead in range(self.staleness + 1):
            urgent = {serial for serial, begun in self._begun.items() if begun + self.staleness <= version + ahead}
            least = min(len(urgent) - ahead * self.groups, self.groups) - len(urgent.intersection(chosen))
            if least <= 0:
                continue
            complete = [serial for serial in self._ended if serial in urgent and serial not in chosen]
            if len(complete) < least:
                return None
            chosen += complete[:least]
        chosen += [serial for serial in self._ended if serial not in chosen][: self.groups - len(chosen)]
        if len(chosen) < self.groups:
            return None
        for serial in chosen:
            self.give_up(serial)
        return sorted(chosen)

    def find_overdue(self, version: int) -> list[int]:
        """Return the serial numbers of the groups that are too old for steps at weight version `version` or later."""
        return [serial for serial, begun in self._begun.items() if begun + self.staleness < version]
