"""Makes requests from a batch of prompts, checks an engine's results, and sorts batches of samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from enginehouse.data import Batch, Ragged
from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError


def row_seeds(seed: int, rows: np.ndarray) -> list[int]:
    """Return a 31-bit seed for each row, computed from the row's index in the whole batch (`rows`). So samples do not
    depend on the replica that generates them. The indices are mixed as in SplitMix64 (Steele, Lea & Flood 2014), so
    that neighbouring rows get unrelated seeds."""
    with np.errstate(over="ignore"):
        mixed = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64((seed + 1) * 0xD1342543DE82EF95 & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) & np.uint64(0x7FFFFFFF)).tolist()


def make_seeded_requests(batch: Batch, sampling: SamplingParams, seed: int | None, name: str) -> list[GenerateRequest]:
    """Make a request for each row of `prompt_ids`. With a seed, each request gets its own seed, derived from the row's
    `prompt_index`. Raises `EnginehouseError` if there is a seed but no column `prompt_index`."""
    seeds = None
    if seed is not None:
        if "prompt_index" not in batch:
            raise EnginehouseError(
                "generate with a seed needs a column 'prompt_index' with each row's index in the whole batch"
            )
        seeds = row_seeds(seed, batch.tensor("prompt_index").numpy())
    return make_requests(batch.ragged("prompt_ids"), sampling, seeds, name)


def make_requests(
    prompts: Ragged, sampling: SamplingParams, seeds: Sequence[int] | None, name: str
) -> list[GenerateRequest]:
    """Make a request for each prompt, with the seed in `seeds` unless that is None. Request ids begin with `name`."""
    tokens = prompts.values.tolist()
    offsets = prompts.offsets.tolist()
    return [
        GenerateRequest(
            id=f"{name}-{row}",
            prompt_ids=tokens[begin:end],
            sampling=sampling if seeds is None else replace(sampling, seed=seeds[row]),
        )
        for row, (begin, end) in enumerate(itertools.pairwise(offsets))
    ]


def check_result(request: GenerateRequest, result: GenerateResult, engine: str) -> None:
    """Check that a result belongs to its request, because the position of a sample alone decides which prompt, reward
    and group it gets. Raises `EnginehouseError` if `engine` returned the result of another request, not `n`
    completions, or a completion with another number of logprobs than tokens."""
    if result.id != request.id or len(result.completions) != request.sampling.n:
        raise EnginehouseError(
            f"{engine} was asked for {request.sampling.n} completion(s) of request {request.id!r} and returned "
            f"{len(result.completions)} of request {result.id!r}; see the check 'samples' of `enginehouse certify`"
        )
    for number, completion in enumerate(result.completions):
        if len(completion.logprobs) != len(completion.token_ids):
            raise EnginehouseError(
                f"{engine} returned {len(completion.token_ids)} tokens with {len(completion.logprobs)} logprobs "
                f"as completion {number} of request {request.id!r}; see the check 'logprobs' of "
                "`enginehouse certify`"
            )


def sort_samples(pieces: Iterable[tuple[Sequence[int], Batch]]) -> Batch:
    """Concatenate samples in the order of their rows.

    Args:
        pieces: at least one pair of row indices and the samples of these rows. The samples of a row must be next to
            each other, and every row must have the same number of samples.
    """
    row_parts, sample_parts = zip(*pieces, strict=True)
    rows = np.concatenate([np.asarray(part, np.int64) for part in row_parts])
    samples = Batch.concat(sample_parts)
    if (np.diff(rows) > 0).all():
        return samples
    samples_per_row = len(samples) // len(rows)
    return samples.take((np.argsort(rows)[:, None] * samples_per_row + np.arange(samples_per_row)).ravel())
