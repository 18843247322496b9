"""SGLang's names for a replica's weight versions and requests, which no other client of the server uses."""

from __future__ import annotations

import secrets

from enginehouse.errors import EnginehouseError


class Labels:
    """Names that one launch of a replica gives; `where` names the replica in messages."""

    def __init__(self, where: str):
        self.where = where
        self._launch = secrets.token_hex(4)

    def label(self, number: int) -> str:
        """Return the name of a weight version, or the beginning of the names of a request's rows."""
        return f"{self._launch}-{number}"

    def number(self, label: str) -> int:
        """Return the version that has this label.

        Raises:
            EnginehouseError: The label is not of this launch.
        """
        launch, _, number = label.rpartition("-")
        if launch != self._launch:
            raise EnginehouseError(
                f"{self.where}: the sglang server says it serves weights {label!r}, which did not come from this "
                "replica: another client changes its weights, or it was restarted. Give each replica a separate server"
            )
        return int(number)
