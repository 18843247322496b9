"""Sends Ray's notices about dead workers to the log instead of the console.

Only this module changes Ray's internals. `ray.init(log_to_driver=False)` does not stop
`ray._private.worker.listen_error_messages` from printing "(raylet) A worker died or was killed ..." to stdout, beside
the controller's error with role, rank and method. Remove this module once Ray obeys that flag there.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def quiet_notices() -> None:
    """Log Ray's notices about the cluster at level INFO instead of printing them, if this Ray version allows it."""
    from ray._private import worker

    printing = getattr(worker, "print_to_stdstream", None)
    if printing is None or getattr(printing, "quiet", False):
        return

    def notice(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if data.get("pid") != "raylet":
            printing(data, *args, **kwargs)
            return
        for line in data.get("lines", ()):
            log.info("raylet: %s", line)

    notice.quiet = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = notice
