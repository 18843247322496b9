"""Prompts to train on or to validate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.ragged import Ragged
from enginehouse_rl.data.column_names import ColumnNames
from enginehouse_rl.data.files import Shape, Table, open_table
from enginehouse_rl.data.rendering import Counted, Renderer, TokenLimit, all_too_long, check_length, uncounted
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import kept_by_file, ranks, sources_of


class PromptDataset:
    """The prompts of a file, or of several, tokenized once; other columns are kept for the reward function.

    Attributes:
        dropped: how many prompts were left out because they are too long.
        sources: what is drawn from, with which weights.
        ranks: of each prompt, its place in `data.order_by`; None: it has none.
    """

    def __init__(
        self,
        table: Table,
        prompts: Sequence[Any],
        texts: Sequence[str],
        tokens: Sequence[np.ndarray],
        kept: Sequence[int],
        files: str | Path | Sequence[str | Path] | Mapping[str, float],
        order: Sequence[int] | None,
        renderer: Renderer,
        names: ColumnNames,
    ) -> None:
        """Use `load`. `kept` are the rows of the table to use, `order` the ranks of all."""
        self._renderer, self._names = renderer, names
        self._table = table
        self._prompts = prompts
        self._held = {name: values for name, values in table.needed.items() if values is not prompts}
        self._kept = np.array(kept, dtype=np.int64)
        self._texts = [texts[row] for row in self._kept]
        self._tokens = Ragged.from_list([tokens[row] for row in self._kept], dtype=torch.int32)  # batches get int64
        self.dropped = len(texts) - len(self._kept)
        self.sources = sources_of(files, kept_by_file(kept, [len(file) for file in table.by_file()]))
        self.ranks = None if order is None else [order[row] for row in kept]

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path] | Mapping[str, float],
        tokenizer: Any,
        prompt_column: str = "prompt",
        max_prompt_tokens: int | TokenLimit = 1024,
        chat_template: bool | None = None,
        overlong: Literal["error", "drop"] = "error",
        counted: Counted = uncounted,
        order_by: str | None = None,
        system: str | None = None,
        tools: str | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> PromptDataset:
        """Read JSONL or Parquet files and tokenize their prompts.

        Args:
            path: the file, or several, whose rows follow each other; or the weights of several, by path.
            tokenizer: the model's `transformers` tokenizer.
            prompt_column: column with the prompt, a string or a list of chat messages.
            max_prompt_tokens: what is longer is too long.
            chat_template: apply the tokenizer's chat template: None to messages only; True also to plain strings, as
                one message of the user; False never.
            overlong: what to do with prompts that are too long; `"drop"` leaves them out.
            counted: shows how many are done.
            order_by: column with a number, for `ranks`.
            system: the system message of chats that begin with none.
            tools: column with what the model may call, a list of JSON schemas or its text, for the chat template.
            columns: names of other columns, and of values in them, for rewards and environments.

        Raises:
            DataError: saying which file, row and column is wrong and what would be right; all prompts are too long, or
                all of a file with a weight.
        """
        limit = max_prompt_tokens
        if isinstance(limit, int):
            limit = TokenLimit.of("data.max_prompt_tokens", limit)
        names = ColumnNames(columns or {})
        needed = [name for name in (prompt_column, order_by, tools, *names.needed) if name is not None]
        table = open_table(list(path) if isinstance(path, Mapping) else path, list(dict.fromkeys(needed)))
        names.check(table)
        order = None if order_by is None else ranks(table.needed[order_by], order_by, table.where)
        renderer, schemas = Renderer(tokenizer, chat_template, system), table.needed[tools] if tools else None
        texts, tokens = renderer.prompts(table.needed[prompt_column], table.where, counted, tools=schemas)
        lengths = [len(ids) for ids in tokens]
        if overlong == "error":
            check_length(lengths, limit, "the prompt", table.where)
        rows = [row for row, length in enumerate(lengths) if length <= limit.tokens]
        if not rows:
            raise all_too_long(len(lengths), min(lengths), limit)
        return cls(table, table.needed[prompt_column], texts, tokens, rows, path, order, renderer, names)

    def shapes(self) -> list[Shape]:
        """Return the columns that rows have, as `Table.shapes` does."""
        return self._names.shapes(self._table.shapes())

    def where(self, row: int) -> str:
        """Name a row of the files, as `Shape.first` and the column `row` count them, for a message."""
        return self._table.where(row)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._texts)

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the prompts at `indices`, in this order.

        Returns:
            A batch with `prompt_ids` (ragged int64), `prompt` (str, as given or as the chat template rendered it),
            `messages` (the chat messages that the template got; None for a text), `row` (int64 `(rows,)`, its place
            among the files' rows) and `columns` (a dict of the row's other columns).
        """
        index = np.asarray(indices, dtype=np.int64)
        numbers = index.tolist()
        tokens = self._tokens.take(index)
        places = self._kept[index]
        return Batch(
            {
                "prompt_ids": tokens.like(tokens.values.to(torch.int64)),
                "prompt": [self._texts[row] for row in numbers],
                "messages": [self._renderer.writer.messages(self._prompts[row]) for row in places.tolist()],
                "row": torch.from_numpy(places),
                "columns": self._columns(places.tolist()),
            }
        )

    def _columns(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the columns of each row but the prompt."""
        others = self._table.others(rows)
        if not self._held:
            return others
        columns = [{name: values[row] for name, values in self._held.items()} for row in rows]
        return [self._names.apply(column_values | other) for column_values, other in zip(columns, others, strict=True)]

    def all(self, limit: int | None = None) -> Batch:
        """Return the first `limit` prompts (unset: all) in the order of the file; columns as in `rows`."""
        return self.rows(np.arange(len(self) if limit is None else min(limit, len(self))))


class PromptSampler(Sampler):
    """Draws each step's prompts from a data set; `next()` gives a batch as `PromptDataset.rows` does."""

    def __init__(self, dataset: PromptDataset, prompts_per_step: int, seed: int = 0) -> None:
        """Start before the first prompt of epoch 0."""
        super().__init__(dataset, prompts_per_step, seed, dataset.sources, dataset.ranks)
