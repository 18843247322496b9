"""Converts prompts and responses of all data files to one form: text, or chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.errors import DataError
from enginehouse.jsontext import decode_json

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Chat role of each speaker name of the ShareGPT format."""
_LIST = re.compile(r"\s*\[")
"""The beginning of a JSON list."""


def read_text_or_chat(value: Any) -> Any:
    """Return a prompt or response as a string or a list of chat messages.

    JSON text of chat messages is parsed, because Arrow has no type for arbitrary chats. In other values, a key with
    None counts as absent at any depth, because Arrow gives every object the keys of all objects. Messages of ShareGPT,
    `{"from": "human", "value": ...}`, get a role and a content. A value that is neither text nor chat is returned
    unchanged, for the caller to reject.
    """
    if not isinstance(value, str):
        return _with_roles(drop_none(value))
    if not _LIST.match(value):
        return value
    try:
        messages = _with_roles(decode_json(value))
    except ValueError:
        return value
    return messages if are_messages(messages) else value


def _with_roles(value: Any) -> Any:
    """Return messages of ShareGPT as chat messages, and any other value unchanged."""
    if not isinstance(value, list) or not value:
        return value
    for message in value:
        if not isinstance(message, dict) or "role" in message or "value" not in message:
            return value
        if message.get("from") not in SPEAKERS:
            return value
    return [{"role": SPEAKERS[message["from"]], "content": message["value"]} for message in value]


def drop_none(value: Any) -> Any:
    """Return a copy of a value without those object keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


def are_messages(value: Any) -> bool:
    """Return True if a value is a list of chat messages, each with a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a string. Text parts are joined. Raises `DataError` if a part is not text."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise DataError(
                f"the content of a message with role {message['role']!r} has the part {shorten(part)}, but only text "
                'parts are supported: give parts of the form {"type": "text", "text": ...}'
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def check_content(message: Mapping[str, Any]) -> None:
    """Raise a `DataError` for an empty message, or for content that no template can render.

    A message without content needs tool calls or reasoning. The content of a tool's message may be an object.
    """
    if isinstance(message.get("content"), Mapping) and message["role"] != "tool":
        raise DataError(
            f"the content of a message with role {message['role']!r} must be a text or a list of parts, not an object: "
            f"{shorten(message['content'])}"
        )
    if not any(message.get(key) for key in ("tool_calls", "reasoning_content")) and "content" not in message:
        raise DataError(f"a message with role {message['role']!r} has no 'content': {shorten(message)}")


def shorten(value: Any) -> str:
    """Return the start of a value's `repr`, for messages."""
    text = repr(value)
    return text[:80] + "..." if len(text) > 80 else text
