"""Packs requests to a rollout worker, and its answers, into arrays.

A step has millions of tokens. Arrays are sent as a whole, but serializing Python numbers one by one takes seconds.
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
class RequestBatch:
    """Packed requests.

    Attributes:
        tokens: prompts, concatenated, int64.
        sampling: the distinct sampling parameters, without seeds.
        ways: index into `sampling` for each request.
    """

    ids: tuple[str, ...] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sampling: tuple[SamplingParams, ...] = ()
    ways: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()

    @classmethod
    def pack(cls, requests: Sequence[GenerateRequest], ids: Sequence[str]) -> RequestBatch:
        """Pack requests under the ids `ids` instead of the requests' own ids."""
        places: dict[SamplingParams, int] = {}
        ways, seeds = [], []
        for request in requests:
            seeds.append(request.sampling.seed)
            unseeded = request.sampling if seeds[-1] is None else replace(request.sampling, seed=None)
            ways.append(places.setdefault(unseeded, len(places)))
        prompts = [request.prompt_ids for request in requests]
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        return cls(tuple(ids), _flatten(prompts, np.int64), lengths, tuple(places), tuple(ways), tuple(seeds))

    def unpack(self) -> Iterator[GenerateRequest]:
        tokens, offsets = self.tokens.tolist(), [0, *np.cumsum(self.lengths).tolist()]
        bounds = itertools.pairwise(offsets)
        for name, (begin, end), way, seed in zip(self.ids, bounds, self.ways, self.seeds, strict=True):
            sampling = self.sampling[way]
            yield GenerateRequest(name, tokens[begin:end], sampling if seed is None else replace(sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Packed results of requests.

    Attributes:
        firsts: index of each request's first completion, then the number of completions.
        tokens: tokens of all completions, concatenated, int32.
        offsets: index of each completion's first token, then the number of tokens.
        reasons: index into `REASONS` of the finish reason of each completion.
        versions: first and last weight version of each completion, `(completions, 2)`.
        prompt_logprobs: logprobs of prompts by request id, if requested.
        apart: `tokens` and `logprobs`, left in the process that generated them, with one row per completion. If `apart`
            is not None, both fields are empty here.
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
    def pack(cls, results: Sequence[GenerateResult], failures: Mapping[str, WorkerFailure]) -> AnswerBatch:
        """Pack results that passed `check_result`."""
        completions = [completion for result in results for completion in result.completions]
        versions = [(completion.first_version, completion.last_version) for completion in completions]
        scored = ((result.id, result.prompt_logprobs) for result in results)
        return cls(
            ids=tuple(result.id for result in results),
            firsts=np.cumsum([0, *(len(result.completions) for result in results)]),
            tokens=_flatten([completion.token_ids for completion in completions], np.int32),
            logprobs=_flatten([completion.logprobs for completion in completions], np.float32),
            offsets=np.cumsum([0, *(len(completion.token_ids) for completion in completions)]),
            reasons=np.array([REASONS.index(completion.finish_reason) for completion in completions], np.int8),
            versions=np.array(versions, np.int64).reshape(-1, 2),
            prompt_logprobs={name: np.asarray(row, np.float32) for name, row in scored if row is not None},
            failures=failures,
        )

    def split(self) -> tuple[AnswerBatch, Batch]:
        """Split the batch into the part for the controller, and the tokens that stay in this process."""
        lengths = torch.from_numpy(np.diff(self.offsets))
        tokens = Ragged.from_lengths(torch.from_numpy(self.tokens), lengths)
        rows = Batch({"tokens": tokens, "logprobs": tokens.like(torch.from_numpy(self.logprobs))})
        return replace(self, tokens=self.tokens[:0], logprobs=self.logprobs[:0]), rows

    def join(self, rows: Batch) -> AnswerBatch:
        tokens, logprobs = (rows.ragged(name).values.numpy() for name in ("tokens", "logprobs"))
        return replace(self, tokens=tokens, logprobs=logprobs, apart=None)

    def result(self, place: int, request_id: str) -> GenerateResult:
        """Return the result of the request at index `place`, under the caller's id `request_id`. The result views this
        batch's arrays."""
        completions = []
        for number in range(self.firsts[place], self.firsts[place + 1]):
            span = slice(self.offsets[number], self.offsets[number + 1])
            first, last = self.versions[number].tolist()
            tokens: Any = self.tokens[span]
            logprobs: Any = self.logprobs[span]
            completions.append(Completion(tokens, logprobs, REASONS[self.reasons[number]], first, last))
        prompt_logprobs: Any = self.prompt_logprobs.get(self.ids[place])
        return GenerateResult(request_id, tuple(completions), prompt_logprobs)

    def samples(self, requests: Sequence[GenerateRequest], places: Sequence[int]) -> Batch:
        """Make a batch of the completions of some requests, in the requests' order.

        Args:
            places: index in `ids` of each request.

        Returns:
            `input_ids` ragged int64 (prompt and response), `loss_mask` ragged bool (True on the response),
            `rollout_logprobs` ragged float32 (0 on the prompt), `finish_reason` objects, and `first_version` and
            `weight_version`, each int64 `(rows,)`, the versions that sampled the first and the last token.
        """
        counts = np.diff(self.firsts)[list(places)]
        chosen = _concat_ranges(self.firsts[list(places)], counts)
        lengths = np.empty((len(chosen), 2), np.int64)
        lengths[:, 0] = np.repeat([len(request.prompt_ids) for request in requests], counts)
        lengths[:, 1] = np.diff(self.offsets)[chosen]
        drawn = _concat_ranges(self.offsets[chosen], lengths[:, 1])
        response = np.repeat(np.tile([False, True], len(chosen)), lengths.reshape(-1))
        prompts = [request.prompt_ids for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        tokens = np.empty(len(response), np.int64)
        tokens[~response] = _flatten(prompts, np.int64)
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
    """Return `AnswerBatch.samples` of results, one for each request."""
    return AnswerBatch.pack(results, {}).samples(requests, range(len(requests)))


def _concat_ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(begins - ends + lengths, lengths)


def _flatten(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    """Return all rows concatenated; a row is a list, an array or a tensor in host memory."""
    if rows and isinstance(rows[0], list):
        return np.fromiter(itertools.chain.from_iterable(rows), dtype)
    return np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.empty(0, dtype)
