"""The `fsdp` engine as its tests make and drive it. In a module of its own because rank processes import it by name."""

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, policy, weights_of

from enginehouse.data import Batch
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import LossSpec, LossValue, Metrics, Outputs, TokenView
from enginehouse.engines.weights import ParamMeta
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
    seed: int = 0,
    **options: Any,
) -> FSDPEngine:
    """An engine that is set up, in several micro-batches a batch; the environment says where ranks meet."""
    engine = FSDPEngine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank, device=device)
    spec = ModelSpec(path=path, head=head, dtype=dtype, seed=seed)
    engine.setup(spec, FSDPOptions(**{**OPTIONS, "tokens_per_microbatch": 40, **options}), context)
    return engine


def refusal(rank: int, world_size: int, path: str, options: dict[str, Any]) -> str:
    """What is said of a model and options that are refused."""
    try:
        make_sharded(path, rank, world_size, **options)
    except ConfigError as error:
        if torch.distributed.is_initialized():  # one rank alone has no group
            torch.distributed.barrier()  # a rank that left early would close connections that others are still making
        return str(error)
    finally:
        if torch.distributed.is_initialized():
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


class Trained(NamedTuple):
    """What a rank has of a few steps: scores where it gives any, and weights as all, and as it alone, holds them."""

    scores: Batch | None
    stepped: list[Metrics]
    metrics: list[Metrics]
    weights: dict[str, torch.Tensor]
    described: list[ParamMeta]
    held: dict[str, torch.Tensor]
    mesh: Any


def own_shard(engine: FSDPEngine, sizes: Sequence[int]) -> Batch:
    """The rows of this rank, of a batch that is dealt by these sizes."""
    return make_batch(4, 4).split(sizes)[engine.mesh.dp_rank]


def train(rank: int, world_size: int, path: str, head: str, sizes: Sequence[int], options: dict[str, Any]) -> Trained:
    """A scenario: score and train in a layout."""
    engine = make_sharded(path, rank, world_size, head, **options)
    trained = [parameter for parameter in engine._model.parameters() if parameter.requires_grad]
    assert all(isinstance(parameter, DTensor) for parameter in trained), "not sharded"
    results = score_and_train(engine, own_shard(engine, sizes), head)
    source = engine.weight_source()
    found = Trained(*results, weights_of(engine), source.metadata(), dict(source.iter_local()), engine.mesh)
    engine.shutdown()
    return found


def assert_trained_like(oracle: tuple[Any, ...], results: Sequence[Trained], sizes: Sequence[int]) -> None:
    """Ranks of a layout score, step, and hold in the end what the oracle does, and the same on all."""
    scores, stepped, metrics, weights = oracle
    answers = [found for found in results if found.mesh.is_output_rank]
    assert len(answers) == len(sizes)
    assert all(found.scores is None for found in results if found not in answers)
    for name in scores.columns:
        gathered = torch.cat([found.scores[name].values for found in answers])
        torch.testing.assert_close(gathered, scores[name].values, atol=1e-5, rtol=1e-5)
    for step, of_oracle in enumerate(metrics):
        loss = sum(found.metrics[step]["loss"].total for found in answers if found.metrics[step])
        assert loss == pytest.approx(of_oracle["loss"].total, rel=1e-4, abs=1e-4)
    for found in results:
        for ours, theirs in zip(found.stepped, stepped, strict=True):
            assert (ours["lr"], ours["skipped"]) == (theirs["lr"], theirs["skipped"])
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert found.weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found.weights[name], weight, atol=1e-4, rtol=0)
            assert torch.equal(found.weights[name], results[0].weights[name]), "ranks gathered different weights"
        assert found.described == results[0].described, "ranks describe the weights differently"


def save(
    rank: int, world_size: int, path: str, sizes: Sequence[int], directory: str, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A scenario: save and export after two steps; the weights then, and after two more."""
    engine = make_sharded(path, rank, world_size, **options)
    shard = own_shard(engine, sizes)
    score_and_train(engine, shard, steps=2)
    engine.save(f"{directory}/saved")
    engine.export_hf(f"{directory}/exported")
    at_save = weights_of(engine)
    score_and_train(engine, shard, steps=2)
    weights = weights_of(engine)
    engine.shutdown()
    return at_save, weights


def go_on(
    rank: int, world_size: int, path: str, sizes: Sequence[int], directory: str, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A scenario: go on from what `save` saved, in an engine of another seed; the weights at first and at the end."""
    engine = make_sharded(path, rank, world_size, seed=5, **options)
    engine.load(f"{directory}/saved")
    at_load = weights_of(engine)
    score_and_train(engine, own_shard(engine, sizes), steps=2)
    weights = weights_of(engine)
    engine.shutdown()
    return at_load, weights


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
