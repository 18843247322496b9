"""What this package adds to enginehouse: commands that show a run. Light: nothing is imported until it is used."""

from __future__ import annotations

enginehouse_protocol = "1.1"
