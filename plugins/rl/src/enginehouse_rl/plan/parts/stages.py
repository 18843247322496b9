from __future__ import annotations

from collections.abc import Iterable

from enginehouse.plugin import Stage
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.functions import FunctionCall
from enginehouse_rl.plan.parts.actor import ActorPart
from enginehouse_rl.plan.parts.advantage import AdvantagePart
from enginehouse_rl.plan.parts.auxiliary import AuxiliaryPart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.loss import LossPart
from enginehouse_rl.plan.stages import StagePlan, plan_own_stage, plan_stages


class StageModelsPart(Part[Config]):
    """The models that stages of plugins use."""

    models: dict[str, AuxiliaryPart[Config]]

    def settle(self) -> None:
        self.models = {}
        for name, section in self.config.stages.items():
            self.models[name] = model = AuxiliaryPart(self.run)
            model.name = f"stages.{name}"
            model.read()
            record = self.run[AdvantagePart].own_stages.get(name)
            if record is not None and record.model and section.path:
                model.head = "value" if record.model == "score" else "causal_lm"
                model.place(self.run[ActorPart].optimizer_steps)
                if model.head == "value":
                    model.check_scores(section.path)

    def facts(self) -> Iterable[Fact]:
        if self.models:
            models = self.models.items()
            lines = [f"{name}, by {model.describe(model.role)}" if model.role else name for name, model in models]
            yield "stages", "; ".join(lines)


class StagesPart(Part[Config]):
    """The stages of a step, which add columns to its samples before training."""

    stages: tuple[StagePlan, ...]

    def settle(self) -> None:
        advantage, own = self.run[AdvantagePart], []
        for name, record in advantage.own_stages.items():
            section, key = self.config.stages.get(name), f"stages.{name}"
            arguments = section.arguments if section is not None else {}
            if arguments and not record.function:
                self.refuse(f"{key}.arguments must be empty: the stage has no function that takes arguments")
            call = self.run.call(Stage, name, arguments, key) if record.function else FunctionCall("")
            own.append(plan_own_stage(name, record, call.arguments))
        self.stages = plan_stages(
            self.findings, self.config, advantage.needs, advantage.uses_reference, self.run[LossPart].old_logprobs, own
        )
