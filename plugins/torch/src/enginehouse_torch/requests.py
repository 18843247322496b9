"""A request on its way through the rollout engine: checked on arrival, completed sample by sample."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from enginehouse.engines.requests import check_request
from enginehouse.engines.rollout import Completion, FinishReason, GenerateRequest, GenerateResult


class PendingRequest:
    """A request and what has come of it so far.

    Attributes:
        request: as it came.
        prompt: its token ids, `(tokens,)` int64.
        seed: of its random streams; the request's, or fresh.
        admitted: how many of its samples have been begun.
        prompt_logprobs: filled in by the prefill, if asked for.
        text_of: decodes token ids, where the request has stop strings.
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
        """Whether every sample is complete."""
        return self._missing == 0

    @property
    def unadmitted(self) -> int:
        """Number of samples not begun."""
        return self.request.sampling.n - self.admitted

    def complete(self, sample: int, completion: Completion) -> None:
        """Put in one sample's completion."""
        self._completions[sample] = completion
        self._missing -= 1

    def complete_rest(self, reason: FinishReason, version: int) -> None:
        """Complete every sample that is not with no tokens."""
        for sample, completion in enumerate(self._completions):
            if completion is None:
                self.complete(sample, Completion((), (), reason, version, version))

    def result(self) -> GenerateResult:
        """The result; every sample must be complete."""
        return GenerateResult(
            self.request.id, tuple(c for c in self._completions if c is not None), self.prompt_logprobs
        )

    def stopped_by_text(self, token_ids: list[int]) -> bool:
        """Whether the text that ends with these tokens holds a stop string that their last token completed."""
        assert self.text_of is not None
        longest = max(len(stop.encode()) for stop in self.request.sampling.stop)
        # A token stands for at least one byte, and a character cut in two for at most three more.
        text = self.text_of(token_ids[-(longest + 4) :])
        return any(stop in text for stop in self.request.sampling.stop)
