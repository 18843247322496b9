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
    """Tokenize the prompts of a benchmark, like the prompts of a held-out file.

    The result has the same columns as `PromptDataset.rows`. Its column `columns` has the arguments of
    `enginehouse_rl.benchmarks.scoring.score`.

    Args:
        tokenizer: the model's tokenizer.
        system: the system message for chats that begin without one; None: none is added.

    Raises:
        DataError: the chat template rejects messages.
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
