"""Wheels made for a test: empty packages by which pip can fill a runtime without an index."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from enginehouse.plugin.requirements import installed_version


class Wheelhouse:
    """A folder of wheels, the only place pip looks for packages."""

    def __init__(self, folder: Path):
        self.folder = folder

    def add(self, distribution: str, version: str, module: str | None = None) -> None:
        """Make a wheel, with a module that knows its version."""
        stem = f"{distribution.replace('-', '_')}-{version}"
        name = module or distribution.replace("-", "_")
        files = {
            f"{name}/__init__.py": f"__version__ = {version!r}\n",
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
            f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{file},,\n" for file in [*files, f"{stem}.dist-info/RECORD"])
        with zipfile.ZipFile(self.folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in {**files, f"{stem}.dist-info/RECORD": record}.items():
                wheel.writestr(file, text)

    def add_all(self, requirements: Iterable[str]) -> None:
        """Make a wheel of what is installed here for each of some requirements."""
        for text in requirements:
            name = Requirement(text).name
            if (version := installed_version(name)) is not None:
                self.add(name, version.partition("+")[0])


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheelhouse:
    """An empty folder of wheels; pip looks nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Wheelhouse(folder)
