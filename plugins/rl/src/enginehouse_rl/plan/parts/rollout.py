"""Plans the engine that answers training prompts, and the engine that answers held-out prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from enginehouse.engines.options import RolloutOptions
from enginehouse.errors import UserError
from enginehouse.plugin import RolloutBackend
from enginehouse.plugin.capabilities import (
    PAUSE_KEEP,
    PAUSE_KEEP_CACHE,
    PROMPT_LOGPROBS,
    SEED,
    STOP_STRINGS,
    WEIGHT_CHECKSUMS,
)
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config, EngineConfig, EvaluationSamplingConfig, SamplingConfig
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.engines import RoleEngine
from enginehouse_rl.plan.parts.model import ModelPart


class GeneratorPart(Part[Config]):
    """An engine that generates responses, for the role `name`."""

    name: ClassVar[str]

    def place(self, section: EngineConfig, replicas: int, key: str, trains: bool, validates: bool) -> RoleEngine:
        """Add the role, and let its engine check the model and the sampling settings.

        Args:
            key: the key of the section that contains the engine's section.
            trains: true if the engine answers training prompts.
            validates: true if the engine answers held-out prompts.
        """
        run = self.run
        run.engines[self.name] = engine = RoleEngine(run, RolloutBackend, section, key, replicas)
        every = self.verify(engine)
        role = replace(engine.role(run.config.model.path, replicas), effect_check_every=every)
        run.roles[self.name] = role
        engine.check_model(run[ModelPart].json, role.model)
        self._check_stops(engine, trains, validates)
        self._check_sampling(engine, trains, validates)
        return engine

    def check_differing(self) -> None:
        """Check that several responses to one held-out prompt can differ."""
        evaluation = self.config.evaluation
        if evaluation.samples_per_prompt > 1 and evaluation.sampling.temperature == 0:
            self.refuse(
                f"evaluation.samples_per_prompt is {evaluation.samples_per_prompt}, but "
                "evaluation.sampling.temperature is 0: the samples of a prompt would all be the same; set the "
                "temperature, for example to 1.0"
            )

    def verify(self, engine: RoleEngine) -> int:
        """Note the checks of weights that the backend does not support.

        Returns:
            The number of weight updates between checks of their effect: `weights.effect_check_every`, or 0 if the
            backend does not support the check.
        """
        every = self.config.weights.effect_check_every
        name = engine.name
        if engine.lacks(SEED):
            self.note(f"engine {name!r} does not seed its samples: two runs with the same train.seed will differ")
        if engine.lacks(WEIGHT_CHECKSUMS):
            rest = "the others are not checked, so an update that the engine drops may not be noticed"
            if every and not engine.lacks(PROMPT_LOGPROBS):
                rest = (
                    "unless these are all, logprobs of a few tokens are compared too, at every update that changes "
                    "weights"
                )
            self.note(
                f"engine {name!r} may not read back all its weights: the bytes of an update are checked on arrival, "
                f"and the weights that it reads back are compared; {rest}"
            )
        if every and engine.lacks(PROMPT_LOGPROBS):
            self.note(
                f"engine {name!r} cannot score prompts (capability {PROMPT_LOGPROBS!r}): the effect of a weight "
                "update is not checked (weights.effect_check_every)"
            )
            return 0
        return every

    def _check_stops(self, engine: RoleEngine, trains: bool, validates: bool) -> None:
        """Check that the backend supports the stop strings of the config."""
        rollout, evaluation = self.config.rollout.sampling, self.config.evaluation.sampling
        stops = {"rollout.sampling.stop": rollout.stop} if trains else {}
        if validates and evaluation.stop is not None:
            stops["evaluation.sampling.stop"] = evaluation.stop
        elif validates and not trains:
            stops["evaluation.sampling.stop (unset: rollout.sampling.stop)"] = rollout.stop
        for key, stop in stops.items():
            if stop and engine.lacks(STOP_STRINGS):
                self.refuse(f"{key}: engine {engine.name!r} cannot stop at strings (capability {STOP_STRINGS!r})")

    def _check_sampling(self, engine: RoleEngine, trains: bool, validates: bool) -> None:
        """Check the sampling settings with the backend's options, unless these have a problem."""
        sections: dict[str, SamplingConfig | EvaluationSamplingConfig] = {}
        if trains:
            sections["rollout"] = self.config.rollout.sampling
        if validates:
            sections["evaluation"] = self.config.evaluation.sampling
        for key, section in sections.items():
            try:
                if isinstance(engine.typed, RolloutOptions):
                    variables = {**os.environ, **engine.section.env}
                    engine.typed.check_sampling(section.top_p, section.top_k, self.run.device, variables)
            except UserError as error:
                self.refuse(f"{key}.sampling: {error}{engine.owner_words}")


