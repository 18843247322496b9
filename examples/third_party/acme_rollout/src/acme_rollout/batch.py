"""The running completions: one forward pass of a transformers model gives each of them a token.

Rows are padded on the left, so that all end at the same place. A row joins with a pass over its prompt, and leaves when
it has ended; keys and values of the other rows stay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from enginehouse.engines import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from transformers import DynamicCache


@dataclass(eq=False)
class Row:
    """One completion of a request.

    Attributes:
        job: the request.
        prompt: the prompt's tokens.
        sampling: sampling parameters.
        random: gives one number for each token, so that a token depends only on seed, sample and position.
        reason: why it has ended, or None.
        first: weight version of its first token.
        last: weight version of its last token.
    """

    job: Job
    prompt: list[int]
    sampling: SamplingParams
    random: random.Random
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    first: int = 0
    last: int = 0

    def completion(self, version: int) -> Completion:
        """Return the completion; `version` is its weight version if it has no token."""
        first, last = (self.first, self.last) if self.tokens else (version, version)
        return Completion(self.tokens, self.logprobs, self.reason or "abort", first, last)


@dataclass(eq=False)
class Job:
    """A request, and the future of its answer."""

    request: GenerateRequest
    answer: asyncio.Future[GenerateResult]
    rows: list[Row] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None

    def __post_init__(self) -> None:
        sampling, prompt = self.request.sampling, list(self.request.prompt_ids)
        for sample in range(sampling.n):
            seed = None if sampling.seed is None else f"{sampling.seed}/{sample}"
            self.rows.append(Row(self, prompt, sampling, random.Random(seed)))

    def result(self, version: int) -> GenerateResult:
        """Return the answer; a row that has not ended is aborted."""
        return GenerateResult(self.request.id, [row.completion(version) for row in self.rows], self.prompt_logprobs)


class Batch:
    """Rows, and the keys and values that a model has computed for them.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        ends: end-of-sequence tokens.
        text_of: decodes tokens, for stop strings.
    """

    def __init__(self, model: Any, ends: Sequence[int], text_of: Callable[[list[int]], str]):
        self._model = model
        self._ends = frozenset(ends)
        self._text_of = text_of
        self._cache = DynamicCache()
        self._mask = torch.zeros((0, 0), dtype=torch.int64, device=model.device)
        self._stale = False
        self.rows: list[Row] = []

    def weights_changed(self) -> None:
        """Compute keys and values again before the next token."""
        self._stale = True

    @torch.inference_mode()
    def advance(self, fresh: Sequence[Job], version: int) -> None:
        """Sample a token for each row, and the first tokens of fresh requests, by the weights of `version`."""
        self._keep([number for number, row in enumerate(self.rows) if row.reason is None and not row.job.answer.done()])
        if self.rows:
            if self._stale:
                self._cache, self._mask, logits = self._run([row.prompt + row.tokens for row in self.rows])
            else:
                logits = self._run_last()
            self._draw(self.rows, logits[:, -1], version)
        self._stale = False
        if fresh:
            self._join(fresh, version)

    def _run_last(self) -> torch.Tensor:
        """Run the model on the last token of each row."""
        last = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._mask.device)
        self._mask = torch.cat((self._mask, torch.ones_like(last)), 1)
        positions = self._mask.sum(1, keepdim=True) - 1
        out = self._model(last, attention_mask=self._mask, position_ids=positions, past_key_values=self._cache)
        return out.logits

    def _run(self, tokens: Sequence[list[int]]) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
        """Run the model on whole sequences, and return keys and values, mask, and logits."""
        longest = max(map(len, tokens))
        device = self._mask.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in tokens], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in tokens], device=device)
        cache = DynamicCache()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self._model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        return cache, mask, out.logits

    def _join(self, fresh: Sequence[Job], version: int) -> None:
        """Add requests: each prompt is run once, whatever the number of its completions."""
        cache, mask, logits = self._run([list(job.request.prompt_ids) for job in fresh])
        for job, scores in zip(fresh, logits, strict=True):
            if job.request.sampling.prompt_logprobs:
                job.prompt_logprobs = _score_prompt(job, scores)
        number_of = torch.tensor([number for number, job in enumerate(fresh) for _ in job.rows], device=mask.device)
        rows = [row for job in fresh for row in job.rows]
        self._draw(rows, logits[number_of, -1], version)
        parts = [(self._cache, self._mask), (cache, mask)] if self.rows else [(cache, mask)]
        chosen = [torch.arange(len(self.rows), device=mask.device), number_of][-len(parts) :]
        self._merge(parts, chosen)
        self.rows += rows

    def _keep(self, numbers: Sequence[int]) -> None:
        """Drop all rows but some."""
        if len(numbers) == len(self.rows):
            return
        self.rows = [self.rows[number] for number in numbers]
        if self.rows:
            self._merge([(self._cache, self._mask)], [torch.tensor(numbers, device=self._mask.device)])

    def _merge(self, parts: Sequence[tuple[DynamicCache, torch.Tensor]], rows: Sequence[torch.Tensor]) -> None:
        """Merge keys, values and mask of some rows of each part, with no more padding than the longest row needs."""
        masks = [mask[chosen] for (_, mask), chosen in zip(parts, rows, strict=True)]
        length = max(int(mask.sum(1).max()) for mask in masks)
        self._mask = torch.cat([_fit(mask, 1, length) for mask in masks])
        whole = DynamicCache()
        for layer in range(len(parts[0][0].layers)):
            cached = [(cache.layers[layer], chosen) for (cache, _), chosen in zip(parts, rows, strict=True)]
            keys = torch.cat([_fit(part.keys[chosen], 2, length) for part, chosen in cached])
            values = torch.cat([_fit(part.values[chosen], 2, length) for part, chosen in cached])
            whole.update(keys, values, layer)
        self._cache = whole

    def _draw(self, rows: Sequence[Row], logits: torch.Tensor, version: int) -> None:
        """Sample a token for each row that may have one more, and end the row if the token ends it."""
        tokens, logprobs = draw(logits, [row.sampling for row in rows], [row.random.random() for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row.sampling.max_tokens == 0:
                row.reason = "length"
                continue
            row.first = row.first if row.tokens else version
            row.last = version
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.reason = self._reason(row)

    def _reason(self, row: Row) -> FinishReason | None:
        sampling, token = row.sampling, row.tokens[-1]
        if token in sampling.stop_token_ids or (token in self._ends and not sampling.ignore_eos):
            return "stop"
        if sampling.stop:
            text = self._text_of(row.tokens)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(row.tokens) == sampling.max_tokens else None


def draw(
    logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample a token from each row of logits `(rows, vocabulary)`, each by one number in [0, 1).

    Returns:
        Tokens, and their logprobs under `logits / temperature`, before top-k and top-p.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    vocabulary = logits.shape[1]
    logprobs = torch.log_softmax(logits.float() / column([row.temperature or 1.0 for row in sampling]), -1)
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    kept = ordered.exp()
    rank = torch.arange(vocabulary, device=logits.device)
    kept = kept * (rank < column([row.top_k or vocabulary for row in sampling]))
    reached = kept.cumsum(-1)
    wanted = column([row.top_p if row.top_p < 1 else 2.0 for row in sampling]) * reached[:, -1:]
    reached = (kept * (reached - kept < wanted)).cumsum(-1)
    # The factor below 1 keeps the number below the sum, which float32 rounds.
    place = torch.searchsorted(reached, column(uniforms) * (1 - 2**-23) * reached[:, -1:], right=True)
    greedy = column([row.temperature == 0 for row in sampling])
    place = torch.where(greedy, 0, place).clamp(max=vocabulary - 1)
    return order.gather(1, place)[:, 0].tolist(), ordered.gather(1, place)[:, 0].tolist()


def _score_prompt(job: Job, logits: torch.Tensor) -> list[float]:
    """Return the logprob of each prompt token, the first 0; `logits` may be padded on the left."""
    prompt = torch.tensor(list(job.request.prompt_ids), device=logits.device)
    scores = torch.log_softmax(logits[-len(prompt) :].float() / (job.request.sampling.temperature or 1.0), -1)
    return [0.0, *scores[:-1].gather(1, prompt[1:, None])[:, 0].tolist()]


def _fit(tensor: torch.Tensor, dimension: int, length: int) -> torch.Tensor:
    """Cut or pad a dimension on its left."""
    size = tensor.shape[dimension]
    if size >= length:
        return tensor.narrow(dimension, size - length, length)
    shape = list(tensor.shape)
    shape[dimension] = length - size
    return torch.cat((tensor.new_zeros(shape), tensor), dimension)
