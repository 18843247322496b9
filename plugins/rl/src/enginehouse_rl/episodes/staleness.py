"""Which groups are under way, and which of those that ended are trained on next: bookkeeping alone, without time.

A group that was begun while weight version b was served is trained on while the trainer's is at most b + `staleness`.
The same step trains on `groups` of them and makes the next version. So after a step, of the groups whose last version
is at most j versions on, there may be no more than j steps can take; that is the schedulability condition of earliest
deadline first (Liu & Layland 1973), and what `choose` keeps. Within it, who ends first is taken first.
"""

from __future__ import annotations


class StalenessWindow:
    """Groups from their beginning to the step that trains on them.

    Args:
        groups: that a step trains on.
        staleness: how many versions before the trainer's a group may have been begun. 0: groups are begun by the step
            that trains on them.
        extra: groups begun beyond those that are needed.
    """

    def __init__(self, groups: int, staleness: int = 0, extra: int = 0):
        self.groups, self.staleness, self.extra = groups, staleness, extra
        self._begun: dict[int, int] = {}  # serial number, version; what ended too
        self._ended: list[int] = []  # in order of arrival

    @property
    def open_groups(self) -> tuple[int, ...]:
        """Groups begun, and neither taken nor given up, in the order of their serial numbers; what ended too."""
        return tuple(sorted(self._begun))

    def count_room(self, wanted: int, left: int) -> int:
        """How many more groups may be begun.

        Args:
            wanted: groups that the step at hand waits for; 0 between two takes.
            left: groups that are still to be trained on until the run ends, `wanted` included.
        """
        most = min(wanted + self.staleness * self.groups, left)
        if most and (wanted or self.staleness):
            most += self.extra
        return max(most - len(self._begun), 0)

    def begin(self, serial: int, version: int) -> None:
        """A group is begun while `version` is served."""
        self._begun[serial] = version

    def end(self, serial: int) -> None:
        """It is whole, scored, and to be trained on."""
        self._ended.append(serial)

    def give_up(self, serial: int) -> None:
        """It will not be trained on."""
        del self._begun[serial]
        if serial in self._ended:
            self._ended.remove(serial)

    def choose(self, version: int) -> list[int] | None:
        """Take the groups to train on while the trainer's weights are `version`; None: they have not ended yet.

        Returns:
            Their serial numbers, in order.
        """
        chosen: list[int] = []
        for ahead in range(self.staleness + 1):
            due = {serial for serial, begun in self._begun.items() if begun + self.staleness <= version + ahead}
            least = min(len(due) - ahead * self.groups, self.groups) - len(due.intersection(chosen))
            if least <= 0:
                continue
            ended = [serial for serial in self._ended if serial in due and serial not in chosen]
            if len(ended) < least:
                return None
            chosen += ended[:least]
        chosen += [serial for serial in self._ended if serial not in chosen][: self.groups - len(chosen)]
        if len(chosen) < self.groups:
            return None
        for serial in chosen:
            self.give_up(serial)
        return sorted(chosen)

    def find_overdue(self, version: int) -> list[int]:
        """Groups that no step that trains with `version` or a later one may take."""
        return [serial for serial, begun in self._begun.items() if begun + self.staleness < version]
