"""Samples: what a reward is given, and what becomes of what it gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.errors import ConfigError
from enginehouse.rl.rewards.program import Score
from enginehouse.rl.samples import reward_figures, sample_metrics, sample_rows, with_rewards

CHAT = [{"role": "user", "content": "one?"}]


class Pool:
    """Gives prepared scores and remembers the rows."""

    function = "mine:score"

    def __init__(self, *scores: Score):
        self.scores = list(scores)

    def score(self, rows: list[dict[str, Any]]) -> list[Score]:
        self.rows = rows
        return self.scores


def scored(pool: Pool) -> Batch:
    """Two samples for each of two prompts, each of two prompt tokens and one response token."""
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: [f"r{row[0]}" for row in ids])
    samples = Batch(
        {
            "input_ids": Ragged.from_list([[1, 2, 10 + row] for row in range(4)]),
            "loss_mask": Ragged.from_list([[False, False, True]] * 4),
            "finish_reason": ["stop", "length", "stop", "stop"],
            "weight_version": torch.ones(4, dtype=torch.int64),
            "seconds": torch.ones(4),
        }
    )
    prompts = Batch(
        {"prompt": ["<one?>", "two?"], "messages": [CHAT, None], "columns": [{"answer": "a"}, {"answer": "b"}]}
    )
    return with_rewards(samples, prompts, tokenizer, pool)  # type: ignore[arg-type]


PLAIN = [Score(1.0, {}), Score(0.0, {}), Score(0.5, {}), Score(0.5, {})]


def test_a_reward_is_given_prompt_messages_response_and_columns():
    pool = Pool(*PLAIN)
    scored(pool)
    assert pool.rows[1] == {
        "prompt": "<one?>", "messages": CHAT, "response": "r11", "finish_reason": "length", "answer": "a",
    }  # fmt: skip
    assert pool.rows[2]["messages"] is None
    assert pool.rows[2]["answer"] == "b"


def test_figures_and_failures_are_logged_and_written_with_the_samples():
    scores = [
        Score(1.0, {"format": 1.0}),
        Score(0.0, {}, "raised ValueError"),
        Score(0.5, {"format": 0.0}),
        Score(0.5, {"format": 0.5, "early": 3.0}),
    ]
    samples = scored(Pool(*scores))
    assert samples["reward"].tolist() == [1.0, 0.0, 0.5, 0.5]
    expected = {"failures": 1.0, "format": 0.5, "early": 3.0}  # means over the rows that have them
    assert reward_figures(samples, "validation") == {f"validation/{name}": value for name, value in expected.items()}
    metrics = sample_metrics(samples)
    assert {name: metrics[f"reward/{name}"] for name in expected} == expected
    rows = sample_rows(samples)
    assert rows[0]["reward/format"] == 1.0
    assert "reward_failure" not in rows[0]
    assert rows[1]["reward_failure"] == "raised ValueError"
    assert rows[3]["reward/early"] == 3.0


def test_a_step_without_failures_says_so():
    assert sample_metrics(scored(Pool(*PLAIN)))["reward/failures"] == 0.0


@pytest.mark.parametrize("name", ["mean", "failures", "reward_stderr", "tokens_mean", "truncated", "pass@1", "mean@4"])
def test_a_figure_may_not_be_called_like_a_metric_of_the_run(name):
    with pytest.raises(ConfigError, match=f"mine:score returns a figure '{name}', which is what a metric of the run's"):
        scored(Pool(Score(1.0, {name: 2.0}), *PLAIN[1:]))


def test_a_figure_may_not_pass_for_one_of_a_file_of_the_validation():
    with pytest.raises(ConfigError, match=r"mine:score returns a figure 'easy/reward'.*'easy_reward' for one"):
        scored(Pool(Score(1.0, {"easy/reward": 2.0}), *PLAIN[1:]))
