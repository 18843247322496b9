"""The pages of docs/contract/, made from the promised names, their docstrings and the suites' checks."""

import inspect
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import griffe

from enginehouse.engines import train
from enginehouse.plugin import capabilities
from enginehouse_testing.checks import checks_of
from tools.contract.surface import HOOKS, ROOT, Name, is_function, surface

FOLDER = ROOT / "docs" / "contract"
CHECKED = {
    "enginehouse.engines.TrainEngine": "train",
    "enginehouse.engines.RolloutEngine": "rollout",
    "enginehouse.engines.WeightTransport": "transport",
    "enginehouse.engines.environment.Environment": "environment",
    "enginehouse.engines.tracker.Tracker": "tracker",
    "enginehouse.plugin.Advantage": "advantage",
    "enginehouse.plugin.Loss": "loss",
    "enginehouse.plugin.Reward": "reward",
}
"""Names that have a suite, and the kind by which `enginehouse certify` knows that suite."""
OLD = "enginehouse.rl."
"""Beginning of the import paths that moved to `enginehouse_rl`. A table lists these names without descriptions."""
INDEX = """\
# Plugin contract

The contract lists everything that a plugin may rely on. This is contract **{version}**. `make contract` writes these
pages from the source. To learn how to write a plugin, begin with [Plugins](../plugins/index.md).

- **Promised** is every name on these pages, at the address given here. Anything else that can be imported may change.
  This includes a name that a description mentions but that no page lists, such as `ALIGNMENT`.
- **A plugin states its contract** in `enginehouse_protocol`: the oldest that has all it uses, so the latest "since" of
  the names that it uses. It runs on an enginehouse whose contract has the same major version and the same or a newer
  minor version. A plugin that uses names of {version} states `enginehouse_protocol = "{version}"`.
- **A minor version only adds.** Within a major version no name disappears or changes its meaning. A test runs a plugin
  that was built against 1.0; its wheel is in `tests/contract/wheels/`.
- **A major version may drop** a name if an earlier minor version warned about it and named its replacement
  ([deprecation](../plugins/publishing.md#deprecation)).
- **New checks do not break old plugins.** If a check is newer than the contract that the plugin states, its failure is
  a warning in the certificate.
- New fields, arguments and hooks have a default or are optional.

"since" is the contract version that introduced a name. `tests/contract/surface.json` has the same facts for programs.
A test fails if it differs from the source.
"""


class Section(NamedTuple):
    """A heading on a page, and the names below it.

    Attributes:
        title: Heading.
        module: Module that plugins import the names from.
        defined: Patterns (as in a shell) for the import paths at which the names are defined. A name belongs to the
            first section that fits.
    """

    title: str
    module: str
    defined: tuple[str, ...] = ("*",)


class Page(NamedTuple):
    """A page of the contract; `about` is a sentence on its content."""

    title: str
    about: str
    sections: tuple[Section, ...]


