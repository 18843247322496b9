"""Tokens in, tokens and their logprobs out: what is drawn, from which distribution, and what is said of it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import (
    LOGPROB_TOLERANCE,
    drawn_logprobs,
    greedy_error,
    logprob_error,
    named,
    of_one,
    oracle,
)
from enginehouse_testing.comparison import larger
from enginehouse_testing.models import VOCABULARY_SIZE
from enginehouse_testing.prompts import prompts
from enginehouse_testing.replica import Drawn, Replica

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


async def _greedy(replica: Replica) -> list[Drawn]:
    return await replica.draw(*prompts(8), temperature=0.0, max_tokens=24, ignore_eos=True)


@of_one
def _judge_greedy(drawn: list[Drawn]) -> Measured:
    short = [len(one.tokens) for one in drawn if len(one.tokens) != 24]
    return wrong(f"{short[0]} tokens were drawn, not 24") if short else greedy_error("tied", drawn)


async def _token_ids(replica: Replica) -> list[Drawn]:
    return await replica.draw(*prompts(8, seed=1, special=True), temperature=1.0, max_tokens=6, ignore_eos=True)


@of_one
def _judge_token_ids(drawn: list[Drawn]) -> Measured:
    return logprob_error("tied", drawn)


async def _logprobs(replica: Replica) -> list[list[Drawn]]:
    given = prompts(4, seed=2, longest=20)
    return [
        await replica.draw(*given, max_tokens=12, n=1 if knobs["temperature"] == 0 else 3, **knobs) for knobs in KNOBS
    ]


@of_one
def _judge_logprobs(drawn: list[list[Drawn]]) -> Measured:
    found = []
    for knobs, of_knobs in zip(KNOBS, drawn, strict=True):
        one = logprob_error("tied", of_knobs, knobs["temperature"] or 1.0)
        found.append(named(", ".join(f"{name} {value:g}" for name, value in knobs.items()), one))
    return larger(*found)


async def _truncation(replica: Replica) -> list[list[Drawn]]:
    return [await replica.draw(PROMPT, n=300, max_tokens=1, ignore_eos=True, **knobs) for knobs in KNOBS[2:4]]


@of_one
def _judge_truncation(drawn: list[list[Drawn]]) -> Measured:
    """Counts what lies outside of what is kept, with a little room for rounding."""
    by_p, by_k = drawn
    likely = torch.exp(drawn_logprobs("tied", by_p[0], 1.6)[0]).double()
    ordered, order = likely.sort(descending=True)
    before = torch.empty_like(likely)
    before[order] = ordered.cumsum(0) - ordered  # what all likelier tokens have together
    outside = [one.tokens[0] for one in by_p if before[one.tokens[0]] > 0.8 + 1e-4]
    if outside:
        return Measured(
            len(outside), f"top_p 0.8: token {outside[0]} was drawn, likelier ones have {before[outside[0]]:.4f}"
        )
    outside = [one.tokens[0] for one in by_k if likely[one.tokens[0]] < ordered[2] - 1e-6]
    return Measured(len(outside), f"top_k 3: token {outside[0]} was drawn" if outside else "")


async def _prompt_logprobs(replica: Replica) -> list[tuple[list[int], list[float], int]]:
    found = []
    for max_tokens in (0, 3):
        for prompt in prompts(3, seed=3, longest=24, special=True):
            result = await replica.request(prompt, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=True)
            scored = [float(one) for one in result.prompt_logprobs or ()]
            found.append((prompt, scored, max_tokens - len(result.completions[0].token_ids)))
    return found


@of_one
def _judge_prompt_logprobs(found: list[tuple[list[int], list[float], int]]) -> Measured:
    worst = Measured(0.0)
    for prompt, scored, missing in found:
        if len(scored) != len(prompt) or missing:
            return wrong(f"{len(prompt)} tokens of a prompt have {len(scored)} logprobs, {missing} tokens are missing")
        with torch.no_grad():
            right, _ = oracle("tied").row(torch.tensor(prompt))
        worst = larger(worst, Measured(float((torch.tensor(scored) - right).abs().max()), f"prompt {prompt}"))
    return worst


async def _distribution(replica: Replica) -> list[Drawn]:
    return await replica.draw(PROMPT, n=DRAWS, max_tokens=1, temperature=1.6, seed=11, ignore_eos=True)


@of_one
def _judge_distribution(drawn: list[Drawn]) -> Measured:
    counts = np.bincount([one.tokens[0] for one in drawn], minlength=VOCABULARY_SIZE)
    if counts.sum() != DRAWS:
        return wrong(f"{counts.sum()} completions came, not {DRAWS}")
    expected = torch.exp(drawn_logprobs("tied", drawn[0], 1.6)[0]).double().numpy()
    return Measured(excess(counts, expected), f"of {DRAWS} draws")


def excess(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """By how many standard deviations Pearson's statistic exceeds its mean; rare tokens are put together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = int((~rare).sum())
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


