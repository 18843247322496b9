"""Runs a benchmark: `python -m benchmarks NAME [option=value ...]`.

A benchmark is a module of this package with `measure(**options) -> {"metrics": {name: number}, ...}`. The result is
printed, and written to `benchmarks/out/NAME.json` with `commit`, `written`, `metrics`, `command`, `machine` and all
that `measure` returned. A result may have `"sides"`, a table `{row: {column: value}}`, and a `"name"` for its file if a
benchmark has several sizes. In a checkout only one benchmark runs at a time.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import inspect
import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import busy_cores, commit, machine

OUT = Path(__file__).parent / "out"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    console = Console() if sys.stdout.isatty() else Console(width=140)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    known = names()
    if not arguments or arguments[0] not in known:
        console.print(f"usage: python -m benchmarks NAME [option=value ...]\nbenchmarks: {', '.join(known)}")
        return 2
    name, *settings = arguments
    measure = importlib.import_module(f"benchmarks.{name}").measure
    try:
        options = read_options(measure, settings)
    except ValueError as error:
        console.print(f"benchmark {name}: {error}")
        return 2
    busy = round(busy_cores(), 2)
    described = machine() | {"cores_busy_before": busy}
    OUT.mkdir(exist_ok=True)
    with (OUT / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            console.print(
                f"benchmark {name}: another one runs in this checkout, and would share its folder and its cores"
            )
            return 2
        result = measure(**options)
    name = result.pop("name", name)
    path = OUT / f"{name}.json"
    written = {
        "commit": commit(),
        "written": described["time"],
        "metrics": {},
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": described,
    }
    path.write_text(json.dumps(written | result, indent=2) + "\n")
    for table in tables(name, result):
        console.print(table)
    if busy > 0.2:
        console.print(f"[yellow]others kept {busy} cores busy: these figures are not to be kept[/]")
    console.print(f"written to {path}")
    return 0


def names() -> list[str]:
    """Return the modules of this package that measure something."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\ndef measure(" in path.read_text())


def read_options(measure: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    """Read `option=value` words as keyword arguments of `measure`; values are Python literals, or strings.

    Raises:
        ValueError: a word has no `=`, or names no parameter of `measure`.
    """
    known = list(inspect.signature(measure).parameters)
    options = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in known:
            raise ValueError(f"{setting!r} is not option=value with an option of {', '.join(known) or 'none'}")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return options


def tables(name: str, result: Mapping[str, Any]) -> list[Table]:
    """Return a result as tables: its sides, if it has any, and its metrics."""
    metrics = Table("metric", title=name, title_justify="left")
    metrics.add_column("value", justify="right")
    for metric, value in result["metrics"].items():
        metrics.add_row(metric, shown(value))
    if not (sides := result.get("sides")):
        return [metrics]
    columns = list(dict.fromkeys(column for row in sides.values() for column in row))
    table = Table(title=f"{name}: sides", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for side, row in sides.items():
        table.add_row(side, *(shown(row.get(column)) for column in columns))
    return [table, metrics]


def shown(value: Any) -> str:
    """Return a value as a table shows it: numbers with three or four digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
