"""What a run's validations say, in words: above all whether the model has become worse."""

from __future__ import annotations

import math
from collections.abc import Mapping

SHOWN = 10
"""Most parts of a validation (files, and values of `evaluation.by`) that a line or a summary shows."""
BEST_MARGIN = 2.0
"""Standard errors that a validation has to lie below the best one: the best of several was lucky as well."""

REWARD, ERROR = "reward", "reward_stderr"
COUNTS = ("failures", "dropped")
"""Figures that are said where they are not 0."""


class Validations:
    """A run's validations, in their order."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, Mapping[str, float]]] = []
        self._how = ""

    def __bool__(self) -> bool:
        """Whether there was one."""
        return bool(self._taken)

    def add(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Take one in.

        Args:
            step: after which step; 0 before the first.
            metrics: `validation/reward` and others.
            how: responses are drawn, in a word or two: `"greedy"`.
        """
        self._taken.append((step, metrics))
        self._how = how or self._how

    def lines(self) -> list[str]:
        """The last one, a line a part: the whole first."""
        step, metrics = self._taken[-1]
        how = f", {self._how}" if self._how else ""
        found = []
        for part in _parts(metrics):
            said = [self._of_reward(part)] if f"{part}/{REWARD}" in metrics else []
            said += [
                f"{own} {figure(value)}"
                for name, value in metrics.items()
                for above, _, own in [name.rpartition("/")]
                if above == part and own not in (REWARD, ERROR) and not own.startswith("mean@")
                if value or own not in COUNTS
            ]
            label = part.removeprefix("validation").lstrip("/")
            found.append(f"{label}: {'  '.join(said)}" if label else "  ".join(said))
        more = [f"{len(found) - SHOWN} more in validation.jsonl"] if len(found) > SHOWN else []
        first, *others = [*found[:SHOWN], *more]
        return [f"validation at step {step}{how}: {first}", *(f"  {line}" for line in others)]

    def no_tool_called(self) -> bool:
        """True if the last one counts calls of tools, and there was none."""
        calls = self._taken[-1][1].get("validation/tool_calls")
        return calls == 0.0

    def table(self) -> list[str]:
        """The last one's figures: a line that names them, and a line a part, the whole first; empty before it."""
        if not self._taken:
            return []
        metrics = self._taken[-1][1]
        names = list(dict.fromkeys(own for name in metrics for _, _, own in [name.rpartition("/")]))
        names = [name for name in names if not name.startswith("mean@")]
        cells = [["", *names]]
        for part in _parts(metrics):
            figures = [metrics.get(f"{part}/{name}") for name in names]
            label = part.removeprefix("validation").lstrip("/")
            cells.append([label or "all", *("" if one is None else figure(one) for one in figures)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in cells
        )
        return ["  ".join(line).rstrip() for line in lines]

    def facts(self) -> list[tuple[str, str]]:
        """How the run's validations went, as `(metric, sentence)`."""
        step, metrics = self._taken[-1]
        first_step, first = self._taken[0]
        how = f", {self._how}" if self._how else ""
        facts = []
        for name, value in metrics.items():
            part, _, own = name.rpartition("/")
            if own != REWARD and not own.startswith("pass@"):
                continue
            before = f"{figure(first[name])} at step {first_step} -> " if len(self) > 1 and name in first else ""
            worse = f"; {said}" if own == REWARD and (said := self.worse(part)) else ""
            facts.append((name, f"{before}{figure(value)} at step {step}{how}{worse}"))
        return facts[:SHOWN]

    def rewards(self) -> list[float]:
        """The rewards of all, oldest first."""
        name = f"validation/{REWARD}"
        return [metrics[name] for _, metrics in self._taken if name in metrics]

    def worse_anywhere(self) -> bool:
        """Whether a part of the last one is worse than it was."""
        return any(self.worse(part) for part in _parts(self._taken[-1][1]))

    def worse(self, part: str = "validation") -> str:
        """Whether a part of the last one is worse than the first or the best, in words; empty if it is not.

        It is worse by more than the standard error of the difference, and than the best by twice that.
        """
        name = f"{part}/{REWARD}"
        taken = [(step, one) for step, one in self._taken if name in one]
        if len(taken) < 2:
            return ""
        (first_step, first), (_, last) = taken[0], taken[-1]
        if first[name] - last[name] > _error(first, last, part):
            return "worse than before training" if first_step == 0 else f"worse than at step {first_step}"
        best_step, best = max(taken, key=lambda one: one[1][name])
        if best[name] - last[name] > BEST_MARGIN * _error(best, last, part):
            return f"worse than at step {best_step} ({figure(best[name])})"
        return ""

    def __len__(self) -> int:
        """How many there were."""
        return len(self._taken)

    def _of_reward(self, part: str) -> str:
        """`reward 0.775 -> 0.310 +- 0.033, worse than before training`."""
        name = f"{part}/{REWARD}"
        metrics, first = self._taken[-1][1], self._taken[0][1]
        before = f"{figure(first[name])} -> " if len(self) > 1 and name in first else ""
        error = metrics.get(f"{part}/{ERROR}")
        spread = f" +- {figure(error)}" if error is not None else ""
        worse = self.worse(part)
        return f"{REWARD} {before}{figure(metrics[name])}{spread}" + (f", {worse}" if worse else "")


def figure(value: float) -> str:
    """A metric as people read it: three digits that matter."""
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def _parts(metrics: Mapping[str, float]) -> list[str]:
    """`validation`, or `validation/FILE`, and what is below: the names up to the last slash."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in metrics))


def _error(one: Mapping[str, float], other: Mapping[str, float], part: str) -> float:
    """Standard error of the difference of two validations, taken as independent: more than it is."""
    return math.hypot(one.get(f"{part}/{ERROR}", 0.0), other.get(f"{part}/{ERROR}", 0.0))
