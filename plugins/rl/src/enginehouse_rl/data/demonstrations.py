from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enginehouse.data.batch import Batch
from enginehouse.data.ragged import Ragged
from enginehouse_rl.data.conversations import open_demonstrations
from enginehouse_rl.data.rendering import Counted, Renderer, TokenLimit, check_length, join, skip_counting
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import Source, make_sources


class DemonstrationDataset:
    """Demonstrations for supervised training from one or more files: prompts with responses, tokenized once."""

    def __init__(self, tokens: Sequence[np.ndarray], learned: Sequence[np.ndarray], sources: Sequence[Source]) -> None:
        """Use `load` instead. For each demonstration, `tokens` has the tokens of the prompt and the response, and
        `learned` has a mask of them: true for the tokens that the loss trains the model to generate."""
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
        counted: Counted = skip_counting,
        system: str | None = None,
        tools: str | None = None,
        conversation: str | None = None,
    ) -> DemonstrationDataset:
        """Read JSONL or Parquet files and tokenize their demonstrations.

        The row of a demonstration is the prompt as `PromptDataset` renders it, the response, and the end of the
        response (docs/rows.md).

        Args:
            path: a file; or several, whose rows follow each other; or a mapping from paths to weights.
            tokenizer: the model's `transformers` tokenizer.
            prompt_column: column with the prompt, a string or a list of chat messages.
            response_column: column with the response: a string, or a list of chat messages. The model is trained only
                on the messages of the assistant.
            max_tokens: maximum number of tokens of prompt and response together; a longer demonstration is an error.
            chat_template: as for `PromptDataset.load`.
            system: as for `PromptDataset.load`.
            tools: as for `PromptDataset.load`.
            conversation: column with prompt and response as one chat. The assistant's first turn begins the response.

        Raises:
            DataError: a file, a row or a column is wrong.
        """
        limit = TokenLimit.from_option("data.max_tokens", max_tokens)
        table = open_demonstrations(path, prompt_column, response_column, tools, conversation)
        renderer, schemas = Renderer(tokenizer, chat_template, system), table.needed[tools] if tools else None
        prompts, answers = table.needed[prompt_column], table.needed[response_column]
        rendered = renderer.render_prompts(prompts, table.where, counted, tools=schemas)
        responses = renderer.render_completions(prompts, rendered, answers, response_column, table.where, tools=schemas)
        tokens, learned = join(rendered[1], responses)
        check_length([len(ids) for ids in tokens], limit, "prompt and response together", table.where)
        return cls(tokens, learned, make_sources(path, [len(file) for file in table.list_files()]))

    def __len__(self) -> int:
        return len(self._tokens)

    def rows(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Return the demonstrations at `indices`, in this order.

        Returns:
            A batch with `input_ids` (ragged int64: the prompt, the response, and the end of the response) and
            `loss_mask` (ragged bool: true for the tokens that the loss trains the model to generate).
        """
        index = np.asarray(indices, dtype=np.int64)
        tokens, learned = self._tokens.take(index), self._learned.take(index)
        return Batch({"input_ids": tokens.like(tokens.values.to(torch.int64)), "loss_mask": learned})

    def all(self, limit: int | None = None) -> Batch:
        """Return the first `limit` demonstrations (unset: all) in the order of the file, with the columns of `rows`."""
        return self.rows(np.arange(len(self) if limit is None else min(limit, len(self))))

    def make_sampler(self, rows_per_step: int, seed: int = 0) -> Sampler[DemonstrationDataset]:
        """Return a sampler of `rows_per_step` demonstrations per step, which uses the weights of the sources."""
        return Sampler(self, rows_per_step, seed, self.sources)
