"""Tool calls in an answer's text, in the form that the model's own chat template writes them in.

Which form that is is found by having the template write a call, and seeing who reads it.
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
"""JSON schemas of tools, as OpenAI's `tools`."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a policy wants to have called.

    Attributes:
        id: names it among all calls of a conversation. Of one that was parsed here, nine letters or digits, which is
            what the strictest templates take.
        name: of the tool.
        arguments: by name.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    def entry(self) -> dict[str, Any]:
        """It as one of OpenAI's `tool_calls`, its arguments as JSON text."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False).encode("utf-8", "replace").decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Call:
        """One of OpenAI's `tool_calls`; its arguments may be JSON text or an object.

        Raises:
            ValueError: it is none, in words.
        """
        return cls(str(entry.get("id") or ""), *_named(entry.get("function", entry)))


class Parsed(NamedTuple):
    """What an answer says.

    Attributes:
        content: its text without the calls; thoughts are part of it.
        calls: in their order.
        problems: what is wrong with each call that is not well-formed, in words for the policy.
    """

    content: str
    calls: list[Call]
    problems: list[str]


class CallFormat:
    """A form of tool calls.

    Args:
        name: as a config may say.
        read: tells content, calls as names and arguments, and problems.
    """

    def __init__(self, name: str, read: Callable[[str], tuple[str, list[Named], list[str]]]):
        self.name, self._read = name, read

    def parse(self, text: str, turn: int = 0) -> Parsed:
        """Tell the calls of an answer from its content. What a thought says, in `<think>`, is no call.

        Args:
            text: an answer with its special tokens, but for what closed it, as `ChatTemplate.text` gives it.
            turn: counts the answers of a conversation, so that the ids of their calls differ.
        """
        content, named, problems = self._read(text)
        return Parsed(content, [Call(_id(turn, number, text), *one) for number, one in enumerate(named)], problems)


def call_format(template: ChatTemplate, name: str = "auto") -> CallFormat:
    """The form in which a model writes calls.

    Args:
        template: of the model, with the tools that may be called.
        name: of a form, of `FORMATS`; `"auto"`: that of the template, or what the tokenizer's `response_template` says.

    Raises:
        UserError: there is no such form, or the template writes calls in none that is known.
    """
    begun = template.begin.rstrip().endswith("<think>")
    if name != "auto":
        if name not in FORMATS:
            raise UserError(f"there is no form of tool calls {name!r}: {nearest(name, ['auto', *FORMATS])}")
        return _form(name, template.tools or (), begun)
    if getattr(template.tokenizer, "response_template", None):
        form = CallFormat("declared", partial(_declared, template))
        if problems := form.parse(".").problems:
            raise UserError(f"the response_template of the model's tokenizer cannot be used: {problems[0]}")
        return form
    for name in FORMATS:
        form = _form(name, template.tools or (), begun)
        if [(call.name, call.arguments) for call in form.parse(template.call(*_PROBE)).calls] == [_PROBE]:
            return form
    raise UserError(
        "the chat template of the model's tokenizer writes tool calls in no form that is known, or not at all. Say one "
        f"that the messages tell the model of ({', '.join(FORMATS)}), or give the tokenizer a chat_template that does"
    )


_PROBE = ("probe", {"key": "value"})
"""What a template is asked to write."""

Named = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""
_Found = tuple[int, int, "Named | str"]
"""Where a call begins and ends in a text, and it, or what is wrong with it."""


def _form(name: str, schemas: Schemas, begun: bool) -> CallFormat:
    """One of `FORMATS`; `begun`: the template has begun a thought where an answer begins."""
    find = FORMATS[name]

    def read(text: str) -> tuple[str, list[Named], list[str]]:
        end = _end_of_thoughts(text) if begun or text.lstrip().startswith("<think>") else 0
        rest, text = [text[:end]], text[end:]
        named: list[Named] = []
        problems: list[str] = []
        end = 0
        for number, (begin, past, found) in enumerate(find(text, schemas), 1):
            rest.append(text[end:begin])
            end = past
            if isinstance(found, str):
                problems.append(f"tool call {number} is not well-formed: {found}")
            else:
                named.append(found)
        content = "".join([*rest, text[end:]])
        return content.strip() if end else content, named, problems

    return CallFormat(name, read)


def _declared(template: ChatTemplate, text: str) -> tuple[str, list[Named], list[str]]:
    """By what the tokenizer declares of the model's answers."""
    try:
        said = template.tokenizer.parse_response(text, prefix=template.begin, tools=template.tools)
        return said.get("content") or "", [_named(one.get("function", one)) for one in said.get("tool_calls") or ()], []
    except Exception as error:  # it raises what it likes
        return text, [], [f"a tool call is not well-formed: {error}"]


def _end_of_thoughts(text: str) -> int:
    """Where the thought ends that an answer begins with. One without an end is all of it."""
    return _past(text, 0, "</think>")


# Forms


