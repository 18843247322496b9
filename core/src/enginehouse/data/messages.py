"""What a row says, in one form whatever file it comes from: a text, or chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.errors import DataError
from enginehouse.jsontext import decode_json

_LIST = re.compile(r"\s*\[")
"""The beginning of a list in JSON."""


def read_text_or_chat(value: Any) -> Any:
    """Return a prompt or a response in its one form: a string, or a list of messages.

    JSON text of chat messages is read: Arrow has no type for a chat of any form. In what is no text a key without a
    value counts as absent, at any depth: Arrow gives every object the keys that any has. What is neither a text nor a
    chat comes back as it is, for the caller to refuse.
    """
    if not isinstance(value, str):
        return drop_none(value)
    if not _LIST.match(value):
        return value
    try:
        messages = decode_json(value)
    except ValueError:
        return value
    return messages if are_messages(messages) else value


def drop_none(value: Any) -> Any:
    """Return a value without the keys that have none, at any depth."""
    if isinstance(value, dict):
        return {key: drop_none(one) for key, one in value.items() if one is not None}
    return [drop_none(one) for one in value] if isinstance(value, list) else value


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of chat messages, with a role each."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def join_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a string: parts of text are joined.

    Raises:
        DataError: a part is no text.
    """
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise DataError(
                f"a part of the content of a turn of the {message['role']} is {shorten(part)}, and models are "
                'given text alone here: give parts of the form {"type": "text", "text": ...}'
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def check_content(message: Mapping[str, Any]) -> None:
    """Refuse a message that says nothing, or nothing that a template could write.

    Raises:
        DataError: it has neither content nor calls of tools, or its content is an object. A tool may give one.
    """
    if isinstance(message.get("content"), Mapping) and message["role"] != "tool":
        raise DataError(
            f"the content of a turn of the {message['role']} is an object, expected a text or a list of parts: "
            f"{shorten(message['content'])}"
        )
    if not any(message.get(key) for key in ("tool_calls", "reasoning_content")) and "content" not in message:
        raise DataError(f"a turn of the {message['role']} has no 'content': {shorten(message)}")


def shorten(value: Any) -> str:
    """Return a value as messages show it: cut."""
    text = repr(value)
    return text[:80] + "..." if len(text) > 80 else text
