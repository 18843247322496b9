"""Plans the models of roles other than the actor: the critic, the reference and the reward model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from enginehouse.engines.model import end_ids
from enginehouse.errors import nearest
from enginehouse.plugin import TrainBackend
from enginehouse.plugin.capabilities import LORA
from enginehouse.roles.role_plan import RolePlan
from enginehouse.weights.names import stored_shapes
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.paths import read_model
from enginehouse_rl.config.schema import AuxiliaryModelConfig, Config, DPOConfig
from enginehouse_rl.plan.parts.actor import ActorPart, place_actor
from enginehouse_rl.plan.parts.advantage import AdvantagePart
from enginehouse_rl.plan.parts.draft import C, Fact, Part
from enginehouse_rl.plan.parts.engines import RoleEngine
from enginehouse_rl.plan.parts.model import ModelPart, check_writes
from enginehouse_rl.plan.roles import list_auxiliaries
from enginehouse_rl.plan.tokenizers import check_tokens


class AuxiliaryPart(Part[C]):
    """The model of a role other than the actor.

    Attributes:
        name: the name of the role, which is also the key of its section.
    """

    name: str
    head: Literal["causal_lm", "value"] = "causal_lm"
    trained = False

    @property
    def section(self) -> AuxiliaryModelConfig:
        return list_auxiliaries(self.config)[self.name]

    @property
    def role(self) -> RolePlan | None:
        """The role; None if the run has no such model."""
        return self.run.roles.get(self.name)

    def read(self) -> None:
        """Read the model of the role, and check that it uses the same tokens as the actor's model. Do nothing if the
        role uses the actor's model."""
        run, path = self.run, self.section.path
        run.models[self.name] = {}
        if not path:
            return
        with self.findings.collecting():
            run.models[self.name] = model = read_model(path, f"{self.name}.path")
            self.check_read(path, model)
            paths, models = (run.config.model.path, path), (run[ModelPart].json, model)
            check_tokens(self.findings, self.name, paths, models, run.config.model.trust_remote_code)

    def check_read(self, path: str, model: Mapping[str, Any]) -> None:
        """Check, by the `config.json` of a model, that the model meets the requirements of the role. Not called if the
        role uses the actor's model."""

    def place(self, optimizer_steps: int) -> None:
        """Add the role with its engine and processes, and let the engine check the model.

        `optimizer_steps` is the length of the learning-rate schedule. Even a role that is not trained has a schedule.
        """
        run, section, path = self.run, self.section, self.section.path
        shares = self._choose_host()
        engine, like = run.engines[shares or "actor"], run.roles[shares or "actor"]
        processes = like.processes if shares else section.processes or like.processes
        if section.engine is not None:
            engine = RoleEngine(run, TrainBackend, section.engine, self.name, processes)
            if "backend" not in section.engine.model_fields_set and section.engine.backend != like.backend:
                self.note(
                    f"{self.name}.engine names no engine, so the default engine {section.engine.backend!r} runs the "
                    f"{self.name}, and not {like.backend!r}, the engine of the {shares or 'actor'}. To use that one, "
                    f"set {self.name}.engine.backend={like.backend}"
                )
        elif processes != like.processes:
            engine.check_processes(processes, f"{self.name}.processes is {processes}")
        if shares and engine.interpreter != like.interpreter:
            self.refuse(
                f"{self.name}.shares is {shares}, which runs in {like.interpreter.name}, but {self.name} needs "
                f"{engine.interpreter.name}: a process has only one environment; leave {self.name}.shares unset"
            )
        if self.head == "value":
            engine.check_value_head(self.name)
        role = engine.role(path or run.config.model.path, processes)
        options = dict(role.options)
        if "total_steps" in options:
            total = (section.engine or run.config.actor.engine).options.get("total_steps")
            options["total_steps"] = total or optimizer_steps
        run.engines[self.name] = engine
        run.roles[self.name] = replace(
            role,
            options=options,
            model=replace(role.model, head=self.head),
            shares=shares and (like.shares or shares),
            trained=self.trained,
        )
        if path:
            engine.check_model(run.models[self.name], run.roles[self.name].model, f"{self.name}.path")
        elif section.engine:
            engine.check_model(run[ModelPart].json, run.roles[self.name].model)

    def check_scores(self, path: str) -> None:
        """Reject a model without a value head. Called for roles that compute scores."""
        names = stored_shapes(Path(path))
        if names and not {"score.weight", "value_head.weight"} & names.keys():
            self.refuse(
                f"{self.name}.path must be a sequence classifier with one label, such as `enginehouse rm` trains, but "
                f"{path} has no score.weight"
            )

    def describe(self, role: RolePlan) -> str:
        """Describe the role's model, engine and processes."""
        path, engine_words = self.section.path or self.config.model.path, ""
        if self.section.engine is not None:
            engine_words = self.run.engines[self.name].words
        if role.shares:
            return f"{path}{f': {engine_words}' if engine_words else ''}, in the {role.shares}'s processes"
        engine = engine_words or f"{role.backend} with the {self.section.shares or 'actor'}'s options"
        return f"{path}: {engine}, {count(role.processes, 'rank')}, in separate processes"

    def _choose_host(self) -> str | None:
        """Return the role whose processes this role shares; None if it has its own processes."""
        section, roles = self.section, self.run.roles
        shares: str | None = section.shares
        if shares is None and section.engine is None and section.processes is None:
            shares = "actor"
        if shares and shares not in roles:
            self.refuse(
                f"{self.name}.shares is {shares}, which is no role of this run that is placed before {self.name}. "
                f"{nearest(shares, roles)}"
            )
            shares = "actor"
        if shares and section.processes is not None:
            self.refuse(
                f"{self.name}.processes is {section.processes}, but {self.name}.shares is {shares}: a role either has "
                "its own processes or shares those of another role; leave one of the two keys unset"
            )
        return shares


