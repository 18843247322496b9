"""Checks which tokens are sampled, from which distribution, and which logprobs come with them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import EXACT, Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import (
    LOGPROB_TOLERANCE,
    TOLERANCES,
    distributions_of,
    greedy_error,
    logprob_error,
    oracle,
    prefixed,
)
from enginehouse_testing.comparison import larger
from enginehouse_testing.models import VOCABULARY_SIZE
from enginehouse_testing.prompts import prompts, texts_as_ids
from enginehouse_testing.replica import ReplicaTrial, SampledCompletion

KNOBS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_p": 0.8},
    {"temperature": 1.6, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 5},
    {"temperature": 0.0},
)
DRAWS = 2000
PROMPT = [5, 6, 7]

Completions = list[SampledCompletion]

CHECKS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)


def _rows(count: int, path: str, **how: Any) -> list[list[int]]:
    """Return random prompts for a tiny model, or texts as prompts for the user's model in the directory `path`."""
    return [prompt for prompt, _ in texts_as_ids(path)[:count]] if path else prompts(count, **how)


async def _draw_greedily(replica: ReplicaTrial, path: str = "") -> Completions:
    return await replica.draw(*_rows(8, path), temperature=0.0, max_tokens=24, ignore_eos=True)


@CHECKS.judge(_draw_greedily, tolerances=TOLERANCES)
def greedy(completions: Completions, model: str = "tied") -> Measured:
    """At temperature 0 each token is the oracle's most likely token. The error is the difference of the logprobs of the
    two tokens, in nats."""
    short = [len(completion.tokens) for completion in completions if len(completion.tokens) != 24]
    return wrong(f"a completion must have 24 tokens, not {short[0]}") if short else greedy_error(model, completions)


async def _draw_after_special_tokens(replica: ReplicaTrial) -> Completions:
    return await replica.draw(*prompts(8, seed=1, special=True), temperature=1.0, max_tokens=6, ignore_eos=True)


@CHECKS.judge(_draw_after_special_tokens)
def token_ids(completions: Completions) -> Measured:
    """A prompt is used exactly as its ids, special tokens included: the logprobs of the next tokens agree with the
    oracle."""
    return logprob_error("tied", completions)


async def _draw_with_knobs(replica: ReplicaTrial, path: str = "") -> list[Completions]:
    rows = _rows(4, path, seed=2, longest=20)
    return [
        await replica.draw(*rows, max_tokens=12, n=1 if knobs["temperature"] == 0 else 3, **knobs) for knobs in KNOBS
    ]


@CHECKS.judge(_draw_with_knobs, tolerances=TOLERANCES)
def logprobs(by_knobs: list[Completions], model: str = "tied") -> Measured:
    """Logprobs of sampled tokens agree with the oracle. They refer to the whole distribution at the temperature (1 for
    greedy sampling), whatever top_k and top_p are."""
    return larger(
        *(
            prefixed(
                ", ".join(f"{name} {value:g}" for name, value in knobs.items()),
                logprob_error(model, completions, knobs["temperature"] or 1.0),
            )
            for knobs, completions in zip(KNOBS, by_knobs, strict=True)
        )
    )


async def _draw_truncated(replica: ReplicaTrial) -> list[Completions]:
    return [await replica.draw(PROMPT, n=300, max_tokens=1, ignore_eos=True, **knobs) for knobs in KNOBS[2:4]]


@CHECKS.judge(_draw_truncated, tolerance=EXACT)
def truncation(by_knobs: list[Completions]) -> Measured:
    """With top_k or top_p, only tokens within the truncated distribution are sampled."""
    # Count the tokens outside, with a little tolerance for rounding.
    by_p, by_k = ([completion.tokens[0] for completion in completions] for completions in by_knobs)
    likely = torch.exp(distributions_of("tied", by_knobs[0][0], 1.6)[0]).double()
    ordered, order = likely.sort(descending=True)
    before = torch.empty_like(likely)
    before[order] = ordered.cumsum(0) - ordered  # the sum of all more likely tokens
    outside = [token for token in by_p if before[token] > 0.8 + 1e-4]
    if outside:
        detail = f"top_p 0.8: token {outside[0]} was sampled, but likelier ones reach {before[outside[0]]:.4f}"
        return Measured(len(outside), detail)
    outside = [token for token in by_k if likely[token] < ordered[2] - 1e-6]
    return Measured(len(outside), f"top_k 3: token {outside[0]} was sampled" if outside else "")


