"""Chooses the transports that carry the actor's weights to the rollout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from enginehouse.engines.options import LoraOptions, RolloutOptions
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import Placement as Reach
from enginehouse.plugin import RolloutBackend, TrainBackend, Transport
from enginehouse.plugin.capabilities import ADAPTER_UPDATES, CROSS_HOST, SAME_HOST, SAME_PROCESS
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.parts.placement import PlacementPart


class WeightsPart(Part[Config]):
    """The transports of weights.

    `weights.transport` chooses the transport to the rollout. Another role uses this transport too if it reaches that
    role.
    """

    reason = ""

    def settle(self) -> None:
        self._choose_adapter()
        for name in ("rollout", "evaluation"):
            if name in self.run.roles:
                transport, reason = "", ""
                with self.findings.collecting():
                    transport, reason = self._choose(name)
                self.reason = self.reason or reason
                self.run.roles[name] = replace(self.run.roles[name], transport=transport)

    def facts(self) -> Iterable[Fact]:
        rollout = self.run.roles["rollout"]
        every = rollout.effect_check_every
        checked = f"their effect checked every {every} updates" if every else "their effect unchecked"
        what = ", the adapter alone" if rollout.model.adapter else ""
        yield "weights", f"by {rollout.transport} ({self.reason}){what}; {checked}"

    def _choose_adapter(self) -> None:
        """Let the rollout take adapters alone, if the config asks for it."""
        if self.config.weights.adapter == "merged":
            return
        run = self.run
        adapter: LoraOptions | None = getattr(run.engines["actor"].typed, "lora", None)
        if obstacle := self._find_obstacle(adapter):
            self.refuse(f"weights.adapter is alone, but {obstacle}; set weights.adapter=merged")
        elif adapter is None:
            self.refuse("weights.adapter is alone, but the actor has no adapter: set actor.engine.options.lora")
        else:
            rollout = run.roles["rollout"]
            run.roles["rollout"] = replace(rollout, model=replace(rollout.model, adapter=adapter))

    def _find_obstacle(self, adapter: LoraOptions | None) -> str:
        """Return the reason why updates cannot bring an adapter alone; empty if they can."""
        run = self.run
        for name in ("actor", "rollout"):
            if run.engines[name].lacks(ADAPTER_UPDATES):
                return f"engine {run.engines[name].name!r} lacks the capability {ADAPTER_UPDATES!r}"
        if run.roles["rollout"].devices_of is not None:
            return "the rollout's weights do not stay in memory while the actor has its devices"
        if "evaluation" in run.roles:
            return "the engine of evaluation.engine gets whole weights"
        options, model = run.engines["rollout"].typed, run[ModelPart].json
        try:
            if isinstance(options, RolloutOptions) and model and adapter is not None:
                options.check_adapter(adapter, model.get("text_config") or model, run.device, run.dtype)
        except UserError as error:
            return f"engine {run.engines['rollout'].name!r} cannot add it to the model: {error}"
        return ""

    def _choose(self, role: str) -> tuple[str, str]:
        """Return the name of the transport, and the reason for choosing it. Both are empty if a backend has a problem.

        Raises:
            UserError: the transport in the config does not exist or does not reach the role, or no transport reaches
                the role.
        """
        run, config, named = self.run, self.config, self.config.weights.transport
        colocated = role == "rollout" and run[PlacementPart].kind == "colocated"
        one_process, joined = colocated or config.cluster.launcher == "inline", bool(config.cluster.address)
        apart = f"in different processes of {'any hosts of a cluster' if joined else 'one host'}"
        where = "in the same process" if one_process else apart
        record = None if named == "auto" else run.plugins.get(Transport, named)
        sufficient = {SAME_PROCESS} if one_process else {SAME_HOST, CROSS_HOST}
        if record is not None and sufficient.intersection(record.capabilities):
            return named, "set by weights.transport"
        if record is not None and role == "rollout":
            reach = ", ".join(sorted(record.capabilities)) or "none"
            raise ConfigError(
                f"weights.transport: actor and rollout are {where} (rollout.placement), but {named!r} cannot connect "
                f"them (its capabilities: {reach}); set weights.transport=auto, which chooses a transport"
            )
        train, rollout = run.engines["actor"].record, run.engines[role].record
        if not isinstance(train, TrainBackend) or not isinstance(rollout, RolloutBackend):
            return "", ""
        ranks, apart_in_cluster = config.actor.processes, joined and not one_process
        if apart_in_cluster and role == "rollout":
            self.note(
                "cluster.address is set: whether actor and rollout share a host is known only when the run starts, so "
                "the transport is chosen as if they did not (weights.transport=shared_memory is faster if they do)"
            )
        ends = Reach(colocated=one_process, hosts=1 + joined, device=run.device, training_ranks=ranks)
        picked = run.plugins.pick_transport(train, rollout, ends)
        several = f", and {ranks} processes train" if apart_in_cluster and ranks > 1 else ""
        return run.plugins.name_of(picked), f"actor and {role} are {where}{several}"
