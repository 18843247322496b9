"""Reads tool calls from the text of an answer, in the format that the model's chat template writes.

To find the format, the template renders a known call. Only the right format reads the same call from that text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from enginehouse.errors import UserError, nearest

if TYPE_CHECKING:
    from enginehouse_environments.dialogue import ChatTemplate

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of tools, in the form of OpenAI's `tools`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str  # unique in a conversation; if parsed here, nine letters or digits, as the strictest templates need
    name: str
    arguments: Mapping[str, Any]

    def entry(self) -> dict[str, Any]:
        """Return the call as an entry of OpenAI's `tool_calls`, with arguments as JSON text."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False).encode("utf-8", "replace").decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class Parsed(NamedTuple):
    """The parts of an answer."""

    content: str  # its text without the calls, but with thoughts
    calls: list[ToolCall]
    problems: list[str]  # one for each malformed call, in words for the policy


class CallFormat:
    """A format of tool calls.

    Args:
        name: name in configs.
        read: splits a text into content, functions and problems.
    """

    def __init__(self, name: str, read: Callable[[str], tuple[str, list[Function], list[str]]]):
        self.name, self._read = name, read

    def parse(self, text: str, turn: int = 0) -> Parsed:
        """Split an answer into content and calls. Text inside `<think>` is never a call.

        Args:
            text: an answer as `ChatTemplate.text` returns it.
            turn: number of the answer in its conversation, which makes the ids of calls unique.
        """
        content, functions, problems = self._read(text)
        calls = [ToolCall(_make_id(turn, number, text), *function) for number, function in enumerate(functions)]
        return Parsed(content, calls, problems)


def find_call_format(template: ChatTemplate, name: str = "auto") -> CallFormat:
    """Return the format in which a model writes calls.

    Args:
        template: the model's template with its tools.
        name: one of `FORMATS`; `"auto"`: the format of the template, or the format that the tokenizer's
            `response_template` declares.

    Raises:
        UserError: there is no such format, or the template writes calls in no known format.
    """
    in_thought = template.begin.rstrip().endswith("<think>")
    if name != "auto":
        if name not in FORMATS:
            raise UserError(f"unknown format of tool calls {name!r}. {nearest(name, ['auto', *FORMATS])}")
        return _make_format(name, template.tools or (), in_thought)
    if getattr(template.tokenizer, "response_template", None):
        form = CallFormat("declared", partial(_read_declared, template))
        if problems := form.parse(".").problems:
            raise UserError(f"the response_template of the model's tokenizer cannot be used: {problems[0]}")
        return form
    for name in FORMATS:
        form = _make_format(name, template.tools or (), in_thought)
        if [(call.name, call.arguments) for call in form.parse(template.call(*_PROBE)).calls] == [_PROBE]:
            return form
    raise UserError(
        "the chat template of the model's tokenizer writes no tool calls, or writes them in an unknown format. Set "
        f"format to one that the messages explain to the model ({', '.join(FORMATS)}), or give the tokenizer a "
        "chat_template that writes calls"
    )


_PROBE = ("probe", {"key": "value"})
"""A call that a template renders, to find its format."""

Function = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""
_Span = tuple[int, int, "Function | str"]
"""Start and end of a call in a text, and its function or a description of its problem."""


def _make_format(name: str, schemas: Schemas, in_thought: bool) -> CallFormat:
    """Return one of `FORMATS`. `in_thought` is true if the template begins answers with a thought."""
    find = FORMATS[name]

    def read(text: str) -> tuple[str, list[Function], list[str]]:
        end = _find_end(text, 0, "</think>") if in_thought or text.lstrip().startswith("<think>") else 0
        parts, text = [text[:end]], text[end:]
        functions: list[Function] = []
        problems: list[str] = []
        end = 0
        for number, (begin, next_end, result) in enumerate(find(text, schemas), 1):
            parts.append(text[end:begin])
            end = next_end
            if isinstance(result, str):
                problems.append(f"tool call {number} is not well-formed: {result}")
            else:
                functions.append(result)
        content = "".join([*parts, text[end:]])
        return content.strip() if end else content, functions, problems

    return CallFormat(name, read)


def _read_declared(template: ChatTemplate, text: str) -> tuple[str, list[Function], list[str]]:
    """Read calls as the tokenizer's `response_template` describes them."""
    try:
        message = template.tokenizer.parse_response(text, prefix=template.begin, tools=template.tools)
        functions = [_read_function(call.get("function", call)) for call in message.get("tool_calls") or ()]
        return message.get("content") or "", functions, []
    except Exception as error:  # it may raise anything
        return text, [], [f"a tool call is not well-formed: {error}"]


# Formats


