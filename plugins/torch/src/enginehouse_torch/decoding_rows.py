"""The completions of a running batch, one row each, as columns in numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from enginehouse.engines.rollout import Completion, FinishReason
from enginehouse_torch import sampling
from enginehouse_torch.requests import RequestProgress

FIRST_WIDTH = 64  # tokens a row has room for at first; doubled as needed


@dataclass
class DecodingRows:
    """Columns with one entry per completion.

    Attributes:
        owner: `RequestProgress` of each row, object.
        sample: number of the row's sample in its request, int64.
        stream: the row's stream of random numbers, uint64.
        prompt_tokens: length of the row's prompt, int64.
        count, limit: number of tokens sampled so far, and its maximum, int64.
        temperature, top_k, top_p: float32, int64, float32.
        stops: token ids that end the row, `(rows, any)` int64, padded with -1.
        has_stop_text: True if stop strings may end the row too, bool.
        tokens, logprobs: tokens sampled so far and their logprobs, `(rows, width)` int64 and float32.
        first_version, last_version: weight versions of the first and the last token, int64.
        alive: False once finished, bool. The forward pass still computes finished rows until the batch is compacted.
    """

    owner: np.ndarray
    sample: np.ndarray
    stream: np.ndarray
    prompt_tokens: np.ndarray
    count: np.ndarray
    limit: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    stops: np.ndarray
    has_stop_text: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    first_version: np.ndarray
    last_version: np.ndarray
    alive: np.ndarray

    @classmethod
    def begin(
        cls, entries: Sequence[tuple[RequestProgress, int]], end_ids: tuple[int, ...], version: int
    ) -> DecodingRows:
        """Create rows for the next `count` samples of each `(request, count)`, and mark the samples as admitted."""
        repeats = np.array([count for _, count in entries])
        owner = np.empty(len(entries), dtype=object)
        owner[:] = [pending for pending, _ in entries]

        def column(values: list, dtype: type) -> np.ndarray:
            return np.array(values, dtype=dtype).repeat(repeats)

        params = [pending.request.sampling for pending, _ in entries]
        stops = [(*p.stop_token_ids, *(() if p.ignore_eos else end_ids)) for p in params]
        table = np.full((len(entries), max(map(len, stops))), -1)
        for row, ids in zip(table, stops, strict=True):
            row[: len(ids)] = ids
        sample = np.concatenate([np.arange(pending.admitted, pending.admitted + count) for pending, count in entries])
        for pending, count in entries:
            pending.admitted += count
        total = len(sample)
        seeds = column([pending.seed for pending, _ in entries], np.uint64)
        limit = column([p.max_tokens for p in params], np.int64)
        width = min(FIRST_WIDTH, int(limit.max()))
        return cls(
            owner=owner.repeat(repeats),
            sample=sample,
            stream=sampling.streams(seeds, sample.astype(np.uint64)),
            prompt_tokens=column([len(pending.prompt) for pending, _ in entries], np.int64),
            count=np.zeros(total, np.int64),
            limit=limit,
            temperature=column([p.temperature for p in params], np.float32),
            top_k=column([p.top_k for p in params], np.int64),
            top_p=column([p.top_p for p in params], np.float32),
            stops=table.repeat(repeats, 0),
            has_stop_text=column([bool(p.stop) for p in params], np.bool_),
            tokens=np.zeros((total, width), np.int64),
            logprobs=np.zeros((total, width), np.float32),
            first_version=np.full(total, version),
            last_version=np.full(total, version),
            alive=np.ones(total, bool),
        )

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def cached(self) -> np.ndarray:
        """Number of each row's tokens in the cache, int64: all but the last sampled token."""
        return self.prompt_tokens + self.count - 1

    def cached_tokens(self) -> list[np.ndarray]:
        """Return the ids of each row's tokens in the cache."""
        return [
            np.concatenate((owner.prompt, tokens[: count - 1]))
            for owner, tokens, count in zip(self.owner, self.tokens, self.count, strict=True)
        ]

    def take(self, index: np.ndarray) -> DecodingRows:
        """Copy the rows that a numpy `index` selects."""
        return DecodingRows(*(getattr(self, field.name)[index] for field in fields(self)))

    @staticmethod
    def concat(first: DecodingRows, second: DecodingRows) -> DecodingRows:
        """Return the rows of `first`, followed by the rows of `second`."""
        joined = []
        for field in fields(DecodingRows):
            a, b = getattr(first, field.name), getattr(second, field.name)
            if a.ndim == 2:
                width = max(a.shape[1], b.shape[1])
                a, b = (np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in (a, b))
            joined.append(np.concatenate((a, b)))
        return DecodingRows(*joined)

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append a sampled token to each row that is alive, and complete the rows that end with it."""
        if self.count.max() >= self.tokens.shape[1]:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, self.tokens.shape[1])))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, self.logprobs.shape[1])))
        where = np.arange(len(self)), self.count
        self.tokens[where] = tokens
        self.logprobs[where] = logprobs
        self.last_version[self.alive] = version
        self.count += self.alive
        stopped = (tokens[:, None] == self.stops).any(1)
        for row in np.flatnonzero(self.has_stop_text & self.alive & ~stopped):
            stopped[row] = self.owner[row].ends_with_stop(self.tokens[row, : self.count[row]].tolist())
        self.complete(self.alive & stopped, "stop")
        self.complete(self.alive & (self.count >= self.limit), "length")

    def complete(self, which: np.ndarray, reason: FinishReason) -> None:
        """Hand the tokens of the rows in the mask `which` to their requests, and mark the rows as finished."""
        ended = np.flatnonzero(which)
        if not len(ended):
            return
        self.alive &= ~which
        columns = (self.sample, self.count, self.tokens, self.logprobs, self.first_version, self.last_version)
        for owner, *row in zip(self.owner[ended], *(column[ended].tolist() for column in columns), strict=True):
            sample, count, tokens, logprobs, first, last = row
            owner.complete(sample, Completion(tokens[:count], logprobs[:count], reason, first, last))
