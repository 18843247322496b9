from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from enginehouse.engines.memory import MemoryDemand, MemoryUse, ModelShape
from enginehouse.plugin.capabilities import LENT_WEIGHTS
from enginehouse_rl.config.schema import AnyConfig
from enginehouse_rl.plan.device import find_gpu
from enginehouse_rl.plan.memory import Needs
from enginehouse_rl.plan.parts.data import DataPart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.model import ModelPart

GENERATING = ("rollout", "evaluation")


class MemoryPart(Part[AnyConfig]):
    """Estimates the memory that the engines need, and checks that each device has enough.

    Attributes:
        lines: the memory of each role, as text.
        total: the memory in a few words; empty if unknown.
    """

    lines: list[str]
    total: str

    def settle(self) -> None:
        run, data = self.run, self.run[DataPart]
        gpu = find_gpu() if run.device == "cuda" else None
        longest, description = data.find_longest()
        uses: dict[str, MemoryUse | None] = {}
        exact = True
        for name, role in run.roles.items():
            config = run.models.get(name) or run[ModelPart].json
            shape = ModelShape.of(config.get("text_config") or config)
            if shape is None:
                uses[name] = None
                continue
            exact = exact and shape.exact and "text_config" not in config
            demand = MemoryDemand(
                shape=shape if role.model.head == "causal_lm" else replace(shape, tied=True),  # without the LM head
                head=role.model.head,
                itemsize=4 if role.model.dtype == "float32" else 2,
                processes=role.processes,
                rows=data.rows_of(name),
                longest=max(longest, data.find_longest_answered()) if name in GENERATING else longest,
                trained=role.trained,
                device=run.device,
                card=gpu and gpu.size,
                takes_turns=role.devices_of is not None,
                borrows=self._borrows(name),
            )
            options = run.engines[name].typed
            uses[name] = None if options is None else options.memory(demand)
        needs = Needs(run.roles, uses, run.device, gpu)
        self.lines, self.total = needs.table(), needs.describe_total()
        if self.lines and description:
            self.lines.append(f"rows of at most {longest:,} tokens: {description}")
        needs.check(self.findings, exact)

    def _borrows(self, name: str) -> bool:
        """True if a role may compute with the actor's own copy of the weights."""
        is_colocated, engines = self.run.roles[name].shares == "actor", self.run.engines
        return (
            name == "rollout"
            and is_colocated
            and not any(engines[role_name].lacks(LENT_WEIGHTS) for role_name in (name, "actor"))
        )

    def facts(self) -> Iterable[Fact]:
        return zip(("memory", *[""] * len(self.lines)), self.lines, strict=False)
