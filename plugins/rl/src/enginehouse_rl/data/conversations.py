"""Opens demonstrations. In a column of whole chats, the response begins with the assistant's first turn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from enginehouse.data.messages import are_messages, read_text_or_chat, shorten
from enginehouse_rl.data.files import RowProblems, Table, open_table


def open_demonstrations(
    path: str | Path | Iterable[str | Path],
    prompt: str,
    response: str,
    tools: str | None = None,
    conversation: str | None = None,
    seconds: float | None = None,
) -> Table:
    """Open files of demonstrations, with a prompt and a response in each row.

    Args:
        tools: the column with the tools that the model may call, if there is one.
        conversation: the column with prompt and response as one chat. `Table.needed` then contains prompts and
            responses as two columns.
        seconds: the time limit for reading, as for `open_table`.

    Raises:
        DataError: as for `open_table`; or a conversation has no turn of the assistant, or begins with such a turn.
    """
    needed = [prompt, response] if conversation is None else [conversation]
    table = open_table(path, [*needed, tools or None], seconds)
    if conversation is not None:
        problems = RowProblems()
        pairs = [
            _split(chat, f"{table.where(row)}: column {conversation!r}", problems)
            for row, chat in enumerate(table.needed[conversation])
        ]
        problems.raise_any()
        table.needed[prompt], table.needed[response] = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return table


def _split(chat: Any, where: str, problems: RowProblems) -> tuple[list[Any], list[Any]]:
    """Return the messages before the assistant's first turn, and the remaining messages."""
    messages = read_text_or_chat(chat)
    if not are_messages(messages):
        problems.add(f"{where} must be a chat, a list of messages with roles, not {shorten(chat)}")
        return [], []
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        problems.add(
            f"{where} must be a chat in which the assistant answers another role; its roles are {', '.join(roles[:5])}"
        )
        return [], []
    first = roles.index("assistant")
    return messages[:first], messages[first:]
