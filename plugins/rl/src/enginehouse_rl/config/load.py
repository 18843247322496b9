"""Reads a config: one YAML file and dotted overrides. Errors name the key, its line or override, and the solution.

Relative paths in a config (`model.path`, `data.*`, `run.directory`) are relative to the current directory, as in a
shell, and not to the directory of the config.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from enginehouse.errors import ConfigError, describe_os_error, did_you_mean, join_problems, nearest
from enginehouse.plugin.options_schema import section_type, several_sections_type
from enginehouse_rl.config.counting import count
from enginehouse_rl.config.document import dump, parse
from enginehouse_rl.config.migration import answer_key, answer_value
from enginehouse_rl.config.schema import SCHEMAS, Config

C = TypeVar("C", bound=BaseModel)

Key = tuple[str, ...]

_HYDRA = re.compile(r"\+\+?|~")
_HYDRA_KEYS = {"+": "+key=value", "++": "++key=value", "~": "~key"}
"""The prefixes of Hydra's overrides, and the form in which `migration.md` lists each."""

MISTYPED = 0.85
"""Smallest similarity (0 to 1) to a key of enginehouse at which an unknown key counts as mistyped. A less similar key,
such as `trainer`, may belong to another project."""


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[C] = Config) -> C:  # type: ignore[assignment]
    """Read a config file and apply overrides.

    Args:
        path: YAML file; plain scalars follow YAML 1.2 (`enginehouse_rl.config.document`).
        overrides: `"dotted.key=value"`, with the value as YAML: `"rollout.engine.backend=vllm"`, `"train.steps=10"`,
            `"rollout.sampling.stop=[a, b]"`. A mapping replaces the mapping in the file. Later overrides win.
        schema: one of `enginehouse_rl.config.schema.SCHEMAS`.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value is wrong, in the file or in an override. One
            message lists all problems of keys and values.
    """
    path = Path(path)
    data, lines = _read(path)
    sources = _Sources({key: f"line {number}" for key, number in lines.items()})
    if problems := _override(data, overrides, sources, schema):
        raise ConfigError(_suggest_command(path, schema) + join_problems(problems, f"the config {path}"))
    return schema.model_validate(data)


def make_config(data: dict[str, Any], overrides: Sequence[str] = (), schema: type[C] = Config) -> C:  # type: ignore[assignment]
    """Make a config from plain data and overrides, as `load_config` does from a file.

    Raises:
        ConfigError: the data or an override is wrong.
    """
    if problems := _override(data, overrides, _Sources({}), schema):
        raise ConfigError(join_problems(problems, "the config"))
    return schema.model_validate(data)


def _override(data: dict[str, Any], overrides: Sequence[str], sources: _Sources, schema: type[BaseModel]) -> list[str]:
    """Apply overrides to `data` in place, and check the result. Return the problems of both steps."""
    problems = [problem for override in overrides for problem in _apply_override(data, override, sources)]
    return problems + check(schema, data, sources)[1]


def is_overridden(key: str, overrides: Sequence[str]) -> bool:
    """True if an override sets a key, or the section that contains it."""
    keys = (key, key.rpartition(".")[0])
    return any(override.partition("=")[0].strip() in keys for override in overrides)


def dump_config(config: BaseModel) -> str:
    """Write a config, including defaults, as YAML that loads as an equal config."""
    return dump(config.model_dump())


@dataclass
class _Sources:
    """The line or the override in which each key was written, for messages."""

    lines: dict[Key, str]
    overridden: dict[Key, str] = field(default_factory=dict)

    def locate(self, key: Key) -> str:
        """Describe where `key` was written, and each override of a key inside it. If there is neither, describe where
        the section of `key` was written."""
        places = [text for place in (self.lines, self.overridden) if (text := place.get(key))]
        places += [text for inner, text in self.overridden.items() if _is_inside(inner, key)]
        for length in range(len(key) - 1, 0, -1):
            if places:
                break
            places = [text for place in (self.overridden, self.lines) if (text := place.get(key[:length]))][:1]
        return ", ".join(places)

    def replace(self, key: Key, override: str) -> None:
        """Record that `key`, with everything inside it, comes from an override."""
        for place in (self.lines, self.overridden):
            for replaced in [written for written in place if written == key or _is_inside(written, key)]:
                del place[replaced]
        self.overridden[key] = f"in the override {override!r}"


def _is_inside(key: Key, section: Key) -> bool:
    return len(key) > len(section) and key[: len(section)] == section


