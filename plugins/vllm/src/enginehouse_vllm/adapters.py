"""vLLM's side of updates that bring an adapter alone. It runs in each of vLLM's worker processes.

A replica has one adapter, under one id, and every request names it. An update replaces its matrices, so requests in
progress continue with the new ones. vLLM's public way would be a new id for each version, read from files; it cannot
move a request to another id. So this module uses vLLM's LoRA manager directly, as of the versions that the plugin
allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.read_back import BITS, ReadRegions, Region
from enginehouse.weights.reports import Reporter
from enginehouse.weights.staged_source import StagedSource
from enginehouse_vllm import truncation
from enginehouse_vllm.served_adapter import ADAPTER_ID, adapter_request


class WorkerExtension(truncation.WorkerExtension):
    """Further methods of vLLM's workers."""

    model_runner: Any
    rank: int

    def enginehouse_clear_adapter(self, reports: str) -> None:
        """Serve an adapter that changes nothing. vLLM would read one that it does not hold from a file, and end.

        Args:
            reports: path of the `Reports`, which get the outcome.
        """
        Reporter(reports, self.rank).run(self._clear)

    def enginehouse_load_adapter(self, reports: str, parameters: list[Any], settings: Mapping[str, Any]) -> None:
        """Replace the served adapter, check that the matrices are as they were staged, and compare them with what is
        then served.

        Args:
            reports: path of the `Reports`, which get what `ReadBack.compare` returns.
            settings: as in an `adapter_config.json`.
        """
        Reporter(reports, self.rank).run(lambda: self._load(parameters, settings))

    def _clear(self) -> None:
        worker_manager = self.model_runner.lora_manager
        manager = worker_manager._adapter_manager
        manager.remove_adapter(ADAPTER_ID)
        worker_manager.add_dummy_lora(adapter_request(), rank=1)
        manager.activate_adapter(ADAPTER_ID)
        slot = manager.lora_index_to_id.index(ADAPTER_ID)
        held = [part[slot] for layer in manager.modules.values() for part in layer.lora_b_stacked]
        if any(part.count_nonzero() for part in held):
            raise WeightSyncError("vllm still holds an adapter")

    def _load(self, parameters: list[Any], settings: Mapping[str, Any]) -> list[ReadRegions]:
        manager = self.model_runner.lora_manager._adapter_manager
        lacking = [name for name, *_ in parameters if _find_layer(manager, name)[0] is None]
        if lacking:
            raise WeightSyncError(
                f"vllm adds no adapter that could be read back to the layers of {listed(lacking)}: use "
                "weights.adapter=merged",
                lacking,
            )
        source = StagedSource(parameters)
        helper = PEFTHelper.from_dict(dict(settings))
        with source.checked():
            _replace(self.model_runner.lora_manager, source, helper)
            read = read_back(manager, source, helper)
        source.close()
        return read


def _replace(worker_manager: Any, source: Iterable[tuple[str, torch.Tensor]], helper: PEFTHelper) -> None:
    """Do what vLLM does after it has read an adapter from files to load it in place of another."""
    helper.validate_legal(worker_manager.lora_config)
    manager, dtype = worker_manager._adapter_manager, worker_manager.lora_config.lora_dtype
    # Copies, because vLLM keeps the tensors, and scales B in place.
    tensors = {name: tensor.to(device="cpu", dtype=dtype, copy=True) for name, tensor in source}
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=ADAPTER_ID,
        tensors=tensors,
        peft_helper=helper,
        device="cpu",
        dtype=dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=_mapper(manager),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)


def read_back(manager: Any, source: StagedSource, helper: PEFTHelper) -> list[ReadRegions]:
    """Compare the matrices that vLLM computes with with the staged matrices; see `ReadBack.compare`."""
    read, wrong = [], []
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    for (name, staged), total in zip(source, source.sums, strict=True):
        held, part = _held_part(manager, name, staged, slot)
        _, is_down = parse_fine_tuned_lora_name(name)
        _, scaling = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
        expected = part.to(device=held.device, dtype=held.dtype) * (1 if is_down else scaling)
        bits = BITS[held.element_size()]
        rows, columns = expected.shape
        fits = held.dtype == staged.dtype and torch.equal(
            held[:rows, :columns].contiguous().view(bits), expected.contiguous().view(bits)
        )
        if not fits or held[rows:].count_nonzero() or held[:, columns:].count_nonzero():
            wrong.append(name)
        read.append((total, [Region.of_part(part, staged).as_plain_data()]))
    if wrong:
        raise WeightSyncError(f"vllm does not hold {listed(wrong)} as sent", wrong)
    return read


def _held_part(manager: Any, name: str, staged: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix that vLLM computes with, padded to the largest rank, and the part of the staged matrix that
    belongs there. With tensor parallelism a process holds all of A or of B, and some columns or rows of the other."""
    layer, index = _find_layer(manager, name)
    _, is_down = parse_fine_tuned_lora_name(name)
    held = (layer.lora_a_stacked if is_down else layer.lora_b_stacked)[index][slot, 0]
    if layer.tp_size == 1:
        return held, staged
    if is_down:
        splits = type(layer).__name__.startswith("RowParallel")
        return held, staged.narrow(1, layer.tp_rank * layer.input_size, layer.input_size) if splits else staged
    if hasattr(layer, "output_ids"):  # several matrices in one
        size = layer.output_slices[index]
        return held, staged.narrow(0, layer.output_ids[index] * size, size)
    if type(layer).__name__.startswith("ColumnParallel"):
        return held, staged.narrow(0, layer.tp_rank * layer.output_size, layer.output_size)
    return held, staged


def _find_layer(manager: Any, name: str) -> tuple[Any, int]:
    """Return vLLM's layer to which a matrix belongs, and the place of the matrix among those that vLLM has joined, such
    as queries, keys and values. The layer is None if vLLM adds no adapter there, or splits the matrix in a way that
    `_held_part` does not know."""
    layer, _ = parse_fine_tuned_lora_name(name, _mapper(manager))
    places = {
        part: (joined, index) for joined, parts in manager.packed_modules.items() for index, part in enumerate(parts)
    }
    joined, index = places.get(layer, (layer, 0))
    found = manager.modules.get(joined)
    parts = len(manager.packed_modules.get(joined, (joined,)))
    if found is None or len(found.lora_a_stacked) != parts:
        return None, index
    base = type(found.base_layer).__name__
    known = hasattr(found, "output_ids") or base in ("RowParallelLinear", "ColumnParallelLinear", "ReplicatedLinear")
    return (found if found.tp_size == 1 or known else None), index


def _mapper(manager: Any) -> Any:
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
