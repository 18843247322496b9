"""Tokenizes the prompts of a benchmark as those of any held-out file."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.data.batch import Batch
from enginehouse.data.ragged import Ragged
from enginehouse_rl.benchmarks.lm_eval_tasks import BenchmarkItems
from enginehouse_rl.data.rendering import Counted, Renderer, skip_counting


def load_prompts(
    name: str, source: BenchmarkItems, tokenizer: Any, system: str | None, counted: Counted = skip_counting
) -> Batch:
    """Return the prompts of a benchmark; columns as `PromptDataset.rows` gives them.

    The column `columns` has what `enginehouse_rl.benchmarks.scoring.score` takes.

    Args:
        name: the benchmark.
        source: its items.
        tokenizer: the model's.
        system: the system message of chats that begin with none; None: they have none.
        counted: shows how many are done.

    Raises:
        DataError: the chat template refuses messages.
    """
    renderer = Renderer(tokenizer, None, system)
    prompts = [item.prompt for item in source.items]
    texts, tokens = renderer.render_prompts(prompts, lambda row: f"{name}, item {row + 1}", counted)
    return Batch(
        {
            "prompt_ids": Ragged.from_list(tokens, dtype=torch.int64),
            "prompt": texts,
            "messages": [renderer.writer.read_messages(prompt) for prompt in prompts],
            "row": torch.arange(len(prompts)),
            "columns": [{"benchmark": name, "task": item.task, "doc": item.doc} for item in source.items],
        }
    )
