"""Computes metrics of the samples of a step or a validation, and makes their rows for `samples/`."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.data.columns import TEXTS
from enginehouse.errors import ConfigError
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.episodes.token_rows import TOKEN_COLUMNS, token_rows
from enginehouse_rl.plan.rewards import is_reserved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.environment import Score

WRITTEN_COLUMNS = (*TEXTS, "reward", "finish_reason", "response_tokens", "reward_figures", "reward_failure", "trace")
"""Columns from which the rows of `samples/` are made."""
ROWS_READ_AT_ONCE = 64
"""Maximum number of samples whose texts are fetched to the controller at a time when samples are written."""


def sample_rows(
    samples: Batch | DistributedBatch, tokenizer: PreTrainedTokenizerBase | None = None, most_tokens: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a plain row for each sample with its response and its rewards, for `samples/`. Fetches a few rows at a
    time.

    If episodes have several rows, each row states its `episode` and its place in the episode as `segment`. Only the
    last row then has the values of the whole episode.

    Args:
        samples: The columns `WRITTEN_COLUMNS`, and the columns that `token_rows` reads if tokens are written.
        tokenizer: Tokenizer for the text of each token. None: no tokens are written.
        most_tokens: Maximum total number of tokens whose text and values are written as `by_token`. Rows from the first
            on get `by_token` until this number is reached.
    """
    episodes = EpisodeRows(samples["episode"])
    ends = set(episodes.last.tolist())
    places = zip(episodes.index.tolist(), episodes.segment.tolist(), strict=True)
    groups = samples["group"].tolist() if "group" in samples else None
    rows = zip(_fetch_plain_rows(samples, tokenizer, most_tokens), places, strict=True)
    for number, (row, (episode, segment)) in enumerate(rows):
        if not episodes.are_single:
            row |= {"episode": episode, "segment": segment}
        if groups is not None:
            row["group"] = groups[number]
        if number not in ends:
            del row["reward"], row["finish_reason"]
        yield row


def _fetch_plain_rows(
    samples: Batch | DistributedBatch, tokenizer: PreTrainedTokenizerBase | None, most_tokens: int
) -> Iterator[dict[str, Any]]:
    rows_with_tokens = 0
    if tokenizer is not None and most_tokens:
        lengths = samples.ragged("input_ids").lengths if isinstance(samples, Batch) else samples.lengths("input_ids")
        rows_with_tokens = int((lengths.cumsum(0) <= most_tokens).sum())
    columns_with_tokens = (*WRITTEN_COLUMNS, *TOKEN_COLUMNS, *(["advantages"] if "advantages" in samples else []))
    for first, last, names in (
        (0, rows_with_tokens, columns_with_tokens),
        (rows_with_tokens, len(samples), WRITTEN_COLUMNS),
    ):
        for begin in range(first, last, ROWS_READ_AT_ONCE):
            part = samples.slice(begin, min(begin + ROWS_READ_AT_ONCE, last))
            fetched = part if isinstance(part, Batch) else part.fetch(names)
            rows = _make_plain_rows(fetched)
            if tokenizer is not None and names is columns_with_tokens:
                for row, tokens in zip(rows, token_rows(fetched, tokenizer), strict=True):
                    row["by_token"] = tokens
            yield from rows


def _make_plain_rows(samples: Batch) -> list[dict[str, Any]]:
    names = ("prompt", "response", "reward", "finish_reason", "tokens")
    columns = (
        decode_texts(samples["prompt"]),
        decode_texts(samples["response"]),
        samples["reward"].tolist(),
        samples["finish_reason"],
        samples["response_tokens"].tolist(),
    )
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    notes = (decode_texts(samples["answer"]), samples["reward_figures"], samples["reward_failure"], samples["trace"])
    for row, answer, figures, failure, trace in zip(rows, *notes, strict=True):
        if answer:
            row["answer"] = answer
        row |= {f"reward/{name}": value for name, value in figures.items()}
        if failure:
            row["reward_failure"] = failure
        if trace is not None:
            row["turns"] = trace.rows()
    return rows


def encode_texts(samples: Batch) -> Batch:
    """Return the samples with their texts as bytes, so that readers of other columns need not decode the texts."""
    return samples.with_columns(**{name: _encode(samples[name]) for name in TEXTS})


def _encode(texts: Sequence[str]) -> Ragged:
    rows = [text.encode(errors="surrogatepass") for text in texts]
    values = torch.from_numpy(np.frombuffer(bytearray(b"".join(rows)), np.uint8))
    return Ragged.from_lengths(values, [*map(len, rows)])


def decode_texts(column: Sequence[str] | Ragged) -> Sequence[str]:
    """Return a column of texts, decoded if it was encoded as bytes."""
    if not isinstance(column, Ragged):
        return column
    encoded, bounds = column.values.numpy().tobytes(), itertools.pairwise(column.offsets.tolist())
    return [encoded[begin:end].decode(errors="surrogatepass") for begin, end in bounds]


