"""Requests on their way to a worker, and what came of them on its way back: in columns.

A step's tokens are millions: as arrays they travel without a look at each; as Python numbers they would take seconds.
A batch of samples is made of the columns too, and not of results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.rollout import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.controller.launchers.failure import WorkerFailure

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Requests:
    """Some requests, packed.

    Attributes:
        ids: of each.
        tokens: their prompts, end to end, int64.
        lengths: tokens of each prompt.
        sampling: how to draw, each way once and without a seed.
        ways: which of them each request takes.
        seeds: of each.
    """

    ids: tuple[str, ...] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sampling: tuple[SamplingParams, ...] = ()
    ways: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()

    @classmethod
    def pack(cls, requests: Sequence[GenerateRequest], ids: Sequence[str]) -> Requests:
        """Pack requests, by the names `ids` instead of their own."""
        ways: dict[SamplingParams, int] = {}
        taken, seeds = [], []
        for request in requests:
            seeds.append(request.sampling.seed)
            unseeded = request.sampling if seeds[-1] is None else replace(request.sampling, seed=None)
            taken.append(ways.setdefault(unseeded, len(ways)))
        prompts = [request.prompt_ids for request in requests]
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        return cls(tuple(ids), _flat(prompts, np.int64), lengths, tuple(ways), tuple(taken), tuple(seeds))

    def unpack(self) -> Iterator[GenerateRequest]:
        """The requests."""
        tokens, offsets = self.tokens.tolist(), [0, *np.cumsum(self.lengths).tolist()]
        bounds = itertools.pairwise(offsets)
        for name, (begin, end), way, seed in zip(self.ids, bounds, self.ways, self.seeds, strict=True):
            sampling = self.sampling[way]
            yield GenerateRequest(name, tokens[begin:end], sampling if seed is None else replace(sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of some requests, packed. What is said of a request by a number is said by its place here.

    Attributes:
        ids: of the requests that were drawn.
        firsts: the first completion of each; and, at last, how many completions there are.
        tokens: of all completions, end to end, int32.
        logprobs: of these, float32.
        offsets: where each completion begins there; and, at last, how many tokens there are.
        reasons: why each ended, as a place in `REASONS`.
        versions: its first and last weight version, `(completions, 2)`.
        prompt_logprobs: by id, where they were asked for.
        failures: what went wrong with requests that failed, each by itself, by id.
        apart: `tokens` and `logprobs`, which are empty here then: a row a completion, where they were made.
    """

    ids: tuple[str, ...]
    firsts: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    offsets: np.ndarray
    reasons: np.ndarray
    versions: np.ndarray
    prompt_logprobs: Mapping[str, np.ndarray]
    failures: Mapping[str, WorkerFailure]
    apart: DistributedBatch | None = None

    @classmethod
    def pack(cls, results: Sequence[GenerateResult], failures: Mapping[str, WorkerFailure]) -> Answer:
        """Pack results, as `check_result` wants them."""
        completions = [completion for result in results for completion in result.completions]
        versions = [(completion.first_version, completion.last_version) for completion in completions]
        scored = ((result.id, result.prompt_logprobs) for result in results)
        return cls(
            ids=tuple(result.id for result in results),
            firsts=np.cumsum([0, *(len(result.completions) for result in results)]),
            tokens=_flat([completion.token_ids for completion in completions], np.int32),
            logprobs=_flat([completion.logprobs for completion in completions], np.float32),
            offsets=np.cumsum([0, *(len(completion.token_ids) for completion in completions)]),
            reasons=np.array([REASONS.index(completion.finish_reason) for completion in completions], np.int8),
            versions=np.array(versions, np.int64).reshape(-1, 2),
            prompt_logprobs={name: np.asarray(row, np.float32) for name, row in scored if row is not None},
            failures=failures,
        )

    def split(self) -> tuple[Answer, Batch]:
        """What the controller gets of this, and what stays."""
        lengths = torch.from_numpy(np.diff(self.offsets))
        tokens = Ragged.from_lengths(torch.from_numpy(self.tokens), lengths)
        rows = Batch({"tokens": tokens, "logprobs": tokens.like(torch.from_numpy(self.logprobs))})
        return replace(self, tokens=self.tokens[:0], logprobs=self.logprobs[:0]), rows

    def joined(self, rows: Batch) -> Answer:
        """Both parts of `split` in one again."""
        tokens, logprobs = (rows.ragged(name).values.numpy() for name in ("tokens", "logprobs"))
        return replace(self, tokens=tokens, logprobs=logprobs, apart=None)

    def result(self, place: int, request_id: str) -> GenerateResult:
        """The result of a request, which its caller calls `request_id`. It holds views of this answer's arrays."""
        drawn = []
        for number in range(self.firsts[place], self.firsts[place + 1]):
            here = slice(self.offsets[number], self.offsets[number + 1])
            first, last = self.versions[number].tolist()
            tokens: Any = self.tokens[here]
            logprobs: Any = self.logprobs[here]
            drawn.append(Completion(tokens, logprobs, REASONS[self.reasons[number]], first, last))
        scored: Any = self.prompt_logprobs.get(self.ids[place])
        return GenerateResult(request_id, tuple(drawn), scored)

    def samples(self, requests: Sequence[GenerateRequest], places: Sequence[int]) -> Batch:
        """Samples as a batch: in the order of the requests, and the samples of a request in theirs.

        Args:
            requests: what was asked for.
            places: of each.

        Returns:
            `input_ids` ragged int64 (prompt and response), `loss_mask` ragged bool (true on the response),
            `rollout_logprobs` ragged float32 (0 on the prompt), `finish_reason` objects, and `first_version` and
            `weight_version`, each int64 `(rows,)`, the versions the first and the last token were drawn from.
        """
        counts = np.diff(self.firsts)[list(places)]
        chosen = _ranges(self.firsts[list(places)], counts)
        lengths = np.empty((len(chosen), 2), np.int64)
        lengths[:, 0] = np.repeat([len(request.prompt_ids) for request in requests], counts)
        lengths[:, 1] = np.diff(self.offsets)[chosen]
        drawn = _ranges(self.offsets[chosen], lengths[:, 1])
        response = np.repeat(np.tile([False, True], len(chosen)), lengths.reshape(-1))
        prompts = [request.prompt_ids for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        tokens = np.empty(len(response), np.int64)
        tokens[~response] = _flat(prompts, np.int64)
        tokens[response] = self.tokens[drawn]
        logprobs = np.zeros(len(response), np.float32)
        logprobs[response] = self.logprobs[drawn]
        input_ids = Ragged.from_lengths(torch.from_numpy(tokens), lengths.sum(1))
        return Batch(
            {
                "input_ids": input_ids,
                "loss_mask": input_ids.like(torch.from_numpy(response)),
                "rollout_logprobs": input_ids.like(torch.from_numpy(logprobs)),
                "finish_reason": [REASONS[reason] for reason in self.reasons[chosen].tolist()],
                "first_version": torch.from_numpy(self.versions[chosen, 0]),
                "weight_version": torch.from_numpy(self.versions[chosen, 1]),
            }
        )


def assemble(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult]) -> Batch:
    """`Answer.samples` of results, one for each request."""
    return Answer.pack(results, {}).samples(requests, range(len(requests)))


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of ranges, end to end."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(begins - ends + lengths, lengths)


def _flat(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """All rows end to end; a row is a list, an array or a tensor in host memory."""
    if rows and isinstance(rows[0], list):
        return np.fromiter(itertools.chain.from_iterable(rows), dtype)
    return np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.empty(0, dtype)
