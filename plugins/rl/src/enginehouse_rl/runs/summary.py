"""A run's last words: how it ended, what it reached, where everything is."""

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

from enginehouse_rl.runs.display import clock
from enginehouse_rl.runs.validations import figure

if TYPE_CHECKING:
    from enginehouse_rl.runs.directory import RunDirectory
    from enginehouse_rl.runs.history import History
    from enginehouse_rl.runs.record import Status

_STYLE = {"finished": "green", "interrupted": "yellow", "failed": "red"}


def summary_facts(run: RunDirectory, history: History, status: Status) -> list[tuple[str, str]]:
    """What there is to say of a run that has ended, as `(label, sentence)`."""
    if evaluated := run.record.content.get("evaluated"):
        return _evaluation_facts(run, evaluated, history, status)
    facts = [("outcome", f"{status} after {run.last_step} of {history.steps} steps")]
    if not run.last_step:
        facts = [("outcome", f"{status} before the first step ended")]
    for label, name in (("reward", history.named("reward/mean")), ("loss", history.named("loss"))):
        if name and (change := history.change(name)):
            first, last, count = change
            over = f"means of the first and the last {count} steps" if count > 1 else "the first and the last step"
            facts.append((label, f"{figure(first)} -> {figure(last)} ({over})"))
    if (accuracy := history.now("validation/accuracy")) is not None:  # of preferences
        facts.append(("validation/accuracy", f"{figure(accuracy)}, of held-out rows"))
    if history.validations:
        facts += history.validations.facts()
    if history.steps_per_second:
        taken = f"{history.taken} step{'s' if history.taken > 1 else ''} in {clock(history.seconds)}"
        facts.append(("speed", f"{history.steps_per_second:.3g} steps/s ({taken}; starting workers is not counted)"))
    if run.alarms:
        told = ", ".join(f"{alarm.get('alarm')} at step {alarm['step']}" for alarm in run.alarms)
        many = "1 alarm" if len(run.alarms) == 1 else f"{len(run.alarms)} alarms"
        facts.append(("alarms", f"{many}: {told} (what to try: {shown(run.path / 'alarms.jsonl')})"))
    if status == "finished":  # of another run `saved_words` says it, on the other stream
        facts.append(("saved", _saved(run)))
        facts.append(("results", shown(run.path)))
    return facts


def _evaluation_facts(
    run: RunDirectory, evaluated: Mapping[str, Any], history: History, status: Status
) -> list[tuple[str, str]]:
    """As `summary_facts`, of what `enginehouse eval` ran; its figures are in a table of their own."""
    known = [f"{name} {evaluated[name]}" for name in ("step", "checksum") if evaluated.get(name)]
    model = ", ".join([str(evaluated["model"]), *known])
    facts = [("outcome", status if history.validations else f"{status} without figures"), ("model", model)]
    return [*facts, ("results", shown(run.path))] if status == "finished" else facts


def next_steps(run: RunDirectory, steps: int) -> list[str]:
    """What one may want to do now, with this run's own paths; `steps` are those it was to take."""
    hints = []
    if (report := run.path / "report.html").is_file():
        hints.append(f"look at the run: open {shown(report)} in a browser")
    samples = sorted((run.path / "samples").glob("*.jsonl")) if (run.path / "samples").is_dir() else []
    if samples:
        hints.append(f"read what the model said: {shown(samples[-1])}")
    if run.last_step:
        hints.append(f"see where the time went: open {shown(run.timeline.path)} in https://ui.perfetto.dev")
    if (step := run.checkpoints.newest_step) is not None and run.last_step < steps:
        hints.append(f"go on after step {step}: the same command with --resume")
    if run.models.newest:
        link = run.path / "model"
        model = shown(link if link.exists() else run.models.newest)
        hints.append(f"use the model: {_auto_class(run.models.newest)}.from_pretrained({model!r})")
    return hints


def _auto_class(model: Path) -> str:
    """What of transformers loads a model, of `peft` an adapter: a reward model is a classifier."""
    if (model / "adapter_config.json").is_file():
        return "AutoPeftModelForCausalLM"
    config = model / "config.json"
    (architecture, *_) = (json.loads(config.read_text()) if config.is_file() else {}).get("architectures") or [""]
    return f"AutoModelFor{'SequenceClassification' if architecture.endswith('Classification') else 'CausalLM'}"


def summary_panel(run: RunDirectory, history: History, status: Status) -> RenderableType:
    """`summary_facts` and `next_steps` in a frame."""
    table = Table.grid(padding=(0, 2))
    for label, said in summary_facts(run, history, status):
        table.add_row(Text(label, style="dim"), Text(said, overflow="fold"))
    for index, hint in enumerate(next_steps(run, history.steps)):
        table.add_row(Text("next" if index == 0 else "", style="dim"), Text(hint, overflow="fold"))
    return Panel(
        table, title=Text(f"{run.path.name}: {status}", style="bold"), border_style=_STYLE.get(status, ""), expand=False
    )


def summary_lines(run: RunDirectory, history: History, status: Status) -> list[str]:
    """The same as plain lines, for a log."""
    facts = summary_facts(run, history, status) + [("next", hint) for hint in next_steps(run, history.steps)]
    return [f"{label}: {said}" for label, said in facts]


def saved_words(run: RunDirectory) -> str:
    """What of a run is on disk, in one sentence."""
    if not run.opened:
        return f"Nothing was begun; {shown(run.path)} is as it was"
    if run.record.content.get("evaluated"):
        figures = "no figures yet" if run.validated_step < 0 else "figures and answers"
        return f"Saved: {figures}. It is all in {shown(run.path)}"
    step = run.checkpoints.newest_step
    resume = "" if step is None else f"; with --resume it goes on after step {step}"
    return f"Saved: {_saved(run)}. It is all in {shown(run.path)}{resume}"


def shown(path: Path) -> str:
    """A path relative to the current directory where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def _saved(run: RunDirectory) -> str:
    steps = "1 step" if run.last_step == 1 else f"{run.last_step} steps"
    metrics = f"metrics of {steps}" if run.last_step else "no metrics yet"
    if run.models.saved_step is None:
        return f"{metrics}, no model"
    return f"{metrics}, the model of step {run.models.saved_step}"
