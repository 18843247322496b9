"""Describes the validations of a run as text, above all whether the model has become worse."""

from __future__ import annotations

import math
from collections.abc import Mapping

SHOWN = 10
"""Maximum number of parts of a validation (files, and values of `evaluation.by`) in a line or a summary."""
BEST_MARGIN = 2.0
"""Number of standard errors by which a validation must be below the best validation to count as worse. The best of
several validations is partly luck."""

_STDERR = "_stderr"
REWARD, ERROR = "reward", f"reward{_STDERR}"
ROUNDING = 1e-9
"""Size below which a metric is rounding noise, and is shown as 0."""
COUNTS = ("failures", "dropped")
"""Counts that are shown only if they are not 0."""


class Validations:
    """A run's validations, in their order."""

    def __init__(self) -> None:
        self._validations: list[tuple[int, Mapping[str, float]]] = []
        self._how = ""

    def __bool__(self) -> bool:
        return bool(self._validations)

    def add(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Add the validation after a step; step 0 is before the first.

        `how` describes in a word or two how responses were sampled: `"greedy"`.
        """
        self._validations.append((step, metrics))
        self._how = how or self._how

    def lines(self) -> list[str]:
        """Describe the last validation, one line for each part, beginning with the whole."""
        step, metrics = self._validations[-1]
        how = f", {self._how}" if self._how else ""
        lines = []
        for part in _list_parts(metrics):
            texts = [self._describe_reward(part)] if f"{part}/{REWARD}" in metrics else []
            texts += [
                f"{metric} {_format_metric(metric, value)}{_describe_spread(metrics, name)}"
                for name, value in metrics.items()
                for above, _, metric in [name.rpartition("/")]
                if above == part
                and metric != REWARD
                and not metric.startswith("mean@")
                and not metric.endswith(_STDERR)
                if value or metric not in COUNTS
            ]
            label = part.removeprefix("validation").lstrip("/")
            lines.append(f"{label}: {'  '.join(texts)}" if label else "  ".join(texts))
        more = [f"{len(lines) - SHOWN} more in validation.jsonl"] if len(lines) > SHOWN else []
        first, *further = [*lines[:SHOWN], *more]
        return [f"validation at step {step}{how}: {first}", *(f"  {line}" for line in further)]

    def lacks_tool_calls(self) -> bool:
        """True if the last validation counts tool calls, and there were none."""
        return self._validations[-1][1].get("validation/tool_calls") == 0.0

    def table(self) -> list[str]:
        """Return the last validation as a table: a line of names, then a line for each part, the whole first."""
        if not self._validations:
            return []
        metrics = self._validations[-1][1]
        names = list(dict.fromkeys(metric for name in metrics for _, _, metric in [name.rpartition("/")]))
        names = [name for name in names if not name.startswith("mean@")]
        cells = [["", *names]]
        for part in _list_parts(metrics):
            figures = [metrics.get(f"{part}/{name}") for name in names]
            label = part.removeprefix("validation").lstrip("/")
            cells.append([label or "all", *("" if value is None else format_figure(value) for value in figures)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in cells
        )
        return ["  ".join(line).rstrip() for line in lines]

    def facts(self) -> list[tuple[str, str]]:
        """Describe how metrics changed from the first validation to the last, as `(metric, sentence)`."""
        step, metrics = self._validations[-1]
        first_step, first = self._validations[0]
        how = f", {self._how}" if self._how else ""
        facts = []
        for name, value in metrics.items():
            part, _, metric = name.rpartition("/")
            if metric != REWARD and (not metric.startswith("pass@") or metric.endswith(_STDERR)):
                continue
            before = f"{format_figure(first[name])} at step {first_step} -> " if len(self) > 1 and name in first else ""
            worse = f"; {decline}" if metric == REWARD and (decline := self.describe_decline(part)) else ""
            facts.append((name, f"{before}{format_figure(value)} at step {step}{how}{worse}"))
        return facts[:SHOWN]

    def rewards(self) -> list[float]:
        """Return the rewards of all validations, oldest first."""
        name = f"validation/{REWARD}"
        return [metrics[name] for _, metrics in self._validations if name in metrics]

    def has_worsened(self) -> bool:
        """True if a part of the last validation is worse than before."""
        return any(self.describe_decline(part) for part in _list_parts(self._validations[-1][1]))

    def describe_decline(self, part: str = "validation") -> str:
        """Describe how a part of the last validation is worse than in the first or in the best validation; empty if it
        is not.

        It is worse than the first if the difference exceeds the standard error of the difference. It is worse than the
        best if the difference exceeds `BEST_MARGIN` standard errors.
        """
        name = f"{part}/{REWARD}"
        rewarded = [(step, metrics) for step, metrics in self._validations if name in metrics]
        if len(rewarded) < 2:
            return ""
        (first_step, first), (_, last) = rewarded[0], rewarded[-1]
        if first[name] - last[name] > _bound_standard_error(first, last, part):
            return "worse than before training" if first_step == 0 else f"worse than at step {first_step}"
        best_step, best = max(rewarded, key=lambda validation: validation[1][name])
        if best[name] - last[name] > BEST_MARGIN * _bound_standard_error(best, last, part):
            return f"worse than at step {best_step} ({format_figure(best[name])})"
        return ""

    def __len__(self) -> int:
        return len(self._validations)

    def _describe_reward(self, part: str) -> str:
        """Describe a part's reward: `reward 0.775 -> 0.310 ± 0.033, worse than before training`."""
        name = f"{part}/{REWARD}"
        metrics, first = self._validations[-1][1], self._validations[0][1]
        before = f"{format_figure(first[name])} -> " if len(self) > 1 and name in first else ""
        spread = _describe_spread(metrics, name)
        worse = self.describe_decline(part)
        return f"{REWARD} {before}{format_figure(metrics[name])}{spread}" + (f", {worse}" if worse else "")


def format_figure(value: float) -> str:
    """Return a metric with three decimals, or three significant digits if small, or as a whole number if large."""
    if 0.01 <= abs(value) < 1000 or abs(value) < ROUNDING:
        return f"{value:.3f}" if abs(value) >= ROUNDING else "0.000"
    return format_digits(value)


def _format_metric(name: str, value: float) -> str:
    return f"{value:,.0f}" if name in COUNTS else format_figure(value)


def format_digits(value: float) -> str:
    """Return a number with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _describe_spread(metrics: Mapping[str, float], name: str) -> str:
    """Return ` ± ` and the standard error of a metric; empty if it has no standard error."""
    error = metrics.get(f"{name}{_STDERR}")
    return "" if error is None else f" ± {format_figure(error)}"


def _list_parts(metrics: Mapping[str, float]) -> list[str]:
    """Return the parts of a validation: the names of the metrics up to the last slash, such as `validation/FILE`."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in metrics))


def _bound_standard_error(first: Mapping[str, float], last: Mapping[str, float], part: str) -> float:
    """Return a bound on the standard error of the difference of two validations, treating them as independent."""
    return math.hypot(first.get(f"{part}/{ERROR}", 0.0), last.get(f"{part}/{ERROR}", 0.0))
