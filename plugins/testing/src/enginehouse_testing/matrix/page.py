"""The compatibility page: Markdown made of findings, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse_testing.matrix import task
from enginehouse_testing.matrix.combination import Combination
from enginehouse_testing.matrix.row import TOLERANCE, Row

if TYPE_CHECKING:
    from enginehouse_testing.matrix.findings import Findings

BUSY = 0.2
"""Cores kept busy by others from which on the page says of a row that its times are too long."""


def render(found: Findings, data: str) -> str:
    """The page.

    Args:
        found: what was found.
        data: the name of the JSON file that has all of it.
    """
    rows = list(found.rows.values())
    parts = [
        _introduction(found, data),
        _glance(rows),
        _runs([row for row in rows if row.figures]),
        _reasons("Failed", [row for row in rows if row.outcome == "failed"]),
        _reasons("Not run", [row for row in rows if row.outcome == "refused"]),
        _certificates(list(found.certificates.values())),
        _versions(rows),
        _machine(found),
    ]
    return "\n".join(line for part in parts if part for line in (*part, ""))


def _introduction(found: Findings, data: str) -> list[str]:
    return [
        f"# Compatibility{found.plugin and f' of {found.plugin}'}",
        "",
        f"Of commit {found.commit[:8] or 'unknown'}, written {found.written}.",
        "",
        *([f"![certified or not]({data.removesuffix('.json')}.svg)", ""] if found.plugin else []),
        "Which training engine works with which rollout engine by which weight transport, and how far apart the two "
        "compute. One command measured every figure of this page, by the conformance suite and a short real run of "
        "each combination, and wrote the page; nothing in it is filled in by hand. All figures are in "
        f"[{data}]({data}).",
        "",
        '```bash not-run="runs every combination of engines"',
        found.command,
        "```",
        "",
        "That makes what is missing, or was found with other versions, and keeps the rest; `--again` makes all anew.",
    ]


def _glance(rows: Sequence[Row]) -> list[str]:
    transports = list(dict.fromkeys(row.transport for row in rows))
    if not transports:
        return []
    lines = [
        "## At a glance",
        "",
        "Mean absolute difference of the logprobs that the rollout reported from those of the trainer, in nats, in "
        f"float32. More than {TOLERANCE:g} counts as failed. *not run*: the plan refuses it, for the reason given "
        "below; an empty cell: not tried yet.",
        "",
        *_head(["train", "rollout", *transports], figures_from=2),
    ]
    at = {row.combination: row for row in rows}
    for train, rollout in dict.fromkeys((row.train, row.rollout) for row in rows):
        found = [at.get(Combination(train, rollout, transport)) for transport in transports]
        lines.append(_line([train, rollout, *map(_glanced, found)]))
    return lines


def _glanced(row: Row | None) -> str:
    if row is None:
        return ""
    if row.outcome == "ran" and row.figures:
        return f"{row.figures.mean_difference:.1e}"
    return "**failed**" if row.outcome == "failed" else "not run"


def _runs(rows: Sequence[Row]) -> list[str]:
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
        *_head(
            [
                "train",
                "rollout",
                "transport",
                "actor",
                "replicas",
                "mean",
                "largest",
                "update, s",
                "tokens/s",
                "others",
            ],
            figures_from=5,
        ),
    ]
    for row in rows:
        found = row.figures
        assert found is not None
        lines.append(
            _line(
                [
                    row.train,
                    row.rollout,
                    row.transport,
                    row.layouts["actor"],
                    f"{row.layouts['rollout']}, {row.placement}",
                    f"{found.mean_difference:.1e}",
                    f"{found.max_difference:.1e}",
                    f"{found.update_seconds:.3g}",
                    f"{found.tokens_per_second:,.0f}",
                    "" if row.busy_cores is None else f"{row.busy_cores:.1f}",
                ]
            )
        )
    return lines


def _reasons(title: str, rows: Sequence[Row]) -> list[str]:
    """Combinations by the reason that nothing, or nothing good, was found of them."""
    if not rows:
        return []
    lines = [f"## {title}", "", *_head(["combination", "why"])]
    for reason in dict.fromkeys(row.reason for row in rows):
        of = "<br>".join(str(row.combination) for row in rows if row.reason == reason)
        lines.append(_line([of, reason]))
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
        *_head(
            [
                "kind",
                "name",
                "certificate",
                "passed",
                "failed",
                "not run",
                "not declared",
                "layouts",
                "nearest",
                "written",
            ]
        ),
    ]
    for one in certificates:
        name = [one["kind"], one["backend"]]
        if problem := one.get("problem"):
            lines.append(_line([*name, f"none: {problem}", *[""] * 7]))
            continue
        counts = [str(one["counts"].get(word, 0)) for word in ("passed", "failed", "not run", "not declared")]
        near = one["nearest"]
        nearest = near and f"{near['name']} at {near['layout']}: {near['measured']:.1e} of {near['tolerance']:g}"
        verdict = "passed" if one["passed"] else "**failed**" if one["failed"] else "not whole"
        lines.append(_line([*name, verdict, *counts, ", ".join(one["layouts"]), nearest or "", one["written"][:10]]))
    failed = [
        f"- {one['kind']} {one['backend']}: {_cell(text)}" for one in certificates for text in one.get("failed", ())
    ]
    return [*lines, *(["", "Failed:", "", *failed] if failed else [])]


def _versions(rows: Sequence[Row]) -> list[str]:
    """With which versions rows were found; a line for each that differs."""
    found = dict.fromkeys(
        (kind, getattr(row, kind), ", ".join(f"{name} {version}" for name, version in versions.items()))
        for row in rows
        if row.figures
        for kind, versions in row.standing.items()
    )
    if not found:
        return []
    return ["## Versions", "", *_head(["kind", "name", "ran with"]), *(_line(one) for one in sorted(found))]


def _machine(found: Findings) -> list[str]:
    machine = found.machine
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
    """Text on one line that ends no cell."""
    return "<br>".join(text.replace("|", "\\|").splitlines())
