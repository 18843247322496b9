"""Compares the fsdp engine's allocations in training with `plan`'s estimate, and measures a process before its start.

    python -m tools.gpu.memory --models Qwen3-0.6B Qwen3-1.7B --out memory.json

On a CPU fake tensors measure allocations (`tests/measured_memory.py`).
"""

import argparse
import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.memory import MemoryDemand, ModelShape
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import LossSpec
from enginehouse_fsdp.engine import FSDPEngine
from enginehouse_fsdp.options import FSDPOptions

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
MODELS = {
    "Qwen3-0.6B": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "tiny": QWEN3 | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 8192},
}  # fmt: skip
LONGEST = 1024
ROWS = 32
OPTIONS = FSDPOptions.model_validate(
    {"tokens_per_microbatch": 16384, "activation_checkpointing": True, "share_prompts": "never"}
)


def planned(config: Mapping[str, Any]) -> int:
    """Return the bytes that a rank needs while it computes, as `plan` estimates them."""
    shape = ModelShape.of(config)
    assert shape is not None
    use = OPTIONS.memory(
        MemoryDemand(shape=shape, itemsize=2, processes=1, rows=ROWS, longest=LONGEST, trained=True, device="cuda")
    )
    assert use is not None
    return sum(use.held.values()) + sum(use.working.values())


def on_card(config: Mapping[str, Any]) -> int:
    """Return the peak bytes allocated in a second step, when moments and gradients exist."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ids = Ragged.from_list(
        [torch.randint(config["vocab_size"], (LONGEST,)).tolist() for _ in range(ROWS)], dtype=torch.int64
    )
    batch = Batch({"input_ids": ids, "loss_mask": Ragged(torch.ones(len(ids.values), dtype=torch.bool), ids.offsets)})
    engine = FSDPEngine()
    with tempfile.TemporaryDirectory() as path:
        with torch.device("cuda"):  # on one core this takes minutes
            AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).save_pretrained(path)
        torch.cuda.empty_cache()
        context = ProcessContext(role="actor", rank=0, world_size=1, local_rank=0, device="cuda")
        engine.setup(ModelSpec(path, dtype="bfloat16"), OPTIONS, context)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        engine.forward_backward(batch, LossSpec("supervised"))
        engine.optim_step()
    peak = torch.cuda.max_memory_allocated()
    engine.shutdown()
    del engine
    torch.cuda.empty_cache()
    return peak


def compare(device: str, models: list[str]) -> dict[str, float]:
    """Return each model's ratio of planned to measured bytes, the smallest and the largest, and a process's own GiB."""
    found: dict[str, float] = {}
    for name in models:
        if device == "cuda":
            measured = on_card(MODELS[name])
        else:
            measured = importlib.import_module("tests.measured_memory").fsdp_peak(
                MODELS[name], OPTIONS, 1, OPTIONS.tokens_per_microbatch, LONGEST
            )
        found[f"{name} planned by measured"] = planned(MODELS[name]) / measured
        found[f"{name} measured GiB"] = measured / 2**30
    ratios = [value for name, value in found.items() if name.endswith("planned by measured")]
    found |= {"least planned by measured": min(ratios), "most planned by measured": max(ratios)}
    if device == "cuda":  # memory on the card that was not allocated: CUDA's context, its libraries, NCCL
        free, whole = torch.cuda.mem_get_info()
        found["process GiB"] = (whole - free - torch.cuda.memory_reserved()) / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Qwen3-0.6B", "Qwen3-1.7B"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(compare(given.device, given.models), indent=2) + "\n")


if __name__ == "__main__":
    main()