def check_figures(scores: Sequence[Score], function: str) -> None:
    """Check the names of the metrics that a reward function returned with its scores.

    Raises:
        ConfigError: A metric has the name of one of the run's metrics, or its name contains a "/".
    """
    for name in dict.fromkeys(name for score in scores for name in score.figures):
        if is_reserved(name):
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, but the run itself writes a metric with this "
                "name in reward/ or validation/: use another name"
            )
        if "/" in name:
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, but '/' separates a validation file or "
                f"value from its metric: use another name, {name.replace('/', '_')!r} for example"
            )


def measure_rewards(samples: Batch | DistributedBatch, prefix: str) -> dict[str, float]:
    """Return `PREFIX/failures`, the number of rows without a reward, and the mean of each metric of the reward."""
    values_by_name = collections.defaultdict(list)
    for figures in samples["reward_figures"]:
        for name, value in figures.items():
            values_by_name[f"{prefix}/{name}"].append(value)
    failures = float(sum(map(bool, samples["reward_failure"])))
    return {f"{prefix}/failures": failures} | {
        name: statistics.fmean(values) for name, values in values_by_name.items()
    }


def measure_left_over(samples: Batch | DistributedBatch, left_over: torch.Tensor) -> dict[str, float]:
    """Return the mean length of the responses whose tasks an earlier step left over (`rollout.extra_groups`).

    If this mean is larger than `response/tokens_mean`, the mean length of all responses that are trained on, then long
    responses arrive late.

    Args:
        left_over: True for groups whose tasks were left over, bool `(groups,)`.
    """
    late = left_over[samples["group"]] & (samples["weight_version"] >= 0)
    lengths = samples["response_tokens"][late].float()
    return {"response/left_over_tokens_mean": lengths.mean().item()} if len(lengths) else {}


def sample_metrics(samples: Batch | DistributedBatch, version: int) -> dict[str, float]:
    """Return metrics of a step's samples: rewards, lengths in tokens, finish reasons and weight versions.

    `reward/...`, `response/stopped`, `response/truncated` and the mean rewards of stopped and truncated responses are
    computed over episodes. Lengths and versions are computed over rows. If episodes have several rows,
    `response/rows_mean` is the mean number of rows. Rows without a token of the policy, such as the row of a failed
    episode, count only in `reward/...`.

    Args:
        version: Version of the trainer's weights. `staleness/...` is the number of versions from the weights that
            generated the oldest token of a sample to this version.
    """
    rows, is_drawn = EpisodeRows(samples["episode"]), samples["weight_version"] >= 0
    reward, episode_drawn = samples["reward"][rows.last], is_drawn[rows.last]
    _, group = samples["group"][rows.last].unique(return_inverse=True)
    best = torch.full((int(group.max()) + 1,), -torch.inf).scatter_reduce_(0, group, reward, "amax")
    worst = torch.full_like(best, torch.inf).scatter_reduce_(0, group, reward, "amin")
    figures = {
        "reward/mean": reward.mean().item(),
        "reward/std": reward.std(correction=0).item(),
        "reward/max": reward.max().item(),
        "reward/min": reward.min().item(),
        "reward/groups_all_equal": (best == worst).float().mean().item(),
        **measure_rewards(samples, "reward"),
    }
    if not episode_drawn.all():
        figures["response/failed"] = 1 - episode_drawn.float().mean().item()
    if not is_drawn.any():
        return figures
    lengths = samples["response_tokens"][is_drawn].float()
    reason = samples["finish_reason"]
    reasons = [reason[row] for row in rows.last[episode_drawn].tolist()]
    rewards = collections.defaultdict(list)
    for finish, value in zip(reasons, reward[episode_drawn].tolist(), strict=True):
        rewards[finish].append(value)
    rewards_by_finish = {
        f"response/{name}_reward": rewards[finish] for name, finish in (("stopped", "stop"), ("truncated", "length"))
    }
    behind = (version - samples["first_version"][is_drawn]).float()
    if not rows.are_single:
        figures["response/rows_mean"] = len(lengths) / int(episode_drawn.sum())
    return figures | {
        "response/tokens_mean": lengths.mean().item(),
        "response/tokens_max": lengths.max().item(),
        "response/stopped": reasons.count("stop") / max(len(reasons), 1),
        "response/truncated": reasons.count("length") / max(len(reasons), 1),
        **{name: statistics.fmean(values) for name, values in rewards_by_finish.items() if values},
        "weights/version": float(samples["weight_version"][is_drawn].min()),
        "staleness/mean": behind.mean().item(),
        "staleness/max": behind.max().item(),
    }
