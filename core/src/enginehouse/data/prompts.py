"""Prompts to train on or to validate with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.files import Table, open_table
from enginehouse.data.ragged import Ragged
from enginehouse.data.rendering import Renderer, check_length
from enginehouse.data.sampler import Sampler


class PromptDataset:
    """The prompts of a file, tokenized once; every other column is kept for the reward function."""

    def __init__(
        self, table: Table, prompts: Sequence[Any], texts: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> None:
        """Use `load`."""
        self._table = table
        self._prompts = prompts
        self._texts = texts
        self._tokens = Ragged.from_list(tokens, dtype=torch.int32)  # half the memory; batches get int64

    @classmethod
    def load(
        cls,
        path: str | Path,
        tokenizer: Any,
        prompt_column: str = "prompt",
        max_prompt_tokens: int = 1024,
        chat_template: bool | None = None,
    ) -> PromptDataset:
        """Read a JSONL or Parquet file and tokenize its prompts.

        Args:
            path: the file.
            tokenizer: the model's `transformers` tokenizer.
            prompt_column: column with the prompt, a string or a list of chat messages.
            max_prompt_tokens: longer prompts are an error.
            chat_template: apply the tokenizer's chat template: None to messages only; True also to plain strings, as
                one message of the user; False never.

        Raises:
            DataError: saying which file, row and column is wrong and what would be right.
        """
        table = open_table(path, (prompt_column,))
        texts, tokens = Renderer(tokenizer, chat_template).prompts(table.needed[prompt_column], table.where)
        lengths = [len(ids) for ids in tokens]
        check_length(lengths, max_prompt_tokens, "the prompt", "data.max_prompt_tokens", table.where)
        return cls(table, table.needed[prompt_column], texts, tokens)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._texts)

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """The prompts at `indices`, in this order.

        Returns:
            A batch with `prompt_ids` (ragged int64), `prompt` (str, as given or as the chat template rendered it),
            `messages` (the chat messages as in the file; None for a text), `row` (int64 `(rows,)`, the prompt's place
            in the file) and `columns` (a dict of the row's other columns).
        """
        index = np.asarray(indices, dtype=np.int64)
        numbers = index.tolist()
        tokens = self._tokens.take(index)
        return Batch(
            {
                "prompt_ids": tokens.like(tokens.values.to(torch.int64)),
                "prompt": [self._texts[row] for row in numbers],
                "messages": [None if isinstance(given := self._prompts[row], str) else given for row in numbers],
                "row": torch.from_numpy(index.copy()),
                "columns": self._table.others(numbers),
            }
        )

    def all(self, limit: int | None = None) -> Batch:
        """The first `limit` prompts (unset: all) in the order of the file; columns as in `rows`."""
        return self.rows(np.arange(len(self) if limit is None else min(limit, len(self))))


class PromptSampler(Sampler):
    """Draws each step's prompts from a data set; `next()` gives a batch as `PromptDataset.rows` does."""

    def __init__(self, dataset: PromptDataset, prompts_per_step: int, seed: int = 0) -> None:
        """Start before the first prompt of epoch 0."""
        super().__init__(dataset, prompts_per_step, seed)
