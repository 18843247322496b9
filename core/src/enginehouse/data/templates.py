"""Chat templates: what they are given, in the form that they take, and what they write around an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from enginehouse.data.messages import join_parts
from enginehouse.jsontext import decode_json

_ASKED, _SAID = {"role": "user", "content": "a"}, "enginehouse"
_ANSWERED = [_ASKED, {"role": "assistant", "content": _SAID}]
_TOOL = {
    "type": "function",
    "function": {"name": "a", "description": "a", "parameters": {"type": "object", "properties": {}}},
}


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    begin: bool = False,
    tools: Sequence[Any] | None = None,
    **named: Any,
) -> str:
    """Render a chat by a tokenizer's template, in the form of those in use that the template takes.

    A content may be a text or parts of text. Arguments of calls are objects, as transformers has them; a template that
    refuses these gets OpenAI's form, their JSON text.

    Args:
        tokenizer: with the template.
        messages: of the chat.
        begin: whether the template begins an answer at the end.
        tools: JSON schemas of what may be called.
        named: given to the template by name, as `enable_thinking`.

    Raises:
        Exception: whatever the template raises.
    """
    asked = [_in_parts(message) for message in messages] if _wants_parts(tokenizer) else list(messages)
    given = {**named, "tools": tools, "add_generation_prompt": begin}
    write = functools.partial(tokenizer.apply_chat_template, tokenize=False, **given)
    try:
        return write([_with_arguments(message, _as_object) for message in asked])
    except Exception:
        if any(message.get("tool_calls") for message in asked):
            with suppress(Exception):
                return write([_with_arguments(message, _as_text) for message in asked])
        raise


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed(call, change) for call in calls]} if calls else dict(message)


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    """A call whose arguments have another form, wherever they stand."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        with suppress(ValueError):
            read = decode_json(arguments)
            return read if isinstance(read, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _written(tokenizer: Any, content: Any) -> str:
    """A user's turn; empty where the template refuses it."""
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # templates raise what they like
        return ""


@functools.lru_cache(maxsize=8)
def _forms(tokenizer: Any) -> tuple[str, str]:
    """What a template writes of a text, and of the same in parts."""
    return _written(tokenizer, _SAID), _written(tokenizer, [{"type": "text", "text": _SAID}])


def takes_parts(tokenizer: Any) -> bool:
    """Return whether a template writes a content of parts as it writes the same text, or parts alone."""
    text, parts = _forms(tokenizer)
    return _SAID in parts and (text == parts or _SAID not in text)


def _wants_parts(tokenizer: Any) -> bool:
    """Whether a template loses a content that is a text, as those of models that see do."""
    text, parts = _forms(tokenizer)
    return _SAID in parts and _SAID not in text


@functools.lru_cache(maxsize=8)
def writes_calls(tokenizer: Any) -> bool:
    """Return whether a template writes what an assistant calls, as far as can be told."""
    answer = {"role": "assistant", "content": _SAID}
    call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {"a": "a"}}}
    try:
        without, calling = (
            [render_chat(tokenizer, [_ASKED, {**answer, **calls}], tools=tools) for tools in ([_TOOL], None)]
            for calls in ({}, {"tool_calls": [call]})
        )
        return without != calling
    except Exception:  # templates raise what they like
        return True


def find_begun_turn(tokenizer: Any, prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what a chat template wrote of an answer at the end of a prompt: `<think>` and a line break, say.

    It is the model's turn that a reward judges, and this is its beginning; "" where there is none, or no telling.

    Args:
        tokenizer: with the template.
        prompt: as the template rendered it.
        messages: of which it did.
    """
    head, asking = _around_answers(tokenizer) if getattr(tokenizer, "chat_template", None) else ("", "")
    if not head.strip():
        return ""
    if asking and prompt.endswith(asking):
        return asking.partition(head)[2]
    last = join_parts(messages[-1]).get("content")
    tail = prompt.rpartition(last.strip())[2] if isinstance(last, str) and last.strip() else ""
    return tail.partition(head)[2]


@functools.lru_cache(maxsize=8)
def _around_answers(tokenizer: Any) -> tuple[str, str]:
    """What the template writes before an assistant's words, thoughts apart, and what where it asks for an answer."""
    try:  # of an earlier turn: some templates write an empty thought into the last
        before, whole = render_chat(tokenizer, [_ASKED]), render_chat(tokenizer, [*_ANSWERED, _ASKED])
        asking = render_chat(tokenizer, [_ASKED], True)
    except Exception:  # templates raise what they like
        return "", ""
    head = whole.partition(_SAID)[0].removeprefix(before).partition("<think>")[0]
    return head, asking.removeprefix(before) if asking.startswith(before) else ""


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token that the chat template writes after what an assistant says; None where there is none."""
    return _end_written_by(tokenizer) if getattr(tokenizer, "chat_template", None) else None


@functools.lru_cache(maxsize=8)
def _end_written_by(tokenizer: Any) -> int | None:
    try:
        _, said, closing = render_chat(tokenizer, _ANSWERED).rpartition(_SAID)
    except Exception:  # templates raise what they like
        return None
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"] if said else []
    return next((one for one in ids if one in special), None)


def text_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end what a model writes: the end of a turn, and the tokenizer's end of sequence."""
    ends = (turn_end(tokenizer), getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(end for end in ends if end is not None))
