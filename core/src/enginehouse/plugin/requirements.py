"""Whether a backend's requirements are installed, found from distributions' metadata: nothing is imported.

A requirement may give alternatives, `"engine>=2 | engine-cpu>=2"`: some engines are one module under several
distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from enginehouse.plugin.loaded import canonical_name

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Missing:
    """A requirement that is not met.

    Attributes:
        requirement: the requirement string.
        installed: the version there is, of the first alternative there is; None where there is none.
    """

    requirement: str
    installed: str | None

    def __str__(self) -> str:
        there = f"{self.installed} is installed" if self.installed else "it is not installed"
        return f"needs {' or '.join(_alternatives(self.requirement))}, but {there}"


def find_missing(requirements: Iterable[str], path: Sequence[str] | None = None) -> Iterator[Missing]:
    """Yield those of `requirements` that a Python environment does not meet.

    Markers are honoured; extras of a requirement are not followed. Pre-releases count (containers ship them).

    Args:
        requirements: requirement strings, each perhaps several with `|` between them.
        path: where that environment imports from (its `sys.path`); None: this one.

    Raises:
        packaging.requirements.InvalidRequirement: a string is no requirement.
    """
    for text in requirements:
        wanted = parse_requirement(text)
        wanted = [one for one in wanted if one.marker is None or one.marker.evaluate()]
        found = [(one, version) for one in wanted if (version := installed_version(one.name, path)) is not None]
        if wanted and not any(one.specifier.contains(version, prereleases=True) for one, version in found):
            yield Missing(text, found[0][1] if found else None)


def parse_requirement(text: str) -> list[Requirement]:
    """The alternatives of a requirement string.

    Raises:
        packaging.requirements.InvalidRequirement: one of them, or all of them together, is no requirement.
    """
    # packaging costs 10 ms to import; most backends require nothing of their own
    from packaging.requirements import Requirement

    return [Requirement(one) for one in _alternatives(text)]


def installed_version(distribution: str, path: Sequence[str] | None = None) -> str | None:
    """The version of a distribution, in the environment that imports from `path` (None: this one), if it is there."""
    if path is None:
        found = metadata.distributions(name=distribution)
    else:
        found = metadata.distributions(name=distribution, path=list(path))
    return next((one.version for one in found), None)


def installed_versions(requirements: Iterable[str]) -> dict[str, str]:
    """The version of every distribution that is named in some requirements and installed here."""
    names = [one.name for text in requirements for one in parse_requirement(text)]
    return {name: version for name in names if (version := installed_version(name)) is not None}


def install_line(missing: Iterable[Missing], distribution: str) -> str:
    """The `pip install` command that brings what is missing, by an extra of the plugin where one covers it."""
    from packaging.requirements import Requirement

    wanted = [Requirement(_alternatives(one.requirement)[0]) for one in missing]
    names = {canonical_name(requirement.name) for requirement in wanted}
    for extra, covered in _extras(distribution):
        if names <= covered:
            return f'pip install "{distribution}[{extra}]"'
    return "pip install " + " ".join(f'"{requirement}"' for requirement in wanted)


def _alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def _extras(distribution: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each extra of a distribution and the distributions it adds."""
    from packaging.requirements import Requirement

    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return
    requirements = [Requirement(text) for text in found.requires or ()]
    for extra in found.metadata.get_all("Provides-Extra") or ():
        yield extra, {canonical_name(one.name) for one in requirements if _only_with(one, extra)}


def _only_with(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
