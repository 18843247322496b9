"""The rollout engine's record of a request, which is checked on arrival and completed sample by sample."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import Completion, FinishReason, GenerateRequest, GenerateResult


class RequestProgress:
    """A request and its completions so far.

    Attributes:
        request: the request as it arrived.
        prompt: its token ids, `(tokens,)` int64.
        seed: seed of its random streams, chosen here if the request has none.
        admitted: number of its samples that have begun.
        prompt_logprobs: set by the prefill if the request asks for them.
        text_of: decodes token ids; set if the request has stop strings.
    """

    def __init__(self, request: GenerateRequest, vocabulary: int, max_model_tokens: int | None):
        check_request(request, vocabulary, max_model_tokens)
        self.request = request
        self.prompt = np.asarray(request.prompt_ids, dtype=np.int64)
        seed = request.sampling.seed
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed % 2**64
        self.admitted = 0
        self.prompt_logprobs: list[float] | None = None
        self.text_of: Callable[[list[int]], str] | None = None
        self._completions: list[Completion | None] = [None] * request.sampling.n
        self._missing = request.sampling.n

    @property
    def finished(self) -> bool:
        """True if every sample is complete."""
        return self._missing == 0

    @property
    def unadmitted(self) -> int:
        """Number of samples that have not begun."""
        return self.request.sampling.n - self.admitted

    def complete(self, sample: int, completion: Completion) -> None:
        """Store the completion of one sample."""
        self._completions[sample] = completion
        self._missing -= 1

    def complete_rest(self, reason: FinishReason, version: int) -> None:
        """Complete every remaining sample with no tokens."""
        for sample, completion in enumerate(self._completions):
            if completion is None:
                self.complete(sample, Completion((), (), reason, version, version))

    def result(self) -> GenerateResult:
        """Return the result; every sample must be complete."""
        completions = tuple(completion for completion in self._completions if completion is not None)
        return GenerateResult(self.request.id, completions, self.prompt_logprobs)

    def ends_with_stop(self, token_ids: list[int]) -> bool:
        """Return True if the last of these tokens completes a stop string."""
        assert self.text_of is not None
        longest = max(len(stop.encode()) for stop in self.request.sampling.stop)
        # A token stands for at least one byte. A character cut in two can take up to three tokens more.
        text = self.text_of(token_ids[-(longest + 4) :])
        return any(stop in text for stop in self.request.sampling.stop)
