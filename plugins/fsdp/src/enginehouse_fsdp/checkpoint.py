"""Checkpoints by torch.distributed.checkpoint: every rank writes its own part, any number of ranks reads them.

Entries: `model.<name>`, `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>`, `optimizer.step`, and for each
rank `rng.<kind>.<rank>`. A directory appears whole or not at all.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from enginehouse.modeling.files import CheckpointError
from enginehouse.modeling.ranks import Ranks


def save(path: str, state: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write `state` into the directory `path`, replacing what it held once all is written; collective."""
    target = Path(path)
    token = ranks.gather(uuid.uuid4().hex[:8])[0]
    partial = target.with_name(f".{target.name}.partial-{token}")
    try:
        dcp.save(dict(state), checkpoint_id=str(partial), no_dist=not dist.is_initialized())
        ranks.on_rank_zero(lambda: _move_into_place(partial, target))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load(path: str, state: dict[str, torch.Tensor]) -> None:
    """Overwrite the tensors of `state`, all or none, from the directory `path`; collective.

    Raises:
        CheckpointError: it is missing, lacks an entry, or an entry has another shape.
    """
    stored = _stored(path)
    for name, tensor in state.items():
        if name not in stored:
            raise CheckpointError(f"checkpoint {path!r} lacks {name!r}: it is of another model, or without that part")
        if stored[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{name!r} in checkpoint {path!r} has shape {stored[name]}, here {tuple(tensor.shape)}"
            )
    extra = sorted(name for name in stored if name.startswith("model.") and name not in state)
    if extra and any(name.startswith("model.") for name in state):
        raise CheckpointError(f"checkpoint {path!r} has an unknown {extra[0]!r}: it is of another model")
    with torch.no_grad():
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())


def entries(path: str, prefix: str) -> list[str]:
    """Names of the entries that begin with `prefix`.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    return [name for name in _stored(path) if name.startswith(prefix)]


def _stored(path: str) -> dict[str, tuple[int, ...]]:
    """Each entry's shape."""
    if not (Path(path) / ".metadata").is_file():
        raise CheckpointError(f"{path!r} holds no checkpoint of the fsdp engine (no file .metadata)")
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {name: tuple(getattr(entry, "size", ())) for name, entry in metadata.state_dict_metadata.items()}


def _move_into_place(partial: Path, target: Path) -> None:
    replaced = target.with_name(f".{target.name}.replaced-{partial.name[-8:]}")
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
