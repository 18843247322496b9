from __future__ import annotations

from enginehouse.plugin import Advantage as AdvantageRecord
from enginehouse.plugin import Filter, Stage
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.functions import FunctionCall
from enginehouse_rl.plan.parts.draft import Part
from enginehouse_rl.plan.stages import find_own_stages


class AdvantagePart(Part[Config]):
    """The advantage.

    Attributes:
        needs: the columns that the advantage reads, as its record lists them; None: all columns except texts.
        own_stages: the stages that plugins provide, by name.
        needed: the columns that the advantage or one of these stages reads.
        uses_reference: true if one of these columns comes from a reference model, or a KL term needs such a model.
        compares: true if the advantage compares the samples of a prompt with each other.
    """

    needs: tuple[str, ...] | None
    own_stages: dict[str, Stage]
    needed: set[str]
    uses_reference: bool
    compares: bool
    call: FunctionCall

    def settle(self) -> None:
        section, kl = self.config.algorithm.advantage, self.config.algorithm.kl
        records = self.run.records(AdvantageRecord, section.name)
        self.needs = next((record.needs for record in records), None)
        self.own_stages = find_own_stages(self.findings, self.run.plugins, self.config, self.needs)
        self.needed = {*(self.needs or ()), *(name for stage in self.own_stages.values() for name in stage.needs)}
        self.uses_reference = kl.coefficient > 0 or "reference_logprobs" in self.needed
        self.compares = any(record.compares_samples for record in records)
        self.call = self.run.call(AdvantageRecord, section.name, section.arguments, "algorithm.advantage")
        self._check_rewards_are_read()

    def _check_rewards_are_read(self) -> None:
        """Reject reward settings without an effect: the advantage does not read the columns that they change."""
        config, needs = self.config, self.needs
        if needs is None:
            return
        name, kl, model = config.algorithm.advantage.name, config.algorithm.kl, config.reward_model
        rewards = list(config.reward.list_rewards().values())
        normalized = any(reward.normalize != "none" for reward in rewards)
        if "reward" not in needs and "token_rewards" not in needs and kl.coefficient and kl.place == "reward":
            self.refuse(
                f"algorithm.kl.place is reward, but the advantage {name!r} does not read the reward: set "
                "algorithm.kl.place=loss"
            )
        weighed = normalized or model.weight != 1.0 or any(reward.weight != 1.0 for reward in rewards)
        if "rewards" in needs and "reward" not in needs and weighed:
            self.refuse(
                f"the advantage {name!r} reads each reward separately, before weight and normalize are applied: remove "
                "these keys, and set algorithm.advantage.arguments.weights instead"
            )
        weights, number = config.algorithm.advantage.arguments.get("weights"), len(rewards) + bool(model.path)
        if "rewards" in needs and isinstance(weights, list | tuple) and len(weights) != number:
            self.refuse(
                f"algorithm.advantage.arguments.weights must have a number for each reward: it has {len(weights)} "
                f"numbers, but the number of rewards is {number}"
            )
        if "baseline" in needs and (model.path or normalized):
            self.refuse(
                f"the advantage {name!r} compares with the reward of one more response to each prompt. That response "
                "gets no normalized reward and no score of a reward model: remove reward_model and normalize"
            )


class FilterPart(Part[Config]):
    """The filter of groups.

    Attributes:
        call: the filter function; None: the run trains on all groups.
    """

    call: FunctionCall | None = None

    def settle(self) -> None:
        if (section := self.config.rollout.keep) is not None:
            self.call = self.run.call(Filter, section.name, section.arguments, "rollout.keep")
