"""Config keys and options of engines as table rows, read from their pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from enginehouse.plugin.arguments import REQUIRED, bounds_of, default_words, type_words


class Option(NamedTuple):
    """One option: dotted name, type with its bounds, default as YAML shows it, and description."""

    name: str
    type: str
    default: str
    description: str


def describe_options(model: type[BaseModel], prefix: str = "") -> list[Option]:
    """Describe every option of a model. Options of nested models get dotted names."""
    return list(_options(model, prefix))


def _options(model: type[BaseModel], prefix: str) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        if several := several_sections_type(field.annotation):
            inner, place = several
            kind = "sections by name" if place == "NAME" else "list of sections"
            yield Option(prefix + name, kind, "unset", field.description or "")
            yield from _options(inner, f"{prefix}{name}.{place}.")
            continue
        if section is None:
            kind = ", ".join([type_words(field.annotation), *bounds_of(field.metadata)])
            yield Option(prefix + name, kind, _default(field), field.description or "")
            continue
        if not field.is_required() and field.default is None:  # the section is optional
            yield Option(prefix + name, "section or null", _default(field), field.description or "")
        yield from _options(section, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    return REQUIRED if field.is_required() else default_words(field.get_default(call_default_factory=True))


def section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the config class of a section, also of an optional section (`Section | None`); None for an option."""
    if get_origin(annotation) is list:
        return None
    inner = [part for part in get_args(annotation) if part is not type(None)]
    kind = inner[0] if len(inner) == 1 else annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def several_sections_type(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """Return the config class of named (`dict[str, Section]`) or listed (`list[Section]`) sections; None for other
    types. The second value is the placeholder for a section's name or number in a dotted key: `"NAME"` or `"N"`."""
    place = {dict: "NAME", list: "N"}.get(get_origin(annotation))
    inner = section_type(get_args(annotation)[-1]) if place else None
    return None if inner is None or place is None else (inner, place)
