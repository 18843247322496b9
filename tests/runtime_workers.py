"""A worker that looks around in the Python environment it runs in."""

import sys
from importlib import metadata

from enginehouse.controller import Worker, register
from enginehouse.data import Batch


class Onlooker(Worker):
    """Says what it sees."""

    @register
    def files(self, *modules: str) -> dict[str, str]:
        """Where modules are imported from."""
        import importlib

        return {name: importlib.import_module(name).__file__ or "" for name in modules}

    @register
    def versions(self, *distributions: str) -> dict[str, str]:
        """Versions of distributions; `"absent"` where there is none."""
        return {name: _version(name) for name in distributions}

    @register
    def interpreter(self) -> str:
        """The interpreter."""
        return sys.executable

    @register
    def paths(self) -> list[str]:
        """Where it imports from."""
        return sys.path

    @register
    def twice(self, batch: Batch) -> Batch:
        """The batch, with its column `x` doubled."""
        return batch.with_columns(x=batch.tensor("x") * 2)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
