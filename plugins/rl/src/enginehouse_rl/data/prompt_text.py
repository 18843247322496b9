"""Writes prompts as text: the chat template writes chats, and plain strings stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from enginehouse.data.messages import are_messages, check_content, drop_none, join_parts, read_text_or_chat, shorten
from enginehouse.data.templates import render_chat, takes_parts, writes_calls
from enginehouse.errors import DataError
from enginehouse.jsontext import decode_json
from enginehouse_rl.data.files import RowProblems, describe_kind

Where = Callable[[int], str]
"""Function that returns the name of row `i` for messages."""


class _NoTemplate(DataError):
    """There is no chat template to apply. All rows that need a template share this problem."""


class PromptWriter:
    """Writes prompts as text. Takes the arguments of `enginehouse_rl.data.rendering.Renderer`."""

    def __init__(self, tokenizer: Any, chat_template: bool | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.system = system
        self._writes_tools: bool | None = None

    def is_plain(self, prompt: Any) -> bool:
        """True if a prompt is a string to which no chat template is applied."""
        return isinstance(prompt, str) and not self.chat_template

    def prepare_chat(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return chat messages in the format that the template accepts, with the system message of the config.

        Raises:
            DataError: a message is empty, or has content that the template does not accept.
        """
        chat = [dict(message) for message in messages]
        for message in chat:
            check_content(message)
        if any(message.get("tool_calls") for message in chat) and not writes_calls(self.tokenizer):
            raise DataError(
                "a turn calls tools, but the chat template of the model's tokenizer leaves tool calls out: use a model "
                "whose template writes them, or write the calls into the content"
            )
        if any(isinstance(message.get("content"), list) for message in chat):
            texts = [join_parts(message) for message in chat]  # raises for a picture, of which only a mark would remain
            chat = chat if takes_parts(self.tokenizer) else texts
        if self.system is None or chat[0]["role"] in ("system", "developer"):
            return chat
        return [{"role": "system", "content": self.system}, *chat]

    def read_messages(self, prompt: Any) -> list[dict[str, Any]] | None:
        """Return the messages from which the template renders a prompt; None for a plain string."""
        content = read_text_or_chat(prompt)
        if isinstance(content, str):
            return self.prepare_chat([{"role": "user", "content": content}]) if self.chat_template else None
        return self.prepare_chat(content)

    def apply_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str:
        """Return the text that the chat template writes for messages.

        Raises:
            DataError: the template rejects the messages.
        """
        chat = self.prepare_chat(messages)
        try:
            return render_chat(self.tokenizer, chat, add_generation_prompt, tools)
        except Exception as error:  # templates raise errors of any kind
            added = ", the first of which is data.system" if len(chat) > len(messages) else ""
            raise DataError(f"the chat template rejects the messages{added}: {error}") from error

    def render_row(self, prompt: Any, tools: Any, row: int, where: Where, problems: RowProblems) -> str | None:
        """Return the prompt of a row as text. If the row has a problem, add it to `problems` and return None."""
        try:
            return self._render(prompt, read_tools(tools))
        except _NoTemplate as error:
            problems.add_alike(where(row), str(error))
        except DataError as error:
            problems.add(f"{where(row)}: {error}")
        return None

    def _render(self, prompt: Any, tools: list[Any] | None) -> str:
        if self.is_plain(prompt):
            if self.system is not None or tools or self._has_arguments:
                raise _NoTemplate(
                    f"the prompt is a string, to which no chat template is applied, but {self._name_cause(tools)}: set "
                    "data.chat_template=true, or give chat messages"
                )
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not are_messages(messages):
            raise DataError(
                f"the prompt is {shorten(prompt)} ({describe_kind(prompt)}); expected a string, or a list of chat "
                "messages with 'role' and 'content'"
            )
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with a turn of the assistant, but the model is to write that turn: leave it out; "
                "for `enginehouse sft` it belongs in the column of responses (data.response)"
            )
        if self.chat_template is False:
            raise _NoTemplate(
                "the prompt is a list of chat messages, but data.chat_template is false: "
                "unset it, or give plain strings"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            reason = (
                "data.chat_template is true" if isinstance(prompt, str) else "the prompt is a list of chat messages"
            )
            raise _NoTemplate(
                f"{reason}, but the model's tokenizer has no chat template: "
                "give plain strings, or a model whose tokenizer has one"
            )
        text = self.apply_template(messages, True, tools)
        if tools and self._writes_tools is None:
            self._writes_tools = text != self.apply_template(messages, True)
        if tools and not self._writes_tools:
            raise _NoTemplate(
                "the row has tools (data.tools), but the chat template of the model's tokenizer writes no tools: use a "
                "model whose template writes them, or unset data.tools"
            )
        return text

    def _name_cause(self, tools: list[Any] | None) -> str:
        """Name the setting that requires a chat template."""
        if self.system is None and not tools:
            return "data.template_arguments are set"
        return "data.system is set" if self.system is not None else "the row has tools (data.tools)"

    @functools.cached_property
    def _has_arguments(self) -> bool:
        return bool(getattr(getattr(self.tokenizer, "apply_chat_template", None), "keywords", None))


def read_tools(value: Any) -> list[Any] | None:
    """Return a row's tools, which may be given as the text of a JSON list; None if there are none."""
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = decode_json(value)
        except ValueError as error:
            raise DataError(f"its tools (data.tools) are not valid JSON: {error}: {shorten(value)}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"its tools (data.tools) are {shorten(tools)} ({describe_kind(tools)}); expected a list of JSON "
            "schemas, or such a list as text"
        )
    return tools if isinstance(value, str) else drop_none(tools)  # Arrow gives each object the keys of all objects