async def _samples(replica: Replica) -> list[list[Drawn]]:
    given = prompts(3, seed=4)
    each = [replica.draw(one, n=6, max_tokens=20, temperature=1.6, ignore_eos=True) for one in given]
    return list(await asyncio.gather(*each))


@of_one
def _judge_samples(drawn: list[list[Drawn]]) -> Measured:
    for of_prompt in drawn:
        if len(of_prompt) != 6:
            return wrong(f"n 6 gave {len(of_prompt)} completions")
    same = 18 - sum(len({tuple(one.tokens) for one in of_prompt}) for of_prompt in drawn)
    return Measured(same, f"{same} of 18 completions repeat another" if same else "")


async def _seed(replica: Replica) -> list[list[Drawn]]:
    async def seeded(seed: int) -> list[Drawn]:
        return await replica.draw(PROMPT, n=4, max_tokens=12, seed=seed)

    alone, again, other = await seeded(123), await seeded(123), await seeded(124)
    beside = replica.draw(*prompts(9, seed=5, longest=20), n=3, max_tokens=15, top_k=5, temperature=1.3)
    _, crowded = await asyncio.gather(beside, seeded(123))
    return [alone, again, crowded, other]


@of_one
def _judge_seed(drawn: list[list[Drawn]]) -> Measured:
    alone, again, crowded, other = ([one.tokens for one in found] for found in drawn)
    if alone != again:
        return Measured(1, "the same seed gave other completions the second time")
    if alone != crowded:
        return Measured(1, "the same seed gave other completions beside other requests")
    return Measured(float(alone == other), "another seed gave the same completions" if alone == other else "")


async def _many(replica: Replica) -> list[list[Drawn]]:
    given = prompts(96, seed=6, longest=30)
    lengths = [1 + number % 7 for number in range(len(given))]
    each = [
        replica.draw(prompt, max_tokens=length, ignore_eos=True) for prompt, length in zip(given, lengths, strict=True)
    ]
    return list(await asyncio.gather(*each))


@of_one
def _judge_many(drawn: list[list[Drawn]]) -> Measured:
    for number, of_request in enumerate(drawn):
        if [len(one.tokens) for one in of_request] != [1 + number % 7]:
            return wrong(f"request {number} was for {1 + number % 7} tokens of one completion, and got others")
    return logprob_error("tied", [one for of_request in drawn for one in of_request])


CHECKS = (
    RolloutCheck(
        name="greedy",
        capability=PROTOCOL,
        claim="At temperature 0 each token is the oracle's likeliest, in nats below it",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_greedy,),
        judge=_judge_greedy,
    ),
    RolloutCheck(
        name="token_ids",
        capability=PROTOCOL,
        claim="A prompt is taken as the ids it is, special tokens too: the next tokens' logprobs are the oracle's",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_token_ids,),
        judge=_judge_token_ids,
    ),
    RolloutCheck(
        name="logprobs",
        capability=PROTOCOL,
        claim="Logprobs of drawn tokens are the oracle's, of the whole distribution at the temperature (greedy: 1), "
        "whatever top_k and top_p keep",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_logprobs,),
        judge=_judge_logprobs,
    ),
    RolloutCheck(
        name="truncation",
        capability=PROTOCOL,
        claim="With top_k or top_p only tokens are drawn that it keeps",
        tolerance=0.0,
        acts=(_truncation,),
        judge=_judge_truncation,
    ),
    RolloutCheck(
        name="prompt_logprobs",
        capability=capabilities.PROMPT_LOGPROBS,
        claim="Logprobs of a prompt are the oracle's, with and without tokens to generate, the first 0",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_prompt_logprobs,),
        judge=_judge_prompt_logprobs,
    ),
    RolloutCheck(
        name="distribution",
        capability=PROTOCOL,
        claim="Tokens are drawn as often as their probability says: chi-square, in standard deviations above its mean",
        tolerance=4.0,
        acts=(_distribution,),
        judge=_judge_distribution,
    ),
    RolloutCheck(
        name="samples",
        capability=PROTOCOL,
        claim="n completions come for each prompt, and they differ",
        tolerance=0.0,
        acts=(_samples,),
        judge=_judge_samples,
    ),
    RolloutCheck(
        name="seed",
        capability=capabilities.SEED,
        claim="The same seed gives the same completions in the same order, whatever runs beside; another gives others",
        tolerance=0.0,
        acts=(_seed,),
        judge=_judge_seed,
    ),
    RolloutCheck(
        name="many",
        capability=PROTOCOL,
        claim="Of many requests at once each gets its own tokens, as many as it asked for",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_many,),
        judge=_judge_many,
    ),
)
