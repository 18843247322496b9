"""The page of the contract, docs/contract.md: made of the promised names, their docstrings and the suites' checks."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import griffe

from enginehouse.engines import train
from enginehouse.plugin import capabilities
from enginehouse_testing.checks import checks_of
from tools.contract.surface import HOOKS, ROOT, Name, is_function, surface

PAGE = ROOT / "docs" / "contract.md"
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
"""What has a suite, and the kind of record that `enginehouse certify` knows it by."""
HEAD = """\
# The contract

`make contract` wrote this page, from the source. It is contract **{version}**: all that a plugin may count on. How to
write one: [plugins](plugins/index.md).

- **What is promised** is on this page, under the address it has here. What else can be imported is not promised.
- **A plugin says what it was written for**: `enginehouse_protocol = "{version}"`. It runs where the major version is
  the same and the minor version is not older.
- **A minor version adds.** Nothing of this page goes, or comes to mean something else, within a major version: a
  plugin that was built against 1.0 is kept as a wheel in `tests/contract/wheels/`, and a test runs it.
- **A major version may drop** what a minor version before it has warned of, by the name to use instead
  ([publishing](plugins/publishing.md#deprecation)).
- **A check that comes later** than the contract that a plugin says is a warning in its certificate, and fails nothing.
- A field, an argument or a hook that comes later has a default, or may be left out.

"since" is the contract version a name came in. `tests/contract/surface.json` has the same for programs, and a test
fails where the source and it differ.
"""
TITLES = {
    HOOKS: "Hooks",
    "enginehouse.plugin": "Records, and what else a plugin's module imports",
    "enginehouse.plugin.capabilities": "Capabilities",
    "enginehouse.engines": "Engines and transports",
    "enginehouse.engines.options": "Options of engines",
    "enginehouse.engines.environment": "Environments",
    "enginehouse.engines.transcript": "Transcripts of environments",
    "enginehouse.engines.tracker": "Trackers",
    "enginehouse.data": "Batches",
    "enginehouse.weights": "Weights: names and checksums",
    "enginehouse.errors": "Errors",
    "enginehouse.quiet": "Quiet",
    "enginehouse_rl.advantages.groups": "Advantages: rewards by group",
    "enginehouse_rl.advantages.tokens": "Advantages: rewards and credits of tokens",
    "enginehouse_rl.losses.aggregate": "Losses: sums and what divides them",
    "enginehouse_rl.losses.policy": "Losses of policies, made of an equation",
}


def page(snapshot: Mapping[str, Any]) -> str:
    """The page's text."""
    today = surface()
    since = {address: entry["since"] for address, entry in snapshot["names"].items()}
    modules: dict[str, list[str]] = {}
    for address, name in today.items():
        if not name.owner:
            modules.setdefault(address.rpartition(".")[0], []).append(address)
    first = [module for module in TITLES if module in modules]
    lines = [HEAD.format(version=snapshot["contract"])]
    for module in [*first, *sorted(set(modules) - set(first))]:
        lines.append(f"\n## {TITLES.get(module, f'`{module}`')}\n")
        lines.append(f"Module `{module}`.\n" if module in TITLES else "")
        if module == "enginehouse.engines":
            lines.append((train.__doc__ or "").partition("\n\n")[2])  # the conventions of tokens
        for address in modules[module]:
            lines += _capability(address, since) if module.endswith(".capabilities") else _entry(address, since)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _entry(address: str, since: Mapping[str, str]) -> Iterator[str]:
    """A class, a function or a constant."""
    today = surface()
    name, short = today[address], address.rpartition(".")[2]
    if not name.says.startswith("class("):
        code = f"{short}{name.says}" if "(" in name.says[:7] else f"{short}: {name.says}".replace(":  =", " =")
        code = f"async {short}{name.says.removeprefix('async ')}" if name.says.startswith("async ") else code
        yield f"### `{short}`\n\n`{code}` (since {since[address]})\n"
        yield from _said(name)
        return
    yield f"### `{short}`\n"
    bases = name.says.removeprefix("class(").removesuffix(")")
    yield f"{'A protocol' if 'Protocol' in bases else 'A class'}, since {since[address]}" + (
        f"; all of {', '.join(f'`{base}`' for base in bases.split(', '))} too.\n" if _listed(bases) else ".\n"
    )
    described = yield from _said(name)
    members = {
        one: member
        for one, member in today.items()
        if member.owner == address and not _inherited(one.rpartition(".")[2], member, bases) and not _fields(one)
    }
    fields = {one: member for one, member in members.items() if not is_function(member.says)}
    if fields:
        yield from ("| | type and default | since | |", "|---|---|---|---|")
        for one, member in fields.items():
            own = one.rpartition(".")[2]
            text = member.text.split("\n\n")[0] or described.get(own, "")
            yield _row(f"`{own}`", f"`{member.says.removeprefix('property: ')}`", since[one], text)
        yield ""
    for one, member in members.items():
        if is_function(member.says):
            own, says = one.rpartition(".")[2], member.says
            code = f"async {own}{says.removeprefix('async ')}" if says.startswith("async ") else f"{own}{says}"
            yield f"**`{code}`** (since {since[one]})\n"
            yield from _said(member)
    if address in CHECKED:
        yield from _checks(CHECKED[address])


def _capability(address: str, since: Mapping[str, str]) -> Iterator[str]:
    short = address.rpartition(".")[2]
    value = getattr(capabilities, short)
    kinds = [kind for kind, names in capabilities.BY_KIND.items() if value in names]
    of = [f"`{one.name}` ({kind})" for kind in kinds for one in checks_of(kind) if value in (one.capability, one.also)]
    yield f"### `{short}`\n\n`{value!r}`, of: {', '.join(kinds)} (since {since[address]})\n"
    yield from _said(surface()[address])
    yield f"Checks: {', '.join(of)}.\n" if of else ""


def _checks(kind: str) -> Iterator[str]:
    """What the suite of a protocol looks at."""
    yield f"What `enginehouse certify NAME --kind {kind}` checks:\n"
    yield from ("| check | where it declares | since | what must be so |", "|---|---|---|---|")
    for check in checks_of(kind):
        declared = [f"`{one}`" for one in (check.capability, check.also) if one not in ("", "protocol")]
        yield _row(f"`{check.name}`", " and ".join(declared), check.since, check.claim)
    yield ""


def _said(name: Name) -> Any:
    """A docstring as Markdown; returns what it says of attributes, by name."""
    described: dict[str, str] = {}
    docstring = griffe.Docstring(inspect.cleandoc(name.text))
    for section in docstring.parse("google", warnings=False, returns_named_value=False):
        if section.kind is griffe.DocstringSectionKind.text:
            yield re.sub(r"\n(?=[^\n*|-])", "\n", section.value).strip() + "\n"
        elif section.kind is griffe.DocstringSectionKind.attributes:
            described |= {one.name: one.description for one in section.value}
        elif section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.raises):
            raises = section.kind is griffe.DocstringSectionKind.raises
            for one in section.value:
                what = f"Raises `{one.annotation}`" if raises else f"`{one.name}`"
                yield f"- {what}: {_flat(one.description)}"
            yield ""
        elif section.kind is griffe.DocstringSectionKind.returns:
            yield f"- Returns: {_flat(' '.join(one.description for one in section.value))}\n"
    return described


def _listed(bases: str) -> bool:
    """Whether a class stands on one of the page."""
    shorts = {address.rpartition(".")[2] for address, name in surface().items() if not name.owner}
    return any(base in shorts for base in bases.split(", "))


def _inherited(short: str, member: Name, bases: str) -> bool:
    """Whether a class on the page that this one stands on has the same."""
    classes = [address for address in surface() if address.rpartition(".")[2] in bases.split(", ")]
    return any((one := surface().get(f"{base}.{short}")) and one.says == member.says for base in classes)


def _fields(address: str) -> bool:
    """Whether that is the `__init__` of a dataclass, which takes the fields that the page has."""
    owner, _, short = address.rpartition(".")
    return short == "__init__" and any(one.startswith("dataclass") for one in surface()[owner].decorators)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _row(*cells: str) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", _flat(cell)) for cell in cells) + " |"