def _hermes(text: str, schemas: Schemas) -> Iterator[_Found]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    end = 0
    while (begin := text.find("<tool_call>", end)) >= 0:
        found, end = _enclosed(text, begin + len("<tool_call>"), "</tool_call>")
        yield begin, end, found


def _llama(text: str, schemas: Schemas) -> Iterator[_Found]:
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`; more after `;`."""
    tag = "<|python_tag|>"
    begin = text.find(tag)
    tagged = begin >= 0
    end = begin + len(tag) if tagged else 0
    if not tagged and not re.match(r'\s*\{(?=.*"name")(?=.*"(parameters|arguments)")', text, re.DOTALL):
        return
    begin = max(begin, 0)
    while text[end:].strip():
        try:
            value, end = _value(text, end)
            yield begin, end, _named(value)
        except ValueError as error:
            yield begin, len(text), str(error)
            return
        begin = end
        end += len(text[end:]) - len(text[end:].lstrip(" \n;"))


def _mistral(text: str, schemas: Schemas) -> Iterator[_Found]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}`, again and again."""
    mark = "[TOOL_CALLS]"
    end = 0
    while (begin := text.find(mark, end)) >= 0:
        head = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?").match(text, begin + len(mark))
        try:
            value, end = _value(text, head.end() if head else begin + len(mark))
            for one in value if isinstance(value, list) and not head else [value]:
                yield begin, end, _named({"name": head[1], "arguments": one} if head else one)
                begin = end
        except ValueError as error:
            following = text.find(mark, begin + len(mark))
            end = following if following >= 0 else len(text)
            yield begin, end, str(error)


def _qwen3_coder(text: str, schemas: Schemas) -> Iterator[_Found]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, each on lines of its own."""
    begins = re.compile(r"<tool_call>|<function=")
    end = 0
    while begins.search(text, end):
        begin = begins.search(text, end).start()  # type: ignore[union-attr]
        head = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>").match(text, begin)
        if head is None:
            end = _past(text, begin, "</tool_call>")
            yield begin, end, "<function=NAME> is to follow <tool_call>"
            continue
        arguments, end = {}, head.end()
        while one := re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL).match(text, end):
            arguments[one[1]] = _typed(one[2], _schema_of(schemas, head[1], one[1]))
            end = one.end()
        if tail := re.compile(r"\s*</function>(?:\s*</tool_call>)?").match(text, end):
            end = tail.end()
            yield begin, end, (head[1], arguments)
        else:
            end = _past(text, end, "</tool_call>")
            yield begin, end, "<parameter=NAME>...</parameter> or </function> is missing in it"


FORMATS: dict[str, Callable[[str, Schemas], Iterator[_Found]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "llama": _llama,
    "mistral": _mistral,
}
"""By name, what finds calls in a text."""


def _enclosed(text: str, begin: int, close: str) -> tuple[Named | str, int]:
    """The call whose JSON stands from `begin` to `close`, or to the end; and where it ends."""
    try:
        value, end = _value(text, begin)
        rest = text[end:].lstrip()
        if rest and not rest.startswith(close):
            raise ValueError(f"{close} is to follow its JSON, and {rest[:20]!r} does")
        return _named(value), _past(text, end, close)
    except ValueError as error:
        return str(error), _past(text, begin, close)


def _past(text: str, begin: int, close: str) -> int:
    end = text.find(close, begin)
    return len(text) if end < 0 else end + len(close)


def _value(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that a text has at a place, and where it ends.

    Raises:
        ValueError: there is none, in words.
    """
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    try:
        return json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).raw_decode(text, begin)
    except json.JSONDecodeError as error:
        said = text[error.pos : error.pos + 20]
        where = f"at {said!r}" if said else "at its end"
        raise ValueError(f"it is no JSON: {error.msg} {where}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON that can be read: {error}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(number: str) -> float:
    """A number of JSON's, which may be beyond all that a float holds: `1e999` would be passed on as no JSON."""
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _named(value: Any) -> Named:
    """Name and arguments of a call as an object.

    Raises:
        ValueError: it lacks them, in words.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError('an object with "name" and "arguments" is wanted')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value(arguments, 0)[0]
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {value['name']} are no object")
    return value["name"], dict(arguments or {})


def _schema_of(schemas: Schemas, tool: str, argument: str) -> Mapping[str, Any]:
    functions = (schema.get("function", schema) for schema in schemas)
    parameters = (one.get("parameters") or {} for one in functions if one.get("name") == tool)
    return next(parameters, {}).get("properties", {}).get(argument, {"type": "string"})


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that is written without quotes, as what its schema says it is; as text where it cannot be that."""
    kinds = schema.get("type")
    if "string" in ([kinds] if isinstance(kinds, str) else kinds or ()):
        return text
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _id(turn: int, number: int, text: str) -> str:
    """Nine letters or digits, the same whenever this is said again at this place."""
    return hashlib.blake2b(f"{turn} {number} {text}".encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]
