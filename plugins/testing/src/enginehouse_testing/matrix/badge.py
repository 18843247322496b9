"""Makes a badge for a plugin's README from its certificates: a picture, and JSON for shields.io."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anybadge

from enginehouse.atomic import write_whole
from enginehouse.plugin import CONTRACT

LABEL = f"enginehouse {CONTRACT[0]}.{CONTRACT[1]}"


def badge_of(certificates: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the badge's message, and its colour.

    Args:
        certificates: a summary for each part; see `enginehouse_testing.matrix.certified.findings`.
    """
    if failed := sum(len(summary.get("failed", ())) for summary in certificates):
        return f"failed ({failed} {'check' if failed == 1 else 'checks'})", "#e05d44"
    if not certificates or not all(summary["passed"] for summary in certificates):
        return "not certified", "#9f9f9f"
    return f"certified ({sum(summary['counts']['passed'] for summary in certificates)} checks)", "#4c1"


def write_badge(page: Path, certificates: Sequence[Mapping[str, Any]]) -> tuple[Path, Path]:
    """Write a badge as `PAGE.svg` beside a page, and as shields.io's endpoint `PAGE.badge.json`; return both paths."""
    message, colour = badge_of(certificates)
    picture, endpoint = page.with_suffix(".svg"), page.with_suffix(".badge.json")
    write_whole(picture, anybadge.Badge(label=LABEL, value=message, default_color=colour).badge_svg_text)
    content = {"schemaVersion": 1, "label": LABEL, "message": message, "color": colour.removeprefix("#")}
    write_whole(endpoint, json.dumps(content) + "\n")
    return picture, endpoint
