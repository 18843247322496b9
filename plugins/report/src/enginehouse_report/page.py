"""Writes the page of one or several runs: a single HTML file that contacts no host.

The data are blocks of compressed JSON in base64, so that a model's text never becomes markup. `page.js` decodes a block
when it needs it. The Content-Security-Policy allows only the page's own script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from enginehouse.atomic import write_whole
from enginehouse_report.run_files import find_differences, read_run
from enginehouse_report.samples import SampleTable, read_samples, whole_rows
from enginehouse_report.spans import read_timeline
from enginehouse_rl.runs.jsonlines import encode_row

ASSETS = Path(__file__).parent / "assets"
NAME = "report.html"
"""Name of the file in a run directory."""
ROWS_BYTES = 6_000_000
"""Maximum number of bytes for whole rows with their tokens, for all runs of a page together."""
CHUNK_BYTES = 400_000
"""Number of JSON characters in a block of whole rows. Opening a row reads its whole block."""


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    rows_bytes: int = ROWS_BYTES,
    seconds: float | None = None,
    show_host: bool = False,
) -> int:
    """Write the page of one or several runs.

    Args:
        runs: run directories.
        out: the file, which is replaced atomically.
        rows_bytes: maximum number of bytes for whole rows with their tokens.
        seconds: time limit for reading samples. The page names the files that were not read.
        show_host: True if the page shows the host's name and the absolute path of each run.

    Returns:
        The number of bytes written.

    Raises:
        UserError: a path is no run directory.
        OSError: the page cannot be written.
    """
    files = [read_run(path) for path in runs]
    parts = [run.part(show_host=show_host) for run in files]
    for part, name in zip(parts, distinct_names([run.path for run in files]), strict=True):
        part["name"] = name
    names = ("config", "versions")
    main = {
        "runs": parts,
        "differing": {name: find_differences(parts, name) for name in names} if len(parts) > 1 else {},
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": metadata.version("enginehouse-report"),
    }
    blocks = {"main": block(main)}
    for number, run in enumerate(files):
        each = None if seconds is None else seconds / len(files)
        table = read_samples(run.path, each)
        rows = dict(_row_blocks(table, number, rows_bytes // len(files)))
        blocks[f"samples-{number}"] = block(table.part())
        blocks |= rows
        blocks[f"timeline-{number}"] = block(read_timeline(run.path / "timeline.json"))
    text = page(" and ".join(part["name"] for part in parts), blocks)
    write_whole(out, text)
    return len(text.encode("utf-8", "backslashreplace"))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish them."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [os.sep.join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _row_blocks(table: SampleTable, run: int, room: int) -> Iterator[tuple[str, str]]:
    """Yield blocks of whole rows while there is room. The columns `block` and `at` get each row's block and index."""
    blocks: list[Any] = [None] * len(table.places)
    places: list[Any] = [None] * len(table.places)
    table.columns |= {"block": blocks, "at": places}
    number, size = 0, 0
    waiting: list[str] = []
    for index, row in whole_rows(table):
        if room <= 0:
            break
        text = encode_row(row)
        blocks[index], places[index] = number, len(waiting)
        waiting.append(text)
        size += len(text)
        if size >= CHUNK_BYTES:
            packed = pack(f"[{','.join(waiting)}]")
            yield f"rows-{run}-{number}", packed
            number, waiting, size, room = number + 1, [], 0, room - len(packed)
    if waiting:
        yield f"rows-{run}-{number}", pack(f"[{','.join(waiting)}]")


def block(content: Mapping[str, Any]) -> str:
    """Return plain data as a block. Numbers that are not finite become null."""
    return pack(encode_row(content))


def pack(text: str) -> str:
    """Compress a JSON text into base64. Characters that UTF-8 cannot encode become JSON escapes."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode()


def page(title: str, blocks: Mapping[str, str], live: str = "") -> str:
    """Return the HTML text with data blocks by name. `live` is the path of a server with newer data, if any."""
    style = _asset("uPlot.min.css") + _asset("page.css")
    script = _asset("uPlot.iife.min.js") + _asset("page.js")
    licence = re.sub(r"--+", "-", _asset("uPlot.LICENSE"))
    values = {
        "title": html.escape(title),
        "live": html.escape(live),
        "policy": policy(style, script, live),
        "style": style,
        "script": script,
        "licence": licence,
        "data": "\n".join(
            f'<script type="application/octet-stream" id="block-{name}">{packed}</script>'
            for name, packed in blocks.items()
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _asset("page.html"))


def policy(style: str, script: str, live: str) -> str:
    """Return the Content-Security-Policy. It allows the page's own script, and requests to its own server, if any."""
    rules = ["default-src 'none'", f"script-src {_hash(script)}", f"style-src {_hash(style)}", "img-src data:"]
    rules += ["connect-src 'self'"] if live else []
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
