"""Oracle of quantized rollouts: transformers, with linear layers that are quantized by hand."""

from collections.abc import Sequence

import torch

LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as float8_e4m3fn, `(rows, columns)`, and the scale of each row, float32 `(rows, 1)`."""
    scale = rows.float().abs().amax(-1, keepdim=True) / LARGEST
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale


class QuantizedLinear(torch.nn.Linear):
    """Rounds its weights for each output channel, and its inputs for each token."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        inputs, tokens = quantized(states)
        weights, channels = quantized(self.weight)
        return (inputs.float() @ weights.float().t() * tokens * channels.t()).to(states.dtype)


@torch.no_grad()
def half_logprobs(path: str, ids: Sequence[int], quantizes: bool) -> torch.Tensor:
    """The logprob of each token but the first, of a model in bfloat16, whose linear layers may be quantized."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    for name, layer in model.named_modules():
        if quantizes and isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.__class__ = QuantizedLinear
    logprobs = model(torch.tensor([list(ids)])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(list(ids))[1:, None])[:, 0]
