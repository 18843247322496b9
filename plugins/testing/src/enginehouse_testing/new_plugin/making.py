"""Making the package: what its names are, whether they will do, and the files from the templates."""

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
from enginehouse_testing.new_plugin.kinds import KINDS, certify_line

TEMPLATES = Path(__file__).parent / "templates"

FOLDERS = ("build", "dist", "docs", "examples", "scripts", "src", "test", "tests", "tools")
"""What a package may not be called, as a wheel of it would bring a module that folders of other projects are, too."""

PINNED = ("torch", "transformers")
"""What the package's tests are run with, as it is here."""


@dataclass(frozen=True, slots=True)
class NewPlugin:
    """A package that is to be made.

    Attributes:
        name: of the distribution: `"acme-rollout"`.
        kinds: what it brings, keys of `KINDS`.
        starts: by kind what it starts from, where that is not a skeleton.
        author: for its metadata; empty: none is named.
    """

    name: str
    kinds: tuple[str, ...]
    starts: dict[str, str]
    author: str = ""

    @property
    def module(self) -> str:
        """Its package, and the name by which a config calls what it brings."""
        return self.name.replace("-", "_")

    @property
    def stem(self) -> str:
        """What its functions begin with: its name, without the kinds that it ends with."""
        parts = self.module.split("_")
        while len(parts) > 1 and parts[-1] in KINDS:
            parts.pop()
        return "_".join(parts)

    @property
    def title(self) -> str:
        """What its classes begin with."""
        return "".join(part.capitalize() for part in self.stem.split("_"))

    @property
    def folders(self) -> list[str]:
        """The templates that it is made of, in order."""
        return ["base", *(f"{kind}_{self.starts[kind]}" if kind in self.starts else kind for kind in self.kinds)]

    def data(self) -> dict[str, Any]:
        """What the templates are filled in with."""
        major, minor = __version__.split(".")[:2]
        needed = dict.fromkeys(one for kind, start in self.starts.items() for one in KINDS[kind].starts[start])
        contract = max(KINDS[kind].contract for kind in self.kinds)
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
            "pinned": {one: metadata.version(one).partition("+")[0] for one in PINNED},
        }


def check_starts(kinds: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """By kind what a package starts from.

    Raises:
        UserError: no kind that is asked for has such a start.
    """
    found: dict[str, str] = {}
    for word in words:
        fitting = [kind for kind in kinds if word in KINDS[kind].starts]
        if not fitting:
            able = [kind for kind, one in KINDS.items() if word in one.starts]
            if able:
                raise UserError(f"--from {word} is for --kind {able[0]}, and not for {', '.join(kinds)}")
            raise UserError(
                f"there is nothing to start from called {word!r}; "
                + nearest(word, {start for one in KINDS.values() for start in one.starts})
            )
        found |= dict.fromkeys(fitting, word)
    return found


def check_name(plugin: NewPlugin) -> None:
    """See that a package may be called so.

    Raises:
        UserError: it may not; the message has a name that will do.
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
    """Whose name it is already; empty: nobody's."""
    from enginehouse.plugin import plugins

    for one in plugins().providers(name=plugin.module):
        if one.record.kind in plugin.kinds and one.plugin.distribution != plugin.name:
            return f"{one.plugin.distribution} offers it, of kind {one.record.kind}"
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
    """Write the package.

    Args:
        plugin: what it is.
        directory: where it goes; made, unless it is there and empty.

    Returns:
        Its files, below `directory`, sorted.

    Raises:
        UserError: the name will not do, or there is something in `directory`.
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
