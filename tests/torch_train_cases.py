"""Batches, losses and the oracle that the tests of the `torch` training engine share.

In a module of its own because rank processes import it by name.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import LossSpec, LossValue, Mean, Outputs, TokenView
from enginehouse_testing.models import VOCABULARY_SIZE
from enginehouse_torch.options import TorchTrainOptions
from enginehouse_torch.train import TorchTrainEngine


def make_engine(
    path: str, rank: int = 0, world_size: int = 1, head: str = "causal_lm", dtype: str = "float32", **options: Any
) -> TorchTrainEngine:
    """An engine that is set up; with several ranks the environment says where they meet."""
    engine = TorchTrainEngine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank)
    engine.setup(ModelSpec(path=path, head=head, dtype=dtype), TorchTrainOptions(**options), context)
    return engine


def make_batch(groups: int, per_group: int, seed: int = 0, longest: int = 9) -> Batch:
    """Rows of ragged length in groups that share a prompt, with what `policy` and `squared_error` need."""
    draw = np.random.default_rng(seed)
    ids, masks = [], []
    for _ in range(groups):
        prompt = draw.integers(3, VOCABULARY_SIZE, draw.integers(1, longest)).tolist()
        for _ in range(per_group):
            response = draw.integers(1, VOCABULARY_SIZE, draw.integers(1, longest)).tolist()
            ids.append(prompt + response)
            masks.append([False] * len(prompt) + [True] * len(response))
    return batch_of(ids, masks, seed)


def batch_of(ids: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], seed: int = 0) -> Batch:
    """A batch of given rows, with random advantages (dense), returns and old logprobs (ragged)."""
    column = Ragged.from_list(ids, dtype=torch.int64)
    noise = torch.Generator().manual_seed(seed)
    tokens = len(column.values)
    return Batch(
        {
            "input_ids": column,
            "loss_mask": Ragged(torch.tensor([m for mask in masks for m in mask], dtype=torch.bool), column.offsets),
            "returns": Ragged(torch.randn(tokens, generator=noise), column.offsets),
            "old_logprobs": Ragged(-3 + torch.randn(tokens, generator=noise), column.offsets),
            "advantages": torch.randn(len(ids), generator=noise),
            "note": ["text"] * len(ids),
        }
    )


POLICY = LossSpec("torch_train_cases:policy", {"clip": 0.5}, Outputs(entropy=True, temperature=0.7))
SQUARED_ERROR = LossSpec("torch_train_cases:squared_error", {}, Outputs(logprobs=False, values=True))
NOT_FINITE = LossSpec("torch_train_cases:not_finite")
PER_ROW = LossSpec("torch_train_cases:per_row")


def policy(view: TokenView, clip: float) -> LossValue:
    """A clipped policy loss with an entropy bonus: uses every kind of column."""
    mask = view.columns["loss_mask"]
    ratio = torch.exp(view.outputs["logprobs"] - view.columns["old_logprobs"])
    gain = torch.clamp(ratio, max=1 + clip) * view.columns["advantages"][view.row]
    counted = float(mask.sum())
    total = -(gain + 0.1 * view.outputs["entropy"])[mask].sum()
    return LossValue(total, counted, {"ratio": Mean(float(ratio.detach()[mask].sum()), counted)})


def per_row(view: TokenView) -> LossValue:
    """A loss whose mean is over rows, those without a loss token included."""
    return LossValue(-view.outputs["logprobs"][view.columns["loss_mask"]].sum(), float(view.rows))


def squared_error(view: TokenView) -> LossValue:
    mask = view.columns["loss_mask"]
    return LossValue(((view.outputs["values"] - view.columns["returns"])[mask] ** 2).sum(), float(mask.sum()))


def not_finite(view: TokenView) -> LossValue:
    return LossValue(view.outputs["logprobs"].sum() * float("inf"), 1.0)


def weights_of(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    """A copy of the engine's weights."""
    return {name: tensor.clone() for name, tensor in engine.weight_source().iter_full()}


def plain_model(path: str) -> Any:
    """The same model as transformers alone loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def oracle_outputs(model: Any, ids: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropy of one row's tokens from a forward pass of that row alone; 0 at position 0."""
    distribution = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float() / temperature, dim=-1)
    logprobs = distribution.gather(-1, ids[1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    zero = torch.zeros(1)
    return torch.cat([zero, logprobs]), torch.cat([zero, entropy])


def oracle_policy_loss(model: Any, batch: Batch, clip: float = 0.5, temperature: float = 0.7) -> torch.Tensor:
    """`policy` written once more, row by row, as its mean over the batch's loss tokens."""
    total, counted = torch.zeros(()), 0
    for row in range(len(batch)):
        values = batch.row(row)
        logprobs, entropy = oracle_outputs(model, values["input_ids"], temperature)
        for t in torch.nonzero(values["loss_mask"])[:, 0].tolist():
            ratio = torch.exp(logprobs[t] - values["old_logprobs"][t])
            total = total - (torch.clamp(ratio, max=1 + clip) * values["advantages"] + 0.1 * entropy[t])
            counted += 1
    return total / counted


def exhausting(view: TokenView) -> LossValue:
    """A loss that really asks for more memory than any machine has."""
    torch.empty(1 << 60, dtype=torch.uint8)
    raise AssertionError
