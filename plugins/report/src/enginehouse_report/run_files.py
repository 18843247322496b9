"""Reads a run directory at any time, also while the run writes it.

Any file may be missing, and the last line of a file may be incomplete. A run that is resumed truncates its files.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from enginehouse.errors import EnginehouseError, UserError, listed
from enginehouse_report.columns import make_columns
from enginehouse_report.headline import make_headline
from enginehouse_rl.config import run_lock
from enginehouse_rl.config.document import parse
from enginehouse_rl.config.earlier_run import RUN_MARKER, read_record
from enginehouse_rl.config.schema import SCHEMAS
from enginehouse_rl.metrics import find_metric
from enginehouse_rl.runs.jsonlines import read_lines_from
from enginehouse_rl.runs.record import seconds_logged

T = TypeVar("T")

ERROR_LINES = 12
"""Number of last lines of `error.txt` that a page shows, besides its first two."""
SECRET = re.compile(r"(^|\.)env(\.|=)")
"""Matches keys of environment variables of an engine's processes, whose values are never shown."""
HIDDEN = "(not shown)"


class GrowingLines:
    """Reads a growing JSONL file; `rows` has all rows so far."""

    def __init__(self, path: Path):
        self.path = path
        self._restart()

    def _restart(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._inode, self._end = 0, 0

    def refresh(self) -> bool:
        """Read new lines. Return True if the file was replaced or truncated, so that all rows were read again."""
        try:
            stat = self.path.stat()
        except OSError:
            changed = bool(self.rows)
            self._restart()
            return changed
        changed = bool(self._end) and (stat.st_ino != self._inode or stat.st_size < self._end)
        if changed:
            self._restart()
        self._inode = stat.st_ino
        try:
            rows, self._end = read_lines_from(self.path, self._end)
        except OSError:
            rows = []
        self.rows += rows
        return changed


class RunFiles:
    """The files of a run directory, except its samples and its timeline."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.metrics = GrowingLines(self.path / "metrics.jsonl")
        self.validations = GrowingLines(self.path / "validation.jsonl")
        self.alarms = GrowingLines(self.path / "alarms.jsonl")

    def refresh(self) -> bool:
        """Read new lines. Return True if a file was truncated, so that earlier rows are invalid."""
        cut_back = [lines.refresh() for lines in (self.metrics, self.validations, self.alarms)]
        return any(cut_back)

    def part(self, metrics: int = 0, validations: int = 0, *, show_host: bool = True) -> dict[str, Any]:
        """Return the data of the run for a page, with its rows from the given indices on.

        `show_host=False` omits the host's name and the absolute path, because users share pages.
        """
        record = read_record(self.path)
        config, changed, problem = self.config()
        resumed_after = record.get("resumed_after")
        columns = make_columns(self.metrics.rows[metrics:])
        validated = make_columns(self.validations.rows[validations:])
        return {
            "name": self.path.name,
            "path": str(self.path) if show_host else _relative_directory(config) or self.path.name,
            "host": _text(record.get("host")) if show_host else "",
            "facts": facts(record, config, self.path, self.metrics.rows),
            "headline": make_headline(self.metrics.rows, self.validations.rows, _coerce(int, resumed_after)),
            "config": config,
            "changed": changed,
            "config_problem": problem,
            "versions": versions(record),
            "alarms": [_alarm(row) for row in self.alarms.rows],
            "error": _error_lines(self.path / "error.txt"),
            "metrics": columns,
            "validations": validated,
            "meanings": describe_metrics([*columns["columns"], *validated["columns"]]),
        }

    def config(self) -> tuple[dict[str, Any], list[str], str]:
        """Return the config by dotted keys, the keys that differ from defaults, and a problem in reading it."""
        try:
            config = parse((self.path / "config.yaml").read_text(encoding="utf-8", errors="replace"), "config.yaml")[0]
        except FileNotFoundError:
            return {}, [], "there is no config.yaml"
        except (OSError, EnginehouseError) as error:
            return {}, [], str(error)
        config = config if isinstance(config, Mapping) else {}
        return flatten(config), find_changed(config), ""


def read_run(path: Path) -> RunFiles:
    """Read a run's files.

    Raises:
        UserError: the path is no run directory.
    """
    check_run(path)
    run = RunFiles(path)
    run.refresh()
    return run


def check_run(path: Path) -> None:
    """Check that a path is a run directory.

    Raises:
        UserError: the path is no run directory; the message names the nearest runs.
    """
    if not is_run(path):
        what = f"no {RUN_MARKER} is in it" if path.is_dir() else "there is no such directory"
        raise UserError(f"{path} is no run directory: {what}. {near_runs(path)}")


def is_run(path: Path) -> bool:
    return (path / RUN_MARKER).is_file()


def near_runs(path: Path) -> str:
    """Describe the runs in and near a path."""
    above = next((parent for parent in path.absolute().parents if parent.is_dir()), Path.cwd())
    places = dict.fromkeys([path, above, *([Path("runs")] if Path("runs").is_dir() else [])])
    runs = [run.parent for place in places for depth in ("*", "*/*") for run in place.glob(f"{depth}/{RUN_MARKER}")]
    if not runs:
        return (
            f"There are no runs near it, in {above} or runs/: name the directory that `run.directory` of a config named"
        )
    names = {_relative(run): run for run in sorted(runs, key=lambda run: -(run / RUN_MARKER).stat().st_mtime)}
    close = difflib.get_close_matches(path.name, [run.name for run in names.values()], n=1)
    guess = next((f"Did you mean {name}? " for name, run in names.items() if [run.name] == close), "")
    return f"{guess}Runs, the newest first: {listed(list(names))}"


def _relative(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def facts(
    record: Mapping[str, Any], config: Mapping[str, Any], path: Path, metrics: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a description of a run as plain data, made from its record, its flattened config and its metrics."""
    status, remark = _status(record, path)
    earlier = _coerce(list, record.get("earlier"))
    before = [process for process in earlier if isinstance(process, Mapping)]
    if status == "killed":
        record = {"seconds": seconds_logged(metrics, record.get("resumed_after")), **record}
    return {
        "status": status,
        "said": remark,
        "started": _text(record.get("started")),
        "ended": _text(record.get("ended")),
        "seconds": _seconds(record, before),
        "at_least": any(process.get("status") == "killed" for process in (*before, {"status": status})),
        "steps": record.get("steps"),
        "of_steps": config.get("train.steps"),
        "kind": _kind(record),
        "model": _model(record, config),
        "algorithm": _algorithm(config),
        "engines": _engines(record),
        "error": _text(record.get("error")),
        "command": _command(record),
        "resumed_after": record.get("resumed_after"),
        "resumed": len(earlier),
        "best": record["best"] if isinstance(record.get("best"), Mapping) else None,
    }


def _status(record: Mapping[str, Any], path: Path) -> tuple[str, str]:
    if not record:
        return "not begun", "there is no run.json that can be read"
    status = _text(record.get("status")) or "unknown"
    if status == "running" and run_lock.find_holder(path) is None:
        if record.get("host") == socket.gethostname():
            return "killed", "its process ended without recording an end"
        return status, "seen from another machine or in a copy; it may have ended"
    return status, ""


def _seconds(record: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the duration so far of all processes of the run, or None if the start of the last process is unknown."""
    last = record.get("seconds")
    if not isinstance(last, (int, float)):
        try:
            last = time.time() - datetime.fromisoformat(str(record.get("started"))).timestamp()
        except ValueError:
            return None
    before = [process.get("seconds") for process in earlier]
    return round(last + sum(seconds for seconds in before if isinstance(seconds, (int, float))), 1)


def _kind(record: Mapping[str, Any]) -> str:
    """Return the command that started the run: `train`, `sft`, `eval`, ..."""
    words = map(str, _coerce(list, record.get("command"))[1:])
    return next((word for word in words if not word.startswith("-")), "")


def _command(record: Mapping[str, Any]) -> str:
    words = list(map(str, _coerce(list, record.get("command"))))
    for place, word in enumerate(words):
        key, equals, _ = word.partition("=")
        if SECRET.search(key + equals) and equals:
            words[place] = f"{key}={HIDDEN}"
    return " ".join([Path(words[0]).name, *words[1:]]) if words else ""


def _model(record: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    return str(_coerce(dict, record.get("evaluated")).get("model") or _text(config.get("model.path")))


def _algorithm(config: Mapping[str, Any]) -> str:
    """Describe the algorithm that the config names."""
    named = {
        "advantage": config.get("algorithm.advantage.name"),
        "loss": config.get("algorithm.loss.name") or config.get("algorithm.loss"),
        "KL": config.get("algorithm.kl.coefficient"),
        "staleness": config.get("train.staleness"),
    }
    return ", ".join(f"{name} {value}" for name, value in named.items() if value not in (None, "", 0, 0.0))


def _engines(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the backend, its version, the ranks and the device of each role."""
    engines = []
    for role, processes in _coerce(dict, record.get("roles")).items():
        ranks = [rank for rank in _coerce(list, processes) if isinstance(rank, dict)]
        if ranks:
            first = ranks[0]
            backend = _text(first.get("backend"))
            engines.append(
                {"role": str(role), "ranks": len(ranks), "nodes": len({str(rank.get("node")) for rank in ranks})}
                | {"backend": backend, "version": _text(first.get(backend) or first.get("torch")).partition("+")[0]}
                | {name: _text(first.get(name)) for name in ("device", "runtime")}
                | {"mesh": first.get("mesh") if isinstance(first.get("mesh"), Mapping) else None}
            )
    return engines


def versions(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of Python and of the packages that a run recorded."""
    packages = _coerce(dict, record.get("versions"))
    return {"python": _text(record.get("python")), **{str(name): _text(value) for name, value in packages.items()}}


def _alarm(row: Mapping[str, Any]) -> dict[str, Any]:
    step = row.get("step")
    return {"step": step if isinstance(step, int) else None} | {
        name: _text(row.get(name)) for name in ("alarm", "said", "advice")
    }


def _error_lines(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    if len(lines) <= ERROR_LINES + 3:
        return "\n".join(lines)
    return "\n".join([*lines[:2], f"... {len(lines) - 2 - ERROR_LINES} lines: error.txt", *lines[-ERROR_LINES:]])


def _coerce(kind: type[T], value: Any) -> T:
    """Return a value if it has this type, else an empty value. A damaged record may contain anything."""
    return value if isinstance(value, kind) else kind()


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def flatten(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a config by dotted keys, with lists as texts. Possible secrets are hidden."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{key}.")
        elif SECRET.search(above):
            flat[key] = HIDDEN
        else:
            flat[key] = value if isinstance(value, (str, int, float, type(None))) else json.dumps(value, default=str)
    return flat


def describe_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the unit and the description of each metric that `enginehouse_rl.metrics` knows."""
    known = {name: find_metric(name) for name in names}
    return {name: [metric.unit, metric.about] for name, metric in known.items() if metric is not None}


def _relative_directory(config: Mapping[str, Any]) -> str:
    """Return the run directory as in the config, or an empty text if that is an absolute path."""
    directory = _text(config.get("run.directory"))
    return "" if Path(directory).is_absolute() else directory


def find_changed(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys that differ from their defaults. If no schema accepts the config, return all keys."""
    for schema in SCHEMAS.values():
        with contextlib.suppress(ValueError):
            return list(flatten(schema.model_validate(config).model_dump(exclude_defaults=True)))
    return list(flatten(config))


def find_differences(parts: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[Any]]:
    """Return the entries of `config` or `versions` that differ between runs. None stands for a missing entry."""
    keys = sorted({key for part in parts for key in part[name]})
    by_key = {key: [part[name].get(key) for part in parts] for key in keys}
    return {key: values for key, values in by_key.items() if any(value != values[0] for value in values)}
