"""What a real run writes of every token is what plain transformers and the algorithm's formula say."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from .conftest import QUICKSTART, SMALL, Start

pytestmark = pytest.mark.slow


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tokens_in_samples_are_those_of_the_model_and_the_algorithm(start: Start, house: Path):
    run = start(
        "train", *SMALL, "data.validation=examples/quickstart/work/validation.jsonl", "train.steps=1",
        "train.samples_every=1", "evaluation.max_prompts=4", "cluster.launcher=inline",
    )  # fmt: skip
    run.finished()
    rows = rows_of(run.directory / "samples" / "step-000001.jsonl")
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row["reward"])
    for row, logprobs in zip(rows, logprobs_of(house / QUICKSTART / "work" / "model", rows), strict=True):
        tokens = row["by_token"]
        chosen = [place for place, mask in enumerate(tokens["mask"]) if mask]
        shown = ("".join(tokens["text"]), row["prompt"] + row["response"])  # `<unk>` may be drawn, and is in both
        assert len({re.sub(r"<[a-z|/]+>", "", text) for text in shown}) == 1
        assert len(chosen) == row["tokens"]
        assert {tokens["version"][place] for place in chosen} == {1}
        assert [tokens["logprob"][place] for place in chosen] == pytest.approx(logprobs, rel=2e-3, abs=2e-3)
        rewards = groups[row["group"]]
        advantage = (row["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        assert [tokens["advantage"][place] for place in chosen] == pytest.approx([advantage] * len(chosen), rel=1e-3)
    held_out = rows_of(run.directory / "samples" / "validation-000001.jsonl")
    assert {name for row in held_out for name in row["by_token"]} == {"text", "mask", "logprob", "version"}
    assert all(len(row["by_token"]["text"]) == len(row["by_token"]["logprob"]) for row in held_out)


def logprobs_of(model: Path, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Of each row's chosen tokens, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for row in rows:
        ids = tokenizer.convert_tokens_to_ids(row["by_token"]["text"])
        with torch.no_grad():
            logprobs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [place for place, mask in enumerate(row["by_token"]["mask"]) if mask]
        found.append([logprobs[place - 1, ids[place]].item() for place in places])
    return found
