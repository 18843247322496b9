"""Compares the weights that replicas serve with the files that they loaded, in runs without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.checksums import checksum


@dataclass(frozen=True, slots=True)
class FileComparison:
    """Result of a comparison.

    Attributes:
        compared: number of served tensors that are also in the files.
        checksum: checksum of the checksums of all served tensors; empty if there are none.
    """

    compared: int
    served: int
    checksum: str


def compare_with_files(states: Sequence[WeightState], directory: Path, dtype: str, where: str) -> FileComparison:
    """Compare the reported states of replicas with a model's safetensors.

    A tensor may be served in the dtype of the file, in the dtype of the model, or in float32, which some layers keep.

    Raises:
        WeightSyncError: a replica serves tensors that differ from the files; the message names them.
    """
    import torch
    import xxhash
    from safetensors import safe_open

    dtypes = [getattr(torch, dtype), torch.float32]
    stored: set[str] = set()
    differing: dict[int, list[str]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in set(tensors.keys()).difference(stored):
                serving = {
                    number: state.checksums[name] for number, state in enumerate(states) if name in state.checksums
                }
                if not serving:
                    continue
                stored.add(name)
                tensor = tensors.get_tensor(name)
                sums = {
                    checksum(tensor),
                    *(checksum(tensor.to(served_dtype)) for served_dtype in dtypes if served_dtype != tensor.dtype),
                }
                for number in (number for number, served in serving.items() if served not in sums):
                    differing.setdefault(number, []).append(name)
    for number, names in differing.items():
        raise WeightSyncError(
            f"{where} replica {number} does not serve {listed(names)} as stored in {directory}: nothing is evaluated",
            parameters=names,
        )
    first: Mapping[str, str] = states[0].checksums if states else {}
    text = "\n".join(f"{name} {first[name]}" for name in sorted(first))
    return FileComparison(len(stored), len(first), xxhash.xxh3_64_hexdigest(text.encode()) if first else "")