ENGINES = "enginehouse.engines"
PAGES = {
    "hooks": Page(
        "Hooks",
        "Functions that a plugin's module defines under `@hookimpl`. See [an observer](../plugins/observer.md).",
        (
            Section("Registration", HOOKS, ("*.enginehouse_register_*", "*.enginehouse_commands")),
            Section("Moments of a run", HOOKS),
        ),
    ),
    "records": Page(
        "Records and capabilities",
        "The records that the `enginehouse_register_*` hooks pass on, and the capabilities that they declare.",
        (
            Section("Records, and what else a plugin's module imports", "enginehouse.plugin"),
            Section("Capabilities", "enginehouse.plugin.capabilities"),
        ),
    ),
    "training-engines": Page(
        "Training engines",
        "The protocol of a training engine. See [a training engine](../plugins/training-engine.md).",
        (
            Section("Engines and losses", ENGINES, ("*.train.*",)),
            Section("Models, meshes and processes", ENGINES, ("*.model.*", "*.mesh.*")),
        ),
    ),
    "rollout-engines": Page(
        "Rollout engines",
        "The protocol of a rollout engine. See [a rollout engine](../plugins/rollout-engine.md).",
        (Section("Engines and requests", ENGINES, ("*.rollout.*", "*.requests.*")),),
    ),
    "weights": Page(
        "Weights and transports",
        "How weights reach a rollout engine. See [a transport](../plugins/transport.md).",
        (
            Section("Transports and updates", ENGINES, ("*.weights.*",)),
            Section("Names and checksums", "enginehouse.weights"),
        ),
    ),
    "options": Page(
        "Engine options, memory and sleep",
        "Options that users set under `engine`, and helpers that an engine of either kind may call.",
        (
            Section("Options", f"{ENGINES}.options"),
            Section("Memory estimates", f"{ENGINES}.memory"),
            Section("Progress", f"{ENGINES}.progress"),
            Section("Sleep", f"{ENGINES}.sleep"),
            Section("Tensor storages", f"{ENGINES}.storages"),
        ),
    ),
    "environments": Page(
        "Environments and trackers",
        "See [an environment](../plugins/environment.md) and [a tracker](../plugins/tracker.md).",
        (
            Section("Environments", f"{ENGINES}.environment"),
            Section("Transcripts", f"{ENGINES}.transcript"),
            Section("Trackers", f"{ENGINES}.tracker"),
        ),
    ),
    "data": Page(
        "Batches, advantages, losses and errors",
        "The data of a step. See [an advantage](../plugins/advantage.md) and [a loss](../plugins/loss.md).",
        (
            Section("Batches", "enginehouse.data"),
            Section("Advantages: statistics of groups", "enginehouse_rl.advantages.groups"),
            Section("Advantages: rewards of tokens", "enginehouse_rl.advantages.tokens"),
            Section("Losses: aggregation", "enginehouse_rl.losses.aggregate"),
            Section("Losses: policy losses from an equation", "enginehouse_rl.losses.policy"),
            Section("Errors", "enginehouse.errors"),
            Section("Quiet", "enginehouse.quiet"),
        ),
    ),
    "modeling": Page(
        "PyTorch modeling",
        "Parts that the training engines of the distribution `enginehouse-torch` share, for engines built on PyTorch.",
        tuple(
            Section(title, f"enginehouse_torch.modeling.{module}")
            for module, title in {
                "token_model": "Token models",
                "loading": "Loading",
                "stored": "Stored form",
                "export": "Export",
                "checkpoint": "Checkpoints",
                "files": "Checkpoint files",
                "finite": "Finite weights",
                "schedule": "Learning rates",
                "ranks": "Ranks",
                "sizes": "Sizes",
                "memory": "GPU memory",
                "offloading": "Offloading",
            }.items()
        ),
    ),
}
"""Pages by file name, without `.md`."""


