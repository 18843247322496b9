"""Writes the compatibility page: Markdown made of findings, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse_testing.matrix import task
from enginehouse_testing.matrix.combination import Combination
from enginehouse_testing.matrix.row import Figures, MatrixRow
from enginehouse_testing.model_under_test import MEAN_DIFFERENCES, PUBLISHED_KL

if TYPE_CHECKING:
    from enginehouse_testing.matrix.findings import MatrixFindings

RUN_COLUMNS = (
    *("train", "rollout", "transport", "actor", "replicas"),
    *("mean", "largest", "update, s", "tokens/s", "others"),
)
MODEL_COLUMNS = (
    *("train", "rollout", "transport", "actor", "steps"),
    *("mean", "largest", "KL", "update, s", "tokens/s"),
)
CHECKED_COLUMNS = ("kind", "name", "check", "measured", "tolerance")
OUTCOMES = ("passed", "failed", "not run", "not declared")
CERTIFICATE_COLUMNS = ("kind", "name", "certificate", *OUTCOMES, "layouts", "nearest", "written")
BUSY = 0.2
"""Number of cores that other programs keep busy. Above it, the page says that the times of a row are too long."""


def render(findings: MatrixFindings, data: str) -> str:
    """Return the page of some findings. `data` is the name of the JSON file that holds all of them."""
    everything = list(findings.rows.values())
    rows = [row for row in everything if not row.model]
    certificates = list(findings.certificates.values())
    parts = [
        _introduction(findings, data),
        _glance(rows),
        _runs([row for row in rows if row.figures]),
        _of_models(
            [row for row in everything if row.model], [summary for summary in certificates if summary.get("model")]
        ),
        _reasons("Failed", [row for row in everything if row.outcome == "failed"]),
        _reasons("Not run", [row for row in everything if row.outcome == "refused"]),
        _certificates([summary for summary in certificates if not summary.get("model")]),
        _versions(everything),
        _machine(findings.machine),
    ]
    return "\n".join(line for part in parts if part for line in (*part, ""))


def _introduction(findings: MatrixFindings, data: str) -> list[str]:
    return [
        f"# Compatibility{findings.plugin and f' of {findings.plugin}'}",
        "",
        f"Of commit {findings.commit[:8] or 'unknown'}, written {findings.written}.",
        "",
        *([f"![certified or not]({data.removesuffix('.json')}.svg)", ""] if findings.plugin else []),
        "For readers who choose engines: which training engine works with which rollout engine and weight transport, "
        "and how far apart the two compute. One command measured every number, with the conformance suite and a short "
        f"real run of each combination, and wrote the page. All numbers are in [{data}]({data}).",
        "",
        '```bash not-run="runs every combination of engines"',
        findings.command,
        "```",
        "",
        "It measures what is missing or was measured with other versions, and keeps the rest. `--again` repeats all.",
    ]


def _glance(rows: Sequence[MatrixRow]) -> list[str]:
    transports = list(dict.fromkeys(row.transport for row in rows))
    if not transports:
        return []
    lines = [
        "## At a glance",
        "",
        "The numbers say how far the rollout's log-probabilities are from the trainer's: the mean absolute difference "
        f"in nats, in float32. 1e-6 is rounding; more than {MEAN_DIFFERENCES['float32']:g} is a failure. *not run* "
        "means that the plan rejects the combination, for the reason below. An empty cell has not been tried.",
        "",
        *_head(["train", "rollout", *transports], figures_from=2),
    ]
    by_combination = {row.combination: row for row in rows}
    for train, rollout in dict.fromkeys((row.train, row.rollout) for row in rows):
        combined = [by_combination.get(Combination(train, rollout, transport)) for transport in transports]
        lines.append(_line([train, rollout, *map(_glance_cell, combined)]))
    return lines


def _glance_cell(row: MatrixRow | None) -> str:
    if row is None:
        return ""
    if row.outcome == "ran" and row.figures:
        return f"{row.figures.mean_difference:.1e}"
    return "**failed**" if row.outcome == "failed" else "not run"


def _runs(rows: Sequence[MatrixRow]) -> list[str]:
    if not rows:
        return []
    steps = sorted({row.setting["steps"] for row in rows})
    shape = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in task.MODEL.items())
    lines = [
        "## Runs",
        "",
        f"Each row is a run of `enginehouse train` with GRPO, {' or '.join(map(str, steps))} steps of "
        f"{task.PROMPTS_A_STEP} prompts, {task.SAMPLES_A_PROMPT} samples each, of up to {task.RESPONSE_TOKENS} tokens, "
        f"on a tiny Qwen3-shaped model made for it ({shape}, random weights). *Difference*: of logprobs, in nats; the "
        "mean over all steps, and the largest of any token. *Update*: from the actor to verified replicas, the median. "
        "*Tokens/s*: drawn by all replicas together, the median. Medians leave out the first step. With a model this "
        "small both are times of hand-overs, not of engines. *Others*: cores that others kept busy before the run "
        f"began; above {BUSY:g} its times say little.",
        "",
        *_head(RUN_COLUMNS, figures_from=5),
    ]
    for row in rows:
        figures = row.figures
        assert figures is not None
        engines = [row.train, row.rollout, row.transport, row.layouts["actor"]]
        differences = [f"{figures.mean_difference:.1e}", f"{figures.max_difference:.1e}"]
        speeds = [f"{figures.update_seconds:.3g}", f"{figures.tokens_per_second:,.0f}"]
        busy_cores = "" if row.busy_cores is None else f"{row.busy_cores:.1f}"
        lines.append(_line([*engines, f"{row.layouts['rollout']}, {row.placement}", *differences, *speeds, busy_cores]))
    return lines


def _of_models(rows: Sequence[MatrixRow], certificates: Sequence[Mapping[str, Any]]) -> list[str]:
    """List runs and certificates of all models except the tiny models in float32, with tables for each model."""
    models = list(dict.fromkeys([*(row.model for row in rows), *(summary["model"] for summary in certificates)]))
    if not models:
        return []
    bounds = " and ".join(f"{MEAN_DIFFERENCES[dtype]:g} in {dtype}" for dtype in ("float32", "bfloat16"))
    lines = [
        "## Other models and dtypes",
        "",
        "Runs with `--model` and `--dtype`; a model of the user's is asked for sums. *Mean* and *largest*: difference "
        f"of logprobs, in nats; a mean of more than {bounds} counts as failed. *KL*: mean k3 estimate of the trainer's "
        f"divergence from the rollout, in nats; {PUBLISHED_KL}. Below, of each engine against transformers in float32: "
        "of training engines the largest error of logprobs, relative to the largest logprob, and of gradients, "
        "relative to their norm; of rollout engines the largest error of a logprob, in nats.",
    ]
    for model in models:
        run_cells = [_model_cells(row, row.figures) for row in rows if row.model == model and row.figures]
        summaries = [summary for summary in certificates if summary["model"] == model]
        checked = [cells for summary in summaries for cells in _certificate_cells(summary)]
        lines += ["", f"### {model}"]
        lines += ["", *_head(MODEL_COLUMNS, figures_from=4), *map(_line, run_cells)] if run_cells else []
        lines += ["", *_head(CHECKED_COLUMNS, figures_from=3), *map(_line, checked)] if checked else []
    return lines


def _certificate_cells(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return the table rows of a certificate: one row for each measured result, or one for its problem."""
    name = [summary["kind"], summary["backend"]]
    if problem := summary.get("problem"):
        return [[*name, f"none: {problem}", "", ""]]
    return [
        [*name, f"{check['name']} at {check['layout']}", f"{check['measured']:.1e}", f"{check['tolerance']:g}"]
        for check in summary["measured"]
    ]


