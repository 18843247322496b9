"""Distributions made for a test: a folder on `sys.path` with a module and a `.dist-info`, found as pip's are."""

import importlib
import itertools
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

_numbers = itertools.count()


def installed(
    site: Path, name: str, points: Mapping[str, str] = {}, *, version: str = "0.1.0", metadata: str = ""
) -> Path:
    """Make a distribution with these entry points for `enginehouse` look installed; returns its `.dist-info`."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
    lines = [f"{point} = {module}\n" for point, module in points.items()]
    (info / "entry_points.txt").write_text("[enginehouse]\n" + "".join(lines))
    importlib.invalidate_caches()
    return info


class Distributions:
    """Installs fake distributions that have one `enginehouse` entry point each."""

    def __init__(self, site: Path):
        self.site = site
        self.modules: list[str] = []

    def add(
        self, distribution: str, source: str, *, name: str | None = None, version: str = "0.1.0", metadata: str = ""
    ) -> str:
        """Install a distribution whose plugin module has this source; returns the module's name.

        The entry point is called `name`, or like the distribution.
        """
        module = f"{distribution.replace('-', '_')}_{next(_numbers)}"
        self.modules.append(module)
        imports = 'from enginehouse.plugin import *\nenginehouse_protocol = "1.0"\n'
        (self.site / f"{module}.py").write_text(imports + textwrap.dedent(source))
        installed(self.site, distribution, {name or distribution: module}, version=version, metadata=metadata)
        return module

    def backend(self, distribution: str, backend: str = "swift", kind: str = "TrainBackend", **rest: str) -> str:
        """Install a distribution that declares one backend; `rest` are further fields, as source."""
        further = "".join(f", {field}={value}" for field, value in rest.items())
        return self.add(
            distribution,
            f"""
            @hookimpl
            def enginehouse_register_backends(register):
                register({kind}(name={backend!r}, engine="nowhere:Engine", options="nowhere:Options"{further}))
            """,
        )


@pytest.fixture
def distributions(tmp_path, monkeypatch):
    """Distributions of a test, on the import path as long as it runs."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made = Distributions(site)
    yield made
    for module in made.modules:
        sys.modules.pop(module, None)
