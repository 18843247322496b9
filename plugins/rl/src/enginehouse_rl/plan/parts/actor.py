"""Plans the actor: the engine that trains the policy, or the only model of a run that trains on given rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from enginehouse.errors import nearest
from enginehouse.plugin import TrainBackend
from enginehouse.plugin.capabilities import LORA
from enginehouse.weights.names import stored_shapes
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import AnyConfig, Config, RMConfig
from enginehouse_rl.plan.parts.advantage import AdvantagePart
from enginehouse_rl.plan.parts.draft import Draft, Fact, Part
from enginehouse_rl.plan.parts.engines import RoleEngine
from enginehouse_rl.plan.parts.model import ModelPart

HIGH_LR = 0.01
"""The plan adds a note for learning rates above this."""
LEAST_ADAPTER_RATE = 1e-5
"""Below this learning rate, rounding to bfloat16 loses most changes of an adapter. At a learning rate of 1e-6, the
served weights show a hundredth of the change that the first step makes."""

_EMBEDDING = re.compile(r"embed|^w[pt]e$|^shared$")
"""Matches the last part of an embedding's name. Its weight has two dimensions, like the weight of a linear layer."""


def place_actor(run: Draft[AnyConfig]) -> RoleEngine:
    section = run.config.actor
    run.engines["actor"] = engine = RoleEngine(run, TrainBackend, section.engine, "actor", section.processes)
    run.roles["actor"] = replace(engine.role(run.config.model.path, section.processes), trained=True)
    return engine


class ActorPart(Part[AnyConfig]):
    """The role that is trained.

    Attributes:
        optimizer_steps: the number of optimizer steps in the run.
    """

    optimizer_steps: int

    def settle(self) -> None:
        run, config, path = self.run, self.config, self.config.model.path
        self.optimizer_steps = config.train.steps
        if isinstance(config, Config):
            warmup = config.critic.warmup_steps if "values" in run[AdvantagePart].needed else 0
            updates = config.algorithm.epochs * config.algorithm.minibatches
            self.optimizer_steps = max(config.train.steps - warmup, 1) * updates
        engine = place_actor(run)
        role, model = run.roles["actor"], run[ModelPart].json
        self._fill_schedule(role.options)
        engine.check_model(model, role.model)
        run[ModelPart].check_trainable("model.path", path, model)
        self._check_targets(role.options, stored_shapes(Path(path)) if model else {})
        self._check_export(engine)
        rate = role.options.get("lr")
        low = isinstance(rate, float) and rate < LEAST_ADAPTER_RATE
        if role.options.get("lora") and run.dtype == "bfloat16" and low:
            self.note(
                f"actor.engine.options.lr is {rate:g}, for adapters in bfloat16: rounding removes such small changes "
                "from the served weights, so the rollout serves the base model in the first tens of steps; for "
                "adapters, use 1e-5 to 1e-4"
            )
        if isinstance(config, RMConfig):
            engine.check_value_head("actor")
            run.roles["actor"] = replace(role, model=replace(role.model, head="value"))

    def facts(self) -> Iterable[Fact]:
        yield "actor", f"{self.run.engines['actor'].words}, {count(self.config.actor.processes, 'rank')}"

    def _fill_schedule(self, options: dict[str, Any]) -> None:
        """Set the length of the learning-rate schedule to the length of the run, unless the config sets it."""
        if options.get("lr", 0) > HIGH_LR:
            self.note(
                f"actor.engine.options.lr is {options['lr']:g}: rates above {HIGH_LR:g} destroy most models; for a "
                "whole model 1e-6 is usual, for adapters 1e-4"
            )
        if "total_steps" not in options:
            return
        options["total_steps"] = total = options["total_steps"] or self.optimizer_steps
        if total < self.optimizer_steps:
            self.note(
                f"actor.engine.options.total_steps is {total}, but the run takes {self.optimizer_steps} optimizer "
                "steps: the remaining steps use the last learning rate of the schedule"
            )
        warmup = options.get("warmup_steps", 0)
        if warmup >= self.optimizer_steps:
            self.note(
                f"the warm-up lasts for the whole run: it takes {warmup} optimizer steps, and the run takes "
                f"{self.optimizer_steps}"
            )

    def _check_targets(self, options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Reject a LoRA target that the model's files do not contain, and note a pattern of `lr_groups` without a
        match. `shapes` maps the names of the tensors in the files to their shapes; it is empty if the files cannot be
        read."""
        path = self.config.model.path
        for pattern in options.get("lr_groups") or {} if shapes else ():
            if not any(fnmatchcase(name, pattern) for name in shapes):
                patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in shapes}
                self.note(
                    f"actor.engine.options.lr_groups: no tensor in {path} matches {pattern!r}. "
                    f"{nearest(pattern, patterns)}"
                )
        targets = (options.get("lora") or {}).get("targets", "all-linear")
        layers = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
        sizes = [(layer.rpartition(".")[2], len(shape)) for layer, shape in layers.items()]
        names = {name for name, _ in sizes}
        linear = {name for name, size in sizes if size == 2 and not _EMBEDDING.search(name)}
        for target in targets if layers and not isinstance(targets, str) else ():
            key, name = "actor.engine.options.lora.targets", target.rpartition(".")[2]
            if name in names and name not in linear:
                self.refuse(f"{key}: {target!r} is no linear layer of {path}. {nearest(name, linear)}")
            elif not any(layer == target or layer.endswith(f".{target}") for layer in layers):
                missing = f"{key}: no tensor in {path} belongs to a layer {target!r}"
                if name in names:  # a model and its files may use different names for a layer
                    self.note(missing)
                else:
                    self.refuse(f"{missing}. {nearest(name, linear)}")

    def _check_export(self, engine: RoleEngine) -> None:
        """Check that the actor has an adapter if the run exports one."""
        kind = self.config.train.export
        if kind == "merged" or engine.record is None:
            return
        if isinstance(self.config, RMConfig):
            self.refuse(f"train.export must be merged, not {kind}: an adapter cannot hold the head of a reward model")
        elif engine.lacks(LORA):
            self.refuse(
                f"train.export is {kind}, but engine {engine.name!r} cannot train adapters (capability {LORA!r}): set "
                "train.export=merged, or choose an engine that can, such as fsdp, and set actor.engine.options.lora"
            )
        elif engine.options and not engine.options.get("lora"):
            self.refuse(
                f"train.export is {kind}, but the actor has no adapter: set actor.engine.options.lora, or "
                "train.export=merged"
            )