class RolloutPart(GeneratorPart):
    """The engine that answers training prompts. It answers held-out prompts too, unless a separate engine does."""

    name = "rollout"

    def settle(self) -> None:
        config, section = self.config, self.config.rollout
        validates = config.evaluation.engine is None and config.is_validated
        engine = self.place(section.engine, section.replicas, "rollout", trains=True, validates=validates)
        if config.train.staleness and engine.lacks(PAUSE_KEEP):
            self.note(
                f"engine {engine.name!r} cannot hold requests while its weights change (capability {PAUSE_KEEP!r}): "
                "each weight update waits until the running requests have ended"
            )
        if section.cache_at_update == "keep":
            self._check_kept_cache(engine)

    def _check_kept_cache(self, engine: RoleEngine) -> None:
        """Check that the engine can keep keys and values over a weight update, and that nobody else could read them."""
        key = "rollout.cache_at_update=keep"
        if not self.config.train.staleness:
            self.refuse(
                f"{key} has no effect if train.staleness is 0, because then no response is generated during a weight "
                "update: remove it, or set train.staleness=1"
            )
        elif engine.lacks(PAUSE_KEEP_CACHE):
            self.refuse(
                f"{key}: engine {engine.name!r} cannot keep keys and values over a weight update (capability "
                f"{PAUSE_KEEP_CACHE!r}); use recompute"
            )
        elif engine.typed is not None and (engine.typed.servers() or getattr(engine.typed, "openai_endpoint", None)):
            self.refuse(
                f"{key}: other clients of engine {engine.name!r} could get answers computed from old keys and values; "
                "use recompute, or remove openai_endpoint and the URLs of running servers"
            )


class EvaluationPart(GeneratorPart):
    """The separate engine that answers held-out prompts, if the config has one."""

    name = "evaluation"

    def settle(self) -> None:
        if (section := self.config.evaluation.engine) is not None:
            engine = self.place(section, 1, "evaluation", trains=False, validates=True)
            self._check_servers(engine, self.run.engines["rollout"])
            if self.config.cluster.launcher == "inline":
                self.refuse(
                    "evaluation.engine needs its own process, but an inline run has one process for all roles; leave "
                    "it unset, or set cluster.launcher=ray"
                )
            if engine.quantizes and not self.run.engines["rollout"].quantizes:
                self.refuse(
                    "evaluation.engine serves quantized weights, and the rollout does not, so another policy would be "
                    "validated; set evaluation.engine.options.quantization=none"
                )
            if not self.config.is_validated:
                self.refuse("evaluation.engine is set, but there is no file to validate on (data.validation)")
        self.check_differing()

    def verify(self, engine: RoleEngine) -> int:
        return int(super().verify(engine) > 0)

    def facts(self) -> Iterable[Fact]:
        if (role := self.run.roles.get("evaluation")) is not None:
            yield (
                "evaluation",
                f"{self.run.engines['evaluation'].words}, 1 replica, in a separate process; weights by "
                f"{role.transport} before each validation, their effect "
                f"{'checked each time' if role.effect_check_every else 'unchecked'}; training continues meanwhile",
            )

    def _check_servers(self, engine: RoleEngine, rollout: RoleEngine) -> None:
        """Reject a server that the rollout uses too."""
        if engine.record is not rollout.record or engine.typed is None or rollout.typed is None:
            return
        if shared := set(engine.typed.servers()) & set(rollout.typed.servers()):
            self.refuse(
                f"evaluation.engine.options: {min(shared)} is also a server of the rollout, but the two roles serve "
                "different weights; start another server, or leave evaluation.engine unset: the rollout then answers "
                "the validation prompts"
            )


class EvalRolloutPart(GeneratorPart):
    """The engine of an evaluation outside a run.

    Attributes:
        reads_back: true if replicas report checksums of the weights that they serve.
    """

    name = "rollout"
    reads_back: bool

    def settle(self) -> None:
        evaluation, rollout = self.config.evaluation, self.config.rollout
        key = "evaluation" if evaluation.engine else "rollout"
        engine = self.place(evaluation.engine or rollout.engine, rollout.replicas, key, trains=False, validates=True)
        self.reads_back = not engine.lacks(WEIGHT_CHECKSUMS)
        self.check_differing()

    def verify(self, engine: RoleEngine) -> int:
        return 0  # its weights never change

    def facts(self) -> Iterable[Fact]:
        replicas = count(self.config.rollout.replicas, "replica")
        yield "rollout", f"{self.run.engines['rollout'].words}, {replicas}"
        read = "read back and compared with the files" if self.reads_back else "not read back"
        yield "weights", f"each replica loads the model's files; the served weights are {read}"
