"""The summary of a run that has ended: its outcome, its metrics, and the paths of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from enginehouse_rl.config.counting import count as count_words
from enginehouse_rl.runs.display import format_duration
from enginehouse_rl.runs.validations import format_digits, format_figure

if TYPE_CHECKING:
    from enginehouse_rl.runs.directory import RunDirectory
    from enginehouse_rl.runs.history import History
    from enginehouse_rl.runs.record import Status

_STYLE = {"finished": "green", "interrupted": "yellow", "failed": "red"}


def summary_facts(run: RunDirectory, history: History, status: Status) -> list[tuple[str, str]]:
    """List the facts of a run that has ended, as `(label, sentence)`."""
    if evaluated := run.record.content.get("evaluated"):
        return _list_evaluation_facts(run, evaluated, history, status)
    facts = [("outcome", f"{status} after {run.last_step:,} of {history.steps:,} steps")]
    if not run.last_step:
        facts = [("outcome", f"{status} before the first step ended")]
    name = history.find_metric("reward/mean", "loss")  # with rewards, the loss says nothing
    if name and (change := history.change(name)):
        first, last, count = change
        over = f"means of the first and the last {count} steps" if count > 1 else "the first and the last step"
        facts.append(
            (
                "loss" if name.endswith("loss") else "reward",
                f"{format_figure(first)} -> {format_figure(last)} ({over})",
            )
        )
    if (accuracy := history.now("validation/accuracy")) is not None:  # a run on preferences
        facts.append(("validation/accuracy", f"{format_figure(accuracy)}, of held-out rows"))
    if history.validations:
        facts += history.validations.facts()
    if history.steps_per_second:
        speed = f"{format_digits(1 / history.steps_per_second)} s a step"
        span = f"{count_words(history.steps_taken, 'step')} in {format_duration(history.seconds)}"
        whole = "starting workers is not counted"
        if history.steps_taken == run.last_step:  # the run was not resumed
            whole = f"{format_duration(run.elapsed_seconds)} with the start of the workers"
        facts.append(("speed", f"{speed} ({span}; {whole})"))
    if run.alarms:
        alarms = ", ".join(f"{alarm.get('alarm')} at step {alarm['step']}" for alarm in run.alarms)
        total = "1 alarm" if len(run.alarms) == 1 else f"{len(run.alarms)} alarms"
        facts.append(("alarms", f"{total}: {alarms} (what to try: {shorten(run.path / 'alarms.jsonl')})"))
    if status == "finished":  # for other runs, `describe_saved` reports it on standard error
        facts.append(("saved", _describe_files(run)))
        facts.append(("results", shorten(run.path)))
    return facts


def _list_evaluation_facts(
    run: RunDirectory, evaluated: Mapping[str, Any], history: History, status: Status
) -> list[tuple[str, str]]:
    """List the facts of a run of `enginehouse eval`, whose metrics are in a separate table."""
    details = [f"{name} {evaluated[name]}" for name in ("step", "checksum") if evaluated.get(name)]
    model = ", ".join([str(evaluated["model"]), *details])
    facts = [("outcome", status if history.validations else f"{status} without metrics"), ("model", model)]
    return [*facts, ("results", shorten(run.path))] if status == "finished" else facts


def next_steps(run: RunDirectory, steps: int) -> list[str]:
    """Suggest what to do next, with the paths of this run; `steps` is the number of steps that the run was to take."""
    hints = []
    if (report := run.path / "report.html").is_file():
        hints.append(f"look at the run: open {shorten(report)} in a browser")
    samples = sorted((run.path / "samples").glob("*.jsonl")) if (run.path / "samples").is_dir() else []
    if samples:
        hints.append(f"read the responses: {shorten(samples[-1])}")
    if run.last_step:
        hints.append(f"see where the time went: open {shorten(run.timeline.path)} in https://ui.perfetto.dev")
    if (step := run.checkpoints.newest_step) is not None and run.last_step < steps:
        hints.append(f"continue after step {step:,}: the same command with --resume")
    if run.models.newest:
        link = run.path / "model"
        model = shorten(link if link.exists() else run.models.newest)
        hints.append(f"use the model: {_find_auto_class(run.models.newest)}.from_pretrained({model!r})")
    return hints


def _find_auto_class(model: Path) -> str:
    """Return the class of transformers that loads a model, or the class of `peft` that loads an adapter."""
    if (model / "adapter_config.json").is_file():
        return "AutoPeftModelForCausalLM"
    config = model / "config.json"
    (architecture, *_) = (json.loads(config.read_text()) if config.is_file() else {}).get("architectures") or [""]
    return f"AutoModelFor{'SequenceClassification' if architecture.endswith('Classification') else 'CausalLM'}"


def summary_panel(run: RunDirectory, history: History, status: Status) -> RenderableType:
    """Return `summary_facts` and `next_steps` in a frame."""
    table = Table.grid(padding=(0, 2))
    for label, sentence in summary_facts(run, history, status):
        table.add_row(Text(label, style="dim"), Text(sentence, overflow="fold"))
    for index, hint in enumerate(next_steps(run, history.steps)):
        table.add_row(Text("next" if index == 0 else "", style="dim"), Text(hint, overflow="fold"))
    return Panel(
        table, title=Text(f"{run.path.name}: {status}", style="bold"), border_style=_STYLE.get(status, ""), expand=False
    )


def summary_lines(run: RunDirectory, history: History, status: Status) -> list[str]:
    """Return `summary_facts` and `next_steps` as plain lines, for a log."""
    facts = summary_facts(run, history, status) + [("next", hint) for hint in next_steps(run, history.steps)]
    return [f"{label}: {sentence}" for label, sentence in facts]


def describe_saved(run: RunDirectory) -> str:
    """Describe in one sentence which results of a run are on disk."""
    if not run.opened:
        return f"Nothing was written; {shorten(run.path)} is unchanged"
    if run.record.content.get("evaluated"):
        figures = "no metrics yet" if run.validated_step < 0 else "metrics and responses"
        return f"Saved: {figures}. It is all in {shorten(run.path)}"
    step = run.checkpoints.newest_step
    resume = "" if step is None else f"; --resume continues after step {step:,}"
    return f"Saved: {_describe_files(run)}. It is all in {shorten(run.path)}{resume}"


def shorten(path: Path) -> str:
    """Return a path relative to the current directory if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _describe_files(run: RunDirectory) -> str:
    metrics = f"metrics of {count_words(run.last_step, 'step')}" if run.last_step else "no metrics yet"
    if run.models.saved_step is None:
        return f"{metrics}, no model"
    return f"{metrics}, the model of step {run.models.saved_step:,}"
