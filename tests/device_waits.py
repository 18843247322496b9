"""What training waits for on a device, counted on the pretend device (`pretend`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pretend import Waits, counted

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec, Outputs
from enginehouse.weights.checksums import mixed_checksum
from enginehouse_rl.steps.mismatch import add_measurement

LENGTHS = [20, 30, 16, 24]
PROMPT = 5
MICROBATCHES = 2


def train_on(device: torch.device) -> Mapping[str, Waits]:
    """Count `forward` and `forward_backward` of `TokenModel`, in two micro-batches, for several losses."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from enginehouse_torch.modeling.token_model import TokenModel

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with counted():
        model = model.to(device)
    tokens = TokenModel(model, device=device, tokens_per_microbatch=64, share_prompts=False)
    batch = make_batch()
    assert len(tokens.microbatches(batch)) == MICROBATCHES
    policy = LossSpec("clipped_policy", {}, Outputs())
    losses = {
        "clipped_policy": policy,
        "measured": add_measurement(policy, version=1),
        "entropy bonus": LossSpec("clipped_policy", {"entropy_coefficient": 0.01}, Outputs(entropy=True)),
        "supervised": LossSpec("supervised", {}, Outputs()),
    }
    found = {}
    with counted():  # the model is examined once, at the first pass
        tokens.forward(batch, Outputs())
    with counted() as found["forward"]:
        tokens.forward(batch, Outputs())
    for name, loss in losses.items():
        with counted() as found[name]:
            tokens.forward_backward(batch, loss)
    return found


def sum_on(device: torch.device) -> Mapping[str, Waits]:
    """Count what a checksum of a tensor on the device waits for; it is the same as on the host."""
    tensor = torch.randn(1000, 3)
    with counted():
        placed = tensor.to(device)
    with counted() as waits:
        total = mixed_checksum(placed)
    assert total == mixed_checksum(tensor)
    return {"mixed_checksum": waits}


def make_batch() -> Batch:
    """Return rows of random tokens with the columns of a policy loss."""
    generator = torch.Generator().manual_seed(0)
    ids = Ragged.from_list([torch.randint(3, 64, (length,), generator=generator).tolist() for length in LENGTHS])
    mask = torch.cat([torch.arange(length) >= PROMPT for length in LENGTHS])

    def draw(scale: float) -> Ragged:
        return Ragged(scale * torch.randn(len(ids.values), generator=generator), ids.offsets)

    versions = torch.ones(len(LENGTHS), dtype=torch.int64)
    return Batch({
        "input_ids": ids,
        "loss_mask": Ragged(mask, ids.offsets),
        "old_logprobs": draw(0.1),
        "rollout_logprobs": draw(0.1),
        "advantages": draw(1.0),
        "first_version": versions,
        "weight_version": versions,
    })  # fmt: skip
