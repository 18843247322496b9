"""Every token of a sample, as `samples/` has it: its text, and what the policy and the algorithm made of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from enginehouse.data import Batch, Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "weight_version", "versions")
"""Columns that are read for it, and `advantages` where there are any."""
DIGITS = 4
"""So many significant digits are written of a number."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 8
"""Tokens that may go by until they end a character; more are no text."""


def token_rows(samples: Batch, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, list[Any]]]:
    """Of each row `{"text": [str], "mask": [0|1], "logprob": [float|None], "version": [int|None]}`, and `"advantage"`
    where there are any: an entry a token, prompts included, None where the policy did not choose it. Of what was drawn
    while weights changed the version is None too, but for the first token and the last: engines say no more.

    Args:
        samples: the columns `READ`, and maybe `advantages`: one a row, or one a token.
        tokenizer: whose text `"".join(text)` is, special tokens included.
    """
    ids, masks = samples.ragged("input_ids"), samples.ragged("loss_mask")
    numbers = {"logprob": _round(samples.ragged("rollout_logprobs").values)}
    if "advantages" in samples:
        advantages = samples["advantages"]
        by_token = advantages.values if isinstance(advantages, Ragged) else advantages[ids.row]
        numbers["advantage"] = _round(by_token)
    tokens, chosen = ids.values.tolist(), masks.values.tolist()
    newest, versions = samples["weight_version"].tolist(), samples["versions"]
    for row, (begin, end) in enumerate(itertools.pairwise(ids.offsets.tolist())):
        mask = chosen[begin:end]
        several = versions[row]
        each = [newest[row]] * len(mask) if several is None else _drop_unknown_versions(mask, several)
        yield {
            "text": split_text(tokens[begin:end], tokenizer),
            "mask": [int(one) for one in mask],
            **{name: _mask_values(mask, values[begin:end]) for name, values in numbers.items()},
            "version": _mask_values(mask, each),
        }


def split_text(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token, all of which make up the text of all. A character of several tokens is its last one's.

    Each is decoded behind the ones before it, since a tokenizer may write a token otherwise where it begins a text.
    """
    whole = str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)  # several times as fast
    made: list[str] = []
    at = 0
    for length in _measure_pieces(tokens, lambda part: backend.decode(part, skip_special_tokens=False)):
        made.append(whole[at : at + length])
        at += length
    if made:
        made[-1] += whole[at:]
    return made


def _measure_pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[int]:
    """How many characters come with each token."""
    before, told, context = 0, 0, ""  # tokens from `before` to `told` have this text
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith(UNFINISHED) and end - told < LONGEST_CHARACTER:
            yield 0
            continue
        yield max(len(text) - len(context), 0)
        before, told, context = told, end, decode(tokens[told:end])


def _round(values: torch.Tensor) -> list[float | None]:
    """Numbers with a few digits; None for what JSON has no word for."""
    exact = values.double().numpy()
    finite = np.isfinite(exact)
    held = np.where(finite, exact, 0.0)
    with np.errstate(divide="ignore"):
        digits = np.where(held == 0, 0, DIGITS - 1 - np.floor(np.log10(np.abs(held))))
    scale = 10.0 ** np.minimum(digits, 22)  # a power of ten that a float is
    rounded = np.round(held * scale) / scale
    listed: list[float | None] = rounded.tolist()
    if not finite.all():
        listed = [value if is_finite else None for value, is_finite in zip(listed, finite.tolist(), strict=True)]
    return listed


def _drop_unknown_versions(mask: Sequence[bool], versions: Sequence[int]) -> list[int | None]:
    """Versions of a row's tokens, without those that `Episode.versions` has the oldest for as nobody knows them."""
    said: list[int | None] = []
    for _, drawn in itertools.groupby(zip(mask, versions, strict=True), key=lambda token: token[0]):
        of_run = [version for _, version in drawn]
        first, last = of_run[0], of_run[-1]
        said += of_run if first == last else [first, *[None] * (len(of_run) - 2), last]
    return said


def _mask_values(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value if chosen else None for value, chosen in zip(values, mask, strict=True)]
