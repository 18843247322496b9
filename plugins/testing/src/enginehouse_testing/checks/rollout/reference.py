"""Compares a replica's completions with the oracle's results."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from enginehouse_testing.check import Measured, wrong
from enginehouse_testing.comparison import larger
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.prompts import rollout_model
from enginehouse_testing.replica import SampledCompletion

LOGPROB_TOLERANCE = 2e-4
"""Maximum difference, in nats, between a logprob and the logprob of the oracle, both in float32."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.3}
"""Tolerance in nats for a user's model: the relative tolerances of training engines (`checks.train.scores`), times the
ten nats of the least likely tokens."""


@functools.cache
def oracle(model: str) -> Oracle:
    """Return the oracle of a model."""
    return Oracle(rollout_model(model))


def distributions_of(model: str, completion: SampledCompletion, temperature: float = 1.0) -> torch.Tensor:
    """Return the oracle's distribution before each generated token, `(tokens, vocabulary)`."""
    distributions = oracle(model).distributions([*completion.prompt, *completion.tokens], temperature)
    return distributions[len(completion.prompt) - 1 : -1]


def logprobs_of(model: str, completion: SampledCompletion, temperature: float = 1.0) -> torch.Tensor:
    """Return the oracle's logprob of each generated token, `(tokens,)`."""
    return distributions_of(model, completion, temperature).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]


def logprob_error(model: str, completions: Iterable[SampledCompletion], temperature: float = 1.0) -> Measured:
    """Return the largest difference, in nats, between the reported and the oracle's logprob of a generated token."""
    worst = Measured(0.0)
    for completion in completions:
        tokens, logprobs = completion.tokens, completion.logprobs
        if len(logprobs) != len(tokens):
            return wrong(f"a completion has {len(tokens)} tokens, but {len(logprobs)} logprobs")
        if not tokens:
            continue
        right = logprobs_of(model, completion, temperature)
        errors = (torch.tensor(logprobs) - right).abs()
        at = int(errors.argmax())
        place = f"token {at} after a prompt of {len(completion.prompt)} tokens"
        detail = f"{place} has the logprob {logprobs[at]:.6g}, not {right[at]:.6g}"
        worst = larger(worst, Measured(float(errors.max()), detail))
    return worst


def switched_error(old: str, new: str, completion: SampledCompletion, keeps_cache: bool) -> Measured:
    """Return the largest difference between a reported logprob and the oracle's, of a completion whose first tokens are
    of one model and whose other tokens are of another.

    Args:
        old: model of the first tokens.
        new: model of the other tokens.
        keeps_cache: True if the keys and values of the first tokens stay those of `old`.
    """
    reported = torch.tensor(completion.logprobs)
    by_old = logprobs_of(old, completion)
    at = int(((reported - by_old).abs() > LOGPROB_TOLERANCE).int().argmax())  # the first token of the new model
    if keeps_cache:
        by_new = oracle(new).continued(
            oracle(old), [*completion.prompt, *completion.tokens], len(completion.prompt) + at - 1
        )
    else:
        by_new = logprobs_of(new, completion)[at:]
    error = (reported[at:] - by_new).abs().max()
    return Measured(float(error), f"the weights changed at token {at}; the worst logprob after it is {error:.2g} off")


def greedy_error(model: str, completions: Iterable[SampledCompletion]) -> Measured:
    """Return the largest difference, in nats, between the logprobs of the most likely and of the chosen token."""
    worst = Measured(0.0)
    for completion in completions:
        tokens = completion.tokens
        if not tokens:
            return wrong("a completion has no tokens")
        distribution = distributions_of(model, completion)
        chosen = distribution.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gap = distribution.max(dim=1).values - chosen
        at = int(gap.argmax())
        right = int(distribution[at].argmax())
        detail = f"token {at} after a prompt of {len(completion.prompt)} tokens is {tokens[at]}, not {right}"
        worst = larger(worst, Measured(float(gap.max()), detail))
    return worst


def serves(model: str, completions: Sequence[SampledCompletion], version: int | None = None) -> Measured:
    """Compare greedy completions with a model: tokens, logprobs and, if `version` is given, the reported version."""
    for completion in completions:
        first, last = completion.first, completion.last
        if version is not None and (first, last) != (version, version):
            return wrong(f"a completion reports weight versions {first} to {last}, not {version}")
    return larger(greedy_error(model, completions), logprob_error(model, completions))


def prefixed(what: str, measured: Measured) -> Measured:
    """Return a result whose detail begins with `what`, which names the judged part."""
    return Measured(measured.error, f"{what}: {measured.detail}") if measured.detail else measured
