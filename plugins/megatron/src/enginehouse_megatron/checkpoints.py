"""Checkpoints in megatron-core's own format (`torch_dist`): each rank writes its part, and every layout can read it.

A directory appears complete or not at all: it is written under another name and moved once every rank is done. An error
on one rank is raised on all. The format contains pickles: do not load a checkpoint from an untrusted source.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint

from enginehouse.atomic import move_into_place
from enginehouse_megatron.training import BufferedTraining
from enginehouse_megatron.weight_map import MappedParameter
from enginehouse_torch.modeling.adapters import check_alike
from enginehouse_torch.modeling.checkpoint import on_every_rank
from enginehouse_torch.modeling.files import CheckpointError, describe_alternative
from enginehouse_torch.modeling.random_state import random_states, restore_random_states
from enginehouse_torch.modeling.ranks import Ranks

WRITTEN_LAST = "metadata.json"
DESCRIPTION = "enginehouse"
"""Key under which a checkpoint stores the description of its content."""
TRAINED = "trained"
"""Key of the trained parameters of a model with adapters, beside the numbers of virtual stages."""


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """Content that a checkpoint is written from, or loaded into.

    `parts` are some of `enginehouse_torch.modeling.files.PARTS`, in that order; `shape` has names and sizes that
    identify the model. If the model has adapters, `trained` are its trained parameters, each stored as one tensor, and
    a checkpoint holds no others.
    """

    models: Sequence[GPTModel]
    training: BufferedTraining | None
    parts: tuple[str, ...]
    shape: dict[str, Any]
    trained: Sequence[MappedParameter] | None = None


def save(path: str, state: CheckpointContent, ranks: Ranks) -> None:
    """Write the directory `path`, and replace its content once everything is written; collective.

    Raises:
        CheckpointError: Some rank cannot write; the old content of `path` stays.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")

    def prepare() -> None:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def describe() -> dict[str, Any]:
        content = _shard(state, ranks, loading=False)
        content[DESCRIPTION] = {
            "parts": list(state.parts),
            "step": 0 if state.training is None else state.training.step_number,
            "ranks": ranks.world_size,
            "shape": state.shape,
        }
        return content

    def write() -> None:
        with warnings.catch_warnings(action="ignore"):
            dist_checkpointing.save(content, str(partial), sharded_strategy=_InProcess("torch_dist", 1))

    try:
        on_every_rank(ranks, prepare)
        content = on_every_rank(ranks, describe)  # a separate step, because a rank that writes waits for the others
        on_every_rank(ranks, write)
        on_every_rank(ranks, lambda: move_into_place(partial, target) if ranks.rank == 0 else None)
    except CheckpointError as error:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {path!r} was not written: {error}") from error


def load(path: str, state: CheckpointContent, ranks: Ranks) -> None:
    """Overwrite the parts of `state` with those in the directory `path`, saved in any layout; collective.

    A rank without a random state in the checkpoint keeps its own.

    Raises:
        CheckpointError: On some rank the checkpoint is missing, incomplete, damaged or of another model, or lacks a
            part.
    """
    description = on_every_rank(ranks, lambda: _read_description(path, state))
    has_random_state = "rng" in state.parts and ranks.rank < description["ranks"]

    def read() -> dict[str, Any]:
        content = _shard(state, ranks, loading=True, random_state=has_random_state)
        with warnings.catch_warnings(action="ignore"):
            # Planning the read finds errors in the content, and raises them on every rank. The validation that is
            # switched off would raise on rank 0 while the other ranks wait for it.
            loaded: dict[str, Any] = dist_checkpointing.load(content, path, validate_access_integrity=False)
        return loaded

    def apply() -> None:
        if "model" in state.parts:
            for entry in state.trained or ():
                entry.parameter.data.copy_(loaded["model"][TRAINED][entry.stored[0].name])
            for stage, model in enumerate(state.models if state.trained is None else ()):
                model.load_state_dict(loaded["model"][str(stage)])
        if state.training is not None and "optimizer" in state.parts:
            state.training.optimizer.load_state_dict(loaded["optimizer"])
            state.training.resume(description["step"])
        elif state.training is not None and "model" in state.parts:
            state.training.optimizer.reload_model_params()
        if has_random_state:
            restore_random_states(loaded["rng"])

    try:
        loaded = on_every_rank(ranks, read)
        on_every_rank(ranks, apply)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path!r} is damaged: {error}. The engine's state may now be partly old and partly new: "
            "load another checkpoint before you continue"
        ) from error


