"""Preferences, tokenized: what a run on pairs of responses, or on rated ones, draws its steps from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.files import RowProblems
from enginehouse.data.preference_files import PreferenceColumns, PreferenceTable
from enginehouse.data.ragged import Ragged
from enginehouse.data.rendering import Counted, Renderer, TokenLimit, check_length, uncounted
from enginehouse.data.sampler import Sampler


class PreferenceDataset:
    """The preferences of a file, or of several, tokenized once. An item is a pair, or a rated response."""

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        each: int,
        figure: str = "",
        figures: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        """Use `load`. `tokens` holds prompt and response together, of an item's `each` responses one after another."""
        self._tokens = Ragged.from_list(tokens, dtype=torch.int32)
        self._prompt_lengths = np.array(prompt_lengths, dtype=np.int64)
        self._each, self._figure, self._figures, self._longest = each, figure, figures, longest

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path],
        tokenizer: Any,
        columns: PreferenceColumns,
        max_tokens: int | TokenLimit = 2048,
        chat_template: bool | None = None,
        counted: Counted = uncounted,
    ) -> PreferenceDataset:
        """Read JSONL or Parquet files and tokenize their preferences.

        Args:
            path: the file, or several, whose rows follow each other.
            tokenizer: the model's `transformers` tokenizer.
            columns: the files'.
            max_tokens: a longer prompt with a response is an error.
            chat_template: as for `PromptDataset.load`.
            counted: shows how many are done.

        Raises:
            DataError: saying which file, row and column is wrong and what would be right.
        """
        limit = TokenLimit.of("data.max_tokens", max_tokens) if isinstance(max_tokens, int) else max_tokens
        read = PreferenceTable(path, columns)
        problems = RowProblems()
        prompts, responses = read.tokens(Renderer(tokenizer, chat_template), range(len(read)), problems, counted)
        figures = read.figures(problems)
        problems.raise_any()
        each = len(responses)
        tokens = [
            np.concatenate((prompt, response))
            for prompt, *of_row in zip(prompts, *responses, strict=True)
            for response in of_row
        ]

        def where(number: int) -> str:
            return read.table.where(number // each)

        check_length([len(ids) for ids in tokens], limit, "prompt and response together", where)
        lengths = [len(prompt) for prompt in prompts for _ in range(each)]
        kind = torch.bool if columns.figure == "label" else torch.float32
        column = torch.tensor(figures, dtype=kind) if columns.figure else None
        return cls(tokens, lengths, each, columns.figure, column, limit.tokens)

    def __len__(self) -> int:
        """Number of items."""
        return len(self._tokens) // self._each

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """The items at `indices`, in this order.

        Returns:
            A batch with a row for each response, those of an item next to each other, the better one first:
            `input_ids` (ragged int64: prompt and response) and `loss_mask` (ragged bool, true on the response); and
            `margin` float32 or `label` bool, where the data have them, of each row its item's.
        """
        index = np.asarray(indices, dtype=np.int64)
        rows = (index[:, None] * self._each + np.arange(self._each)).ravel()
        tokens = self._tokens.take(rows)
        batch = _with_mask(tokens, self._prompt_lengths[rows])
        if self._figures is None:
            return batch
        return batch.with_columns(**{self._figure: self._figures[np.repeat(index, self._each)]})

    def all(self) -> Batch:
        """All items in the order of the file; columns as in `rows`."""
        return self.rows(np.arange(len(self)))

    def mismatched(self, batch: Batch) -> Batch:
        """Each row's prompt with the response of the next row, of the last with the first's; cut where it is too long.

        Args:
            batch: some `rows`.
        """
        ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask")
        lengths = [int(row.numpy().argmax()) for row in mask]
        rows = [row.numpy() for row in ids]
        following = [*range(1, len(rows)), 0]
        tokens = [
            np.concatenate([rows[n][: lengths[n]], rows[next_][lengths[next_] :]])[: self._longest]
            for n, next_ in enumerate(following)
        ]
        return _with_mask(Ragged.from_list(tokens, dtype=torch.int64), np.array(lengths))


def _with_mask(tokens: Ragged, prompt_lengths: np.ndarray) -> Batch:
    starts = np.repeat(tokens.offsets.numpy()[:-1] + prompt_lengths, tokens.lengths.numpy())
    mask = torch.from_numpy(np.arange(tokens.tokens) >= starts)
    return Batch({"input_ids": tokens.like(tokens.values.to(torch.int64)), "loss_mask": tokens.like(mask)})


class PreferenceSampler(Sampler):
    """Draws each step's items from a data set; `next()` gives a batch as `PreferenceDataset.rows` does."""

    dataset: PreferenceDataset

    def __init__(self, dataset: PreferenceDataset, items_per_step: int, seed: int = 0) -> None:
        """Start before the first item of epoch 0."""
        super().__init__(dataset, items_per_step, seed)
