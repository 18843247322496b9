"""Creates the package of a new plugin: checks its names, and writes its files from the templates."""

from __future__ import annotations

import datetime
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from enginehouse import __version__
from enginehouse.errors import UserError, nearest
from enginehouse.plugin.hookspecs import PROJECT
from enginehouse.plugin.loaded import CORE
from enginehouse_testing.new_plugin.kinds import KINDS, STARTS_CONTRACT, certify_line

TEMPLATES = Path(__file__).parent / "templates"

FOLDERS = ("build", "dist", "docs", "examples", "scripts", "src", "test", "tests", "tools")
"""Names that a package may not have, because its module would have the name of folders in other projects."""

PINNED = ("torch", "transformers")
"""Distributions whose installed versions become the constraints of the package's tests."""


@dataclass(frozen=True, slots=True)
class NewPlugin:
    """A package to be made.

    Attributes:
        name: name of the distribution, for example `"acme-rollout"`.
        kinds: kinds of its parts, keys of `KINDS`.
        starts: values of `--from` by kind, for each kind that does not start from a skeleton.
        author: author in the package's metadata, or empty.
    """

    name: str
    kinds: tuple[str, ...]
    starts: dict[str, str]
    author: str = ""

    @property
    def module(self) -> str:
        """The name of its package, and of its records in a config."""
        return self.name.replace("-", "_")

    @property
    def stem(self) -> str:
        """Prefix of the package's functions: its name, without the kinds at the end."""
        parts = self.module.split("_")
        while len(parts) > 1 and parts[-1] in KINDS:
            parts.pop()
        return "_".join(parts)

    @property
    def title(self) -> str:
        """The prefix of its classes."""
        return "".join(part.capitalize() for part in self.stem.split("_"))

    @property
    def folders(self) -> list[str]:
        """Folders of the package's templates. Files of later folders overwrite files of earlier folders."""
        starts = [f"{kind}_{start}" for kind, start in self.starts.items()]
        return ["base", *self.kinds, *starts]

    def data(self) -> dict[str, Any]:
        """Return the values that fill the templates."""
        major, minor = __version__.split(".")[:2]
        needed = dict.fromkeys(name for kind, start in self.starts.items() for name in KINDS[kind].starts[start])
        contract = max([KINDS[kind].contract for kind in self.kinds] + [STARTS_CONTRACT] * bool(self.starts))
        return {
            "name": self.name,
            "module": self.module,
            "stem": self.stem,
            "title": self.title,
            "kinds": list(self.kinds),
            "starts": self.starts,
            "says": {kind: KINDS[kind].says for kind in self.kinds},
            "suites": {kind: KINDS[kind].suite for kind in self.kinds if KINDS[kind].suite},
            "certify": {kind: certify_line(self.module, kind) for kind in self.kinds if KINDS[kind].suite},
            "examples": [kind for kind in self.kinds if KINDS[kind].examples],
            "author": self.author,
            "year": datetime.date.today().year,
            "versions": f">={major}.{minor},<{major}.{int(minor) + 1}",
            "needed": list(needed),
            "contract": ".".join(map(str, contract)),
            "pinned": {name: metadata.version(name).partition("+")[0] for name in PINNED},
        }


def check_starts(kinds: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """Return the value of `--from` that each kind starts from. Kinds that start from a skeleton are left out.

    Args:
        kinds: the chosen kinds.
        words: values of `--from`.

    Raises:
        UserError: none of the chosen kinds accepts one of the values.
    """
    starts: dict[str, str] = {}
    for word in words:
        fitting = [kind for kind in kinds if word in KINDS[kind].starts]
        if not fitting:
            able = [kind for kind in KINDS if word in KINDS[kind].starts]
            if able:
                raise UserError(f"--from {word} is for --kind {able[0]}, and not for {', '.join(kinds)}")
            known = {start for kind in KINDS.values() for start in kind.starts}
            raise UserError(f"--from: unknown start {word!r}. {nearest(word, known)}")
        starts |= dict.fromkeys(fitting, word)
    return starts


def check_name(plugin: NewPlugin) -> None:
    """Check the name of a package.

    Raises:
        UserError: the name is not allowed; the message suggests an allowed one.
    """
    name = plugin.name
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789") or "acme"
        raise UserError(
            f"{name!r} cannot be the name of a package: small letters and digits, with single hyphens between, from a "
            f"letter on; write {better!r}"
        )
    if keyword.iskeyword(plugin.module) or plugin.module in sys.stdlib_module_names:
        raise UserError(f"{plugin.module!r} is a word of Python itself; write 'acme-{name}'")
    if plugin.module in FOLDERS:
        raise UserError(f"{plugin.module!r} would stand in for a folder of every checkout; write 'acme-{name}'")
    if owner := _owner(plugin):
        raise UserError(f"{name!r} is taken: {owner}; write 'acme-{name}'")


def _owner(plugin: NewPlugin) -> str:
    """Describe the owner of a name that is taken; empty if it is free."""
    from enginehouse.plugin import plugins

    for record, owner in plugins().providers(name=plugin.module):
        if record.kind in plugin.kinds and owner.distribution != plugin.name:
            return f"{owner.distribution} offers it, of kind {record.kind}"
    if plugin.name in (CORE, *(f"{CORE}-{extra}" for extra in metadata.metadata(CORE).get_all("Provides-Extra") or ())):
        return "it is one of enginehouse's own packages"
    if "command" in plugin.kinds:
        from enginehouse.cli.main import COMMANDS
        from enginehouse.plugin.first_party import TOOLS

        if plugin.name in COMMANDS or any(plugin.name in commands for commands in TOOLS.values()):
            return f"`enginehouse {plugin.name}` is a command"
    owners = metadata.packages_distributions().get(plugin.module, [])
    if any(
        owner != plugin.name or not metadata.distribution(owner).entry_points.select(group=PROJECT) for owner in owners
    ):
        return f"{owners[0]}, which is installed, has a module {plugin.module!r}"
    return ""


def make(plugin: NewPlugin, directory: Path) -> list[Path]:
    """Write the package into a new or empty directory; return its files, relative to the directory, sorted.

    Raises:
        UserError: the name is not allowed, or the directory is not empty.
    """
    check_name(plugin)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(
            f"{str(directory)!r} is there, and not an empty folder; name another by --directory, or empty it"
        )
    from copier import run_copy

    data = plugin.data()
    for folder in plugin.folders:
        run_copy(str(TEMPLATES / folder), str(directory), data=data, defaults=True, quiet=True, overwrite=True)
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
