"""What SGLang knows a replica's weight versions and requests by: names that no other client of a server gives."""

from __future__ import annotations

import secrets

from enginehouse.errors import EnginehouseError


class Labels:
    """Names of one launch of a replica.

    Args:
        where: names this replica in messages.
    """

    def __init__(self, where: str):
        self._where = where
        self._launch = secrets.token_hex(4)

    def label(self, number: int) -> str:
        """What SGLang calls a version of the weights, and what the ids of a request's rows begin with."""
        return f"{self._launch}-{number}"

    def number(self, label: str) -> int:
        """The version that has this label.

        Raises:
            EnginehouseError: none of this replica's has.
        """
        launch, _, number = label.rpartition("-")
        if launch != self._launch:
            raise EnginehouseError(
                f"{self._where}: the sglang server says it serves weights {label!r}, which did not come from this "
                "replica: somebody else changes its weights, or it was restarted. Give each replica a server of its own"
            )
        return int(number)
