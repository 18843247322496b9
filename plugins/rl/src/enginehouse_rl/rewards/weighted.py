"""The rewards of a run, each with a separate pool. The run trains on their weighted sum."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.errors import ConfigError
from enginehouse.plugin.secrets import insert_variables
from enginehouse_rewards.batch import RewardError
from enginehouse_rewards.pool import RewardPool
from enginehouse_rewards.program import RowScore
from enginehouse_rl.advantages.groups import group_statistics
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.rewards.scorer import Scorer

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse_rl.plan.plan import PlayPlan
    from enginehouse_rl.plan.rewards import RewardPlan

EPSILON = 1e-6

Scoring = Callable[[Sequence[Mapping[str, Any]]], Awaitable[Sequence[RowScore]]]


class WeightedRewards:
    """The pools of a plan's rewards."""

    def __init__(self, plan: PlayPlan):
        self._plan, self._rewards = plan, plan.rewards
        with ExitStack() as stack:
            self._pools = [stack.enter_context(closing(_make_pool(plan, reward))) for reward in plan.rewards]
            self._benchmarks = stack.enter_context(closing(_make_benchmark_pool(plan))) if plan.benchmarks else None
            self._open = stack.pop_all()

    def scorer(self, rows: int) -> Scoring:
        """Return a function that scores rows as requests arrive on one event loop. `rows` has the same meaning as in
        `Scorer`."""
        scorers = [Scorer(pool, rows) for pool in self._pools]
        if len(scorers) == 1 and not self._rewards[0].name:
            return scorers[0]

        async def score(values: Sequence[Mapping[str, Any]]) -> Sequence[RowScore]:
            tasks = [asyncio.ensure_future(scorer(values)) for scorer in scorers]
            try:
                by_reward = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
            if not by_reward:
                if "reward_model" not in self._plan.roles:
                    raise ConfigError("the environment requests a reward, but the config has none: set reward.function")
                return [RowScore(0.0, {}, "")] * len(values)
            return [self._sum(scores) for scores in zip(*by_reward, strict=True)]

        return score

    def make_benchmark_scorer(self, rows: int) -> Scoring:
        """Return a function that scores responses to a benchmark. `rows` has the same meaning as in `Scorer`."""
        assert self._benchmarks is not None  # the plan has a benchmark
        return Scorer(self._benchmarks, rows)

    def close(self) -> None:
        self._open.close()

    def _sum(self, scores: Sequence[RowScore]) -> RowScore:
        """Combine a row's scores into one.

        A failed reward counts as 0 if the run continues, and a reward that abstains is left out. The answer is the
        first answer that a reward returned.

        Raises:
            RewardError: All rewards abstain, and a row without a score ends the run.
        """
        if all(score.abstains for score in scores):
            if self._plan.config.reward.on_error == "fail":
                raise RewardError(
                    "every reward abstained from a row (returned None), so the row has no score: let one of the "
                    "rewards score it, or set reward.on_error=leave_out"
                )
            return RowScore(0.0, {}, "every reward abstained")
        figures: dict[str, float] = {}
        failures = []
        for reward, score in zip(self._rewards, scores, strict=True):
            if not score.failure and not score.abstains:
                figures[reward.name] = score.reward
            figures |= {f"{reward.name}.{name}": value for name, value in score.figures.items()}
            failures += [f"{reward.name} {score.failure}"] if score.failure else []
        total = sum(
            reward.section.weight * reward.clip(score.reward)
            for reward, score in zip(self._rewards, scores, strict=True)
            if not score.failure and not score.abstains
        )
        answer = next((score.answer for score in scores if score.answer), "")
        return RowScore(total, figures, "; ".join(failures), answer)


def with_rewards(samples: DistributedBatch, rewards: Sequence[RewardPlan]) -> DistributedBatch:
    """Add the column `rewards` float32 `(rows, k)` with the clipped rewards in the order of the config.

    If the config normalizes a reward over its group or the batch, `reward` is recomputed: it is the weighted sum of the
    rewards, plus the part of the score that the environment added. Both columns are 0 except in the last row of an
    episode.

    Args:
        samples: All samples of a step in complete groups, as `collect_rows` returns them.
    """
    if not rewards:
        return samples.with_columns(rewards=torch.empty(len(samples), 0))
    if not rewards[0].name:
        return samples.with_columns(rewards=samples["reward"].unsqueeze(1))
    figures = samples["reward_figures"]
    clipped = [[reward.clip(row[reward.name]) if reward.name in row else 0.0 for reward in rewards] for row in figures]
    by_reward = torch.tensor(clipped, dtype=torch.float64).view(len(samples), len(rewards))
    failures = samples["reward_failure"] if "reward_failure" in samples else [" "] * len(samples)
    judges = [
        [reward.name in row or bool(failure) for reward in rewards]
        for row, failure in zip(figures, failures, strict=True)
    ]
    # a failed reward counts 0, a reward that abstained does not count
    judged = torch.tensor(judges, dtype=torch.bool).view(len(samples), len(rewards))
    samples = samples.with_columns(rewards=by_reward.float())
    if all(reward.section.normalize == "none" for reward in rewards):
        return samples
    last = EpisodeRows(samples["episode"]).last
    groups = {"group": samples["group"][last], "batch": torch.zeros(len(last), dtype=torch.int64)}
    total, plain = torch.zeros(2, len(last), dtype=torch.float64)
    for reward, values, is_judged in zip(rewards, by_reward[last].unbind(1), judged[last].unbind(1), strict=True):
        plain += reward.section.weight * values
        if reward.section.normalize != "none":
            _, distances, deviations = group_statistics(values[is_judged], groups[reward.section.normalize][is_judged])
            values = torch.zeros_like(values)
            values[is_judged] = distances / (deviations + EPSILON)
        total += reward.section.weight * values
    # Rounded as `reward` was, so that it is exactly 0 where an environment adds nothing of its own.
    total += samples["reward"][last] - plain.float()
    return samples.with_columns(reward=torch.zeros(len(samples)).index_copy_(0, last, total.float()))


def _make_benchmark_pool(plan: PlayPlan) -> RewardPool:
    """Make the pool in which lm-eval scores. A response that lm-eval cannot score gets the reward 0, and counts as a
    failure."""
    section = plan.config.reward
    return RewardPool(
        "enginehouse_rl.benchmarks.scoring:score",
        name="of the benchmarks",
        processes=section.processes,
        timeout_seconds=section.timeout_seconds,
        on_error="zero",
        max_failures=section.max_failures,
        record=plan.run_directory / "reward_error.benchmarks.txt",
    )


def _make_pool(plan: PlayPlan, reward: RewardPlan) -> RewardPool:
    section = plan.config.reward
    return RewardPool(
        reward.function,
        insert_variables(reward.arguments),
        name=reward.name,
        processes=section.processes,
        timeout_seconds=section.timeout_seconds,
        concurrency=section.concurrency,
        on_error=section.on_error,
        max_failures=section.max_failures,
        python_path=plan.python_path,
        record=plan.run_directory / f"reward_error{reward.name and '.'}{reward.name}.txt",
        may_abstain=len(plan.rewards) > 1,
    )
