"""The problem that every training engine solves: batches, their split over ranks, and losses by name."""

from __future__ import annotations

import functools

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec, LossValue, Mean, Outputs, TokenView
from enginehouse_testing.models import PAD_ID, VOCABULARY_SIZE, tiny_experts, tiny_model, with_value_head, with_weight
from enginehouse_testing.prompts import texts_as_ids

ROWS = 16
TEMPERATURE = 0.7
CLIP = 0.5
ENTROPY = 0.1

POLICY = LossSpec("enginehouse_testing.problem:policy", {}, Outputs(entropy=True, temperature=TEMPERATURE))
SQUARED_ERROR = LossSpec("enginehouse_testing.problem:squared_error", {}, Outputs(logprobs=False, values=True))
NOT_FINITE = LossSpec("enginehouse_testing.problem:not_finite")

MODELS = ("tied", "untied")
CRITICS = ("tied critic", "untied critic")
"""Models, and critic models, with which engines are checked. A check that needs only one model uses the first."""
EXPERTS = ("experts",)
"""Models of the capability `experts`."""

EDGE = ("edge",)
"""A model with a weight that one step takes beyond float32."""
HUGE = 3e38
"""A float32 number. Twice this number is beyond the range of float32."""
UNUSED_ID = 6
"""A token that no row of `batch()` holds, so that its embedding has no gradient and changes no result."""


def model_path(name: str) -> str:
    """Return the directory of a tiny model.

    The tiny models are `"tied"` (Qwen3 architecture), `"untied"` (Llama) and `"experts"`. `"edge"` is the untied model
    with `HUGE` as one weight, in the embedding of `UNUSED_ID`. `"tied critic"` is the tied model with a value head.
    Each dimension is a multiple of 4. Any other name is returned unchanged: it is the directory of a user's model.
    """
    if name in CRITICS:
        return with_value_head(model_path(name.removesuffix(" critic")))
    if name == "experts":
        return tiny_experts()
    if name == "edge":
        return with_weight(model_path("untied"), "model.embed_tokens.weight", (UNUSED_ID, 0), HUGE)
    if name == "tied":
        return tiny_model("qwen3", True, heads=8, key_value_heads=4)
    return tiny_model("llama", False, heads=8, key_value_heads=4) if name == "untied" else name


@functools.cache
def batch_of(model: str) -> Batch:
    """Return `batch()` for a tiny model, or the same columns of texts for a user's model."""
    if model in (*MODELS, *EXPERTS):
        return batch()
    rows = [(prompt, response) for prompt, responses in texts_as_ids(model) for response in responses]
    return _with_columns(rows, seed=0)


def batch(seed: int = 0, groups: int = 4, per_group: int = 4, longest: int = 9) -> Batch:
    """Return rows of ragged length in groups that share a prompt, with the columns that the losses need.

    The first row reads and generates the padding token like any other token, because an engine must not mask it.
    """
    draw = np.random.default_rng(seed)
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(groups):
        prompt = draw.integers(3, VOCABULARY_SIZE, draw.integers(1, longest)).tolist()
        for _ in range(per_group):
            response = draw.integers(1, VOCABULARY_SIZE, draw.integers(1, longest)).tolist()
            if not rows:
                prompt[0] = response[-1] = PAD_ID
            rows.append((list(prompt), response))
    return _with_columns(rows, seed)


def _with_columns(rows: list[tuple[list[int], list[int]]], seed: int) -> Batch:
    """Return rows of prompts and responses with the columns that the losses need."""
    column = Ragged.from_list([prompt + response for prompt, response in rows], dtype=torch.int64)
    masks = [[False] * len(prompt) + [True] * len(response) for prompt, response in rows]
    noise = torch.Generator().manual_seed(seed)
    tokens = column.tokens
    return Batch(
        {
            "input_ids": column,
            "loss_mask": Ragged(torch.tensor([marked for mask in masks for marked in mask]), column.offsets),
            "returns": Ragged(torch.randn(tokens, generator=noise), column.offsets),
            "old_logprobs": Ragged(-3 + torch.randn(tokens, generator=noise), column.offsets),
            "advantages": torch.randn(len(rows), generator=noise),
        }
    )


def uneven(rows: int, parts: int, empty: bool = False) -> list[int]:
    """Return the sizes of `parts` shards of different sizes, with `rows` rows in total. With `empty`, the first of
    several shards has no rows."""
    if parts == 1:
        return [rows]
    shares = np.arange(parts, dtype=float) + (0.0 if empty else 1.0)
    sizes = np.floor(rows * shares / shares.sum()).astype(int)
    sizes[-1] += rows - sizes.sum()
    return sizes.tolist()


def policy(view: TokenView) -> LossValue:
    """Compute a clipped policy loss with an entropy bonus, which reads columns of every kind."""
    mask = view.columns["loss_mask"]
    ratio = torch.exp(view.outputs["logprobs"] - view.columns["old_logprobs"])
    gain = torch.clamp(ratio, max=1 + CLIP) * view.columns["advantages"][view.row]
    counted = float(mask.sum())
    total = -(gain + ENTROPY * view.outputs["entropy"])[mask].sum()
    return LossValue(total, counted, {"ratio": Mean(float(ratio.detach()[mask].sum()), counted)})


def squared_error(view: TokenView) -> LossValue:
    """Compute the squared error of values against returns."""
    mask = view.columns["loss_mask"]
    return LossValue(((view.outputs["values"] - view.columns["returns"])[mask] ** 2).sum(), float(mask.sum()))


def not_finite(view: TokenView) -> LossValue:
    """Return a loss that is infinite and has an infinite gradient."""
    return LossValue(view.outputs["logprobs"].sum() * float("inf"), 1.0)
