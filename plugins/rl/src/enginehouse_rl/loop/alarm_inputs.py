from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse.plugin import Advantage, plugins
from enginehouse_rl.plan.plan import Plan

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import RunPlan

LARGEST_TOLERANCE = 0.05
"""Largest permitted mean difference of the logprobs of generated tokens, in nats. Generated tokens are likely, so
rounding changes their logprobs less than the logprobs of the prompt tokens that an effect check compares."""

LARGEST_QUANTIZED_TOLERANCE = 0.5
"""As `LARGEST_TOLERANCE`, if the rollout engine serves quantized weights. A model of 135 million parameters was 0.17
nats apart in 8 bits."""


@dataclass(frozen=True, kw_only=True)
class AlarmInputs:
    """The properties of a run that alarms need besides its metrics.

    Attributes:
        other_roles: Trained roles other than the actor. The names of their metrics begin with the role's name.
        grouped: True if there are several samples of each prompt.
        compares: True if advantages compare the samples of a prompt.
        kl_in_reward: True if a KL term is subtracted from the rewards after their metrics are computed.
        tolerance: Tolerance of the effect check in nats.
        quantizes: True if the rollout engine serves quantized weights.
        stale: True if the config permits rows that older weights generated (`train.staleness`).
        rewarded: True if advantages depend on rewards, and not, for example, on a teacher's logprobs.
        scored: True if a reward function scores responses, and not only a reward model.
    """

    other_roles: Sequence[str] = ()
    grouped: bool = False
    compares: bool = False
    kl_in_reward: bool = False
    tolerance: float = LARGEST_TOLERANCE
    quantizes: bool = False
    stale: bool = False
    rewarded: bool = True
    scored: bool = True

    @property
    def most_apart(self) -> float:
        """Largest permitted mean difference between the logprobs of rollout and actor, in nats: `tolerance`, but at
        most `LARGEST_TOLERANCE` or `LARGEST_QUANTIZED_TOLERANCE`."""
        return min(self.tolerance, LARGEST_QUANTIZED_TOLERANCE if self.quantizes else LARGEST_TOLERANCE)


def read_alarm_inputs(plan: RunPlan) -> AlarmInputs:
    if not isinstance(plan, Plan):
        return AlarmInputs()
    config, needs = plan.config, plan.advantage_needs
    grouped, kl = config.rollout.samples_per_prompt > 1, config.algorithm.kl
    records = [provided.record for provided in plugins().providers(Advantage, config.algorithm.advantage.name)]
    # a user's function may compare samples
    compares = all(isinstance(record, Advantage) and record.compares_samples for record in records)
    return AlarmInputs(
        other_roles=[name for name, role in plan.roles.items() if role.trained and name != "actor"],
        grouped=grouped,
        compares=grouped and compares and "critic" not in plan.roles,
        kl_in_reward=kl.place == "reward" and kl.coefficient > 0,
        tolerance=plan.effect_tolerance,
        quantizes=plan.roles["rollout"].quantizes,
        stale=bool(config.train.staleness),
        rewarded=needs is None or not {"reward", "rewards", "token_rewards"}.isdisjoint(needs),
        scored=bool(plan.rewards),
    )
