"""Checkpoints in megatron-core's own form (`torch_dist`): each rank writes its part, any layout reads.

A directory appears whole or not at all: it is written under another name beside its own, and moved once every rank is
done. What fails on one rank is said on all. The form holds pickles: load no checkpoint of a stranger.
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
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from enginehouse.atomic import move_into_place
from enginehouse_megatron.training import BufferedTraining
from enginehouse_torch.modeling.checkpoint import on_every_rank
from enginehouse_torch.modeling.files import CheckpointError, found_instead
from enginehouse_torch.modeling.random_state import random_states, restore_random_states
from enginehouse_torch.modeling.ranks import Ranks

WRITTEN_LAST = "metadata.json"
SAID = "enginehouse"
"""Under which key a checkpoint says what it holds."""


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What a checkpoint is written from, or loaded into.

    Attributes:
        models: this rank's parts.
        training: its optimizer; None: none was made yet.
        parts: of `enginehouse_torch.modeling.files.PARTS`, in that order.
        shape: names and sizes by which a checkpoint is known to be of this model.
    """

    models: Sequence[GPTModel]
    training: BufferedTraining | None
    parts: tuple[str, ...]
    shape: dict[str, Any]


def save(path: str, state: CheckpointContent, ranks: Ranks) -> None:
    """Write the directory `path`, replacing what it held once all is written; collective.

    Raises:
        CheckpointError: it cannot be written, on whichever rank; what `path` held is as it was.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")

    def prepare() -> None:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def describe() -> dict[str, Any]:
        content = _sharded(state, ranks, loading=False)
        content[SAID] = {
            "parts": list(state.parts),
            "step": _step(state),
            "ranks": ranks.world_size,
            "shape": state.shape,
        }
        return content

    def write() -> None:
        with warnings.catch_warnings(action="ignore"):
            dist_checkpointing.save(content, str(partial), sharded_strategy=_InProcess("torch_dist", 1))

    try:
        on_every_rank(ranks, prepare)
        content = on_every_rank(ranks, describe)  # apart: who writes waits for the others
        on_every_rank(ranks, write)
        on_every_rank(ranks, lambda: move_into_place(partial, target) if ranks.rank == 0 else None)
    except CheckpointError as error:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {path!r} was not written: {error}") from error


def load(path: str, state: CheckpointContent, ranks: Ranks) -> None:
    """Overwrite the parts of `state` with those in the directory `path`, from whatever layout it was saved; collective.

    A rank the checkpoint has no random state of keeps its own.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of another model, or lacks a part, on whichever rank.
    """
    said = on_every_rank(ranks, lambda: _said(path, state))
    has_random_state = "rng" in state.parts and ranks.rank < said["ranks"]

    def read() -> dict[str, Any]:
        content = _sharded(state, ranks, loading=True, random_state=has_random_state)
        with warnings.catch_warnings(action="ignore"):
            # What is wrong with a checkpoint's content is found as it is planned what to read, and said on every rank;
            # the validation that is left out raises on rank 0, and the others wait for it.
            found: dict[str, Any] = dist_checkpointing.load(content, path, validate_access_integrity=False)
        return found

    def apply() -> None:
        if "model" in state.parts:
            for stage, model in enumerate(state.models):
                model.load_state_dict(found["model"][str(stage)])
        if state.training is not None and "optimizer" in state.parts:
            state.training.optimizer.load_state_dict(found["optimizer"])
            state.training.restored(said["step"])
        elif state.training is not None:
            state.training.optimizer.reload_model_params()
        if has_random_state:
            restore_random_states(found["rng"])

    try:
        found = on_every_rank(ranks, read)
        on_every_rank(ranks, apply)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path!r} is damaged: {error}. What the engine holds now may be partly old and partly new: "
            "load another checkpoint before going on"
        ) from error


class _InProcess(torch_strategies.TorchDistSaveShardedStrategy):
    """Writes in this process.

    megatron-core's own strategy starts a server process for each rank and forks the rank to write: seconds each time,
    and a worker has threads that no fork carries over. The files are the same.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """See `SaveShardedStrategy`."""
        renamed, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        dcp.save(
            torch_strategies.mcore_to_pyt_state_dict(renamed, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _sharded(state: CheckpointContent, ranks: Ranks, *, loading: bool, random_state: bool = True) -> dict[str, Any]:
    """What megatron-core saves, or loads: by part, tensors with their place in the whole."""
    form = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {}
    model = {str(stage): model.sharded_state_dict(metadata=form) for stage, model in enumerate(state.models)}
    if "optimizer" in state.parts and state.training is not None:
        _make_moments(state.training)
        content["optimizer"] = state.training.optimizer.sharded_state_dict(model, is_loading=loading, metadata=form)
    if "model" in state.parts:
        content["model"] = model
    if "rng" in state.parts and random_state:
        # A key for each rank: of one key, all ranks that saved would have to be there to load.
        content["rng"] = ShardedObject(f"rng.{ranks.rank}", random_states(), (1,), (0,), replica_id=0)
    return content


def _make_moments(training: BufferedTraining) -> None:
    """Make the optimizer's state exist before the first step.

    distrib_optimizer.py:642 reads the step of every parameter, which torch's AdamW has only after one.
    """
    for one in training.optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if not one.optimizer.state[parameter]:
                    one.optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _restore_without_step() -> None:
    """Let a parameter's state be loaded that has no `step`.

    distrib_optimizer.py:940 asks for that of torch's AdamW, which is saved once for all parameters and not here.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def restore(self: DistributedOptimizer, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[parameter]
        own = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        original(self, parameter, {"step": own["step"], **tensors} if "step" in own else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = restore


_restore_without_step()


def _step(state: CheckpointContent) -> int:
    return 0 if state.training is None else state.training.step_number


def _said(path: str, state: CheckpointContent) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: there is none, or it lacks a part, or is of another model.
    """
    directory = Path(path)
    if not (directory / WRITTEN_LAST).is_file():
        if any(directory.glob("*.distcp")) and not (directory / ".metadata").is_file():
            raise CheckpointError(f"checkpoint {path!r} is incomplete (no file {WRITTEN_LAST}, which is written last)")
        hint = found_instead(directory)
        if not hint and any(directory.glob("*.distcp")):
            hint = ": it is one of another training engine; go on from its export in Hugging Face form"
        raise CheckpointError(f"{path!r} holds no checkpoint of megatron (no file {WRITTEN_LAST}){hint}")
    try:
        common = dist_checkpointing.load_common_state_dict(path)
    except Exception as error:
        raise CheckpointError(f"checkpoint {path!r} is damaged: {type(error).__name__}: {error}") from error
    if SAID not in common:
        raise CheckpointError(f"checkpoint {path!r} was written by another program: it does not say what it holds")
    said: dict[str, Any] = common[SAID]
    for part in state.parts:
        if part not in said["parts"]:
            raise CheckpointError(
                f"checkpoint {path!r} has no {part}: it was saved with {', '.join(said['parts'])} alone"
            )
    for name, here in state.shape.items():
        if (there := said["shape"].get(name)) != here:
            raise CheckpointError(
                f"checkpoint {path!r} is of another model: its {name} is {there!r}, here it is {here!r}"
            )
    return said
