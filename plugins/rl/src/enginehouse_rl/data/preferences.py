from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.ragged import Ragged
from enginehouse_rl.data.files import RowProblems
from enginehouse_rl.data.preference_files import PreferenceColumns, PreferenceTable
from enginehouse_rl.data.rendering import Counted, Renderer, TokenLimit, check_length, join, skip_counting


class PreferenceDataset:
    """Preferences from one or more files, tokenized once. An item is a pair of responses, or a rated response."""

    def __init__(
        self,
        tokens: Sequence[np.ndarray],
        learned: Sequence[np.ndarray],
        each: int,
        figure: str = "",
        figures: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        """Use `load` instead. An item has `each` responses. For each response, `tokens` has the tokens of the prompt
        and of the response, and `learned` has a mask of them: true for the tokens that the loss counts."""
        self._tokens = Ragged.from_list(tokens, dtype=torch.int32)
        self._learned = Ragged.from_list(learned, dtype=torch.bool)
        self._each, self._figure, self._figures, self._longest = each, figure, figures, longest

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path],
        tokenizer: Any,
        columns: PreferenceColumns,
        max_tokens: int | TokenLimit = 2048,
        chat_template: bool | None = None,
        counted: Counted = skip_counting,
        system: str | None = None,
    ) -> PreferenceDataset:
        """Read JSONL or Parquet files and tokenize their preferences.

        Args:
            path: a file; or several, whose rows follow each other.
            tokenizer: the model's `transformers` tokenizer.
            max_tokens: maximum number of tokens of a prompt with a response; a longer row is an error.
            chat_template: as for `PromptDataset.load`.
            system: as for `PromptDataset.load`.

        Raises:
            DataError: a file, a row or a column is wrong.
        """
        limit = TokenLimit.from_option("data.max_tokens", max_tokens)
        table = PreferenceTable(path, columns)
        problems = RowProblems()
        renderer = Renderer(tokenizer, chat_template, system)
        prompts, responses = table.tokenize(renderer, range(len(table)), problems, counted)
        figures = table.check_figures(problems)
        problems.raise_any()
        per_item = len(responses)
        tokens, learned = join(
            [prompt for prompt in prompts for _ in range(per_item)],
            [response for row_responses in zip(*responses, strict=True) for response in row_responses],
        )

        def where(number: int) -> str:
            return table.table.where(number // per_item)

        check_length([len(ids) for ids in tokens], limit, "prompt and response together", where)
        kind = torch.bool if columns.figure == "label" else torch.float32
        column = torch.tensor(figures, dtype=kind) if columns.figure else None
        return cls(tokens, learned, per_item, columns.figure, column, limit.tokens)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._tokens) // self._each

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the items at `indices`, in this order.

        Returns:
            A batch with a row for each response. The responses of an item are adjacent, the better one first. Its
            columns are `input_ids` (ragged int64: prompt and response) and `loss_mask` (ragged bool: true for the
            tokens that the loss counts). If the data has margins or labels, there is also a column `margin` (float32)
            or `label` (bool).
        """
        index = np.asarray(indices, dtype=np.int64)
        rows = (index[:, None] * self._each + np.arange(self._each)).ravel()
        batch = _make_batch(self._tokens.take(rows), self._learned.take(rows))
        if self._figures is None:
            return batch
        return batch.with_columns(**{self._figure: self._figures[np.repeat(index, self._each)]})

    def all(self) -> Batch:
        """Return all items in the order of the file, with the columns of `rows`."""
        return self.rows(np.arange(len(self)))

    def mismatch(self, batch: Batch) -> Batch:
        """Pair the prompt of each row of a batch with the response of the next row, and the last prompt with the first
        response.

        A pair that is too long is cut off at the end.
        """
        ids, mask = batch.ragged("input_ids"), batch.ragged("loss_mask")
        starts = [int(row.numpy().argmax()) for row in mask]
        following = [*range(1, len(starts)), 0]

        def exchange(column: Ragged) -> list[np.ndarray]:
            rows = [row.numpy() for row in column]
            parts = [(rows[n][: starts[n]], rows[after][starts[after] :]) for n, after in enumerate(following)]
            return [np.concatenate(pair)[: self._longest] for pair in parts]

        tokens = Ragged.from_list(exchange(ids), dtype=torch.int64)
        return _make_batch(tokens, Ragged.from_list(exchange(mask), dtype=torch.bool))


def _make_batch(tokens: Ragged, learned: Ragged) -> Batch:
    return Batch({"input_ids": tokens.like(tokens.values.to(torch.int64)), "loss_mask": learned})
