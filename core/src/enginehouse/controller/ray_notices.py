"""Ray's notices about dead workers: into the log instead of onto the console.

The one place that reaches into Ray's internals. `ray.init(log_to_driver=False)` does not keep
`ray._private.worker.listen_error_messages` from printing "(raylet) A worker died or was killed ..." to stdout,
beside the error that the controller raises with role, rank and method. Remove this once Ray honours the flag there.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def quiet_notices() -> None:
    """Send what Ray would print about the cluster to this module's logger, at level INFO; where Ray allows it."""
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