def pages(snapshot: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of every page, by its file."""
    since = {address: entry["since"] for address, entry in snapshot["names"].items()}
    version, placed = snapshot["contract"], _placed()
    texts = {FOLDER / "index.md": "\n".join(_index(version, placed, since))}
    for file, page in PAGES.items():
        lines = [
            f"# {page.title}\n",
            f"{page.about}\n\nThis page is part of [the contract](index.md), version {version}.\n",
        ]
        for section in page.sections:
            lines.append(f"\n## {section.title}\n\nModule `{section.module}`.\n")
            if section == PAGES["training-engines"].sections[0]:
                lines.append((train.__doc__ or "").partition("\n\n")[2])  # the conventions of tokens
            for address in placed[section]:
                of_capability = section.module == capabilities.__name__
                lines += _capability(address, since) if of_capability else _entry(address, since)
        texts[FOLDER / f"{file}.md"] = "\n".join(lines)
    return {path: re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n" for path, text in texts.items()}


def _placed() -> dict[Section, list[str]]:
    """Return the import paths of the names in each section, in the order of the source."""
    placed: dict[Section, list[str]] = {section: [] for page in PAGES.values() for section in page.sections}
    for address, name in surface().items():
        if name.owner or address.startswith(OLD):
            continue
        module = address.rpartition(".")[0]
        fitting = (
            section
            for section in placed
            if section.module == module and any(fnmatchcase(name.defined, pattern) for pattern in section.defined)
        )
        if (section := next(fitting, None)) is None:
            raise LookupError(f"{address} is on no page of the contract: give its module a section in {__name__}.PAGES")
        placed[section].append(address)
    return placed


def _index(version: str, placed: Mapping[Section, list[str]], since: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the first page: the rules, and all names."""
    yield INDEX.format(version=version)
    yield "\n## Pages\n"
    links: dict[str, str] = {}
    for file, page in PAGES.items():
        yield f"- [{page.title}]({file}.md)"
        names: dict[str, list[str]] = {}
        for section in page.sections:
            for address in placed[section]:
                links[address] = f"[`{_short(address)}`]({file}.md#{_short(address).lower()})"
                names.setdefault(section.module, []).append(links[address])
        yield from (f"    - `{module}`: {', '.join(linked)}" for module, linked in names.items())
    yield "\n## Old addresses\n\nThese addresses still work, with a warning, until contract 2.0."
    yield 'Import the name from the new address. "since" is the contract version that introduced the old address.\n'
    yield from ("| old address | since | new address |", "|---|---|---|")
    for address, name in surface().items():
        if not name.owner and address.startswith(OLD):
            new = name.defined
            yield _row(f"`{address}`", since[address], f"{links[new]} in `{new.rpartition('.')[0]}`")


def _short(address: str) -> str:
    return address.rpartition(".")[2]


def _entry(address: str, since: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a class, a function or a constant."""
    name, short = surface()[address], _short(address)
    if not name.says.startswith("class("):
        yield f"### `{short}`\n\n`{_code(short, name.says)}` (since {since[address]})\n"
        yield from _described(name)
        return
    yield f"### `{short}`\n"
    bases = name.says.removeprefix("class(").removesuffix(")")
    yield f"{'A protocol' if 'Protocol' in bases else 'A class'}, since {since[address]}." + (
        f" It inherits from {', '.join(f'`{base}`' for base in bases.split(', '))}.\n" if _listed(bases) else "\n"
    )
    described = yield from _described(name)
    members = {
        key: member
        for key, member in surface().items()
        if member.owner == address and not _inherited(_short(key), member, bases) and not _sets_fields(key)
    }
    fields = {key: member for key, member in members.items() if not is_function(member.says)}
    if fields:
        yield from ("| | type and default | since | |", "|---|---|---|---|")
        for key, member in fields.items():
            text = member.text.split("\n\n")[0] or described.get(_short(key), "")
            yield _row(f"`{_short(key)}`", f"`{member.says.removeprefix('property: ')}`", since[key], text)
        yield ""
    for key, member in members.items():
        if is_function(member.says):
            yield f"**`{_code(_short(key), member.says)}`** (since {since[key]})\n"
            yield from _described(member)
    if address in CHECKED:
        yield from _checks(CHECKED[address])


def _code(short: str, says: str) -> str:
    """Return a signature, or a constant with its type and value, as the source writes it."""
    if says.startswith("async "):
        return f"async {short}{says.removeprefix('async ')}"
    return f"{short}{says}" if is_function(says) else f"{short}: {says}".replace(": =", " =")


def _capability(address: str, since: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a capability, with the checks that it switches on."""
    value = getattr(capabilities, _short(address))
    kinds = [kind for kind, names in capabilities.BY_KIND.items() if value in names]
    checks = [
        f"`{check.name}` ({kind})"
        for kind in kinds
        for check in checks_of(kind)
        if value in (check.capability, check.also)
    ]
    yield f"### `{_short(address)}`\n\n`{value!r}`, declared by: {', '.join(kinds)} (since {since[address]})\n"
    yield from _described(surface()[address])
    yield f"Checks: {', '.join(checks)}.\n" if checks else ""


def _checks(kind: str) -> Iterator[str]:
    """Yield the table of a suite's checks."""
    yield f"`enginehouse certify NAME --kind {kind}` checks:\n"
    yield from ("| check | if it declares | since | requirement |", "|---|---|---|---|")
    for check in checks_of(kind):
        declared = [f"`{value}`" for value in (check.capability, check.also) if value not in ("", "protocol")]
        yield _row(f"`{check.name}`", " and ".join(declared), check.since, check.claim)
    yield ""


def _described(name: Name) -> Any:
    """Yield a docstring as Markdown. Return its descriptions of attributes, by name."""
    described: dict[str, str] = {}
    docstring = griffe.Docstring(inspect.cleandoc(name.text))
    for section in docstring.parse("google", warnings=False, returns_named_value=False):
        if section.kind is griffe.DocstringSectionKind.text:
            yield re.sub(r"\n(?=[^\n*|-])", "\n", section.value).strip() + "\n"
        elif section.kind is griffe.DocstringSectionKind.attributes:
            described |= {attribute.name: attribute.description for attribute in section.value}
        elif section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.raises):
            raises = section.kind is griffe.DocstringSectionKind.raises
            for entry in section.value:
                subject = f"Raises `{entry.annotation}`" if raises else f"`{entry.name}`"
                yield f"- {subject}: {_flat(entry.description)}"
            yield ""
        elif section.kind is griffe.DocstringSectionKind.returns:
            yield f"- Returns: {_flat(' '.join(entry.description for entry in section.value))}\n"
    return described


def _listed(bases: str) -> bool:
    """True if one of the bases is a promised name."""
    shorts = {_short(address) for address, name in surface().items() if not name.owner}
    return any(base in shorts for base in bases.split(", "))


def _inherited(short: str, member: Name, bases: str) -> bool:
    """True if a promised base class has the same member."""
    classes = [address for address in surface() if _short(address) in bases.split(", ")]
    return any((same := surface().get(f"{base}.{short}")) and same.says == member.says for base in classes)


def _sets_fields(address: str) -> bool:
    """True for the `__init__` of a dataclass, which only sets the listed fields."""
    owner, _, short = address.rpartition(".")
    return short == "__init__" and any(decorator.startswith("dataclass") for decorator in surface()[owner].decorators)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _row(*cells: str) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", _flat(cell)) for cell in cells) + " |"
