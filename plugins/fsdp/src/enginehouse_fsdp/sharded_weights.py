"""The weights of a sharded model under the names of its Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from enginehouse.engines.weights import ParamMeta
from enginehouse.weights.buckets import pack_buckets
from enginehouse.weights.names import unique_state
from enginehouse_fsdp import experts
from enginehouse_fsdp.adapters import base_state, merge_adapters
from enginehouse_fsdp.gathering import SPLITTING_ORDER, Gathering, own_part, split_dimensions
from enginehouse_fsdp.memory_plan import BUCKET_BYTES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from enginehouse_torch.modeling.stored import StoredForm


class ShardedWeights:
    """The `WeightSource` of a model under FSDP2, sharded over `mesh`.

    Metadata list the mesh's axes, and `owners`, in the order in which the axes split a tensor (`SPLITTING_ORDER`).
    Ranks along an axis that does not split the tensor are replicas.

    Args:
        stored: names in the checkpoint; they decide the name of a tied parameter.
        form: names and parts of the model's tensors in the checkpoint.
        dtype: dtype of the yielded weights; the parameters themselves are float32.
        bucket_bytes: bytes gathered at once.
        alpha: `LoraOptions.alpha` if the model has adapters, which are merged into its weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: DeviceMesh,
        stored: frozenset[str],
        form: StoredForm,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        alpha: float = 0.0,
    ):
        self._model = model
        self._mesh = mesh
        self._stored = stored
        self._form = form
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._alpha = alpha

    def metadata(self) -> list[ParamMeta]:
        """Describe all parameters and persistent buffers as the checkpoint stores them, tied ones once."""
        described = []
        state = base_state(unique_state(self._model, self._stored))
        for (name, tensor), whole in zip(state.items(), self._describe_whole(), strict=True):
            for part in self._form.parts(name):
                if part.entry is None:
                    described.append(replace(whole, name=part.name))
                else:
                    shape = (part.rows[1] - part.rows[0], *whole.shape[2:])
                    described.append(ParamMeta(part.name, whole.dtype, shape, experts.owners(name, tensor, part)))
        return described

    def _describe_whole(self) -> list[ParamMeta]:
        """Describe parameters and persistent buffers as the model holds them."""
        names = self._mesh.mesh_dim_names or ()
        axes = sorted(names, key=SPLITTING_ORDER.index)
        ranks = self._mesh.mesh.permute([names.index(axis) for axis in axes])
        described = []
        for name, tensor in base_state(unique_state(self._model, self._stored)).items():
            mesh_shape: tuple[int, ...] = ()
            placements: tuple[str, ...] = ()
            owners: tuple[int, ...] = ()
            if isinstance(tensor, DTensor):
                split = split_dimensions(tensor)
                mesh_shape = tuple(ranks.shape)
                placements = tuple(f"S{split[axis]}" if axis in split else "R" for axis in axes)
                owners = tuple(ranks.flatten().tolist())
            dtype = str(self._served_dtype(tensor)).removeprefix("torch.")
            described.append(ParamMeta(name, dtype, tuple(tensor.shape), owners, mesh_shape, placements))
        return described

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on every rank; the next bucket is gathered while the caller reads this one."""
        state = unique_state(self._model, self._stored)
        names = list(base_state(state))
        buckets = pack_buckets(self._describe_whole(), self._bucket_bytes)
        gathering: Gathering | None = None
        for bucket in [*buckets, None]:
            following = None if bucket is None else self._gather([names[i] for i in bucket], state)
            if gathering is not None:
                for name, tensor in gathering.wait():
                    yield from self._form.apart({name: tensor})
            gathering = following

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor, empty if it has none.

        With adapters it is collective, like `iter_full`, because a part of a merged weight needs the whole of A.
        """
        state = unique_state(self._model, self._stored)
        for base_name in base_state(state):
            for name, tensor in experts.own_parts(self._form, merge_adapters(state, [base_name], self._alpha)):
                yield name, own_part(tensor).to(self._served_dtype(tensor))

    def _served_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _gather(self, names: list[str], state: dict[str, torch.Tensor]) -> Gathering:
        tensors = list(merge_adapters(state, names, self._alpha).values())
        return Gathering.start(names, tensors, [own_part(tensor) for tensor in tensors], self._dtype)
