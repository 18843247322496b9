"""`enginehouse keys`: lists every key of a config file, and writes `docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, get_args

import click

if TYPE_CHECKING:
    from enginehouse.plugin.options_schema import Option
    from enginehouse_rl.config.schema import Section

COLUMNS = ("key", "type", "default", "description")


class ReferenceSection(NamedTuple):
    """A top-level section of a config, as the reference shows it."""

    name: str
    summary: str
    keys: list[Option]


@click.command()
@click.argument("part", required=False)
@click.option("--sft", "command", flag_value="sft", help="Keys of `enginehouse sft`.")
@click.option("--dpo", "command", flag_value="dpo", help="Keys of `enginehouse dpo`.")
@click.option("--rm", "command", flag_value="rm", help="Keys of `enginehouse rm`.")
@click.option("--markdown", is_flag=True, help="Print the keys of all commands as a Markdown page.")
def keys(part: str | None, command: str | None, markdown: bool) -> None:
    """List the config keys with types, bounds and defaults. PART lists only the keys that begin with it.

    \b
    enginehouse keys
    enginehouse keys rollout.sampling

    Options of an engine (engine.options): enginehouse plugins show NAME.
    """
    from enginehouse_rl.config.schema import SCHEMAS

    if markdown and (part or command):
        raise click.UsageError("--markdown writes a page of all keys: leave out PART and --sft, --dpo, --rm")
    if markdown:
        click.echo(_write_page(), nl=False)
        return
    sections = _list_sections(SCHEMAS[command or "train"])
    _print_table(sections if part is None else _choose(sections, part))


def _list_sections(schema: type[Section]) -> list[ReferenceSection]:
    from enginehouse.plugin.options_schema import describe_options, section_type

    sections = []
    for name, field in schema.model_fields.items():
        section, prefix = section_type(field.annotation), f"{name}."
        if section is None:  # several sections by name
            section, prefix = get_args(field.annotation)[1], f"{name}.NAME."
        summary = (section.__doc__ or "").split("\n")[0]
        sections.append(ReferenceSection(name, summary, describe_options(section, prefix)))
    return sections


def _choose(sections: list[ReferenceSection], prefix: str) -> list[ReferenceSection]:
    """Return the sections that contain the key `prefix` or keys inside it, with only these keys."""
    from enginehouse.errors import ConfigError, nearest

    chosen = []
    for section in sections:
        keys = [key for key in section.keys if f"{key.name}.".startswith(f"{prefix.rstrip('.')}.")]
        chosen += [section._replace(keys=keys)] if keys else []
    if not chosen:
        names = {key.name.rpartition(".")[0] for section in sections for key in section.keys}
        raise ConfigError(f"no key begins with {prefix!r}. {nearest(prefix, names)}. `enginehouse keys` lists all keys")
    return chosen


def _print_table(sections: list[ReferenceSection]) -> None:
    from rich.table import Table

    from enginehouse.cli.console import escape, terminal

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    for section in sections:
        table.add_row(f"[bold]{section.name}[/]", "", "", f"[bold]{escape(section.summary)}[/]")
        for key in section.keys:
            table.add_row(*(escape(cell) for cell in key))
    terminal().print(table)


def _write_page() -> str:
    from enginehouse_rl.config.schema import SCHEMAS

    rl = _list_sections(SCHEMAS["train"])
    lines = [
        "# Config keys",
        "",
        "Any key of a config can be overridden on the command line, for example by `train.steps=20`. Options of an",
        "engine, under `engine.options`, are listed by `enginehouse plugins show NAME`.",
        "`enginehouse keys --markdown` writes this page.",
        "",
        "## enginehouse train",
        *_write_tables(rl),
    ]
    for command, schema in SCHEMAS.items():
        if command != "train":
            lines += ["", f"## enginehouse {command}", *_write_tables(_list_sections(schema), but=rl)]
    return "\n".join(lines) + "\n"


def _write_tables(sections: list[ReferenceSection], but: list[ReferenceSection] | None = None) -> Iterator[str]:
    """Write a table for each section. A section that is also in `but` gets only its heading and a reference to it."""
    for section in sections:
        yield from ("", f"### {section.name}", "")
        if but and section in but:
            yield "As above."
            continue
        yield from (section.summary, "", f"| {' | '.join(COLUMNS)} |", "|---|---|---|---|")
        for key in section.keys:
            cells = (f"`{key.name}`", *key[1:])
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
