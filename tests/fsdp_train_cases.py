"""The `fsdp` engine as its tests make and drive it. In a module of its own because rank processes import it by name."""

import resource
from pathlib import Path
from typing import Any

import torch
from torch_train_cases import POLICY, SQUARED_ERROR, policy

from enginehouse.data import Batch
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import LossSpec, LossValue, Metrics, Outputs, TokenView
from enginehouse.errors import ConfigError
from enginehouse_fsdp.engine import FSDPEngine
from enginehouse_fsdp.options import FSDPOptions

OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6, "schedule": "cosine", "total_steps": 8, "warmup_steps": 1}
"""What every engine of a comparison is given, the oracle included."""

STEPS = 5

OUTPUTS = Outputs(entropy=True, temperature=0.7)


def outputs_of(head: str) -> Outputs:
    """What an engine with this head is asked for."""
    return OUTPUTS if head == "causal_lm" else Outputs(logprobs=False, values=True)


def loss_of(head: str) -> LossSpec:
    """What it is trained on."""
    return POLICY if head == "causal_lm" else SQUARED_ERROR


def make_sharded(
    path: str,
    rank: int = 0,
    world_size: int = 1,
    head: str = "causal_lm",
    dtype: str = "float32",
    device: str = "cpu",
    **options: Any,
) -> FSDPEngine:
    """An engine that is set up, in several micro-batches a batch; the environment says where ranks meet."""
    engine = FSDPEngine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank, device=device)
    spec = ModelSpec(path=path, head=head, dtype=dtype)
    engine.setup(spec, FSDPOptions(**{**OPTIONS, "tokens_per_microbatch": 40, **options}), context)
    return engine


def refusal(rank: int, world_size: int, path: str, options: dict[str, Any]) -> str:
    """What is said of a model and options that are refused."""
    try:
        make_sharded(path, rank, world_size, **options)
    except ConfigError as error:
        torch.distributed.barrier()  # a rank that left early would close connections that others are still making
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return "not refused"


def score_and_train(
    engine: Any, shard: Batch, head: str = "causal_lm", steps: int = STEPS
) -> tuple[Batch | None, list[Metrics], list[Metrics]]:
    """Scores before any step; what the optimizer says of each of some steps on the same rows; what the loss says."""
    scores = engine.forward(shard, outputs_of(head))
    stepped, metrics = [], []
    for _ in range(steps):
        metrics.append(engine.forward_backward(shard, loss_of(head)))
        stepped.append(engine.optim_step())
    return scores, stepped, metrics


def limit_memory(room_bytes: int) -> None:
    """From now on this process may take only so much more address space: larger allocations really fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room_bytes, resource.RLIM_INFINITY))


def lift_memory_limit() -> None:
    """Undo `limit_memory`."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def limiting_memory(view: TokenView, room_bytes: int) -> LossValue:
    """A policy loss after which no large tensor can be made."""
    value = policy(view, 0.5)
    limit_memory(room_bytes)
    return value
