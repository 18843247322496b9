"""Whether a backend's requirements are installed, found from distributions' metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Missing:
    """A requirement that is not met.

    Attributes:
        requirement: the requirement string.
        installed: the version there is; None where there is none.
    """

    requirement: str
    installed: str | None

    def __str__(self) -> str:
        there = f"{self.installed} is installed" if self.installed else "it is not installed"
        return f"needs {self.requirement}, but {there}"


def unmet(requirements: Iterable[str]) -> Iterator[Missing]:
    """Yield those of `requirements` that this Python environment does not meet.

    Markers are honoured; extras of a requirement are not followed. Pre-releases count (containers ship them).

    Raises:
        packaging.requirements.InvalidRequirement: a string is no requirement.
    """
    for text in requirements:
        # packaging costs 10 ms to import; most backends require nothing of their own
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Missing(text, None)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            yield Missing(text, installed)


def install_line(missing: Iterable[Missing], distribution: str) -> str:
    """The `pip install` command that brings what is missing, by an extra of the plugin where one covers it."""
    from packaging.requirements import Requirement

    wanted = [Requirement(one.requirement) for one in missing]
    names = {_normal(requirement.name) for requirement in wanted}
    for extra, covered in _extras(distribution):
        if names <= covered:
            return f'pip install "{distribution}[{extra}]"'
    return "pip install " + " ".join(f'"{requirement}"' for requirement in wanted)


def _extras(distribution: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each extra of a distribution and the distributions it adds."""
    from packaging.requirements import Requirement

    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return
    requirements = [Requirement(text) for text in found.requires or ()]
    for extra in found.metadata.get_all("Provides-Extra") or ():
        yield extra, {_normal(one.name) for one in requirements if _only_with(one, extra)}


def _only_with(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _normal(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)
