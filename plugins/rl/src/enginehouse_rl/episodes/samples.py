"""Samples of a step or a validation: figures of them, and plain rows to be written."""

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
"""Columns of which something is written."""
ROWS_READ_AT_ONCE = 64
"""So many samples' texts are brought to the controller at once, where it has them written."""


def sample_rows(
    samples: Batch | DistributedBatch, tokenizer: PreTrainedTokenizerBase | None = None, most_tokens: int = 0
) -> Iterator[dict[str, Any]]:
    """What the model said and what it got for it, a plain row a sample, for `samples/`. A few are read at a time.

    Where an episode has several rows, each says which one of which episode it is, `segment` and `episode`, and what is
    the episode's stands in the last one alone.

    Args:
        samples: the columns `WRITTEN`, and where tokens are written those of `token_rows`.
        tokenizer: has the text of each token; None: no token is written.
        most_tokens: so many tokens, at most, are written with all that is known of each, as `by_token`: those of the
            first rows that have no more.
    """
    of = EpisodeRows(samples["episode"])
    ends, places = set(of.last.tolist()), zip(of.index.tolist(), of.segment.tolist(), strict=True)
    groups = samples["group"].tolist() if "group" in samples else None
    rows = zip(_fetch_plain_rows(samples, tokenizer, most_tokens), places, strict=True)
    for number, (row, (episode, segment)) in enumerate(rows):
        if not of.are_single:
            row |= {"episode": episode, "segment": segment}
        if groups is not None:
            row["group"] = groups[number]
        if number not in ends:
            del row["reward"], row["finish_reason"]
        yield row


def _fetch_plain_rows(
    samples: Batch | DistributedBatch, tokenizer: PreTrainedTokenizerBase | None, most_tokens: int
) -> Iterator[dict[str, Any]]:
    with_tokens = 0
    if tokenizer is not None and most_tokens:
        lengths = samples.ragged("input_ids").lengths if isinstance(samples, Batch) else samples.lengths("input_ids")
        with_tokens = int((lengths.cumsum(0) <= most_tokens).sum())
    with_them = (*WRITTEN_COLUMNS, *TOKEN_COLUMNS, *(["advantages"] if "advantages" in samples else []))
    for first, last, names in ((0, with_tokens, with_them), (with_tokens, len(samples), WRITTEN_COLUMNS)):
        for begin in range(first, last, ROWS_READ_AT_ONCE):
            part = samples.slice(begin, min(begin + ROWS_READ_AT_ONCE, last))
            here = part if isinstance(part, Batch) else part.fetch(names)
            rows = _make_plain_rows(here)
            if tokenizer is not None and names is with_them:
                for row, tokens in zip(rows, token_rows(here, tokenizer), strict=True):
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
    """The samples with their texts as bytes: whoever reads another column need not read them."""
    return samples.with_columns(**{name: _encode(samples[name]) for name in TEXTS})


def _encode(texts: Sequence[str]) -> Ragged:
    rows = [text.encode(errors="surrogatepass") for text in texts]
    values = torch.from_numpy(np.frombuffer(bytearray(b"".join(rows)), np.uint8))
    return Ragged.from_lengths(values, [*map(len, rows)])


def decode_texts(column: Sequence[str] | Ragged) -> Sequence[str]:
    """A column of texts, also where it is of bytes."""
    if not isinstance(column, Ragged):
        return column
    every, bounds = column.values.numpy().tobytes(), itertools.pairwise(column.offsets.tolist())
    return [every[begin:end].decode(errors="surrogatepass") for begin, end in bounds]


def check_figures(scores: Sequence[Score], function: str) -> None:
    """Refuse names of figures of a reward that the run's metrics could not bear.

    Raises:
        ConfigError: a figure has a name of the run's own, or one with a "/" in it.
    """
    for name in dict.fromkeys(name for score in scores for name in score.figures):
        if is_reserved(name):
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, which is what a metric of the run's "
                "own is called, in reward/ or validation/: name it differently"
            )
        if "/" in name:
            raise ConfigError(
                f"reward.function: {function} returns a figure {name!r}, and a '/' stands between a validation "
                f"file or value and its metric: name it differently, {name.replace('/', '_')!r} for one"
            )


def measure_rewards(samples: Batch | DistributedBatch, prefix: str) -> dict[str, float]:
    """`PREFIX/failures`, the rows without a reward, and the mean of each figure over the rows that have it."""
    named = collections.defaultdict(list)
    for figures in samples["reward_figures"]:
        for name, value in figures.items():
            named[f"{prefix}/{name}"].append(value)
    failures = float(sum(map(bool, samples["reward_failure"])))
    return {f"{prefix}/failures": failures} | {name: statistics.fmean(values) for name, values in named.items()}


def left_over_metrics(samples: Batch | DistributedBatch, left_over: torch.Tensor) -> dict[str, float]:
    """Return the mean length of the responses whose tasks had been left over before (`rollout.extra_groups`): beside
    `response/tokens_mean`, which is of all that are trained on, it shows that long ones come late.

    Args:
        samples: of a step.
        left_over: bool `(groups,)`.
    """
    late = left_over[samples["group"]] & (samples["weight_version"] >= 0)
    lengths = samples["response_tokens"][late].float()
    return {"response/left_over_tokens_mean": lengths.mean().item()} if len(lengths) else {}


def sample_metrics(samples: Batch | DistributedBatch, version: int) -> dict[str, float]:
    """Figures of a step's samples: rewards, lengths in tokens, shares that ended by themselves and that were cut, and
    weight versions.

    `reward/...`, `response/stopped` and `response/truncated`, and the mean rewards of these, count episodes; lengths
    and versions count rows, of which an episode may have several, `response/rows_mean` then. Rows without a token of
    the policy's, as of an episode that failed, count in `reward/...` alone.

    Args:
        version: of the trainer's weights: `staleness/...` is how many versions a sample's first token is behind.
    """
    rows, drawn = EpisodeRows(samples["episode"]), samples["weight_version"] >= 0
    reward, ended = samples["reward"][rows.last], drawn[rows.last]
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
    if not ended.all():
        figures["response/failed"] = 1 - ended.float().mean().item()
    if not drawn.any():
        return figures
    lengths = samples["response_tokens"][drawn].float()
    reason = samples["finish_reason"]
    reasons = [reason[row] for row in rows.last[ended].tolist()]
    rewards = collections.defaultdict(list)
    for why, value in zip(reasons, reward[ended].tolist(), strict=True):
        rewards[why].append(value)
    paid = {f"response/{name}_reward": rewards[why] for name, why in (("stopped", "stop"), ("truncated", "length"))}
    behind = (version - samples["first_version"][drawn]).float()
    if not rows.are_single:
        figures["response/rows_mean"] = len(lengths) / int(ended.sum())
    return figures | {
        "response/tokens_mean": lengths.mean().item(),
        "response/tokens_max": lengths.max().item(),
        "response/stopped": reasons.count("stop") / max(len(reasons), 1),
        "response/truncated": reasons.count("length") / max(len(reasons), 1),
        **{name: statistics.fmean(values) for name, values in paid.items() if values},
        "weights/version": float(samples["weight_version"][drawn].min()),
        "staleness/mean": behind.mean().item(),
        "staleness/max": behind.max().item(),
    }
