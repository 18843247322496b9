"""Transfer of tensors between processes. The bytes of each tensor are a separate buffer of the pickle.

With pickle protocol 5 and a buffer callback, as Ray uses them, neither process copies. The writer exports its memory,
and the reader's tensors are views of the received buffers. Without a callback the bytes are inside the pickle. Tensors
from Ray's object store are views of its memory, which nobody may write to. Batches are therefore immutable.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginehouse.data.errors import BatchError, WireVersionError
from enginehouse.data.wire_version import WIRE_VERSION

_EVERYWHERE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_RECENT = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")

DTYPES: dict[str, torch.dtype] = {
    **{str(dtype).removeprefix("torch."): dtype for dtype in _EVERYWHERE},
    **{name: getattr(torch, name) for name in (*_RECENT, "float8_e8m0fnu") if hasattr(torch, name)},
}
"""Dtypes that a batch may hold, by their name on the wire."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_NUMPY_TWIN = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for name, dtype in DTYPES.items()
    if name == "bfloat16" or name.startswith("float8")
}

WireTensor = tuple[str, tuple[int, ...], Any]
"""Dtype name, shape, and bytes (None for a tensor without elements)."""

_read_only_seen = False


def write_tensor(tensor: Tensor, protocol: int) -> WireTensor:
    """Return a tensor in a form that pickle can send. A tensor that is contiguous and in host memory is not copied."""
    name = _NAMES[tensor.dtype]
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return name, shape, None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    twin = _NO_NUMPY_TWIN.get(tensor.dtype)
    array = tensor.numpy() if twin is None else tensor.view(twin).numpy()
    buffer: Any = array  # numpy's stubs do not declare the buffer protocol
    return name, shape, pickle.PickleBuffer(buffer) if protocol >= 5 else array.tobytes()


def read_tensor(wire: WireTensor) -> Tensor:
    """Return the tensor as a view of the received bytes."""
    name, shape, buffer = wire
    dtype = DTYPES[name]
    if buffer is None:
        return torch.empty(shape, dtype=dtype)
    flat = view_buffer(buffer, dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def view_buffer(buffer: Any, dtype: torch.dtype) -> Tensor:
    """View any contiguous buffer, even a read-only one, as a 1-D tensor. Torch warns once per process that a tensor
    over read-only memory could be written to. That is intended here."""
    global _read_only_seen
    if _read_only_seen and not torch.is_warn_always_enabled():
        return torch.frombuffer(buffer, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(buffer, dtype=dtype)
    _read_only_seen = memoryview(buffer).readonly
    return flat


def view_array(array: np.ndarray) -> Tensor:
    """View a numpy array as a tensor. Read-only arrays, such as Ray's, cause neither a warning nor a copy."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if array.flags.writeable or array.size == 0:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return view_buffer(array, dtype).view(array.shape)


def check_version(version: int) -> None:
    """Raise a `WireVersionError` if a batch with wire format `version` cannot be read in this process."""
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"received a batch in wire format {version}, but this process reads wire format {WIRE_VERSION}: "
            "install the same version of enginehouse in both Python environments"
        )


def check_dtype(tensor: Tensor, what: str) -> None:
    """Raise a `BatchError` if a tensor cannot be sent to another process. `what` names the tensor in the message."""
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise BatchError(
            f"{what} is a {tensor.layout} tensor of {tensor.dtype}, but must be a dense tensor of one of these dtypes: "
            + ", ".join(DTYPES)
        )
