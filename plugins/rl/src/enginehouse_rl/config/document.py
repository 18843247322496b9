"""Reads YAML together with the line of every key, and writes YAML that reads back as an equal value.

Plain scalars follow YAML 1.2, and not YAML 1.1 as in PyYAML: `1e-5` is a number; `on`, `yes` and `off` are strings;
`0777` is seven hundred and seventy-seven; `12:30` and `2026-01-01` are strings.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from enginehouse.errors import ConfigError

_SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2. It rejects a key that occurs twice in one mapping."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def construct_yaml_int(self, node: Any) -> int:
        return int(self.construct_scalar(node))  # PyYAML would read 010 as eight

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} occurs twice, first in line {seen[key.value]}",
                    problem_mark=key.start_mark,
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes any string that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: _Dumper, value: str) -> yaml.Node:
    """Write a string. Escape it if it has a rare line break, because YAML readers treat these differently."""
    style = '"' if any(character in value for character in _RARE_BREAKS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_RARE_BREAKS = "\x85\u2028\u2029\ufeff"
_Dumper.add_representer(str, _represent_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def parse(text: str, source: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read one YAML document.

    Args:
        text: the document; an empty document has the value None.
        source: the document's name in errors: a path, or an override.

    Returns:
        The value, and the line number of every key, counted from 1. The line numbers are in a mapping by the path of
        the key from the top.

    Raises:
        ConfigError: the YAML is malformed; the message shows the line.
    """
    lines: dict[tuple[str, ...], int] = {}
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(_describe_error(error, text, source)) from error
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _collect_lines(node, (), lines)
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(_describe_error(error, text, source)) from error
    finally:
        loader.dispose()


def dump(value: Any) -> str:
    """Write mappings, lists and scalars as YAML that `parse` reads back as an equal value, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


def _collect_lines(node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[(*path, key.value)] = key.start_mark.line + 1
                _collect_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _collect_lines(value, (*path, str(index)), lines)


def _describe_error(error: yaml.YAMLError, text: str, source: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return f"{source} is not valid YAML: {problem}"
    lines = text.splitlines()
    shown = f"\n    {lines[mark.line].strip()}" if mark.line < len(lines) else ""
    return f"{source}, line {mark.line + 1}, is not valid YAML: {problem}{shown}"