def _read(path: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} not found{_name_nearest(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, not a config file{_name_nearest(path / 'config.yaml')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {describe_os_error(error)}") from error
    data, lines = parse(text, str(path))
    if data is None:
        return {}, lines
    if not isinstance(data, dict):
        value = _describe_value(data)
        raise ConfigError(f"{path} must contain a mapping of sections (model, data, ...), not {value}")
    return data, lines


def _suggest_command(path: Path, schema: type[BaseModel]) -> str:
    """Name the commands that accept the file if overrides are ignored. Empty if `schema` accepts the file, or if no
    command accepts it."""
    data, _ = _read(path)
    fits = [command for command, candidate in SCHEMAS.items() if not check(candidate, data)[1]]
    if not fits or any(SCHEMAS[command] is schema for command in fits):
        return ""
    names = " or ".join(f"`enginehouse {command}`" for command in fits)
    checks = " or ".join(f"`enginehouse plan{f' --{command}' * (command != 'train')}`" for command in fits)
    return f"This looks like a config for {names}. Check it with {checks}.\n"


def _name_nearest(path: Path) -> str:
    """Return a hint about a missing file: the file with the nearest name, or the directory if it is missing too. Empty
    if no file has a similar name."""
    folder = path.parent
    if not folder.is_dir():
        return f": its directory {folder} does not exist either (the current directory is {Path.cwd()})"
    question = did_you_mean(path.name, [file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml")])
    return f". {question}" if question else ""


def _apply_override(data: dict[str, Any], override: str, sources: _Sources) -> list[str]:
    """Apply as much as possible of one override to `data` in place; return its problems."""
    dotted, equals, text = override.partition("=")
    prefixed = _HYDRA.match(dotted.strip())
    problems = [f"the override {override!r}: {answer_key(_HYDRA_KEYS[prefixed[0]])}"] if prefixed else []
    if prefixed and prefixed[0] == "~":
        return problems
    key = tuple(dotted.strip().lstrip("+").split("."))
    if not equals or not all(key):
        return [f"the override {override!r} is not of the form dotted.key=value, as in train.steps=10"]
    try:
        value = _parse_value(text, override)
    except ConfigError as error:
        return [str(error)]
    section = data
    for depth, part in enumerate(key[:-1], start=1):
        inner = section.get(part)
        if inner is None:  # absent, or a section whose keys are all commented out
            inner = section[part] = {}
        if not isinstance(inner, dict):
            section_name = ".".join(key[:depth])
            return [
                *problems,
                f"the override {override!r} sets a key inside {section_name}, but {section_name} is no section: it "
                f"holds {_describe_value(inner)}",
            ]
        section = inner
    section[key[-1]] = value
    sources.replace(key, override)
    return problems


def _parse_value(text: str, override: str) -> Any:
    """Parse an override's YAML. `#` and `&` are text here, because a command line has neither comments nor anchors."""
    plain = text.strip()
    if plain.startswith(("#", "&")) or (" #" in plain and not plain.startswith(("'", '"', "[", "{"))):
        return plain
    return parse(text, f"the value of the override {override!r}")[0]


def check(
    schema: type[C],
    data: Mapping[str, Any],
    sources: _Sources | None = None,
    prefix: str = "",
    instead: Callable[[str], str] | None = None,
) -> tuple[C | None, list[str]]:
    """Validate `data` against a pydantic model, and describe each problem.

    Args:
        prefix: the dotted key of `data`, for messages: `"actor.engine.options"`.
        instead: returns advice on a key that `schema` lacks; an empty text is no advice. The function gets the dotted
            key without the prefix.

    Returns:
        The model and no messages, or None and one message for each problem.
    """
    try:
        return schema.model_validate(data), []
    except ValidationError as error:
        return None, [
            problem for detail in error.errors() for problem in _describe(detail, schema, sources, prefix, instead)
        ]


def _describe(
    detail: Mapping[str, Any],
    schema: type[BaseModel],
    sources: _Sources | None,
    prefix: str,
    instead: Callable[[str], str] | None,
) -> list[str]:
    """Return the messages for one error of pydantic. An unknown section of another project gets one message for each of
    its keys; any other error gets a single message."""
    key: Key = tuple(str(part) for part in detail["loc"])
    name, place, kind = _join(prefix, detail["loc"]), _locate(key, sources), detail["type"]
    if kind == "extra_forbidden":
        advice = _suggest_namesake(key, schema, prefix) or (instead(".".join(key)) if instead else "")
        fields = _find_section(schema, key[:-1]).model_fields
        mistyped = difflib.get_close_matches(key[-1], fields, n=1, cutoff=MISTYPED)
        answers = {} if advice or mistyped else answer_keys(key, detail["input"], prefix)
        if any(answers.values()):
            return [
                f"unknown key {_join(prefix, path)!r}{_locate(path, sources)}: "
                f"{answer or 'enginehouse has no similar key'}"
                for path, answer in answers.items()
            ]
        hint = advice or nearest(key[-1], fields)
        return [f"unknown key {name!r}{place}{'.' if hint[0].isupper() else ':'} {hint}"]
    if kind == "missing":
        description = _describe_field(schema, key)
        return [f"missing key {name!r}{f': {description}' if description else ''}"]
    return [describe_error(detail, f"{name}{place}")]


def describe_error(detail: Mapping[str, Any], what: str) -> str:
    """Describe the wrong value of the key `what`, from one of the errors of a pydantic `ValidationError`."""
    expectation = _EXPECTED.get(detail["type"])
    if expectation is None:
        message = detail["msg"].removeprefix("Value error, ")
        return f"{what}: {message}, got {_describe_value(detail['input'])}"
    context = detail.get("ctx") or {}
    hint = answer_value(detail["input"]) if isinstance(detail["input"], str) else ""
    message = f"{what}: expected {expectation.format_map(context)}, got {_describe_value(detail['input'])}"
    if hint:
        return f"{message}; {hint}"
    if detail["type"] in ("literal_error", "enum"):
        hint = did_you_mean(str(detail["input"]), re.findall(r"'(.*?)'", context["expected"]))
    return f"{message}. {hint}" if hint else message


_NUMBER = "a number"
_WHOLE = "a whole number"
_MAPPING = "a mapping of keys to values"
_EXPECTED = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "at least {min_length} values",
    "too_long": "at most {max_length} values",
}
"""The expected values, by pydantic's error types."""


def _locate(key: Key, sources: _Sources | None) -> str:
    """Return the place where a key was written, in parentheses; empty if unknown."""
    place = sources.locate(key) if sources else ""
    return f" ({place})" if place else ""


def _join(prefix: str, location: Sequence[str | int]) -> str:
    name = prefix
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def _describe_value(value: Any) -> str:
    """Return a value with its type, in the terms of YAML."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {value[:80]!r}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, list(value)[:8]))}" if value else "an empty mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {count(len(value), 'value')}" if value else "an empty list"
    return repr(value)[:80]


def _suggest_namesake(key: Key, schema: type[BaseModel], prefix: str) -> str:
    """Suggest a key with the same name that is deeper in the section, or elsewhere; empty if there is none."""
    namesakes = [path for path in keys(schema) if path[-1] == key[-1]]
    inside = [path for path in namesakes if path[: len(key) - 1] == key[:-1]]
    elsewhere = [".".join(path) for path in (inside or namesakes)]
    if elsewhere:
        return f"Did you mean {' or '.join(repr(_join(prefix, [path])) for path in elsewhere)}?"
    return ""


def answer_keys(key: Key, value: Any, prefix: str = "") -> dict[Key, str]:
    """Return the answer of `answer_key` to another project's key or, if the key is a section, to each key inside it."""
    if isinstance(value, dict) and value:
        return {
            path: answer
            for inner in value
            for path, answer in answer_keys((*key, str(inner)), value[inner], prefix).items()
        }
    return {key: answer_key(_join(prefix, key))}


def keys(schema: type[BaseModel], above: Key = ()) -> Iterator[Key]:
    """Yield the path of every option of a config class. Sections are not yielded, but the options inside them are."""
    for name, described in schema.model_fields.items():
        inner = section_type(described.annotation)
        if inner:
            yield from keys(inner, (*above, name))
        elif several := several_sections_type(described.annotation):
            yield from keys(several[0], (*above, name, several[1]))
        else:
            yield (*above, name)


def _find_section(schema: type[BaseModel], key: Key) -> type[BaseModel]:
    parts = iter(key)
    for part in parts:
        annotation = schema.model_fields[part].annotation
        inner = section_type(annotation)
        if inner is None:
            inner, _ = several_sections_type(annotation) or (None, "")
            next(parts, None)
        assert inner is not None, f"{part} of {schema.__name__} is not a section"
        schema = inner
    return schema


def _describe_field(schema: type[BaseModel], key: Key) -> str:
    described = _find_section(schema, key[:-1]).model_fields[key[-1]]
    inner = section_type(described.annotation)
    return described.description or ((inner.__doc__ or "").split("\n")[0] if inner else "")
