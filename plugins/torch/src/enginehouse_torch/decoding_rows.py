"""The completions of a running batch, one row each, column by column in numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from enginehouse.engines.rollout import Completion, FinishReason
from enginehouse_torch import sampling
from enginehouse_torch.requests import PendingRequest

FIRST_WIDTH = 64  # tokens a row has room for at first; doubled as needed


@dataclass
class DecodingRows:
    """Arrays of the same first dimension, `rows`.

    Attributes:
        owner: each row's `Pending`, object.
        sample: its sample number in the request, int64.
        stream: its stream of random numbers, uint64.
        prompt_tokens: length of its prompt, int64.
        count, limit: tokens drawn so far, and at most, int64.
        temperature, top_k, top_p: float32, int64, float32.
        stops: token ids that end it, `(rows, any)` int64, filled up with -1.
        has_stop_text: whether strings may end it too, bool.
        tokens, logprobs: drawn so far, `(rows, width)` int64 and float32.
        first_version, last_version: weight versions, int64.
        alive: not finished, bool. A finished row is computed along with the rest until the batch is compacted.
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
    def begin(cls, taken: Sequence[tuple[PendingRequest, int]], end_ids: tuple[int, ...], version: int) -> DecodingRows:
        """Rows for the next samples of each request, `(request, how many)`; marks them as admitted."""
        repeats = np.array([count for _, count in taken])
        owner = np.empty(len(taken), dtype=object)
        owner[:] = [pending for pending, _ in taken]

        def column(values: list, dtype: type) -> np.ndarray:
            return np.array(values, dtype=dtype).repeat(repeats)

        params = [pending.request.sampling for pending, _ in taken]
        stops = [(*p.stop_token_ids, *(() if p.ignore_eos else end_ids)) for p in params]
        table = np.full((len(taken), max(map(len, stops))), -1)
        for row, ids in zip(table, stops, strict=True):
            row[: len(ids)] = ids
        sample = np.concatenate([np.arange(pending.admitted, pending.admitted + count) for pending, count in taken])
        for pending, count in taken:
            pending.admitted += count
        total = len(sample)
        limit = column([p.max_tokens for p in params], np.int64)
        width = min(FIRST_WIDTH, int(limit.max()))
        return cls(
            owner=owner.repeat(repeats),
            sample=sample,
            stream=sampling.streams(
                column([pending.seed for pending, _ in taken], np.uint64), sample.astype(np.uint64)
            ),
            prompt_tokens=column([len(pending.prompt) for pending, _ in taken], np.int64),
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
        """Tokens of each row whose keys and values have been computed: all but the last drawn, int64."""
        return self.prompt_tokens + self.count - 1

    def take(self, index: np.ndarray) -> DecodingRows:
        """Some of the rows, copied; `index` as numpy takes it."""
        return DecodingRows(*(getattr(self, field.name)[index] for field in fields(self)))

    @staticmethod
    def concat(first: DecodingRows, second: DecodingRows) -> DecodingRows:
        """The rows of both."""
        joined = []
        for field in fields(DecodingRows):
            a, b = getattr(first, field.name), getattr(second, field.name)
            if a.ndim == 2:
                width = max(a.shape[1], b.shape[1])
                a, b = (np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=-1) for x in (a, b))
            joined.append(np.concatenate((a, b)))
        return DecodingRows(*joined)

    def record(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Append one drawn token to each row that is alive, and complete the rows it ends."""
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
            stopped[row] = self.owner[row].stopped_by_text(self.tokens[row, : self.count[row]].tolist())
        self.complete(self.alive & stopped, "stop")
        self.complete(self.alive & (self.count >= self.limit), "length")

    def complete(self, which: np.ndarray, reason: FinishReason) -> None:
        """Hand the rows' tokens, `which` (bool), to their requests; they are no longer alive."""
        ended = np.flatnonzero(which)
        if not len(ended):
            return
        self.alive &= ~which
        columns = (self.sample, self.count, self.tokens, self.logprobs, self.first_version, self.last_version)
        for owner, *row in zip(self.owner[ended], *(column[ended].tolist() for column in columns), strict=True):
            sample, count, tokens, logprobs, first, last = row
            owner.complete(sample, Completion(tokens[:count], logprobs[:count], reason, first, last))
