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
from enginehouse_rl.data.rendering import Counted, Renderer, TokenLimit, check_length, make_length_error, skip_counting
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import count_by_file, make_sources, rank_values


class PromptDataset:
    """Prompts from one or more files, tokenized once; the other columns are kept for the reward function.

    Attributes:
        dropped: the number of prompts that were dropped because they are too long.
        ranks: the rank of each prompt by `data.order_by`; None without such a column.
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
        """Use `load` instead. `kept` has the indices of the table's rows to use, and `order` the ranks of all rows."""
        self._renderer, self._names = renderer, names
        self._table = table
        self._prompts = prompts
        self._held = {name: values for name, values in table.needed.items() if values is not prompts}
        self._kept = np.array(kept, dtype=np.int64)
        self._texts = [texts[row] for row in self._kept]
        self._tokens = Ragged.from_list([tokens[row] for row in self._kept], dtype=torch.int32)  # batches get int64
        self.dropped = len(texts) - len(self._kept)
        self.sources = make_sources(files, count_by_file(kept, [len(file) for file in table.list_files()]))
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
        counted: Counted = skip_counting,
        order_by: str | None = None,
        system: str | None = None,
        tools: str | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> PromptDataset:
        """Read JSONL or Parquet files and tokenize their prompts.

        Args:
            path: a file; or several, whose rows follow each other; or a mapping from paths to weights.
            tokenizer: the model's `transformers` tokenizer.
            prompt_column: column with the prompt, a string or a list of chat messages.
            max_prompt_tokens: maximum number of tokens of a prompt.
            chat_template: use of the tokenizer's chat template. None: only for messages; True: also for plain strings,
                each as one user message; False: never.
            overlong: treatment of prompts that are too long: `"error"`, or `"drop"` them.
            order_by: column with a number, for `ranks`.
            system: the system message for chats that begin without one.
            tools: column of the tools that the model may call, for the template: a list of JSON schemas, as a list or
                as text.
            columns: names of other columns, and of values inside them, for rewards and environments.

        Raises:
            DataError: a file, a row or a column is wrong; or all prompts are too long; or a file has a weight, but all
                its prompts are too long.
        """
        limit = TokenLimit.from_option("data.max_prompt_tokens", max_prompt_tokens)
        names = ColumnNames(columns or {})
        table = open_table(path, [prompt_column, order_by, tools, *names.needed])
        names.check(table)
        order = None if order_by is None else rank_values(table.needed[order_by], order_by, table.where)
        renderer, schemas = Renderer(tokenizer, chat_template, system), table.needed[tools] if tools else None
        texts, tokens = renderer.render_prompts(table.needed[prompt_column], table.where, counted, tools=schemas)
        lengths = [len(ids) for ids in tokens]
        if overlong == "error":
            check_length(lengths, limit, "the prompt", table.where)
        rows = [row for row, length in enumerate(lengths) if length <= limit.tokens]
        if not rows:
            raise make_length_error(len(lengths), min(lengths), limit)
        return cls(table, table.needed[prompt_column], texts, tokens, rows, path, order, renderer, names)

    def shapes(self) -> list[Shape]:
        """Return the shapes of the rows, as `Table.shapes` does."""
        return self._names.shapes(self._table.shapes())

    def where(self, row: int) -> str:
        """Name a row for a message. `row` is an index as in `Shape.first` or in the column `row`."""
        return self._table.where(row)

    def __len__(self) -> int:
        return len(self._texts)

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the prompts at `indices`, in this order.

        Returns:
            A batch with `prompt_ids` (ragged int64), `prompt` (str, as the chat template renders it or unchanged),
            `messages` (the chat messages that the template got; None for a text), `row` (int64 `(rows,)`, the index of
            the row in the files) and `columns` (a dict of the row's other columns).
        """
        index = np.asarray(indices, dtype=np.int64)
        numbers = index.tolist()
        tokens = self._tokens.take(index)
        rows = self._kept[index]
        return Batch(
            {
                "prompt_ids": tokens.like(tokens.values.to(torch.int64)),
                "prompt": [self._texts[row] for row in numbers],
                "messages": [self._renderer.writer.read_messages(self._prompts[row]) for row in rows.tolist()],
                "row": torch.from_numpy(rows),
                "columns": self._read_columns(rows.tolist()),
            }
        )

    def _read_columns(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return all columns of each row except the prompt."""
        further_columns = self._table.fetch_others(rows)
        if not self._held:
            return further_columns
        columns = [{name: values[row] for name, values in self._held.items()} for row in rows]
        return [self._names.apply(needed | further) for needed, further in zip(columns, further_columns, strict=True)]

    def all(self, limit: int | None = None) -> Batch:
        """Return the first `limit` prompts (unset: all) in the order of the file, with the columns of `rows`."""
        return self.rows(np.arange(len(self) if limit is None else min(limit, len(self))))

    def make_sampler(self, prompts_per_step: int, seed: int = 0) -> Sampler[PromptDataset]:
        """Return a sampler of `prompts_per_step` prompts per step, which uses the weights of the sources and the ranks
        of the prompts."""
        return Sampler(self, prompts_per_step, seed, self.sources, self.ranks)
