"""Tasks, the groups of episodes that are generated for them, and the batch that a step trains on."""

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
"""The score of every row except the last row of an episode. The last row holds the episode's score."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A task that was played, with its result.

    Attributes:
        rewards: Rewards of the remaining episodes. Each episode has one reward, however many rows it has.
        kept: True if the run trains on the episodes: some remain, and no filter rejected them.
        group: The episodes, if they are in this process.
        rows: If the episodes are in another process: their rows (see `build_batch`), which stay in that process, with
            texts as bytes.
        traces: Traces of the episodes, if they are in this process. Empty: none are known.
        left_over: Number of earlier attempts at the task whose group came too late to be trained on.
    """

    task: Task
    rewards: tuple[float, ...]
    kept: bool
    group: Group | None = None
    rows: DistributedBatch | None = None
    traces: Sequence[Trace | None] = ()
    left_over: int = 0


def collect_rows(groups: Sequence[ScoredGroup]) -> DistributedBatch:
    """Return the rows of one or more groups in the order of `build_batch`, whichever process holds them."""
    local_groups = [group for group in groups if group.group is not None]
    if local_groups or not groups:
        return DistributedBatch.of([build_rows(local_groups)])
    parts = [group.rows for group in groups if group.rows is not None]
    group_of_row = np.repeat(np.arange(len(groups)), [len(part) for part in parts])
    firsts = itertools.accumulate((len(group.rewards) for group in groups), initial=0)
    episode_of_row = [part["episode"] - part["episode"][0] + first for part, first in zip(parts, firsts, strict=False)]
    return DistributedBatch.concat(parts).with_columns(
        group=torch.from_numpy(group_of_row), episode=torch.cat(episode_of_row)
    )


def build_rows(groups: Sequence[ScoredGroup]) -> Batch:
    """Build the batch of the groups that are in this process, as `build_batch` does."""
    local_groups = [(group.group, group.traces) for group in groups if group.group is not None]
    traces = [(*traces, *[None] * (len(group.episodes) - len(traces))) for group, traces in local_groups]
    return build_batch([group for group, _ in local_groups], list(itertools.chain(*traces)))


def sum_rewards(episode: Episode) -> float:
    """Return the reward of an episode, including the rewards of the tokens of all its rows."""
    by_token = [row.token_rewards for row in episode.rows if row.token_rewards is not None]
    return episode.score.reward + sum(float(sum(rewards)) for rewards in by_token)


def make_tasks(prompts: Batch, serials: Sequence[int]) -> list[Task]:
    """Make tasks with the given serial numbers from rows of `PromptDataset.rows`."""
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
    """Build the batch of the rows of episodes.

    Groups and their episodes keep their order. The `earlier` rows of an episode come before its own row.

    Args:
        traces: Trace of each episode. Empty: none are known.

    Returns:
        The columns of samples (`enginehouse.data.columns`) without `rewards`. `loss_mask` is true for tokens that the
        policy chose, and `rollout_logprobs` is 0 for all other tokens. `first_version` and `weight_version` are -1 for
        rows without a chosen token. Without a value, `answer` and `reward_failure` are empty, and `trace` is None.
        `versions` is None for rows whose chosen tokens all have the same version. `baseline` is present if all groups
        have one, `token_rewards` if all rows have some. The last row of an episode has its score and its trace. Its
        other rows have a `reward` of 0, so that the sum over its rows is the episode's reward. All rows of an episode
        have its `finish_reason` and its `baseline`.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [row for episode in episodes for row in episode.rows]
    counts = np.array([1 + len(episode.earlier) for episode in episodes], np.int64)
    sizes = np.array([sum(1 + len(episode.earlier) for episode in group.episodes) for group in groups], np.int64)
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
            "finish_reason": [episode.finish for episode in episodes for _ in episode.rows],
            "prompt": [row.prompt for row in rows],
            "response": [row.response for row in rows],
            "answer": [score.answer for score in scores],
            "reward_figures": [score.figures for score in scores],
            "reward_failure": [score.failure for score in scores],
            "trace": [
                trace
                for episode, own_trace in zip(episodes, traces or [None] * len(episodes), strict=True)
                for trace in (*[None] * len(episode.earlier), own_trace)
            ],
            "versions": [
                list(map(int, row.versions)) if has_several else None
                for row, has_several in zip(rows, (oldest != newest).tolist(), strict=True)
            ],
        }
    )


def _build_optional_columns(
    groups: Sequence[Group], rows: Sequence[Episode | Segment], sizes: np.ndarray, tokens: Ragged
) -> dict[str, torch.Tensor | Ragged]:
    """Build `baseline` if all groups have a baseline, and `token_rewards` if all rows have token rewards.

    Args:
        sizes: Number of rows of each group.
    """
    columns: dict[str, torch.Tensor | Ragged] = {}
    baselines = [group.baseline for group in groups if group.baseline is not None]
    if groups and len(baselines) == len(groups):
        columns["baseline"] = torch.from_numpy(np.repeat(np.array(baselines, np.float32), sizes))
    rewards = [row.token_rewards for row in rows if row.token_rewards is not None]
    if rows and len(rewards) == len(rows):
        columns["token_rewards"] = tokens.like(torch.from_numpy(_flatten(rewards, np.float32)))
    return columns


def _find_versions(rows: Sequence[Episode | Segment], mask: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the oldest and the newest version of each row's chosen tokens, or -1 for rows without chosen tokens."""
    versions = _flatten([row.versions for row in rows], np.int64)
    chosen, not_chosen = mask.like(torch.from_numpy(versions)), ~mask.values.numpy()
    versions[not_chosen] = -1
    newest = chosen.reduced(np.maximum, empty=-1)
    versions[not_chosen] = np.iinfo(np.int64).max
    return torch.where(newest < 0, newest, chosen.reduced(np.minimum)), newest


def _flatten(rows: Sequence[Any], dtype: type[np.generic]) -> np.ndarray:
    if not rows:
        return np.empty(0, dtype)
    return np.concatenate([np.asarray(row) for row in rows], dtype=dtype, casting="unsafe")
