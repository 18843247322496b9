"""A device that is a CPU in disguise, which counts what a GPU would make the host wait for.

A tensor of the device `pretend` has a CPU tensor inside, and every operation runs on that. Reads of values by the host,
and copies between host and device that wait, are counted by line of code. torch has one slot for such a device in a
process, so tests count in a process of their own: `count_waits`.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretend"
READS = frozenset({
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim",
})  # fmt: skip
"""Operations whose result, or the size of it, the host reads."""


class Waits:
    """Number of waits by line of code, as `file.py:function`.

    Attributes:
        reads: reads of values, or of sizes that depend on values.
        to_host: copies to the host.
        to_device: copies to the device that wait, because they are not `non_blocking`.
        launches: number of operations on the device.
    """

    def __init__(self) -> None:
        self.reads: collections.Counter[str] = collections.Counter()
        self.to_host: collections.Counter[str] = collections.Counter()
        self.to_device: collections.Counter[str] = collections.Counter()
        self.launches = 0


_counting: list[Waits] = []


class PretendTensor(torch.Tensor):
    """A tensor of the device `pretend`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device(NAME, 0), requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner.detach() if inner.requires_grad else inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _current().reads[_site()] += 1
        return self.inner.tolist()

    def __repr__(self) -> str:
        return f"PretendTensor({self.inner})"


class _Factories(TorchDispatchMode):
    """Lets operations without a tensor of the device, such as `torch.zeros`, make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors inside, and count it."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PretendTensor)]
    device = kwargs.get("device")
    goes_to = None if device is None else torch.device(device).type
    if not given and goes_to != NAME:
        return func(*args, **kwargs)
    name, waits = func._schema.name.removeprefix("aten::"), _current()
    waits.launches += 1
    if name in READS or (name.startswith(("index", "_index")) and _has_mask(args)):
        waits.reads[_site()] += 1
    stays = True
    if name == "_to_copy" and goes_to is not None:
        stays = goes_to == NAME
        if not stays:
            waits.to_host[_site()] += 1
        elif not given and not kwargs.get("non_blocking"):
            waits.to_device[_site()] += 1
    elif name == "copy_":
        into, source = (isinstance(tensor, PretendTensor) for tensor in args[:2])
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if source and not into:
            waits.to_host[_site()] += 1
        elif into and not source and blocking:
            waits.to_device[_site()] += 1
    if goes_to == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner_args, inner_kwargs = tree_map_only(PretendTensor, lambda tensor: tensor.inner, (args, kwargs))
    result = func(*inner_args, **inner_kwargs)
    if not stays or name == "_local_scalar_dense":
        return result
    known = {id(tensor.inner): tensor for tensor in given}

    def disguise(tensor: torch.Tensor) -> torch.Tensor:
        return known[id(tensor)] if id(tensor) in known else PretendTensor(tensor)

    return tree_map_only(torch.Tensor, disguise, result)


def _has_mask(args: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2]))


def _current() -> Waits:
    return _counting[-1] if _counting else Waits()


def _site() -> str:
    """Return the innermost function of the project or of transformers on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/transformers/" in path or ("/enginehouse" in path and "site-packages" not in path):
            return f"{Path(path).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextlib.contextmanager
def counted() -> Iterator[Waits]:
    """Count within the block, in which tensors may be made on the device."""
    waits = Waits()
    _counting.append(waits)
    try:
        with _Factories():
            yield waits
    finally:
        _counting.remove(waits)


def count_waits(work: Callable[[torch.device], Mapping[str, Waits]]) -> Mapping[str, Waits]:
    """Return the result of `work`, a function of a module, that was called with the device in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_device, work).result()


def _with_device(work: Callable[[torch.device], Mapping[str, Waits]]) -> Mapping[str, Waits]:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend(NAME)
    return work(torch.device(NAME, 0))
