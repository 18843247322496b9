"""Renders chats in the form that a chat template accepts, and finds the text that the template adds to an answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from enginehouse.data.messages import join_parts
from enginehouse.jsontext import decode_json

_QUESTION, _TEXT = {"role": "user", "content": "a"}, "enginehouse"
_DIALOGUE = [_QUESTION, {"role": "assistant", "content": _TEXT}]
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
    """Render a chat with a tokenizer's template, in the form that the template accepts.

    The content of a message may be a text or a list of text parts. The template gets the arguments of tool calls as
    objects, as in transformers. A template that rejects objects gets them as JSON text, as in OpenAI's API.

    Args:
        begin: True: end the text with the beginning of an assistant's turn, which a model then continues.
        tools: JSON schemas of the tools.
        named: further arguments of the template, such as `enable_thinking`.

    Raises:
        Exception: any error that the template raises.
    """
    chat = [_in_parts(message) for message in messages] if _wants_parts(tokenizer) else list(messages)
    arguments = {**named, "tools": tools, "add_generation_prompt": begin}
    write = functools.partial(tokenizer.apply_chat_template, tokenize=False, **arguments)
    try:
        return write([_change_arguments(message, _as_object) for message in chat])
    except Exception:
        if any(message.get("tool_calls") for message in chat):
            with suppress(Exception):
                return write([_change_arguments(message, _as_text) for message in chat])
        raise


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _change_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_change_call(call, change) for call in calls]} if calls else dict(message)


def _change_call(call: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tool call with changed arguments. They are in the call, or in its `function`."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _change_call(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        with suppress(ValueError):
            decoded = decode_json(arguments)
            return decoded if isinstance(decoded, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _write_turn(tokenizer: Any, content: Any) -> str:
    """Return a user's turn as the template renders it; an empty text if the template rejects the turn."""
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # templates raise what they like
        return ""


@functools.lru_cache(maxsize=8)
def _forms(tokenizer: Any) -> tuple[str, str]:
    """Return the template's output for a text, and for the same text as a list of parts."""
    return _write_turn(tokenizer, _TEXT), _write_turn(tokenizer, [{"type": "text", "text": _TEXT}])


def takes_parts(tokenizer: Any) -> bool:
    """Return True if a template renders content parts like plain text, or accepts only parts."""
    text, parts = _forms(tokenizer)
    return _TEXT in parts and (text == parts or _TEXT not in text)


def _wants_parts(tokenizer: Any) -> bool:
    """Return True if a template omits plain text and renders only content parts, as templates of vision models do."""
    text, parts = _forms(tokenizer)
    return _TEXT in parts and _TEXT not in text


@functools.lru_cache(maxsize=8)
def writes_calls(tokenizer: Any) -> bool:
    """Return True if a template writes an assistant's tool calls, or if that cannot be determined."""
    answer = {"role": "assistant", "content": _TEXT}
    call = {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {"a": "a"}}}
    try:
        plain, calling = (
            [render_chat(tokenizer, [_QUESTION, {**answer, **calls}], tools=tools) for tools in ([_TOOL], None)]
            for calls in ({}, {"tool_calls": [call]})
        )
        return plain != calling
    except Exception:  # templates raise what they like
        return True


def find_begun_turn(tokenizer: Any, prompt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the start of an answer that a chat template wrote at the end of a prompt, such as `<think>` and a newline.

    The model's turn, which a reward judges, begins with this start. The result is empty if the template wrote no start,
    or if the start cannot be determined.
    """
    head, request = _around_answers(tokenizer) if getattr(tokenizer, "chat_template", None) else ("", "")
    if not head.strip():
        return ""
    if request and prompt.endswith(request):
        return request.partition(head)[2]
    last = join_parts(messages[-1]).get("content")
    tail = prompt.rpartition(last.strip())[2] if isinstance(last, str) and last.strip() else ""
    return tail.partition(head)[2]


@functools.lru_cache(maxsize=8)
def _around_answers(tokenizer: Any) -> tuple[str, str]:
    """Return two texts of the template: the text before an assistant's words, without a thinking block, and the text
    that asks the model for an answer. Both are empty if the template fails."""
    try:  # in an earlier turn, because some templates write an empty thought into the last one
        question, chat = render_chat(tokenizer, [_QUESTION]), render_chat(tokenizer, [*_DIALOGUE, _QUESTION])
        request = render_chat(tokenizer, [_QUESTION], True)
    except Exception:  # templates raise what they like
        return "", ""
    head = chat.partition(_TEXT)[0].removeprefix(question).partition("<think>")[0]
    return head, request.removeprefix(question) if request.startswith(question) else ""


def turn_end(tokenizer: Any) -> int | None:
    """Return the id of the special token that the chat template writes after an assistant's turn; None if there is no
    such token."""
    return _find_end(tokenizer) if getattr(tokenizer, "chat_template", None) else None


@functools.lru_cache(maxsize=8)
def _find_end(tokenizer: Any) -> int | None:
    try:
        _, text, closing = render_chat(tokenizer, _DIALOGUE).rpartition(_TEXT)
    except Exception:  # templates raise what they like
        return None
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"] if text else []
    return next((token_id for token_id in ids if token_id in special), None)


def text_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that end a model's text: the end of a turn, and the tokenizer's end of sequence."""
    ends = (turn_end(tokenizer), getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(end for end in ends if end is not None))
