"""Demonstrations for supervised training: a prompt and the response to learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.ragged import Ragged
from enginehouse_rl.data.conversations import open_demonstrations
from enginehouse_rl.data.rendering import Counted, Renderer, TokenLimit, check_length, joined, uncounted
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import Source, sources_of


class DemonstrationDataset:
    """The demonstrations of a file, or of several, tokenized once.

    Attributes:
        sources: what is drawn from, with which weights.
    """

    def __init__(self, tokens: Sequence[np.ndarray], learned: Sequence[np.ndarray], sources: Sequence[Source]) -> None:
        """Use `load`. `tokens` holds prompt and response together, `learned` is true on what the model is to write."""
        self.sources = sources
        self._tokens = Ragged.from_list(tokens, dtype=torch.int32)
        self._learned = Ragged.from_list(learned, dtype=torch.bool)

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path] | Mapping[str, float],
        tokenizer: Any,
        prompt_column: str = "prompt",
        response_column: str = "response",
        max_tokens: int | TokenLimit = 2048,
        chat_template: bool | None = None,
        counted: Counted = uncounted,
        system: str | None = None,
        tools: str | None = None,
        conversation: str | None = None,
    ) -> DemonstrationDataset:
        """Read JSONL or Parquet files and tokenize their demonstrations.

        A demonstration is the prompt as `PromptDataset` renders it, the response, and what ends that: see docs/rows.md.

        Args:
            path: the file, or several, whose rows follow each other; or the weights of several, by path.
            tokenizer: the model's `transformers` tokenizer.
            prompt_column: column with the prompt, a string or a list of chat messages.
            response_column: column with the response, a string, or a list of chat messages, of which the
                assistant's are learned.
            max_tokens: longer demonstrations, prompt and response together, are an error.
            chat_template: as for `PromptDataset.load`.
            counted: shows how many are done.
            system: as for `PromptDataset.load`.
            tools: as for `PromptDataset.load`.
            conversation: column with both as one chat, whose first turn of the assistant begins the response.

        Raises:
            DataError: saying which file, row and column is wrong and what would be right.
        """
        limit = TokenLimit.of("data.max_tokens", max_tokens) if isinstance(max_tokens, int) else max_tokens
        files = list(path) if isinstance(path, Mapping) else path
        table = open_demonstrations(files, prompt_column, response_column, tools, conversation)
        renderer, called = Renderer(tokenizer, chat_template, system), table.needed[tools] if tools else None
        prompts, answers = table.needed[prompt_column], table.needed[response_column]
        rendered = renderer.prompts(prompts, table.where, counted, tools=called)
        responses = renderer.completions(prompts, rendered, answers, response_column, table.where, tools=called)
        tokens, learned = joined(rendered[1], responses)
        check_length([len(ids) for ids in tokens], limit, "prompt and response together", table.where)
        sources = sources_of(path, [len(file) for file in table.by_file()])
        return cls(tokens, learned, sources)

    def __len__(self) -> int:
        """Number of demonstrations."""
        return len(self._tokens)

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the demonstrations at `indices`, in this order.

        Returns:
            A batch with `input_ids` (ragged int64: prompt and response, what ends it too) and `loss_mask` (ragged
            bool, true on what the model is to write).
        """
        index = np.asarray(indices, dtype=np.int64)
        tokens, learned = self._tokens.take(index), self._learned.take(index)
        return Batch({"input_ids": tokens.like(tokens.values.to(torch.int64)), "loss_mask": learned})

    def all(self, limit: int | None = None) -> Batch:
        """Return the first `limit` demonstrations (unset: all) in the order of the file; columns as in `rows`."""
        return self.rows(np.arange(len(self) if limit is None else min(limit, len(self))))


class DemonstrationSampler(Sampler):
    """Draws each step's demonstrations from a data set; `next()` gives a batch as `DemonstrationDataset.rows` does."""

    def __init__(self, dataset: DemonstrationDataset, rows_per_step: int, seed: int = 0) -> None:
        """Start before the first demonstration of epoch 0."""
        super().__init__(dataset, rows_per_step, seed, dataset.sources)
