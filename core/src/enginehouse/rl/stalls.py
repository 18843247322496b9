"""Runs that go on without learning anything: what is said of them, and when they end.

A step whose gradient is not finite changes nothing (`TrainEngine.optim_step`), nor does one whose rewards all agree, or
in which no token counts. Each happens now and then; a run of nothing else only costs. The first does not mend itself;
the others may, as where a loss masks prompts that are too hard at the beginning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from enginehouse.errors import EnginehouseError

log = logging.getLogger(__name__)

MOST_SKIPPED = 3
"""Steps in a row in which every optimizer step was skipped, as its gradient was not finite, that end a run."""
LONG = 10
"""Steps in a row without a gradient, a token that counts, a reward or a difference of rewards, that are warned of."""


class StepsSkipped(EnginehouseError):
    """No gradient of several steps in a row was finite: nothing is learned. Weights are as before them."""


class Stalls:
    """Looks at each step's metrics: warns in words, once of each kind, and ends a run that takes no step any more.

    Args:
        groups: whether a prompt's samples can differ: there are several of each.
        beside: roles that are trained beside the actor; their metrics begin with their names.
    """

    def __init__(self, groups: bool = False, beside: Sequence[str] = ()):
        self._groups, self._beside = groups, beside
        self._skipped: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        self._told: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check a step's metrics.

        Raises:
            StepsSkipped: no gradient of it was finite, nor any of the steps before it.
        """
        self._check_skips(step, metrics, "actor", "")
        for role in self._beside:
            self._check_skips(step, metrics, role, f"{role}/")
        highest, lowest = metrics.get("reward/max"), metrics.get("reward/min")
        stalled = {
            "reward": highest == lowest == 0.0,
            "groups": self._groups and metrics.get("reward/groups_all_equal") == 1.0,
            "counted": metrics.get("skipped") == 1.0 and math.isfinite(metrics.get("grad_norm", math.nan)),
            "gradient": metrics.get("grad_norm") == 0.0 and not metrics.get("skipped"),
        }
        for kind, now in stalled.items():
            self._lengths[kind] = self._lengths.get(kind, 0) + 1 if now else 0
        # The first is the cause of the others: it alone is told.
        for kind, length in self._lengths.items():
            if length >= LONG:
                if kind not in self._told:
                    self._told.add(kind)
                    log.warning("steps %d to %d: %s", step - length + 1, step, _STALLED[kind])
                return

    def _check_skips(self, step: int, metrics: Mapping[str, float], role: str, prefix: str) -> None:
        skipped = metrics.get(prefix + "skipped", 0.0)
        finite = math.isfinite(metrics.get(prefix + "grad_norm", math.nan))
        self._skipped[role] = self._skipped.get(role, 0) + 1 if skipped == 1.0 and not finite else 0
        if not skipped or finite:
            return
        names = [f"{prefix}loss", f"{prefix}grad_norm", "reward/max", "reward/min"]
        seen = ", ".join(f"{name} {metrics[name]:.3g}" for name in names if name in metrics)
        of = f" of the {role}" if prefix else ""
        if self._skipped[role] >= MOST_SKIPPED:
            raise StepsSkipped(
                f"every optimizer step{of} of steps {step - self._skipped[role] + 1} to {step} was skipped, as their "
                f"gradient was not finite ({seen}): nothing is learned any more, and weights are as after step "
                f"{step - self._skipped[role]}. {_NOT_FINITE}"
            )
        if f"skipped{of}" not in self._told:
            self._told.add(f"skipped{of}")
            steps = metrics.get(prefix + "optimizer_steps", 1.0)
            log.warning(
                "step %d: %d of %d optimizer steps%s were skipped, as their gradient was not finite (%s). A skipped "
                "step changes nothing; %d steps of nothing else in a row end the run. Later ones: %sskipped in the "
                "metrics",
                step,
                max(round(skipped * steps), 1),
                round(steps),
                of,
                seen,
                MOST_SKIPPED,
                prefix,
            )


_NOT_FINITE = (
    "Look for rewards or advantages that are not finite or beyond float32 (samples/ has them), for a loss of your own "
    "that divides by 0 or takes log(0), and for logprobs far apart (mismatch/*); try a smaller lr, or "
    "model.dtype=float32"
)
_STALLED = {
    "reward": "every reward was 0, so nothing can be learned from them. Is the reward right (samples/ has what it "
    "scored), and does the model ever get an answer right? Begin with easier prompts, or a supervised warm start",
    "groups": "all samples of each prompt had the same reward: what compares them learns nothing. Prompts may be too "
    "easy or too hard, or rollout.sampling.temperature too low; more samples_per_prompt make differences likelier",
    "counted": "no token counted in the loss, so every optimizer step was skipped. Responses without a token, or a "
    "loss that masks them all, leave nothing to learn from: samples/ has what the model said",
    "gradient": "the gradient was exactly 0, so no weight changes but by weight decay. Are all advantages 0, or all "
    "ratios clipped (clip_fraction)?",
}