async def _score_prompts(replica: ReplicaTrial, path: str = "") -> list[tuple[list[int], list[float], int]]:
    scores = []
    for max_tokens in (0, 3):
        for prompt in _rows(3, path, seed=3, longest=24, special=True):
            result = await replica.request(prompt, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=True)
            logprobs = [float(logprob) for logprob in result.prompt_logprobs or ()]
            scores.append((prompt, logprobs, max_tokens - len(result.completions[0].token_ids)))
    return scores


@CHECKS.judge(_score_prompts, capability=capabilities.PROMPT_LOGPROBS, tolerances=TOLERANCES)
def prompt_logprobs(scores: list[tuple[list[int], list[float], int]], model: str = "tied") -> Measured:
    """Logprobs of a prompt agree with the oracle, with and without tokens to generate; the first is 0."""
    worst = Measured(0.0)
    for prompt, scored, missing in scores:
        if len(scored) != len(prompt) or missing:
            return wrong(f"{len(scored)} logprobs for a prompt of {len(prompt)} tokens, {missing} new tokens missing")
        with torch.no_grad():
            right, _ = oracle(model).row(torch.tensor(prompt))
        worst = larger(worst, Measured(float((torch.tensor(scored) - right).abs().max()), f"prompt {prompt}"))
    return worst


async def _draw_often(replica: ReplicaTrial) -> Completions:
    return await replica.draw(PROMPT, n=DRAWS, max_tokens=1, temperature=1.6, seed=11, ignore_eos=True)


@CHECKS.judge(_draw_often, tolerance=4.0)
def distribution(completions: Completions) -> Measured:
    """Tokens are sampled as often as their probabilities require. The error is chi-square, in standard deviations above
    its mean."""
    counts = np.bincount([completion.tokens[0] for completion in completions], minlength=VOCABULARY_SIZE)
    if counts.sum() != DRAWS:
        return wrong(f"the request for {DRAWS} completions returned {counts.sum()}")
    expected = torch.exp(distributions_of("tied", completions[0], 1.6)[0]).double().numpy()
    return Measured(_excess(counts, expected), f"of {DRAWS} draws")


def _excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return by how many standard deviations Pearson's statistic exceeds its mean. Rare tokens form one class."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = int((~rare).sum())
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


async def _draw_samples(replica: ReplicaTrial) -> list[Completions]:
    rows = prompts(3, seed=4)
    return await asyncio.gather(
        *(replica.draw(row, n=6, max_tokens=20, temperature=1.6, ignore_eos=True) for row in rows)
    )


@CHECKS.judge(_draw_samples, tolerance=EXACT)
def samples(by_prompt: list[Completions]) -> Measured:
    """Each prompt gets n completions, and they differ."""
    for completions in by_prompt:
        if len(completions) != 6:
            return wrong(f"a request with n=6 returned {len(completions)} completions")
    same = 18 - sum(len({tuple(completion.tokens) for completion in completions}) for completions in by_prompt)
    return Measured(same, f"{same} of 18 completions repeat another" if same else "")


async def _draw_with_seeds(replica: ReplicaTrial) -> list[Completions]:
    async def draw(seed: int) -> Completions:
        return await replica.draw(PROMPT, n=4, max_tokens=12, seed=seed)

    alone, again, reseeded = await draw(123), await draw(123), await draw(124)
    beside = replica.draw(*prompts(9, seed=5, longest=20), n=3, max_tokens=15, top_k=5, temperature=1.3)
    _, crowded = await asyncio.gather(beside, draw(123))
    return [alone, again, crowded, reseeded]


@CHECKS.judge(_draw_with_seeds, capability=capabilities.SEED, tolerance=EXACT)
def seed(by_draw: list[Completions]) -> Measured:
    """The same seed gives the same completions in the same order, whatever else is running; another seed gives
    others."""
    alone, again, crowded, reseeded = ([completion.tokens for completion in completions] for completions in by_draw)
    if alone != again:
        return Measured(1, "the same seed gave other completions the second time")
    if alone != crowded:
        return Measured(1, "the same seed gave other completions beside other requests")
    return Measured(float(alone == reseeded), "another seed gave the same completions" if alone == reseeded else "")


async def _request_many(replica: ReplicaTrial) -> list[Completions]:
    rows = prompts(96, seed=6, longest=30)
    return await asyncio.gather(
        *(replica.draw(row, max_tokens=1 + number % 7, ignore_eos=True) for number, row in enumerate(rows))
    )


@CHECKS.judge(_request_many)
def many(by_request: list[Completions]) -> Measured:
    """If many requests run at once, each gets its own tokens, as many as it requested."""
    for number, completions in enumerate(by_request):
        if [len(completion.tokens) for completion in completions] != [1 + number % 7]:
            return wrong(f"request {number} must return one completion of {1 + number % 7} tokens")
    return logprob_error("tied", [completion for completions in by_request for completion in completions])