def _read_hermes(text: str, schemas: Schemas) -> Iterator[_Span]:
    """Read calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    end = 0
    while (begin := text.find("<tool_call>", end)) >= 0:
        function, end = _read_enclosed(text, begin + len("<tool_call>"), "</tool_call>")
        yield begin, end, function


def _read_llama(text: str, schemas: Schemas) -> Iterator[_Span]:
    """Read calls of the form `{"name": ..., "parameters": {...}}`, separated by `;`. They are the whole answer, or they
    follow `<|python_tag|>`."""
    tag = "<|python_tag|>"
    begin = text.find(tag)
    has_tag = begin >= 0
    end = begin + len(tag) if has_tag else 0
    if not has_tag and not re.match(r'\s*\{(?=.*"name")(?=.*"(parameters|arguments)")', text, re.DOTALL):
        return
    begin = max(begin, 0)
    while text[end:].strip():
        try:
            value, end = _read_json(text, end)
            yield begin, end, _read_function(value)
        except ValueError as error:
            yield begin, len(text), str(error)
            return
        begin = end
        end += len(text[end:]) - len(text[end:].lstrip(" \n;"))


def _read_mistral(text: str, schemas: Schemas) -> Iterator[_Span]:
    """Read any number of calls of the form `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or
    `[TOOL_CALLS]name[ARGS]{...}`."""
    mark = "[TOOL_CALLS]"
    end = 0
    while (begin := text.find(mark, end)) >= 0:
        head = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?").match(text, begin + len(mark))
        try:
            value, end = _read_json(text, head.end() if head else begin + len(mark))
            for item in value if isinstance(value, list) and not head else [value]:
                yield begin, end, _read_function({"name": head[1], "arguments": item} if head else item)
                begin = end
        except ValueError as error:
            following = text.find(mark, begin + len(mark))
            end = following if following >= 0 else len(text)
            yield begin, end, str(error)


def _read_qwen3_coder(text: str, schemas: Schemas) -> Iterator[_Span]:
    """Read calls of the form `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with
    each tag on a separate line."""
    begins = re.compile(r"<tool_call>|<function=")
    end = 0
    while begins.search(text, end):
        begin = begins.search(text, end).start()  # type: ignore[union-attr]
        head = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>").match(text, begin)
        if head is None:
            end = _find_end(text, begin, "</tool_call>")
            yield begin, end, "<function=NAME> must follow <tool_call>"
            continue
        arguments, end = {}, head.end()
        while match := re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL).match(text, end):
            arguments[match[1]] = _convert(match[2], _find_schema(schemas, head[1], match[1]))
            end = match.end()
        if tail := re.compile(r"\s*</function>(?:\s*</tool_call>)?").match(text, end):
            end = tail.end()
            yield begin, end, (head[1], arguments)
        else:
            end = _find_end(text, end, "</tool_call>")
            yield begin, end, "<parameter=NAME>...</parameter> or </function> is missing"


FORMATS: dict[str, Callable[[str, Schemas], Iterator[_Span]]] = {
    "hermes": _read_hermes,
    "qwen3_coder": _read_qwen3_coder,
    "llama": _read_llama,
    "mistral": _read_mistral,
}
"""Functions that find calls in a text, by the name of their format."""


def _read_enclosed(text: str, begin: int, close: str) -> tuple[Function | str, int]:
    """Read the JSON from index `begin` to the text `close`, or to the end of the text.

    Returns:
        The function, or a description of its problem; and the index where the call ends.
    """
    try:
        value, end = _read_json(text, begin)
        following = text[end:].lstrip()
        if following and not following.startswith(close):
            raise ValueError(f"{close} must follow the JSON, not {following[:20]!r}")
        return _read_function(value), _find_end(text, end, close)
    except ValueError as error:
        return str(error), _find_end(text, begin, close)


def _find_end(text: str, begin: int, close: str) -> int:
    end = text.find(close, begin)
    return len(text) if end < 0 else end + len(close)


def _read_json(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value at a position in a text, and the position where it ends.

    Raises:
        ValueError: there is no JSON value at the position; the policy gets the message.
    """
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return json.JSONDecoder(parse_constant=_refuse, parse_float=_parse_finite).raw_decode(text, begin)
    except json.JSONDecodeError as error:
        excerpt = text[error.pos : error.pos + 20]
        where = f"at {excerpt!r}" if excerpt else "at its end"
        raise ValueError(f"it is no JSON: {error.msg} {where}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON that can be read: {error}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _parse_finite(number: str) -> float:
    """Parse a JSON number. Reject numbers beyond the range of floats, such as `1e999`, because JSON has no infinity."""
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _read_function(value: Any) -> Function:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: the value has no name or no arguments; the policy gets the message.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError('it must be an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _read_json(arguments, 0)[0]
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {value['name']} are no object")
    return value["name"], dict(arguments or {})


def _find_schema(schemas: Schemas, tool: str, argument: str) -> Mapping[str, Any]:
    functions = (schema.get("function", schema) for schema in schemas)
    parameters = (function.get("parameters") or {} for function in functions if function.get("name") == tool)
    return next(parameters, {}).get("properties", {}).get(argument, {"type": "string"})


def _convert(text: str, schema: Mapping[str, Any]) -> Any:
    """Convert an unquoted value to its schema's type; return it as text if it does not fit."""
    kinds = schema.get("type")
    if "string" in ([kinds] if isinstance(kinds, str) else kinds or ()):
        return text
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        return text


def _make_id(turn: int, number: int, text: str) -> str:
    """Return nine letters or digits, always the same for the same call at the same position."""
    return hashlib.blake2b(f"{turn} {number} {text}".encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]
