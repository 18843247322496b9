"""Rows of single tokens for `samples/`: the text of each token, and its values from the policy and the algorithm."""

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
"""Columns from which token rows are made, besides the optional `advantages`."""
DIGITS = 4
"""Number of significant digits to which written numbers are rounded."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 8
"""Maximum number of tokens that may make up one character. Longer sequences of undecodable tokens are not text."""


def token_rows(samples: Batch, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, list[Any]]]:
    """Yield the tokens of each row: `{"text": [str], "mask": [0|1], "logprob": [float|None], "version": [int|None]}`.

    There is also `"advantage"` if the samples have advantages. Each list has an entry for every token, including prompt
    tokens. For tokens that the policy did not choose, logprob, version and advantage are None. If the weights changed
    while the policy generated consecutive tokens, only the first and the last of these tokens have a version, because
    engines do not report more.

    Args:
        samples: The columns `TOKEN_COLUMNS`, and optionally `advantages` with one value for each row or each token.
        tokenizer: Tokenizer that decodes the tokens. `"".join(text)` is the decoded row, including special tokens.
    """
    ids, masks = samples.ragged("input_ids"), samples.ragged("loss_mask")
    numbers = {"logprob": _round(samples.ragged("rollout_logprobs").values)}
    if "advantages" in samples:
        advantages = samples["advantages"]
        by_token = advantages.values if isinstance(advantages, Ragged) else advantages[ids.row]
        numbers["advantage"] = _round(by_token)
    tokens, choices = ids.values.tolist(), masks.values.tolist()
    newest, versions = samples["weight_version"].tolist(), samples["versions"]
    for row, (begin, end) in enumerate(itertools.pairwise(ids.offsets.tolist())):
        mask = choices[begin:end]
        row_versions = versions[row]
        token_versions = (
            [newest[row]] * len(mask) if row_versions is None else _drop_unknown_versions(mask, row_versions)
        )
        yield {
            "text": split_text(tokens[begin:end], tokenizer),
            "mask": [int(choice) for choice in mask],
            **{name: _mask_values(mask, values[begin:end]) for name, values in numbers.items()},
            "version": _mask_values(mask, token_versions),
        }


def split_text(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token. Joined, these texts are the whole text. If several tokens make up a character, the
    last of these tokens gets the character.

    Each token is decoded after the tokens before it, because a tokenizer may write a token differently at the beginning
    of a text.
    """
    whole = str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)  # several times faster than `tokenizer`
    texts: list[str] = []
    position = 0
    for length in _measure_pieces(tokens, lambda part: backend.decode(part, skip_special_tokens=False)):
        texts.append(whole[position : position + length])
        position += length
    if texts:
        texts[-1] += whole[position:]
    return texts


def _measure_pieces(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[int]:
    """Yield the number of characters that each token adds."""
    before, reported, context = 0, 0, ""  # the tokens from `before` to `reported` have this text
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[before:end])
        if text.endswith(UNFINISHED) and end - reported < LONGEST_CHARACTER:
            yield 0
            continue
        yield max(len(text) - len(context), 0)
        before, reported, context = reported, end, decode(tokens[reported:end])


def _round(values: torch.Tensor) -> list[float | None]:
    """Round numbers to `DIGITS` digits; None replaces numbers that JSON cannot express."""
    exact = values.double().numpy()
    finite = np.isfinite(exact)
    numbers = np.where(finite, exact, 0.0)
    with np.errstate(divide="ignore"):
        digits = np.where(numbers == 0, 0, DIGITS - 1 - np.floor(np.log10(np.abs(numbers))))
    scale = 10.0 ** np.minimum(digits, 22)  # a power of ten that a float is
    rounded = np.round(numbers * scale) / scale
    listed: list[float | None] = rounded.tolist()
    if not finite.all():
        listed = [value if is_finite else None for value, is_finite in zip(listed, finite.tolist(), strict=True)]
    return listed


def _drop_unknown_versions(mask: Sequence[bool], versions: Sequence[int]) -> list[int | None]:
    """Return the versions of a row's tokens, with None where the engine did not report one. In such places,
    `Episode.versions` holds the oldest version."""
    reported: list[int | None] = []
    for _, run in itertools.groupby(zip(mask, versions, strict=True), key=lambda token: token[0]):
        run_versions = [version for _, version in run]
        first, last = run_versions[0], run_versions[-1]
        reported += run_versions if first == last else [first, *[None] * (len(run_versions) - 2), last]
    return reported


def _mask_values(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value if chosen else None for value, chosen in zip(values, mask, strict=True)]
