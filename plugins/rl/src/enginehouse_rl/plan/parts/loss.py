"""Checks the losses and the KL term, and chooses whose logprobs are the denominator of the policy ratio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, Literal

from enginehouse.plugin import Loss as LossRecord
from enginehouse.plugin.arguments import KL_ARGUMENTS
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.functions import FunctionCall
from enginehouse_rl.plan.parts.draft import Fact, Part

IMPORTANCE_CAP, STALE_IMPORTANCE_CAP = "importance_cap", 2.0
"""The loss argument for the largest importance weight of a token, and its default for samples of older weights. `null`
turns the importance weights off."""
NARROW = 0.05
"""In bfloat16, a note reports clip ranges narrower than this number, because the logprobs of two engines differ by more
at some tokens."""


class LossPart(Part[Config]):
    """The losses of actor and critic.

    Attributes:
        call: the actor's loss with its arguments, including arguments from other sections of the config, but without
            the arguments of the KL term.
        critic: the critic's loss; None without a critic.
        old_logprobs: the role whose logprobs are the denominator of the policy ratio.
        why_actor: the reason for using the actor's logprobs; empty if the config chooses the actor.
    """

    call: FunctionCall
    critic: FunctionCall | None = None
    old_logprobs: Literal["rollout", "actor"]
    why_actor = ""

    def settle(self) -> None:
        config, section, kl = self.config, self.config.algorithm.loss, self.config.algorithm.kl
        self.old_logprobs, self.why_actor = self._choose_old_logprobs()
        kl_arguments = tuple(KL_ARGUMENTS) if kl.coefficient and kl.place == "loss" else ()
        arguments = self._take_arguments()
        self.call = self.run.call(
            LossRecord, section.name, section.arguments, "algorithm.loss", kl_arguments, arguments
        )
        critic = config.critic.loss if "critic" in self.run.roles else None
        if critic is not None:
            self.critic = self.run.call(LossRecord, critic.name, critic.arguments, "critic.loss")
        self._check_kl()
        self._check_output("algorithm.loss", section.name, "logprobs")
        if critic is not None:
            self._check_output("critic.loss", critic.name, "values")

    def facts(self) -> Iterable[Fact]:
        algorithm = self.config.algorithm
        reason = f" ({self.why_actor})" if self.why_actor else ""
        yield (
            "algorithm",
            f"{algorithm.advantage.name} advantages, {algorithm.loss.name} loss; old logprobs are the "
            f"{self.old_logprobs}'s{reason}",
        )

    def _choose_old_logprobs(self) -> tuple[Literal["rollout", "actor"], str]:
        """Return the role whose logprobs are the denominator of the policy ratio. If it is the actor, return the reason
        too, unless the config chooses the actor. If the config chooses the rollout, reject a loss that needs the
        logprobs of the actor."""
        config, dtype = self.config, self.run.dtype
        loss, configured = config.algorithm.loss, config.algorithm.old_logprobs
        always, narrow, needing = False, list[str](), set[str]()
        for record in self.run.records(LossRecord, loss.name):
            always |= record.always_needs_actor_logprobs
            bounds = {name: loss.arguments.get(name) for name in record.ratio_bounds} if dtype != "float32" else {}
            narrow += [name for name, bound in bounds.items() if isinstance(bound, float) and bound < NARROW]
            needing |= {name for name in record.needs_actor_logprobs if loss.arguments.get(name) is not None}
        reason = ""
        if always or narrow:
            reason = "its ratio is clipped closer to 1 than rounding differences between two engines allow"
        if config.train.staleness:
            reason = "samples come from older weights"
        chosen = configured or ("actor" if reason else "rollout")
        if chosen == "actor":
            return chosen, "" if configured else reason
        cure = "set algorithm.old_logprobs=actor"
        if always:
            self.refuse(f"algorithm.loss.name: {loss.name!r} needs the actor's own logprobs, because {reason}: {cure}")
        elif narrow:
            self.note(
                f"algorithm.loss.arguments.{narrow[0]} is less than {NARROW:g}, but in {dtype} rounding differences "
                f"between the engines are enough to clip ratios: {cure}"
            )
        for name in sorted(needing):
            self.refuse(
                f"algorithm.loss.arguments.{name} compares logprobs of the actor and the rollout, but with "
                f"algorithm.old_logprobs=rollout the actor computes none: {cure}"
            )
        return chosen, ""

    def _take_arguments(self) -> Mapping[str, Any]:
        """Return the loss arguments that are unset in the config and come from other sections (`Loss.taken_from`).

        With `train.staleness` they include the cap of importance weights, if the loss has one and gets the actor's
        logprobs.
        """
        config, loss = self.config, self.config.algorithm.loss
        arguments: dict[str, Any] = {}
        for record, plugin in self.run.plugins.providers(LossRecord, loss.name):
            if not isinstance(record, LossRecord):
                continue
            capped = IMPORTANCE_CAP in record.needs_actor_logprobs and IMPORTANCE_CAP not in loss.arguments
            if config.train.staleness and self.old_logprobs == "actor" and capped:
                arguments[IMPORTANCE_CAP] = STALE_IMPORTANCE_CAP
            for name, key in record.taken_from.items():
                try:
                    if loss.arguments.get(name) is None:
                        arguments[name] = reduce(getattr, key.split("."), config)
                except AttributeError:
                    self.refuse(
                        f"algorithm.loss.name: {loss.name!r} ({plugin}) takes {name!r} from {key}, but the config has "
                        "no such key"
                    )
        return arguments

    def _check_kl(self) -> None:
        """Check that the KL term has an effect, and that the arguments of the loss in the config include no argument of
        the KL term."""
        config, kl = self.config, self.config.algorithm.kl
        if kl.target is not None and not (kl.coefficient and kl.place == "reward"):
            self.refuse(
                "algorithm.kl.target requires a KL term in the reward, whose coefficient it adapts: set "
                "algorithm.kl.place=reward, and algorithm.kl.coefficient to the first value"
            )
        if kl.coefficient and kl.place == "loss" and kl.estimator == "k1":
            self.refuse(
                "algorithm.kl: k1 in the loss regularises nothing, since its gradient is zero in expectation; set "
                "algorithm.kl.estimator to k3 (the gradient of the forward KL), k2 or k3_unbiased (of the reverse KL), "
                "or algorithm.kl.place=reward"
            )
        if kl.coefficient and kl.place == "reward" and kl.chosen_estimator != "k1":
            self.refuse(
                f"algorithm.kl: {kl.estimator} in the reward does not hold the policy near its reference, and may "
                "drive it away, since near the reference its policy gradient is zero in expectation; set "
                "algorithm.kl.estimator=k1, or algorithm.kl.place=loss"
            )
        weighted = self.call.arguments.get(IMPORTANCE_CAP) is not None
        if kl.coefficient and kl.place == "loss" and config.train.staleness and not weighted:
            self.note(
                "algorithm.kl: the term in the loss treats samples of older weights like samples of the current "
                "policy, because algorithm.loss.arguments.importance_cap is unset"
            )
        for name, cure in KL_ARGUMENTS.items():
            if name in config.algorithm.loss.arguments:
                self.refuse(
                    f"algorithm.loss.arguments.{name}: a loss gets this argument from the KL term; set {cure} instead"
                )

    def _check_output(self, key: str, name: str, output: str) -> None:
        """Check that a loss uses the output that its role's model has."""
        records = self.run.records(LossRecord)
        record = next((record for record in records if record.name == name), None)
        if record is not None and record.output != output:
            fitting = ", ".join(record.name for record in records if record.output == output)
            self.refuse(f"{key}.name must be a loss of {output}, but {name!r} is a loss of {record.output}: {fitting}")
