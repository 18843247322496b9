"""Config keys and backends' options as rows of a table, read from their pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


class Option(NamedTuple):
    """One option: dotted name, type with its bounds, default as YAML would show it, description."""

    name: str
    type: str
    default: str
    description: str


def described_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """Describe every option of a model, nested models with dotted names."""
    return list(_options(model, prefix))


def _options(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    from enginehouse.config.load import section_type, several_sections_type

    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        if several := several_sections_type(field.annotation):
            inner, place = several
            how = "sections by name" if place == "NAME" else "list of sections"
            yield Option(prefix + name, how, "unset", field.description or "")
            yield from _options(inner, f"{prefix}{name}.{place}.")
            continue
        if section is None:
            yield Option(prefix + name, _type(field), _default(field), field.description or "")
            continue
        if not field.is_required() and field.default is None:  # it may be left out
            yield Option(prefix + name, "section | None", _default(field), field.description or "")
        yield from _options(section, f"{prefix}{name}.")


def _type(field: FieldInfo) -> str:
    from enginehouse.config.arguments import bounds_of, type_words

    return ", ".join([type_words(field.annotation), *bounds_of(field.metadata)])


def _default(field: FieldInfo) -> str:
    from enginehouse.config.arguments import REQUIRED, default_words

    return REQUIRED if field.is_required() else default_words(field.get_default(call_default_factory=True))
