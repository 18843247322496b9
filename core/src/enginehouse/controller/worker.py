"""The class that runs on a worker process, and its constructor arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from enginehouse.engines.model import ProcessContext


class Worker:
    """Base of worker classes, for type checkers. Plain classes work as well.

    A method named `shutdown` is called once when the group is shut down.

    Attributes:
        context: description of this process, set before `__init__` runs.
        mesh: optional `enginehouse.engines.mesh.Mesh`, by which `dp` calls are split. Set it in `__init__`, or set it
            later and call the group's `refresh_meshes()`.
    """

    context: ProcessContext


class WorkerSpec:
    """A worker class and its constructor arguments. The worker process builds the object.

    Args:
        cls: a class. A class decorated with `@ray.remote` is replaced by the original class.
    """

    def __init__(self, cls: Any, /, *args: Any, **kwargs: Any):
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: type = metadata.modified_class if metadata is not None else cls
        if not isinstance(self.cls, type):
            raise TypeError(f"a WorkerSpec must be made from a class, not from {cls!r}")
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
        """Return a copy with other options of the process; None keeps an option.

        Args:
            env: environment variables, set before the interpreter starts. For these, Ray starts a new process instead
                of using an idle one, and writes the variables to its log.
            variables: environment variables, set before the import of torch.
            distributed: False omits the rendezvous for `torch.distributed`, which imports torch.
            python: path of the interpreter of another Python environment, which must have the same Ray and core.
            reads: directories of models that the worker reads. The worker's node must have each of these directories
                that exists in this process.
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
