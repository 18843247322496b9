"""What alarms have to know of a run besides its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse.plugin import Advantage, plugins
from enginehouse_rl.plan.plan import Plan

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import RunPlan

LARGEST_TOLERANCE = 0.05
"""Nats by which the logprobs of drawn tokens may differ on average. They are likely ones, which rounding moves less
than those of the prompts that an effect check compares."""


@dataclass(frozen=True, kw_only=True)
class AlarmInputs:
    """A run, as alarms see it.

    Attributes:
        other_roles: roles that are trained beside the actor; their metrics begin with their names.
        grouped: whether there are several samples of each prompt.
        compares: whether it is these that advantages come of.
        kl_in_reward: whether a KL term is taken off the rewards, after their figures were made.
        tolerance: that of the effect check, in nats; engines may be apart by it, or `LARGEST_OF_DRAWN` if that is less.
        stale: whether rows of older weights are what the config asks for.
        rewarded: whether advantages come of rewards; of a teacher's logprobs, say, they do not.
        scored: whether a reward function scores responses, and not a reward model alone.
    """

    other_roles: Sequence[str] = ()
    grouped: bool = False
    compares: bool = False
    kl_in_reward: bool = False
    tolerance: float = LARGEST_TOLERANCE
    stale: bool = False
    rewarded: bool = True
    scored: bool = True

    @property
    def most_apart(self) -> float:
        """Nats by which the engines may be apart."""
        return min(self.tolerance, LARGEST_TOLERANCE)


def read_alarm_inputs(plan: RunPlan) -> AlarmInputs:
    """Return what alarms have to know of a run, by its plan."""
    if not isinstance(plan, Plan):
        return AlarmInputs()
    config, needs = plan.config, plan.advantage_needs
    grouped, kl = config.rollout.samples_per_prompt > 1, config.algorithm.kl
    records = [provided.record for provided in plugins().providers(Advantage, config.algorithm.advantage.name)]
    # of one's own: maybe
    compares = all(isinstance(record, Advantage) and record.compares_samples for record in records)
    return AlarmInputs(
        other_roles=[name for name, role in plan.roles.items() if role.trained and name != "actor"],
        grouped=grouped,
        compares=grouped and compares and "critic" not in plan.roles,
        kl_in_reward=kl.place == "reward" and kl.coefficient > 0,
        tolerance=plan.effect_tolerance,
        stale=bool(config.train.staleness),
        rewarded=needs is None or not {"reward", "rewards", "token_rewards"}.isdisjoint(needs),
        scored=bool(plan.rewards),
    )
