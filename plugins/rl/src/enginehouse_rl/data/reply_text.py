"""Writes the replies to prompts as text: the chat template writes chat messages, and strings stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginehouse.data.messages import are_messages, shorten
from enginehouse.data.templates import turn_end
from enginehouse.errors import DataError
from enginehouse_rl.data.files import describe_kind
from enginehouse_rl.data.prompt_text import PromptWriter, read_tools


@dataclass(frozen=True, slots=True)
class Reply:
    """The text that follows a prompt.

    Attributes:
        others: the start and the end, as character positions, of each part that the assistant did not write.
        is_plain: true if the row has the reply as a string, and not as chat messages.
    """

    text: str
    others: tuple[tuple[int, int], ...] = ()
    is_plain: bool = False


class ReplyWriter:
    """Writes the replies to prompts; `prompts` writes the prompts themselves."""

    def __init__(self, prompts: PromptWriter) -> None:
        self._prompts = prompts

    @functools.cached_property
    def turn_end(self) -> int | None:
        """The token that ends a reply to a prompt which the template wrote."""
        end = turn_end(self._prompts.tokenizer)
        return self._prompts.tokenizer.eos_token_id if end is None else end

    def write(self, prompt: Any, text: str, reply: Any, tools: Any) -> Reply:
        """Return a string unchanged, and chat messages as the template writes them after the prompt's `text`.

        Raises:
            DataError: the template rejects the messages, or the assistant's words cannot be told apart from others.
        """
        if isinstance(reply, str):
            return Reply(reply, is_plain=True)
        self._check_messages(prompt, reply)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        schemas = read_tools(tools)

        def write(number: int, begin: bool) -> str:
            try:
                return self._prompts.apply_template([*messages, *reply[:number]], begin, schemas)
            except DataError as error:
                raise DataError(f"cannot be rendered: {error}") from error

        whole = write(len(reply), False)
        if not whole.startswith(text) or len(whole) == len(text):
            raise DataError(
                f"does not continue the prompt: the prompt ends with {text[-30:]!r}, but the chat template writes this "
                "end differently if this reply follows. Make a separate row of each turn of the assistant, and write "
                "the turn as a string, which follows the prompt unchanged"
            )
        other_parts: list[tuple[int, int]] = []
        start = len(text)
        for number in range(1, len(reply)):
            if reply[number]["role"] != "assistant":
                continue
            back = next(back for back in range(number, 0, -1) if reply[back - 1]["role"] == "assistant")
            before, after = self._share_turns(write(back, False), whole, start), write(number, True)
            if not before or not whole.startswith(after):
                raise DataError(
                    "has turns that the chat template writes differently once others follow (for example, without "
                    "earlier thoughts): make a separate row of each turn of the assistant"
                )
            other_parts.append((len(before) - len(text), len(after) - len(text)))
            start = len(after)
        return Reply(whole.removeprefix(text), tuple(other_parts))

    def _check_messages(self, prompt: Any, reply: Sequence[Any] | Any) -> None:
        """Check that a reply is a list of messages that begins and ends with the assistant.

        Raises:
            DataError: it is something else.
        """
        if not isinstance(reply, list):
            raise DataError(f"is {describe_kind(reply)}, expected a string or chat messages")
        if self._prompts.is_plain(prompt):
            raise DataError("is a list of chat messages, but the prompt is a string: give both in the same form")
        if not are_messages(reply):
            raise DataError(f"is {shorten(reply)}; expected a string, or chat messages with 'role' and 'content'")
        for message, does in ((reply[0], "begins"), (reply[-1], "ends")):
            if message["role"] != "assistant":
                raise DataError(
                    f"{does} with a turn of the {message['role']}, but must begin and end with a turn of the "
                    "assistant, because the model learns only these: earlier turns belong to the prompt"
                )

    def _share_turns(self, before: str, whole: str, start: int) -> str:
        """Return the text that a chat `before` shares with a longer chat `whole`, up to the end of the last turn of
        `before`, which begins at `start`.

        A template may write more after the end of a chat, such as `<|endoftext|>`. Returns "" if the turn differs.
        """
        if not whole.startswith(before) and self.turn_end is not None:
            turn, end, _ = before.rpartition(self._prompts.tokenizer.decode([self.turn_end]))
            before = turn + end if len(turn) >= start else ""
        return before if whole.startswith(before) else ""
