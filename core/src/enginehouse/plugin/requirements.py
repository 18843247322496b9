"""Checks of requirements against the metadata of installed distributions. The checks import nothing.

A requirement may give alternatives, `"engine>=2 | engine-cpu>=2"`, because some engines are one module in several
distributions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from enginehouse.plugin.loaded import canonical_name

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Missing:
    """A requirement that is not fulfilled.

    Attributes:
        installed: installed version of the first alternative that is installed; None if no alternative is installed.
    """

    requirement: str
    installed: str | None

    def __str__(self) -> str:
        state = f"{self.installed} is installed" if self.installed else "it is not installed"
        return f"needs {' or '.join(_split_alternatives(self.requirement))}, but {state}"


def find_missing(requirements: Iterable[str], path: Sequence[str] | None = None) -> Iterator[Missing]:
    """Yield the requirements that a Python environment does not meet.

    Markers are evaluated; extras of a requirement are ignored. Pre-releases are accepted, because containers ship them.

    Args:
        requirements: requirement strings, possibly with alternatives separated by `|`.
        path: `sys.path` of the environment; None: this process's environment.

    Raises:
        packaging.requirements.InvalidRequirement: if a string is not a requirement.
    """
    for text in requirements:
        choices = [choice for choice in parse_requirement(text) if choice.marker is None or choice.marker.evaluate()]
        versions = [(choice, installed_version(choice.name, path)) for choice in choices]
        present = [(choice, version) for choice, version in versions if version is not None]
        if choices and not any(choice.specifier.contains(version, prereleases=True) for choice, version in present):
            yield Missing(text, present[0][1] if present else None)


def parse_requirement(text: str) -> list[Requirement]:
    """Return the alternatives of a requirement string. Raises `packaging.requirements.InvalidRequirement` if an
    alternative is not a requirement."""
    # packaging costs 10 ms to import; most backends require nothing
    from packaging.requirements import Requirement

    return [Requirement(alternative) for alternative in _split_alternatives(text)]


def installed_version(distribution: str, path: Sequence[str] | None = None) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed.

    Args:
        path: `sys.path` of the environment; None: this process's environment.
    """
    places: dict[str, Any] = {} if path is None else {"path": list(path)}
    return next((match.version for match in metadata.distributions(name=distribution, **places)), None)


def installed_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution that the requirements name and that is installed here."""
    names = [alternative.name for text in requirements for alternative in parse_requirement(text)]
    return {name: version for name in names if (version := installed_version(name)) is not None}


def install_line(missing: Iterable[Missing], distribution: str) -> str:
    """Return the `pip install` command for missing requirements. It installs an extra of the plugin `distribution` if
    an extra covers all of them."""

    first_choices = [parse_requirement(item.requirement)[0] for item in missing]
    names = {canonical_name(requirement.name) for requirement in first_choices}
    for extra, covered in _extras(distribution):
        if names <= covered:
            return f'pip install "{distribution}[{extra}]"'
    return "pip install " + " ".join(f'"{requirement}"' for requirement in first_choices)


def _split_alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


def _extras(distribution: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each extra of a distribution and the distributions that it adds."""
    from packaging.requirements import Requirement

    try:
        package = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return
    requirements = [Requirement(text) for text in package.requires or ()]
    for extra in package.metadata.get_all("Provides-Extra") or ():
        yield extra, {canonical_name(added.name) for added in requirements if _is_added(added, extra)}


def _is_added(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