def _model_cells(row: MatrixRow, figures: Figures) -> list[str]:
    return [
        *(row.train, row.rollout, row.transport, row.layouts["actor"], str(figures.steps)),
        *(f"{figures.mean_difference:.1e}", f"{figures.max_difference:.1e}"),
        "" if figures.kl is None else f"{figures.kl:.1e}",
        *(f"{figures.update_seconds:.3g}", f"{figures.tokens_per_second:,.0f}"),
    ]


def _reasons(title: str, rows: Sequence[MatrixRow]) -> list[str]:
    """List combinations that failed or did not run, grouped by reason."""
    if not rows:
        return []
    lines = [f"## {title}", "", *_head(["combination", "why"])]
    for reason in dict.fromkeys(row.reason for row in rows):
        combinations = "<br>".join(str(row.combination) for row in rows if row.reason == reason)
        lines.append(_line([combinations, reason]))
    return lines


def _certificates(certificates: Sequence[dict[str, Any]]) -> list[str]:
    if not certificates:
        return []
    lines = [
        "## Certificates",
        "",
        "What `enginehouse certify` found of each: how many checks, each at every layout it is declared for, passed "
        "and failed; were not run, for want of a GPU; belong to a capability that is not declared. *Nearest* is the "
        "result that comes nearest to its tolerance.",
        "",
        *_head(CERTIFICATE_COLUMNS),
    ]
    for summary in certificates:
        name = [summary["kind"], summary["backend"]]
        if problem := summary.get("problem"):
            lines.append(_line([*name, f"none: {problem}", *[""] * 7]))
            continue
        counts = [str(summary["counts"].get(word, 0)) for word in OUTCOMES]
        near = summary["nearest"]
        nearest = near and f"{near['name']} at {near['layout']}: {near['measured']:.1e} of {near['tolerance']:g}"
        verdict = "passed" if summary["passed"] else "**failed**" if summary["failed"] else "not whole"
        last = [", ".join(summary["layouts"]), nearest or "", summary["written"][:10]]
        lines.append(_line([*name, verdict, *counts, *last]))
    failed = [
        f"- {summary['kind']} {summary['backend']}: {_cell(failure)}"
        for summary in certificates
        for failure in summary.get("failed", ())
    ]
    return [*lines, *(["", "Failed:", "", *failed] if failed else [])]


def _versions(rows: Sequence[MatrixRow]) -> list[str]:
    """List the versions behind the rows, with a line for each different set of versions."""
    lines = dict.fromkeys(
        (kind, getattr(row, kind), ", ".join(f"{name} {version}" for name, version in versions.items()))
        for row in rows
        if row.figures
        for kind, versions in row.standing.items()
    )
    if not lines:
        return []
    return ["## Versions", "", *_head(["kind", "name", "ran with"]), *map(_line, sorted(lines))]


def _machine(machine: Mapping[str, Any]) -> list[str]:
    gpus = ", ".join(machine["gpus"]) or "none"
    return [
        "## Machine",
        "",
        f"{machine['platform']}, {machine['cpus']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, GPUs: {gpus}.",
    ]


def _head(names: Sequence[str], figures_from: int | None = None) -> list[str]:
    right = len(names) if figures_from is None else figures_from
    return [_line(names), "|" + "".join("---|" if number < right else "---:|" for number in range(len(names)))]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Return the text as one table cell: `|` is escaped, and line breaks become `<br>`."""
    return "<br>".join(text.replace("|", "\\|").splitlines())