class CriticPart(AuxiliaryPart[Config]):
    """The model that estimates values, used if the advantage needs them."""

    name, head, trained = "critic", "value", True

    def settle(self) -> None:
        config, critic = self.config, self.config.critic
        self.read()
        if "values" not in self.run[AdvantagePart].needed:
            if critic != type(critic)():
                name = config.algorithm.advantage.name
                self.note(f"critic is set, but the advantage {name!r} needs no values: no critic runs")
            return
        if critic.warmup_steps >= config.train.steps:
            self.refuse(
                f"critic.warmup_steps must be less than train.steps ({config.train.steps}), not {critic.warmup_steps}: "
                "otherwise the actor is never trained"
            )
        self.place(config.train.steps * config.algorithm.epochs * config.algorithm.minibatches)
        self.run[ModelPart].check_trainable("critic.path", critic.path or "", self.run.models["critic"])

    def facts(self) -> Iterable[Fact]:
        if self.role:
            critic, warmup = self.config.critic, self.config.critic.warmup_steps
            warmup_words = f"; the actor is not trained in the first {count(warmup, 'step')}" if warmup else ""
            yield "critic", f"{self.describe(self.role)}; {critic.loss.name} loss{warmup_words}"


class ReferencePart(AuxiliaryPart[Config | DPOConfig]):
    """The frozen model with which DPO, a KL term or an advantage compares the policy. A run has no such role if the
    actor's own base model serves as reference.

    Attributes:
        used: true if the run compares the policy with a reference.
    """

    name = "reference"
    used: bool

    def settle(self) -> None:
        config, actor = self.config, self.run.engines["actor"]
        self.read()
        self.used = isinstance(config, DPOConfig) or self.run[AdvantagePart].uses_reference
        changed = sorted(name for name, value in config.reference if value)
        if not self.used:
            for name in changed:
                self.note(f"reference.{name} is set, but algorithm.kl.coefficient is 0: no reference model runs")
            return
        if changed or actor.record is None or actor.lacks(LORA) or not actor.options.get("lora"):
            self.place(self.run[ActorPart].optimizer_steps)

    def check_read(self, path: str, model: Mapping[str, Any]) -> None:
        check_writes("reference.path", path, model)

    def facts(self) -> Iterable[Fact]:
        config = self.config
        model = self.describe(self.role) if self.role else "the actor's base model, without its adapters"
        if isinstance(config, DPOConfig):
            yield "reference", model
        elif not self.used:
            yield "reference", "none (algorithm.kl.coefficient is 0)"
        elif not (kl := config.algorithm.kl).coefficient:
            yield "reference", f"{model}; for the {config.algorithm.advantage.name} advantages"
        else:
            adapted = f", adapted to a divergence of {kl.target:g}" if kl.target else ""
            term = f"{kl.coefficient:g} times the {kl.chosen_estimator} divergence in the {kl.place}"
            yield "reference", f"{model}; {term}{adapted}"


class RewardModelPart(AuxiliaryPart[Config]):
    """The model that scores complete samples, if the config names one."""

    name, head = "reward_model", "value"

    def settle(self) -> None:
        section, keep = self.config.reward_model, self.config.rollout.keep
        self.read()
        if section.path:
            self.check_scores(section.path)
            self.place(self.run[ActorPart].optimizer_steps)
            if keep:
                self.refuse(
                    f"rollout.keep: {keep.name} needs the rewards as soon as a group ends, but the reward model "
                    "scores all samples of a step together: unset rollout.keep or reward_model.path"
                )
        elif section != type(section)():
            self.refuse(
                "reward_model is set, but has no path: set reward_model.path to a directory with a sequence classifier"
            )

    def check_read(self, path: str, model: Mapping[str, Any]) -> None:
        text = model.get("text_config") or model
        if text.get("pad_token_id") is not None and text["pad_token_id"] in end_ids(text.get("eos_token_id")):
            self.note(
                f"reward_model.path: {path} uses its end-of-sequence token for padding. transformers reads the score "
                "of such a model at the token before the end, but enginehouse reads it at the last token, as "
                "`enginehouse rm` trains it. If another program trained the model, the scores differ"
            )

    def facts(self) -> Iterable[Fact]:
        if self.role:
            weight = self.config.reward_model.weight
            yield "reward model", f"{self.describe(self.role)}; {weight:g} times its score is added to the reward"


class EvalRewardModelPart(RewardModelPart):
    """The reward model of an evaluation. It has its own processes, because an evaluation has no actor whose processes
    it could share."""

    @property
    def section(self) -> AuxiliaryModelConfig:
        section = super().section
        if section.shares:  # an evaluation has no role with which it could share
            section = section.model_copy(update={"shares": None if section.engine else "actor"})
        return section

    def settle(self) -> None:
        if not self.section.path:
            return
        self.read()
        place_actor(self.run)
        self.place(self.config.train.steps)
        del self.run.roles["actor"], self.run.engines["actor"]
        self.run.roles[self.name] = replace(self.run.roles[self.name], shares=None)
