"""A `megatron` engine on several ranks, as its tests drive it. In a module of its own: rank processes import it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse_fsdp.engine import FSDPEngine
from enginehouse_fsdp.options import FSDPOptions
from enginehouse_megatron.engine import MegatronEngine
from enginehouse_megatron.options import MegatronOptions
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.models import PAD_ID
from enginehouse_testing.problem import POLICY, batch

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from enginehouse_megatron import weight_map

STEPS = 3


def trained(
    rank: int, world_size: int, path: str, saved: str, options: dict[str, Any], device: str = "cpu"
) -> dict[str, Any]:
    """Logprobs of all tokens where this rank gives them; weights after some steps; whether a checkpoint brings them."""
    engine = MegatronEngine()
    context = ProcessContext("actor", rank, world_size, rank, device=device)
    engine.setup(ModelSpec(path=path), MegatronOptions(**TRAINING, tokens_per_microbatch=40, **options), context)
    scored = engine.forward(batch().drop(["loss_mask"]), Outputs())
    for number in range(STEPS):
        if number == STEPS - 1:
            engine.save(saved)
        engine.forward_backward(batch(), POLICY)
        engine.optim_step()
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in engine.weight_source().iter_full()}
    engine.load(saved)
    engine.forward_backward(batch(), POLICY)
    engine.optim_step()
    again = {name: tensor.to("cpu", copy=True) for name, tensor in engine.weight_source().iter_full()}
    engine.shutdown()
    return {
        "logprobs": None if scored is None else scored.ragged("logprobs").values,
        "weights": weights,
        "goes on alike": all(torch.equal(again[name], weight) for name, weight in weights.items()),
    }


def precise_values(rank: int, world_size: int, path: str, options: dict[str, Any]) -> tuple[float, float]:
    """How far the float32 copies of a bfloat16 model are from its files, at most, and its own parameters from them."""
    engine = MegatronEngine()
    context = ProcessContext("actor", rank, world_size, rank)
    engine.setup(
        ModelSpec(path=path, dtype="bfloat16"),
        MegatronOptions(**TRAINING, tokens_per_microbatch=40, **options),
        context,
    )
    training, files = engine._get_training(), engine._open_files()
    group = parallel_state.get_tensor_model_parallel_group()
    whole = {
        entry.parameter: weight_map.read(entry, files, engine._heads, group.rank(), group.size(), torch.float32)
        for part in engine._models
        for entry in weight_map.map_parameters(part, engine._architecture, files, copies=True)
    }
    copies = rounded = 0.0
    for optimizer in training.optimizer.chained_optimizers:
        groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        for parameter, copy in (pair for group in groups for pair in zip(*group, strict=True)):
            own = optimizer._get_model_param_range_map(parameter)["param"]
            expected = whole[parameter].reshape(-1)[own.start : own.end]
            copies = max(copies, float((copy - expected).abs().max()))
            rounded = max(rounded, float((parameter.detach().reshape(-1)[own.start : own.end] - expected).abs().max()))
    engine.shutdown()
    return copies, rounded


ENGINES: dict[str, Any] = {"megatron": (MegatronEngine, MegatronOptions), "fsdp": (FSDPEngine, FSDPOptions)}


def set_up(backend: str, path: str, rank: int, world_size: int, **options: Any) -> Any:
    make, typed = ENGINES[backend]
    engine = make()
    context = ProcessContext("actor", rank, world_size, rank)
    engine.setup(ModelSpec(path=path), typed(**{**TRAINING, "tokens_per_microbatch": 40, **options}), context)
    return engine


def _step(engine: Any) -> None:
    rows = len(batch())
    size = engine.mesh.dp_size
    sizes = [rows // size] * (size - 1)
    engine.forward_backward(batch().split([*sizes, rows - sum(sizes)])[engine.mesh.dp_rank], POLICY)
    engine.optim_step()


def weights_after_a_step(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, after one more step on the batch."""
    _step(engine)
    return {name: tensor.to("cpu", copy=True) for name, tensor in engine.weight_source().iter_full()}


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weight_source().iter_full()}


def written(rank: int, world_size: int, path: str, saved: str, exported: str, options: dict[str, Any]) -> Any:
    """Saves a checkpoint and exports the model after a step; returns the weights after the next one."""
    engine = set_up("megatron", path, rank, world_size, **options)
    _step(engine)
    engine.save(saved)
    engine.export_hf(exported)
    _step(engine)
    weights = _weights(engine)
    engine.shutdown()
    return weights


def gone_on(rank: int, world_size: int, backend: str, path: str, saved: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of all tokens where this rank gives them, and weights after a step; from a checkpoint if any."""
    engine = set_up(backend, path, rank, world_size, **options)
    if saved:
        engine.load(saved)
    scored = engine.forward(batch().drop(["loss_mask"]), Outputs())
    _step(engine)
    weights = _weights(engine)
    engine.shutdown()
    return {"logprobs": None if scored is None else scored.ragged("logprobs").values, "weights": weights}


def dealt(
    rank: int, world_size: int, path: str, options: dict[str, Any], sizes: list[int], budget: int
) -> dict[str, Any]:
    """How often the model ran for a step, and the weights after it.

    Args:
        sizes: rows of each data-parallel rank.
        budget: most tokens of a micro-batch.
    """
    engine = set_up("megatron", path, rank, world_size, tokens_per_microbatch=budget, **options)
    with _counting_passes() as passes:
        engine.forward_backward(batch().split(list(sizes))[engine.mesh.dp_rank], POLICY)
    engine.optim_step()
    weights = _weights(engine)
    engine.shutdown()
    return {"passes": len(passes), "weights": weights}


def with_padding() -> Batch:
    """The batch, with the padding token drawn in the midst of rows."""
    ids = batch().ragged("input_ids")
    drawn = torch.where(ids.values % 5 == 0, PAD_ID, ids.values)
    return batch().with_columns(input_ids=Ragged(drawn, ids.offsets))


def taught_padding(rank: int, world_size: int, path: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights after a step on rows in which padding was drawn."""
    engine = set_up("megatron", path, rank, world_size, **options)
    engine.forward_backward(with_padding(), POLICY)
    engine.optim_step()
    weights = _weights(engine)
    engine.shutdown()
    return weights


@contextlib.contextmanager
def _counting_passes() -> Iterator[list[None]]:
    """A list with an entry for each forward pass of a model of megatron-core."""
    passes: list[None] = []

    def note(module: torch.nn.Module, *given: object) -> None:
        if isinstance(module, GPTModel):
            passes.append(None)

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield passes
    finally:
        handle.remove()


def held(rank: int, world_size: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of the weights, by what it says and by what is in its model."""
    engine = MegatronEngine()
    engine.setup(ModelSpec(path=path), MegatronOptions(**options), ProcessContext("actor", rank, world_size, rank))
    source = engine.weight_source()
    found = {
        "metadata": source.metadata(),
        "local": [name for name, _ in source.iter_local()],
        "expert numbers": sum(
            parameter.numel()
            for part in engine._models
            for name, parameter in part.named_parameters()
            if ".experts." in name
        ),
    }
    engine.shutdown()
    return found
