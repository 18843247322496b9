"""Writes a config with comments that explain each key and its value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

WIDTH = 100


def write_commented(
    values: Mapping[str, Any],
    schema: type[BaseModel],
    hints: Mapping[str, str],
    options: Mapping[str, type[BaseModel]] | None = None,
) -> str:
    """Return a config as text, in its schema's order, with a comment above each key: its description and a hint.

    Args:
        values: sections as mappings, by name.
        schema: schema of the config.
        hints: reasons for values and advice, by dotted key.
        options: options classes of backends, by dotted key.
    """
    return "\n".join(_write_lines(values, schema, (), hints, options or {}, set())).lstrip("\n") + "\n"


def _write_lines(
    values: Mapping[str, Any],
    schema: type[BaseModel],
    above: tuple[str, ...],
    hints: Mapping[str, str],
    options: Mapping[str, type[BaseModel]],
    described: set[str],
) -> Iterator[str]:
    from enginehouse.plugin.options_schema import section_type
    from enginehouse_rl.config.document import dump

    indent = "  " * len(above)
    for name, field in schema.model_fields.items():
        if name not in values:
            continue
        key = ".".join((*above, name))
        inner = options.get(key) or section_type(field.annotation)
        description = field.description or ((inner.__doc__ or "").split("\n")[0] if inner else "")
        comment = [description.rstrip(".")] if description not in described else []  # only at the first of two engines
        described.add(description)
        if not above:
            yield ""
        sentences = ". ".join(filter(None, [*comment, hints.get(key, "")]))
        yield from textwrap.wrap(
            sentences, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_on_hyphens=False
        )
        value = values[name]
        if inner is not None and isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _write_lines(value, inner, (*above, name), hints, options, described)
        else:
            yield textwrap.indent(dump({name: value}).rstrip("\n"), indent)
