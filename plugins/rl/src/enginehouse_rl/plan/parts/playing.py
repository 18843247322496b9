"""Checks the environment that generates samples, and the rewards that score them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from enginehouse.engines.model import served_positions
from enginehouse.plugin import Environment as EnvironmentRecord
from enginehouse.plugin import Reward, resolve
from enginehouse.plugin.secrets import check_secrets
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.schema import Config, NamedRewardConfig
from enginehouse_rl.plan.arguments import check_call, take_values
from enginehouse_rl.plan.functions import FunctionCall, check_environment, find_function
from enginehouse_rl.plan.parts.data import DataPart
from enginehouse_rl.plan.parts.draft import Fact, Part
from enginehouse_rl.plan.parts.model import ModelPart
from enginehouse_rl.plan.reward_columns import RowColumns, check_reward_columns, run_own_check, run_tokenizer_check
from enginehouse_rl.plan.rewards import REWARD_GETS, RewardPlan, is_reserved, make_reward_key
from enginehouse_rl.plan.tokenizers import vocabulary

SINGLE_TURN = "enginehouse_rl.environments.single_turn:SingleTurn"
"""The built-in environment `single_turn`."""


class EnvironmentPart(Part[Config]):
    """The environment that generates the samples.

    Attributes:
        vocabulary: the number of tokens that every model of the run knows; None if unknown.
        most_tokens: the maximum length in tokens of a sample that every model can read; None if unknown.
    """

    call = FunctionCall("")
    vocabulary: int | None
    most_tokens: int | None

    @property
    def is_single_turn(self) -> bool:
        return self.call.reference == SINGLE_TURN

    def settle(self) -> None:
        run, models = self.run, [self.run[ModelPart].json, *self.run.models.values()]
        numbers = [number for model in models if (number := vocabulary(model)) is not None]
        self.vocabulary = min(numbers, default=None)
        limits = [served_positions(model) for model in models if model]
        limits.append(run.roles["rollout"].options.get("max_model_tokens"))
        known_limits = [limit for limit in limits if isinstance(limit, int)]
        further = "reward_model" in run.roles  # a reward model reads one token more
        self.most_tokens = min(known_limits) - further if known_limits else None
        processes = self.config.environment.processes
        if processes and self.config.cluster.launcher == "inline":
            self.refuse(
                f"environment.processes is {processes}, but an inline run has one process for everything; leave it "
                "unset, or set cluster.launcher=ray"
            )
        check_secrets(self.findings, "environment.arguments", self.config.environment.arguments)
        with self.findings.collecting():
            self.call = self._find_environment()

    def facts(self) -> Iterable[Fact]:
        section, words = self.config.environment, []
        if not self.is_single_turn:
            arguments = ", ".join(f"{name}={value}" for name, value in section.arguments.items())
            validated = "actor" in self.run.roles and self.config.data.validation
            name = f"{section.name} ({arguments})" if arguments else section.name
            words.append(f"{name}{'; validation plays it too' if validated else ''}")
        if section.processes:
            words.append(
                f"in {count(section.processes, 'process')}, each with its own reward processes; tokens and texts do "
                "not pass through the controller"
            )
        if words:
            yield "environment", "; ".join(words)

    def _find_environment(self) -> FunctionCall:
        """Find the environment's class, and check its arguments.

        Raises:
            UserError: there is no such class, or it does not take these arguments.
        """
        section, key = self.config.environment, "environment.arguments"
        name, arguments = section.name, section.arguments
        reference, environment = find_function(
            self.run.plugins, EnvironmentRecord, name, "environment.name", self.run.python_path, always=bool(arguments)
        )
        if environment is not None:
            check_environment(environment, name)
            called = f"environment {name!r}"
            check_call(environment, key, arguments, key, kind="environment", called=called, values=arguments)
            before, tokenizer = len(self.findings.problems), self.run[ModelPart].tokenizer
            arguments = take_values(self.findings, environment, name, key, arguments)
            if len(self.findings.problems) == before:
                run_own_check(environment, key, arguments, self.run[DataPart].columns)
                if tokenizer is not None:
                    run_tokenizer_check(environment, "environment", arguments, tokenizer)
        return FunctionCall(reference, dict(arguments))


class RewardsPart(Part[Config]):
    """The rewards that score samples."""

    rewards: tuple[RewardPlan, ...]

    def settle(self) -> None:
        environment, section = self.run[EnvironmentPart], self.config.reward
        if environment.call.reference and self.run[DataPart].needs_reward:
            self._check_needed(environment)
        # An environment other than the trainer's own may give rewards any columns.
        columns = self.run[DataPart].columns if environment.is_single_turn else None
        rewards = section.list_rewards().items()
        self.rewards = tuple(self._plan_reward(name, reward, columns) for name, reward in rewards)

    def facts(self) -> Iterable[Fact]:
        section = self.config.reward
        if not self.rewards:
            return
        consequence = {
            "fail": "ends the run",
            "zero": "counts as 0, which is the best if all others are negative",
            "leave_out": "is left out of its group",
        }[section.on_error]
        functions = [
            reward.function if not name else f"{reward.weight:g} x {reward.function} ({name})"
            for name, reward in section.list_rewards().items()
        ]
        each = " each" if len(functions) > 1 else ""
        yield (
            "reward",
            f"{' + '.join(functions)}, in {count(section.processes, 'process')}{each}; a reward that raises or takes "
            f"more than {section.timeout_seconds:g} s {consequence}",
        )

    def _plan_reward(self, name: str, section: NamedRewardConfig, columns: Sequence[RowColumns] | None) -> RewardPlan:
        """Find a reward, and check its arguments and the columns that it gets; `columns` is None if unknown."""
        key, arguments, reference = make_reward_key(name), section.arguments, ""
        if is_reserved(name):
            self.refuse(f"{key}: {name!r} is already the name of a metric of the run; name the reward differently")
        check_secrets(self.findings, f"{key}.arguments", arguments)
        with self.findings.collecting():
            reference, function = find_function(
                self.run.plugins, Reward, section.function, f"{key}.function", self.run.python_path, always=True
            )
            check_reward_columns(function, key, arguments, columns or (), REWARD_GETS)
            if function is not None:
                arguments = take_values(self.findings, function, section.function, f"{key}.arguments", arguments)
                run_own_check(function, f"{key}.function", arguments, columns)
        return RewardPlan(name, reference, arguments, section)

    def _check_needed(self, environment: EnvironmentPart) -> None:
        """Check that there is a reward if the environment needs one, and note a reward that may be unused. The
        environment `single_turn` needs a reward. Other environments declare this in `Environment.needs_reward`.
        """
        config, name = self.config, self.config.environment.name
        rewards = config.reward.list_rewards()
        key = "reward" if "" in rewards else "reward.functions"
        asks = True
        if not environment.is_single_turn:
            asks = getattr(resolve(environment.call.reference), "needs_reward", NotImplemented)
        if rewards and asks is False:
            self.note(f"the environment {name!r} scores its episodes itself, so {key} is unused")
        elif rewards and asks is NotImplemented:
            self.note(
                f"the environment {name!r} does not declare whether it uses {key} (context.score), so {key} may be "
                "unused; its class can declare this by needs_reward"
            )
        elif asks is True and not rewards and not config.reward_model.path:
            problem = "set reward.function, several under reward.functions, or reward_model.path"
            reason = "" if environment.is_single_turn else f": the environment {name!r} needs a reward for its answers"
            self.refuse(problem + reason)
