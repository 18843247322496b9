"""Requests on their way to a worker, and what came of them on its way back: in columns.

A step's tokens are millions: as arrays they travel without a look at each; as Python numbers they would take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from enginehouse.engines.rollout import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from enginehouse.rl.generation import flat

if TYPE_CHECKING:
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
        return cls(tuple(ids), flat(prompts, np.int64), lengths, tuple(ways), tuple(taken), tuple(seeds))

    def unpack(self) -> Iterator[GenerateRequest]:
        """The requests."""
        tokens, offsets = self.tokens.tolist(), [0, *np.cumsum(self.lengths).tolist()]
        bounds = itertools.pairwise(offsets)
        for name, (begin, end), way, seed in zip(self.ids, bounds, self.ways, self.seeds, strict=True):
            sampling = self.sampling[way]
            yield GenerateRequest(name, tokens[begin:end], sampling if seed is None else replace(sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of some requests, packed.

    Attributes:
        ids: of the requests that were drawn.
        counts: completions of each.
        tokens: of all completions, end to end, int32.
        logprobs: of these, float32.
        lengths: tokens of each completion.
        reasons: why each ended, as a place in `REASONS`.
        versions: its first and last weight version, `(completions, 2)`.
        prompt_logprobs: by request, where they were asked for.
        failures: what went wrong with requests that failed, each by itself, by id.
    """

    ids: tuple[str, ...]
    counts: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    reasons: np.ndarray
    versions: np.ndarray
    prompt_logprobs: Mapping[str, np.ndarray]
    failures: Mapping[str, WorkerFailure]

    @classmethod
    def pack(cls, results: Sequence[GenerateResult], failures: Mapping[str, WorkerFailure]) -> Answer:
        """Pack results."""
        completions = [completion for result in results for completion in result.completions]
        versions = [(completion.first_version, completion.last_version) for completion in completions]
        scored = ((result.id, result.prompt_logprobs) for result in results)
        return cls(
            ids=tuple(result.id for result in results),
            counts=tuple(len(result.completions) for result in results),
            tokens=flat([completion.token_ids for completion in completions], np.int32),
            logprobs=flat([completion.logprobs for completion in completions], np.float32),
            lengths=np.array([len(completion.token_ids) for completion in completions], np.int64),
            reasons=np.array([REASONS.index(completion.finish_reason) for completion in completions], np.int8),
            versions=np.array(versions, np.int64).reshape(-1, 2),
            prompt_logprobs={name: np.asarray(row, np.float32) for name, row in scored if row is not None},
            failures=failures,
        )

    def unpack(self) -> Iterator[GenerateResult]:
        """The results; their tokens and logprobs are views of this answer's."""
        bounds = [slice(*pair) for pair in itertools.pairwise([0, *np.cumsum(self.lengths).tolist()])]
        completions = map(
            Completion,
            map(self.tokens.__getitem__, bounds),
            map(self.logprobs.__getitem__, bounds),
            map(REASONS.__getitem__, self.reasons.tolist()),
            *self.versions.T.tolist(),
        )
        for name, count in zip(self.ids, self.counts, strict=True):
            drawn = tuple(itertools.islice(completions, count))
            scored: Sequence[float] | None = self.prompt_logprobs.get(name)  # type: ignore[assignment]
            yield GenerateResult(name, drawn, scored)