class _InProcess(torch_strategies.TorchDistSaveShardedStrategy):
    """Writes the same files as megatron-core's own strategy, but in this process.

    Megatron-core's own strategy starts a server process for each rank and forks the rank to write. That takes seconds,
    and a fork does not carry over a worker's threads.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        renamed, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            torch_strategies.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _shard(state: CheckpointContent, ranks: Ranks, *, loading: bool, random_state: bool = True) -> dict[str, Any]:
    """Return what megatron-core saves or loads: by part, tensors with their place in the whole."""
    form = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {}
    if state.trained is None:
        model = {str(stage): model.sharded_state_dict(metadata=form) for stage, model in enumerate(state.models)}
    else:
        model = {TRAINED: {entry.stored[0].name: _shard_alone(entry) for entry in state.trained}}
    if "optimizer" in state.parts and state.training is not None:
        _make_moments(state.training)
        content["optimizer"] = state.training.optimizer.sharded_state_dict(model, is_loading=loading, metadata=form)
    if "model" in state.parts:
        content["model"] = model
    if "rng" in state.parts and random_state:
        # A key for each rank. With one key, all ranks that saved it would have to be there to load it.
        content["rng"] = ShardedObject(f"rng.{ranks.rank}", random_states(), (1,), (0,), replica_id=0)
    return content


def _shard_alone(entry: MappedParameter) -> ShardedTensor:
    """Return a parameter that is stored as one tensor, under its stored name, with its place in the whole."""
    (stored,) = entry.stored
    if stored.split is None:
        return make_sharded_tensor_for_checkpoint(entry.parameter, stored.name)
    return make_tp_sharded_tensor_for_checkpoint(entry.parameter, stored.name, tp_axis=stored.split)


def _make_moments(training: BufferedTraining) -> None:
    """Create the optimizer's state before the first step.

    distrib_optimizer.py:642 reads the step of every parameter, which torch's AdamW has only after its first step.
    """
    for chained in training.optimizer.chained_optimizers:
        adam = chained.optimizer
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **moments}


def _restore_without_step() -> None:
    """Let a parameter's state be loaded without `step`.

    distrib_optimizer.py:940 asks for the step of torch's AdamW, which a checkpoint has only once for all parameters.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def restore(self: DistributedOptimizer, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        own = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        original(self, parameter, {"step": own["step"], **tensors} if "step" in own else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = restore


_restore_without_step()


def _read_description(path: str, state: CheckpointContent) -> dict[str, Any]:
    """Return the description that a checkpoint stores of its content.

    Raises:
        CheckpointError: There is no checkpoint, or it lacks a part or is of another model.
    """
    directory = Path(path)
    if not (directory / WRITTEN_LAST).is_file():
        if any(directory.glob("*.distcp")) and not (directory / ".metadata").is_file():
            raise CheckpointError(f"checkpoint {path!r} is incomplete (no file {WRITTEN_LAST}, which is written last)")
        hint = describe_alternative(directory)
        if not hint and any(directory.glob("*.distcp")):
            hint = ": it is a checkpoint of another training engine; continue from its export in Hugging Face format"
        raise CheckpointError(f"{path!r} holds no checkpoint of megatron (no file {WRITTEN_LAST}){hint}")
    try:
        common = dist_checkpointing.load_common_state_dict(path)
    except Exception as error:
        raise CheckpointError(f"checkpoint {path!r} is damaged: {type(error).__name__}: {error}") from error
    if DESCRIPTION not in common:
        raise CheckpointError(f"checkpoint {path!r} was written by another program: it does not describe its content")
    description: dict[str, Any] = common[DESCRIPTION]
    check_alike(path, saved="lora.alpha" in description["shape"], expected=state.trained is not None)
    for part in state.parts:
        if part not in description["parts"]:
            parts = ", ".join(description["parts"])
            raise CheckpointError(f"checkpoint {path!r} has no {part}: it was saved only with {parts}")
    for name, own in state.shape.items():
        if (saved := description["shape"].get(name)) != own:
            raise CheckpointError(
                f"checkpoint {path!r} is of another model: its {name} is {saved!r}, but this model's is {own!r}"
            )
    return description
