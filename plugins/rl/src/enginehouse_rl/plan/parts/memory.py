from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from enginehouse.engines.memory import MemoryDemand, MemoryUse, ModelShape
from enginehouse.plugin import Transport
from enginehouse.plugin.capabilities import LENT_WEIGHTS
from enginehouse_rl.config.schema import AnyConfig
from enginehouse_rl.plan.device import find_gpu
from enginehouse_rl.plan.memory import Needs
from enginehouse_rl.plan.parts.data import DataPart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.model import ModelPart

GENERATING = ("rollout", "evaluation")
COPIES = "kept copies"
"""Name of the host memory that weight transports keep, in a run on CPUs."""


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
        sizes: dict[str, int] = {}  # bytes of the weights of each role's model
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
            sizes[name] = demand.itemsize * demand.shape.parameters
            options = run.engines[name].typed
            uses[name] = None if options is None else options.memory(demand)
        for name, kept in self._keep_copies(sizes).items():
            if (use := uses[name]) is not None:  # None: such as running servers
                kept //= self._sharers(name)
                on_host = {"host": use.host + kept} if run.device == "cuda" else {"held": {**use.held, COPIES: kept}}
                uses[name] = replace(use, **on_host)
        needs = Needs(run.roles, uses, run.device, gpu)
        self.lines, self.total = needs.table(), needs.describe_total()
        if self.lines and description:
            self.lines.append(f"rows of at most {longest:,} tokens: {description}")
        needs.check(self.findings, exact)

    def _keep_copies(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes of host memory that weight transports keep for all trainers together and for each replica.

        Args:
            sizes: bytes of the weights of each role's model, as far as they are known.
        """
        kept = dict[str, int]()
        for name, role in self.run.roles.items():
            if not role.transport or name not in sizes or role.model.adapter is not None:
                continue
            record = self.run.plugins.get(Transport, role.transport)
            for end, copies in (("actor", record.trainer_copies), (name, record.replica_copies)):
                if copies:
                    kept[end] = kept.get(end, 0) + copies * sizes[name]
        return kept

    def _sharers(self, name: str) -> int:
        """Return among how many lines of the table the copies of a role are divided: of all trainers by their ranks, of
        a replica by its GPUs; on a CPU a replica has one line."""
        role = self.run.roles[name]
        if name == "actor":
            return role.processes
        return role.gpus if self.run.device == "cuda" else 1

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
