"""Compares packed with padded attention: logprobs and gradients of two layers, for heads of the sizes of real models.

    python -m tools.gpu.kernels --device cuda --tokens 253 1410 9000 --heads 64 128 --out kernels.json

The reference is padded rows in float32, and packed rows in float32 must come near it. In bfloat16 the padded rows show
how much rounding there is: `by padded` is the error of packed rows divided by that of padded rows. On a CPU
`tests/packed_attention.py` stands in for the kernels.
"""

import argparse
import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec, Outputs
from enginehouse.errors import ConfigError
from enginehouse_torch.modeling.attention import PADDED_ATTENTION, AttentionChoices, attend_by, choose_attention
from enginehouse_torch.modeling.token_model import TokenModel

VOCABULARY = 512
PER_GROUP = 4
"""Rows that begin with the same prompt."""
STAND_INS = {"rows_apart": (AttentionChoices("rows_apart"), False), "blocks": (AttentionChoices(None, "blocks"), True)}
FORCED = ("flex_attention", "varlen_attention", "flash_attention_2", "flash_attention_3")

Found = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


def model_of(head: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model of two layers with four heads of size `head`, of which two share keys; always the same weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    cls: Any = Qwen3Config  # its stub lacks `head_dim`
    config = cls(
        vocab_size=VOCABULARY, hidden_size=4 * head, intermediate_size=8 * head, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head, max_position_embeddings=16384,
        initializer_range=1 / (4 * head) ** 0.5, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device, dtype).eval()


def batch_of(tokens: int) -> Batch:
    """Return groups of rows that each begin with one prompt, of many lengths and about `tokens` tokens in all."""
    draw = np.random.default_rng(tokens)
    longest = max(8, tokens // 12)
    ids: list[list[int]] = []
    mask: list[bool] = []
    while len(mask) < tokens:
        prompt = draw.integers(1, VOCABULARY, draw.integers(longest // 2, longest)).tolist()
        for size in draw.integers(2, longest, PER_GROUP):
            ids.append(prompt + draw.integers(1, VOCABULARY, size).tolist())
            mask += [False] * len(prompt) + [True] * int(size)
    column = Ragged.from_list(ids, dtype=torch.int64)
    return Batch({"input_ids": column, "loss_mask": Ragged(torch.tensor(mask), column.offsets)})


def computed(model: Any, batch: Batch, attention: AttentionChoices | str, shares: bool, packed: bool) -> Found:
    """Return a batch's logprobs and the gradients of its supervised loss.

    Args:
        model: the model.
        batch: the rows.
        attention: the option `attention`, or the functions to use instead.
        shares: True if rows with the same prompt compute it once.
        packed: True if the rows must be packed.
    """
    attend_by(model, PADDED_ATTENTION)  # the last choice stays set
    given: Any = "auto" if isinstance(attention, AttentionChoices) else attention
    chosen = (
        {"return_value": attention} if isinstance(attention, AttentionChoices) else {"side_effect": choose_attention}
    )
    with mock.patch("enginehouse_torch.modeling.sharing.choose_attention", **chosen):
        token_model = TokenModel(
            model, device=model.device, tokens_per_microbatch=1 << 20, share_prompts=shares, attention=given
        )
    layouts = [part.layout for part in token_model.microbatches(batch)]
    if any(layout is None or (layout.packed is not None) != packed for layout in layouts):
        raise RuntimeError(f"{attention}: the rows are {'padded' if packed else 'packed'}, see the warning above")
    model.zero_grad()
    logprobs = token_model.forward(batch, Outputs())["logprobs"].values
    token_model.forward_backward(batch, LossSpec("supervised"))
    return logprobs, {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def differences(found: Found, right: Found) -> dict[str, float]:
    """Return the errors of logprobs and of the worst gradient, relative to the right results' sizes."""
    (logprobs, gradients), (exact, expected) = found, right
    return {
        "logprobs": float((logprobs - exact).norm() / exact.norm()),
        "gradients": max(float((gradients[name] - true).norm() / true.norm()) for name, true in expected.items()),
    }


def compare(device: torch.device, heads: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the errors of each kernel that is available here, and the worst of all: `logprobs/float32`, ..."""
    worst: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for head in heads:
        models = {dtype: model_of(head, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
        for length in tokens:
            batch = batch_of(length)
            right = computed(models[torch.float32], batch, "sdpa", False, packed=False)
            for dtype, model in models.items():
                name = str(dtype).removeprefix("torch.")
                rounding = differences(computed(model, batch, "sdpa", False, packed=False), right)
                for kernel, (attention, shares) in kernels(device, dtype).items():
                    case = {"kernel": kernel, "head": head, "tokens": length, "dtype": name}
                    try:
                        off = differences(computed(model, batch, attention, shares, packed=True), right)
                    except RuntimeError as error:  # the other kernels are still compared
                        off = {"logprobs": float("inf"), "gradients": float("inf")}
                        case["problem"] = str(error)
                    rows.append({**case, **off})
                    print(json.dumps(rows[-1]), flush=True)
                    for what, value in off.items():
                        figures = {f"{what}/{name}": value}
                        if dtype != torch.float32:
                            figures[f"{what}/{name} by padded"] = value / rounding[what]
                        worst |= {key: max(value, worst.get(key, 0.0)) for key, value in figures.items()}
    kinds = {row["kernel"] for row in rows}
    return {**worst, "kernels": len(kinds), "graphs": graphs(), "names": sorted(kinds), "rows": rows}


def kernels(device: torch.device, dtype: torch.dtype) -> Mapping[str, tuple[AttentionChoices | str, bool]]:
    """Return a device's kernels that support a dtype, and for each whether its rows share prompts."""
    if device.type == "cpu":
        return STAND_INS
    from enginehouse_torch.options import PackingOptions

    found: dict[str, tuple[AttentionChoices | str, bool]] = {}
    for name in FORCED:
        try:
            PackingOptions.model_validate({"attention": name}).check_device("cuda", str(dtype).removeprefix("torch."))
        except (ConfigError, ValueError) as error:
            print(f"not tried: {error}", flush=True)
            continue
        chosen: Any = name
        found[name] = (name, not choose_attention(chosen, device, dtype).rows)
    return found


def graphs() -> int:
    """Return how many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--heads", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[253, 1410, 9000])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = torch.device(given.device)
    with contextlib.ExitStack() as stack:
        if given.device == "cpu":
            stack.enter_context(importlib.import_module("tests.packed_attention").stand_ins())
        found = compare(device, given.heads, given.tokens)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
