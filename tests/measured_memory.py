"""What one rank of a training engine holds at most, measured on tensors without content, with no process but this."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from enginehouse.engines.memory import MemoryDemand, ModelShape
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import Outputs
from enginehouse_fsdp.axes import axis_sizes
from enginehouse_fsdp.optimizer import ShardedAdamW
from enginehouse_fsdp.options import FSDPOptions
from enginehouse_fsdp.sharding import device_mesh, forget_meshes, reshard, shard_model
from enginehouse_torch.modeling import scores
from enginehouse_torch.modeling.heads import ModelInput, token_outputs
from enginehouse_torch.optim import FlatAdamW
from enginehouse_torch.options import TorchTrainOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.options import TrainOptions

CPU = torch.device("cpu")

QWEN3_600M = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN25_32B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
MODELS = {"Qwen3-0.6B": QWEN3_600M, "Qwen2.5-7B": QWEN25_7B, "Qwen2.5-32B": QWEN25_32B}
"""What of their `config.json` decides shapes."""


def fsdp_peak(config: Mapping[str, Any], options: FSDPOptions, ranks: int, tokens: int, longest: int) -> int:
    """Most bytes that a rank of the fsdp engine holds as it accumulates the gradient of a micro-batch, not the first.

    Args:
        config: of the model, as in its `config.json`; it computes in bfloat16.
        options: the engine's.
        ranks: how many share the model.
        tokens: of the micro-batch; each is needed.
        longest: tokens of each of its rows.
    """
    with fake_ranks(ranks):
        model, mesh = empty_model(config, torch.float32), device_mesh(CPU, axis_sizes(ranks, options))
        with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu():
            shard_model(model, ModelSpec("", dtype="bfloat16"), options, mesh, CPU).eval()
            trained = dict(model.named_parameters())
            optimizer = ShardedAdamW(trained, options, dict.fromkeys(trained, 1.0))
            optimizer.state()  # both moments
            for parameter in trained.values():
                parameter.grad = torch.zeros_like(parameter)
            return _peak(model, optimizer._adamw, tokens, longest)


def torch_peak(config: Mapping[str, Any], options: TorchTrainOptions, tokens: int, longest: int) -> int:
    """As `fsdp_peak`, of the torch engine, each rank of which holds the whole model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        optimizer = FlatAdamW(dict(model.named_parameters()), options, 1)
        optimizer.state()
        return _peak(model.eval(), optimizer._adamw, tokens, longest, [*optimizer.tensors(), optimizer.sums])


def empty_model(config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model on the meta device; its buffers are computed."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    model.tie_weights()  # on the meta device each module got a parameter of its own
    return model


@contextlib.contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """Be the first of so many ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Within, a CPU has as much computed at once as a GPU does, and no copies of keys either."""
    with (
        mock.patch.object(scores, "SCORED_AT_ONCE", {}),
        mock.patch.dict("os.environ", TRANSFORMERS_SDPA_FORCE_GQA="1"),
    ):
        yield


def _peak(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    tokens: int,
    longest: int,
    others: Sequence[torch.Tensor] = (),
) -> int:
    one = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():  # a model is tried out once
        token_outputs(model, ModelInput(one[None], None, None, one, one), Outputs())
    reshard(model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *others)
    rows = -(-tokens // longest)
    ids, needed = torch.zeros((rows, longest), dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    with tracker, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is handed gradients that are None
        found = token_outputs(model, ModelInput(ids, None, None, needed, needed), Outputs())
        found["logprobs"].sum().backward()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    return kinds["Total"]


def planned(options: TrainOptions, config: Mapping[str, Any], ranks: int, longest: int) -> int:
    """What the plan says of the same, where there are rows enough."""
    shape = ModelShape.of(config)
    assert shape is not None
    demand = MemoryDemand(
        shape=shape, itemsize=2, processes=ranks, rows=1 << 20, longest=longest, trained=True, device="cuda"
    )
    use = options.memory(demand)
    assert use is not None
    return sum(use.held.values()) + sum(use.working.values())
