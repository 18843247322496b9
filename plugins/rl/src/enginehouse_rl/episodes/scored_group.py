"""Tasks, the groups of episodes that come of them, and the batch that a step trains on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch, Ragged
from enginehouse.engines.environment import Episode, Group, Scored, Segment, Task

if TYPE_CHECKING:
    from enginehouse_rl.episodes.traces import Trace

NO_SCORE = Scored(0.0)
"""The score of a row that is not its episode's last: that has the episode's."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A task that was played, as the controller knows it.

    Attributes:
        task: which it is.
        rewards: of the episodes that are left, one each however many rows they have.
        kept: whether they are trained on: there are some, and no filter refused them.
        group: the episodes, where they are here.
        rows: else their rows, as of `batch_of`, where they were made; of texts, their bytes.
        traces: of the episodes, where they are here: what each spent its time on. Empty: nobody knows.
        left_over: how often the task was begun before and answered too late to be trained on.
    """

    task: Task
    rewards: tuple[float, ...]
    kept: bool
    group: Group | None = None
    rows: DistributedBatch | None = None
    traces: Sequence[Trace | None] = ()
    left_over: int = 0


def collect_rows(played: Sequence[ScoredGroup]) -> DistributedBatch:
    """The episodes of tasks, at least one, as rows wherever they are; as of `batch_of`, the groups in this order."""
    here = [one for one in played if one.group is not None]
    if here or not played:
        return DistributedBatch.of([build_rows(here)])
    parts = [one.rows for one in played if one.rows is not None]
    group = np.repeat(np.arange(len(played)), [len(part) for part in parts])
    firsts = itertools.accumulate((len(one.rewards) for one in played), initial=0)
    episode = [part["episode"] - part["episode"][0] + first for part, first in zip(parts, firsts, strict=False)]
    return DistributedBatch.concat(parts).with_columns(group=torch.from_numpy(group), episode=torch.cat(episode))


def build_rows(played: Sequence[ScoredGroup]) -> Batch:
    """As of `batch_of`, the episodes of tasks whose groups are here."""
    here = [(one.group, one.traces) for one in played if one.group is not None]
    traces = [(*traces, *[None] * (len(group.episodes) - len(traces))) for group, traces in here]
    return build_batch([group for group, _ in here], list(itertools.chain(*traces)))


def total_reward(episode: Episode) -> float:
    """The reward of an episode, with those of the tokens of all its rows."""
    by_token = [row.token_rewards for row in episode.rows if row.token_rewards is not None]
    return episode.score.reward + sum(float(sum(rewards)) for rewards in by_token)


def make_tasks(prompts: Batch, serials: Sequence[int]) -> list[Task]:
    """Rows as `PromptDataset.rows` gives them, as tasks with these serial numbers."""
    ids = prompts.ragged("prompt_ids")
    tokens = ids.values.tolist()
    ends = ids.offsets.tolist()
    return [
        Task(serial, tokens[begin:end], prompt, messages, columns)
        for serial, (begin, end), prompt, messages, columns in zip(
            serials, itertools.pairwise(ends), prompts["prompt"], prompts["messages"], prompts["columns"], strict=True
        )
    ]


def build_batch(groups: Sequence[Group], traces: Sequence[Trace | None] = ()) -> Batch:
    """Episodes as a batch, their rows: groups one after another, the episodes of a group in their order, and of an
    episode that has several rows the `earlier` ones before its own.

    Args:
        groups: their episodes.
        traces: of each episode, what it spent its time on. Empty: nobody knows of any.

    Returns:
        The columns of samples (`enginehouse.data.columns`), but for `rewards`. `loss_mask` is true on what the policy
        chose, and `rollout_logprobs` 0 on the rest; `first_version` and `weight_version` are -1 where there is none;
        `answer` and `reward_failure` are empty, `trace` and `versions` None, where there is nothing to say.
        `baseline` is there where all groups have one, `token_rewards` where all rows have some.

        What comes of the score, and the trace, stands in an episode's last row: the others have a `reward` of 0, so
        that a sum over its rows is the episode's, and nothing else. `finish_reason` and `baseline` are in each.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [row for one in episodes for row in one.rows]
    counts = np.array([1 + len(one.earlier) for one in episodes], np.int64)
    sizes = np.array([sum(1 + len(one.earlier) for one in group.episodes) for group in groups], np.int64)
    scores = [row.score if isinstance(row, Episode) else NO_SCORE for row in rows]
    lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
    mask = Ragged.from_lengths(torch.from_numpy(_flatten([row.mask for row in rows], np.bool_)), lengths)
    oldest, newest = _find_versions(rows, mask)
    tokens = mask.like(torch.from_numpy(_flatten([row.tokens for row in rows], np.int64)))
    return Batch(
        {
            **_build_optional_columns(groups, rows, sizes, tokens),
            "input_ids": tokens,
            "loss_mask": mask,
            "rollout_logprobs": tokens.like(torch.from_numpy(_flatten([row.logprobs for row in rows], np.float32))),
            "reward": torch.tensor([score.reward for score in scores], dtype=torch.float32),
            "group": torch.from_numpy(np.repeat(np.arange(len(groups)), sizes)),
            "episode": torch.from_numpy(np.repeat(np.arange(len(episodes)), counts)),
            "response_tokens": mask.reduced(np.add),
            "first_version": oldest,
            "weight_version": newest,
            "finish_reason": [one.finish for one in episodes for _ in one.rows],
            "prompt": [row.prompt for row in rows],
            "response": [row.response for row in rows],
            "answer": [score.answer for score in scores],
            "reward_figures": [score.figures for score in scores],
            "reward_failure": [score.failure for score in scores],
            "trace": [
                trace
                for one, of_it in zip(episodes, traces or [None] * len(episodes), strict=True)
                for trace in (*[None] * len(one.earlier), of_it)
            ],
            "versions": [
                list(map(int, row.versions)) if several else None
                for row, several in zip(rows, (oldest != newest).tolist(), strict=True)
            ],
        }
    )


def _build_optional_columns(
    groups: Sequence[Group], rows: Sequence[Episode | Segment], sizes: np.ndarray, tokens: Ragged
) -> dict[str, torch.Tensor | Ragged]:
    """The columns that samples have where all groups, of so many rows each, or all rows have what they are made of."""
    columns: dict[str, torch.Tensor | Ragged] = {}
    baselines = [group.baseline for group in groups if group.baseline is not None]
    if groups and len(baselines) == len(groups):
        columns["baseline"] = torch.from_numpy(np.repeat(np.array(baselines, np.float32), sizes))
    rewards = [row.token_rewards for row in rows if row.token_rewards is not None]
    if rows and len(rewards) == len(rows):
        columns["token_rewards"] = tokens.like(torch.from_numpy(_flatten(rewards, np.float32)))
    return columns


def _find_versions(rows: Sequence[Episode | Segment], mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """The oldest and the newest version of each row's chosen tokens; -1 where it has none."""
    versions = _flatten([row.versions for row in rows], np.int64)
    chosen, given = mask.like(torch.from_numpy(versions)), ~mask.values.numpy()
    versions[given] = -1
    newest = chosen.reduced(np.maximum, empty=-1)
    versions[given] = np.iinfo(np.int64).max
    return torch.where(newest < 0, newest, chosen.reduced(np.minimum)), newest


def _flatten(rows: Sequence[Any], dtype: type[np.generic]) -> np.ndarray:
    """All rows end to end."""
    if not rows:
        return np.empty(0, dtype)
    return np.concatenate([np.asarray(row) for row in rows], dtype=dtype, casting="unsafe")
