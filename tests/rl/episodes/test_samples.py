"""Samples: what a reward is given, and what becomes of what it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.environment import Episode, Group
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import ConfigError
from enginehouse_rewards.program import RowScore
from enginehouse_rl.advantages.grpo import grpo
from enginehouse_rl.advantages.rloo import rloo
from enginehouse_rl.environments.single_turn import SingleTurn
from enginehouse_rl.episodes.runner import EpisodeRunner
from enginehouse_rl.episodes.samples import measure_left_over, measure_rewards, sample_metrics, sample_rows
from enginehouse_rl.episodes.scored_group import build_batch, make_tasks
from enginehouse_rl.rewards.scorer import Scorer

CHAT = [{"role": "user", "content": "one?"}]
PROMPTS = Batch(
    {
        "prompt_ids": Ragged.from_list([[1, 2], [1, 2]]),
        "prompt": ["<one?>", "two?"],
        "messages": [CHAT, None],
        "columns": [{"answer": "a"}, {"answer": "b"}],
    }
)


class Pool:
    """Gives prepared scores and remembers the rows."""

    function = "mine:score"

    def __init__(self, *scores: RowScore):
        self.scores = list(scores)
        self.rows: list[Mapping[str, Any]] = []

    def batch(self, rows: int) -> Pool:
        return self

    def submit_all(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Future[list[RowScore]]]:
        futures = []
        for rows in groups:
            futures.append(Future[list[RowScore]]())
            futures[-1].set_result(self.scores[len(self.rows) : len(self.rows) + len(rows)])
            self.rows += rows
        return futures


class Answers:
    """A policy that answers in one token, one more than the last time."""

    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: f"r{ids[0]}", eos_token_id=None, pad_token_id=None, all_special_ids=[],
        apply_chat_template=lambda messages, **_: "",
    )  # fmt: skip
    next = 9

    async def samples(self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None) -> list[Completion]:
        self.next += n
        return [
            Completion([token], [-0.5], "length" if token == 11 else "stop", 1, 2)
            for token in range(self.next - n + 1, self.next + 1)
        ]


def scored(pool: Pool) -> Batch:
    """Two samples for each of two prompts, each of two prompt tokens and one response token."""

    async def play() -> list[Group]:
        policy: Any = Answers()
        player = EpisodeRunner(SingleTurn(), lambda task: policy, Scorer(pool, 4), 2)  # type: ignore[arg-type]
        return [Group(task, await player.play(task)) for task in make_tasks(PROMPTS, range(2))]

    return build_batch(asyncio.run(play()))


PLAIN = [RowScore(1.0, {}), RowScore(0.0, {}), RowScore(0.5, {}), RowScore(0.5, {})]


def test_a_reward_is_given_prompt_messages_response_and_columns():
    pool = Pool(*PLAIN)
    scored(pool)
    assert pool.rows[1] == {
        "prompt": "<one?>", "messages": CHAT, "response": "r11", "response_tokens": 1,
            "finish_reason": "length", "answer": "a",
    }  # fmt: skip
    assert pool.rows[2]["messages"] is None
    assert pool.rows[2]["answer"] == "b"


def test_figures_and_failures_are_logged_and_written_with_the_samples():
    scores = [
        RowScore(1.0, {"format": 1.0}),
        RowScore(0.0, {}, "raised ValueError"),
        RowScore(0.5, {"format": 0.0}),
        RowScore(0.5, {"format": 0.5, "early": 3.0}),
    ]
    samples = scored(Pool(*scores))
    assert samples["reward"].tolist() == [1.0, 0.0, 0.5, 0.5]
    expected = {"failures": 1.0, "format": 0.5, "early": 3.0}  # means over the rows that have them
    assert measure_rewards(samples, "validation") == {f"validation/{name}": value for name, value in expected.items()}
    metrics = sample_metrics(samples, 3)
    assert {name: metrics[f"reward/{name}"] for name in expected} == expected
    rows = list(sample_rows(samples))
    assert rows[0]["reward/format"] == 1.0
    assert "reward_failure" not in rows[0]
    assert rows[1]["reward_failure"] == "raised ValueError"
    assert rows[3]["reward/early"] == 3.0


def test_a_step_without_failures_says_so():
    assert sample_metrics(scored(Pool(*PLAIN)), 2)["reward/failures"] == 0.0


def test_samples_are_rows_of_prompt_and_response_with_their_versions():
    samples = scored(Pool(*PLAIN))
    assert samples["input_ids"][1].tolist() == [1, 2, 11]
    assert samples["loss_mask"][1].tolist() == [False, False, True]
    assert samples["rollout_logprobs"][1].tolist() == [0.0, 0.0, -0.5]
    assert samples["group"].tolist() == [0, 0, 1, 1]
    assert samples["prompt"] == ("<one?>", "<one?>", "two?", "two?")
    metrics = sample_metrics(samples, 3)
    assert metrics["staleness/max"] == 1.0  # the one token a sample has is its last
    assert metrics["weights/version"] == 2.0


def test_responses_that_were_cut_are_counted_apart_from_those_that_ended_otherwise():
    task = make_tasks(PROMPTS, [5, 6])[0]
    made = [
        Episode([1, 2, 10], [False, False, True], [0, 0, -0.5], [0, 0, 2], RowScore(reward, {}), finish=finish)
        for reward, finish in enumerate(("stop", "length", "length", "lost the game"))
    ]
    metrics = sample_metrics(build_batch([Group(task, made)]), 3)
    assert (metrics["response/stopped"], metrics["response/truncated"]) == (0.25, 0.5)
    assert (metrics["response/stopped_reward"], metrics["response/truncated_reward"]) == (0.0, 1.5)


def test_responses_of_tasks_that_were_left_over_are_measured_apart():
    tasks = make_tasks(PROMPTS, [5, 6])
    groups = [
        Group(task, [Episode([1, *[7] * n], [False] + [True] * n, [0] * (n + 1), [2] * (n + 1), RowScore(1.0, {}))])
        for task, n in zip(tasks, (3, 9))
    ]
    assert measure_left_over(build_batch(groups), torch.tensor([False, True])) == {
        "response/left_over_tokens_mean": 9.0
    }
    assert measure_left_over(build_batch(groups), torch.tensor([False, False])) == {}


def test_an_episode_that_failed_counts_by_its_reward_alone():
    """As the policy `mask` leaves it: in the mean and the spread of its group, not as a response or a version."""
    task = make_tasks(PROMPTS, [5, 6])[0]
    made = [
        Episode([1, 2, token], [False, False, True], [0, 0, -0.5], [0, 0, version], RowScore(reward, {}), finish="stop")
        for token, version, reward in ((10, 2, 1.0), (11, 3, 0.5))
    ]
    masked = Episode([1, 2], [False] * 2, [0] * 2, [0] * 2, RowScore(0.0, {}), "two?", "", "failed")
    whole, fewer = (sample_metrics(build_batch([Group(task, one)]), 3) for one in ([*made, masked], made))
    assert whole.pop("reward/mean") == 0.5
    assert whole.pop("reward/min") == 0.0
    assert whole.pop("reward/std") == pytest.approx((1 / 6) ** 0.5)
    assert whole.pop("response/failed") == pytest.approx(1 / 3)
    assert whole == {name: fewer[name] for name in whole}
    assert (whole["weights/version"], whole["staleness/max"], whole["response/stopped"]) == (2.0, 1.0, 1.0)
    alone = sample_metrics(build_batch([Group(task, [masked])]), 3)
    assert {name for name in alone if name[:7] != "reward/"} == {"response/failed"}
    row = next(sample_rows(build_batch([Group(task, [masked])])))
    assert (row["finish_reason"], row["response"], row["tokens"]) == ("failed", "", 0)


def test_groups_need_not_be_of_one_size():
    tasks = make_tasks(PROMPTS, [0, 1])
    one = Episode([1, 2, 9], [False, False, True], [0, 0, -1], [0, 0, 1], RowScore(1.0, {}))
    batch = build_batch([Group(tasks[0], [one] * 3), Group(tasks[1], [one])])
    assert batch["group"].tolist() == [0, 0, 0, 1]
    assert rloo(batch)["advantages"].tolist() == grpo(batch)["advantages"].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["mean", "failures", "reward_stderr", "tokens_mean", "truncated", "pass@1", "mean@4"])
def test_a_figure_may_not_be_called_like_a_metric_of_the_run(name):
    with pytest.raises(ConfigError, match=f"mine:score returns a figure '{name}', but the run itself writes a metric"):
        scored(Pool(RowScore(1.0, {name: 2.0}), *PLAIN[1:]))


def test_a_figure_may_not_pass_for_one_of_a_file_of_the_validation():
    with pytest.raises(ConfigError, match=r"mine:score returns a figure 'easy/reward'.*'easy_reward' for example"):
        scored(Pool(RowScore(1.0, {"easy/reward": 2.0}), *PLAIN[1:]))


async def test_groups_of_one_turn_are_scored_together_and_an_error_on_the_way_reaches_each():
    class Counting(Pool):
        calls = 0

        def submit_all(self, groups):
            self.calls += 1
            if self.calls == 2:
                raise OSError("gone")
            return super().submit_all(groups)

    pool = Counting(*PLAIN)
    scorer = Scorer(pool, 4)  # type: ignore[arg-type]

    async def turn() -> list[Any]:
        return await asyncio.gather(scorer([{}, {}]), scorer([{}, {}]), return_exceptions=True)

    well, ill = await turn(), await turn()
    assert well == [PLAIN[:2], PLAIN[2:]]
    assert pool.calls == 2
    assert [type(one) for one in ill] == [OSError, OSError]
