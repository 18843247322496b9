"""From a batch of prompts to an engine's requests, and from its results to a batch of samples.

Both with a few array operations for a whole batch: this runs once a step for every row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from enginehouse.data import Batch, Ragged
from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams
from enginehouse.errors import EnginehouseError


def row_seeds(seed: int, rows: np.ndarray) -> list[int]:
    """A seed of 31 bits for each row number of a whole batch, so that samples do not depend on who draws them.

    The numbers are mixed as in SplitMix64 (Steele, Lea & Flood 2014): neighbouring rows get unrelated seeds.
    """
    with np.errstate(over="ignore"):
        mixed = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.uint64((seed + 1) * 0xD1342543DE82EF95 & 0xFFFFFFFFFFFFFFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) & np.uint64(0x7FFFFFFF)).tolist()


def seeded_requests(batch: Batch, sampling: SamplingParams, seed: int | None, name: str) -> list[GenerateRequest]:
    """One request a row of `prompt_ids`; with a seed each has one of its own, by the row's `prompt_index`.

    Raises:
        EnginehouseError: there is a seed, and no such column.
    """
    seeds = None
    if seed is not None:
        if "prompt_index" not in batch:
            raise EnginehouseError(
                "generate with a seed needs a column 'prompt_index' with each row's number in the whole batch"
            )
        seeds = row_seeds(seed, batch.tensor("prompt_index").numpy())
    return make_requests(batch.ragged("prompt_ids"), sampling, seeds, name)


def make_requests(
    prompts: Ragged, sampling: SamplingParams, seeds: Sequence[int] | None, name: str
) -> list[GenerateRequest]:
    """One request a row.

    Args:
        prompts: token ids.
        sampling: the same for all rows, but for the seed.
        seeds: one a row; None: rows keep `sampling.seed`.
        name: begins the requests' ids.
    """
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
    """Refuse a result that is not the request's: which row a sample belongs to, and with it its prompt, reward and
    group, is told by its place alone.

    Raises:
        EnginehouseError: `engine` returned a result of another request, other than `n` completions, or logprobs for
            other than their tokens.
    """
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


def in_order(pieces: Iterable[tuple[Sequence[int], Batch]]) -> Batch:
    """The samples of at least one piece, those of each row next to each other, as rows of the batch follow each other.

    Args:
        pieces: rows and their samples, as many for each.
    """
    came = list(pieces)
    rows = np.concatenate([np.asarray(part, np.int64) for part, _ in came])
    samples = Batch.concat([drawn for _, drawn in came])
    if (np.diff(rows) > 0).all():
        return samples
    each = len(samples) // len(rows)
    return samples.take((np.argsort(rows)[:, None] * each + np.arange(each)).ravel())
