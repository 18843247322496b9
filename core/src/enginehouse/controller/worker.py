"""The class that runs on a worker process, and the arguments it is built with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from enginehouse.engines.model import ProcessContext


class Worker:
    """Base of worker classes, for its type: plain classes work as well.

    Attributes:
        context: this process's place; set before `__init__` runs.
        mesh: optional, an `enginehouse.engines.mesh.Mesh`, by which `dp` calls are split. Set it in `__init__`, or
            later and call the group's `refresh_meshes()`.

    A method named `shutdown` is called once when the group shuts down in order.
    """

    context: ProcessContext


class WorkerSpec:
    """A worker class and its constructor's arguments; the object is built in the worker process.

    Args:
        cls: a class. One decorated with `@ray.remote` is taken as the class it decorates.
        args: positional arguments of its constructor.
        kwargs: keyword arguments of its constructor.
    """

    def __init__(self, cls: Any, /, *args: Any, **kwargs: Any):
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: type = metadata.modified_class if metadata is not None else cls
        if not isinstance(self.cls, type):
            raise TypeError(f"a WorkerSpec is made from a class, not from {cls!r}")
        self.args = args
        self.kwargs = kwargs
        self.env: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.distributed = True
        self.python: str | None = None
        self.reads: tuple[str, ...] = ()

    def options(
        self,
        *,
        env: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        distributed: bool | None = None,
        python: str | None = None,
        reads: Iterable[str] | None = None,
    ) -> WorkerSpec:
        """Return a copy with other options of the process; None leaves an option as it is.

        Args:
            env: environment variables, set before the process's interpreter starts (this costs the process its
                warm start, and Ray writes them to its log).
            variables: environment variables, set before torch is imported.
            distributed: False leaves out the rendezvous for `torch.distributed` (which imports torch on rank 0).
            python: path of the interpreter of another Python environment, with the same Ray and core installed.
            reads: directories of models that it reads, which the process's node has to have if this one has them.
        """
        copy = WorkerSpec(self.cls, *self.args, **self.kwargs)
        copy.env = dict(self.env) if env is None else {name: str(value) for name, value in env.items()}
        copy.variables = dict(self.variables if variables is None else variables)
        copy.distributed = self.distributed if distributed is None else distributed
        copy.python = self.python if python is None else python
        copy.reads = self.reads if reads is None else tuple(reads)
        return copy

    def __repr__(self) -> str:
        return f"WorkerSpec({self.cls.__qualname__})"
