"""A chat in which the policy may call tools. Their results become messages."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from enginehouse.engines.environment import Episode, Scored
from enginehouse.engines.transcript import response_text
from enginehouse.errors import ConfigError, EnginehouseError, UserError, nearest
from enginehouse_environments.calls import FORMATS, CallFormat, Parsed, ToolCall, find_call_format
from enginehouse_environments.dialogue import ChatTemplate, Dialogue
from enginehouse_environments.functions import ToolError, make_tools

if TYPE_CHECKING:
    from enginehouse.engines.environment import EpisodeContext, Policy, Task

Positive = Annotated[int, Field(ge=1)]
Message = dict[str, Any]

CHARACTERS_A_TOKEN = 64
"""Number of characters of a tool's result that are tokenized per token of `max_result_tokens`."""


class Tools:
    """A chat with tools. It ends with the first answer without a tool call, which the configured reward scores.

    Args:
        tools: names of built-in tools, or `module:function` of your own tools; or mappings of a `name` and the
            arguments of the function that makes the tool.
        max_turns: maximum number of answers of an episode.
        max_tokens: maximum number of tokens after the prompt, in answers and tool results together. Unset: the context
            length of the models.
        tool_seconds: time limit for a call.
        max_result_tokens: maximum number of tokens of a tool's result. A longer result is cut.
        format: name of the format in which the model writes calls. `auto`: the format of its chat template.
        template: arguments of the chat template by name, such as `enable_thinking`.
    """

    def __init__(
        self,
        tools: Annotated[list[str | dict[str, Any]], Field(min_length=1)],
        max_turns: Positive = 8,
        max_tokens: Positive | None = None,
        tool_seconds: Annotated[float, Field(gt=0)] = 30.0,
        max_result_tokens: Positive = 512,
        format: str = "auto",
        template: dict[str, Any] | None = None,
    ):
        self._tools = {tool.name: tool for tool in make_tools(tools)}
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._seconds, self._max_result_tokens = tool_seconds, max_result_tokens
        self._format, self._template_arguments = format, template
        self._chat: tuple[ChatTemplate, CallFormat] | None = None
        for tool in self._tools.values():
            tool.prepare()

    needs_reward = True

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """Raise `ConfigError` if a tool cannot be made, or for an unknown format of tool calls."""
        make_tools(arguments["tools"])
        if (name := arguments.get("format", "auto")) not in ("auto", *FORMATS):
            raise ConfigError(f"format: unknown format of tool calls {name!r}. {nearest(name, ['auto', *FORMATS])}")

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` if the chat template renders no calls or no tool results."""
        schemas = [tool.schema for tool in make_tools(arguments["tools"])]
        _make_chat(tokenizer, schemas, arguments.get("template"), arguments.get("format", "auto"))

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        template, form = self._get_chat(policy.tokenizer)
        messages = task.messages or [{"role": "user", "content": task.prompt}]
        opening = template.opening(messages)

        async def play(number: int, policy: Policy) -> Episode:
            chat = Dialogue(template, messages, opening)
            figures = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0}
            most = self._find_token_limit(len(opening), context)
            finish = await self._converse(chat, form, policy, most, figures)
            answer, end = chat.answers[-1], "length" if finish == "length" else "stop"
            row = {
                **task.columns,
                "prompt": task.prompt,
                "messages": task.messages,
                "response": response_text(policy.tokenizer, answer, end),
                "response_tokens": len(answer),
                "finish_reason": finish,
            }
            (score,) = await context.score([row])
            scored = Scored(score.reward, {**score.figures, **figures}, score.failure, score.answer)
            return chat.episode(scored, finish)

        return await context.each(play)

    def _get_chat(self, tokenizer: Any) -> tuple[ChatTemplate, CallFormat]:
        """Return the cached template and format of calls; a process has only one tokenizer."""
        if self._chat is None or self._chat[0].tokenizer is not tokenizer:
            schemas = [tool.schema for tool in self._tools.values()]
            self._chat = _make_chat(tokenizer, schemas, self._template_arguments, self._format)
        return self._chat

    def _find_token_limit(self, prompt_tokens: int, context: EpisodeContext) -> float:
        """Return the maximum number of tokens of an episode, including its prompt."""
        own_limit = None if self._max_tokens is None else prompt_tokens + self._max_tokens
        most = min((limit for limit in (own_limit, context.most_tokens) if limit is not None), default=math.inf)
        if most <= prompt_tokens:
            raise EnginehouseError(
                f"the prompt has {prompt_tokens} tokens with its tools, but the models of this run read only {most}, "
                "which leaves none for an answer"
            )
        return most

    async def _converse(
        self, chat: Dialogue, form: CallFormat, policy: Policy, most: float, figures: dict[str, float]
    ) -> str:
        """Generate answers until an answer has no calls or a limit is reached. Return the finish reason."""
        while (room := most - len(chat.transcript.tokens)) > 0:
            completion = await chat.answer(policy, int(min(room, policy.sampling.max_tokens)))
            figures["turns"] += 1
            if completion.finish_reason != "stop":
                return completion.finish_reason
            parsed = form.parse(chat.last, len(chat.answers))
            figures["tool_calls"] += len(parsed.calls) + len(parsed.problems)
            figures["tool_errors"] += len(parsed.problems)
            if not parsed.calls and not parsed.problems:
                return "stop"
            if len(chat.answers) == self._max_turns:
                return "turns"
            results, errors = await self._call_all(parsed, chat.template)
            figures["tool_errors"] += errors
            if not chat.say(results, most - 1):
                break
        return "length"

    async def _call_all(self, parsed: Parsed, template: ChatTemplate) -> tuple[list[Message], int]:
        """Run all calls of an answer concurrently. Return the results as messages, and the number of failures."""
        outcomes = await asyncio.gather(*(self._call(call) for call in parsed.calls))
        results = [(call, text) for call, (text, _) in zip(parsed.calls, outcomes, strict=True)]
        results += [(_NO_CALL, f"error: {problem}") for problem in parsed.problems]
        messages = [_make_result(call, self._cut(template, text)) for call, text in results]
        return messages, sum(failed for _, failed in outcomes)

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Return a call's result or error as text, and True if it failed."""
        if (tool := self._tools.get(call.name)) is None:
            return f"error: unknown tool {call.name!r}. {nearest(call.name, self._tools)}", True
        try:
            return await tool.call(call.arguments, self._seconds), False
        except ToolError as error:
            return f"error: {error}", True

    def _cut(self, template: ChatTemplate, text: str) -> str:
        """Shorten a result, and break up its special tokens, with which a tool could imitate the policy."""
        most, tokenizer = self._max_result_tokens, template.tokenizer
        text = text[: (most + 1) * CHARACTERS_A_TOKEN].encode("utf-8", "replace").decode()
        text = template.break_special_tokens(text)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) <= most:
            return text
        beginning = tokenizer.decode(tokens[:most], clean_up_tokenization_spaces=False).rstrip("\ufffd")
        return f"{beginning}\n[cut after {most} tokens]"


def _make_chat(
    tokenizer: Any, schemas: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None, format: str
) -> tuple[ChatTemplate, CallFormat]:
    """Return the template of chats with these tools, and the format of their calls.

    Raises:
        UserError: the tokenizer has no template, or the template renders no calls or no tool results.
    """
    template = ChatTemplate(tokenizer, schemas, arguments)
    form = find_call_format(template, format)
    if "a result" not in tokenizer.decode(template.continuation([_make_result(_NO_CALL, "a result")], [])):
        raise UserError("the chat template of the model's tokenizer leaves out what a tool says")
    return template, form


_NO_CALL = ToolCall("000000000", "tool_call", {})
"""The call to which the result of a malformed call refers."""


def _make_result(call: ToolCall, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
