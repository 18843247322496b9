"""A chat with the policy that keeps the tokens of its answers exactly as they were generated.

A chat template renders a whole conversation. Rendering it again at each turn would decode the generated tokens and
tokenize them again, perhaps to other tokens. So only the part after an answer is rendered: the text that closes the
answer, the new messages, and the text that begins the next answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.data.templates import render_chat
from enginehouse.engines.transcript import Transcript
from enginehouse.errors import UserError

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, Policy, Score, Segment
    from enginehouse.engines.rollout import Completion

MARK = "ANSWER-0d7c"
"""Content of a placeholder answer, after which the rendered text is cut off."""


class ChatTemplate:
    """Renders the parts of a chat with a tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of `transformers`.
        tools: JSON schemas in the form of OpenAI's `tools`; None: no tools.
        arguments: arguments of the template by name, such as `enable_thinking`.

    Raises:
        UserError: the tokenizer has no template, or the template rejects a question and an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer of the model has no chat template, which renders messages: use a model that has one, "
                "or set its tokenizer's chat_template"
            )
        self.tokenizer, self.tools = tokenizer, list(tools) if tools else None
        self._arguments = dict(arguments or {})
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        texts = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        # the text that begins an answer
        self.begin = self._render([_QUESTION], True).removeprefix(self._render([_QUESTION], False))
        self._closing = self._render_after(_ANSWER, [], False)
        closing = self._encode(self._closing)
        # the token that closes an answer, such as `<|im_end|>`; None if the template writes nothing after an answer
        self.end: int | None = closing[0] if closing else None

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of the first messages, and of the text that begins an answer."""
        return self._encode(self._render(messages, True))

    def continuation(
        self, messages: Sequence[Mapping[str, Any]], before: Sequence[int], stopped: bool = False
    ) -> list[int]:
        """Return the tokens that close an answer, render new messages, and begin the next answer.

        Args:
            messages: new messages, none of them from the policy.
            before: tokens so far, which end with the answer. An answer that closed itself is not closed again.
            stopped: True if the answer ended by itself. Then any special token at its end closed it, for example
                `<|eom_id|>` although the template writes `<|eot_id|>`.
        """
        text = self._render_continuation(messages)
        tokens = self._encode(text)
        if tokens and len(before) and tokens[0] == before[-1]:
            return tokens[1:]
        if not tokens or self.end is None or not self._is_closed(before, stopped):
            return tokens
        if tokens[0] in (self.end, *self._special):
            return tokens[1:]
        return self._encode(text.removeprefix(self.decode([self.end])))  # it begins a longer token

    def text(self, answer: Sequence[int], stopped: bool = False) -> str:
        """Return an answer's text with its special tokens, except the token that closes the answer. `stopped` has the
        same meaning as in `continuation`."""
        tokens = list(map(int, answer))
        return self.decode(tokens[:-1] if self._is_closed(tokens, stopped) else tokens)

    def break_special_tokens(self, text: str) -> str:
        """Put a space into each special token of a text, so that it is tokenized as text."""
        return self._special_texts.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of an answer with a tool call, without the text that closes the answer.

        The text is empty if the template writes no calls.
        """
        try:
            question = self._render([_QUESTION], False)
            answer = self._render([_QUESTION, _call_message(name, arguments)], False)
        except UserError:
            return ""
        answer = answer.removeprefix(question).removeprefix(self.begin)
        end = "" if self.end is None else self.decode([self.end])
        return answer.rpartition(end)[0] if end and end in answer else answer

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _is_closed(self, tokens: Sequence[int], stopped: bool) -> bool:
        closing = {self.end, self.tokenizer.eos_token_id, *(self._special if stopped else ())}
        return len(tokens) > 0 and int(tokens[-1]) in closing

    def _render_continuation(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that follows an answer. If tool results follow, the template renders an answer with calls.

        Without calls, some templates reject a tool's result or write it differently. If the template rejects one call
        for each result, it gets a single call, or else none. The text that closes the answer is rendered without calls.
        """
        results = [message for message in messages if message.get("role") == "tool"]
        for answered in filter(None, (results, results[:1])):
            answer = _call_message("", {"answer": MARK}, answered)
            with suppress(UserError):
                before, after = self._render_after(answer, [], False), self._render_after(answer, messages, True)
                if after.startswith(before):
                    return self._closing + after.removeprefix(before)
        return self._render_after(_ANSWER, messages, True)

    def _render_after(self, answer: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        """Return the rendered text after `MARK` in an answer."""
        _, mark, after = self._render([_QUESTION, answer, *messages], begin).partition(MARK)
        if not mark:
            raise UserError("the chat template of the model's tokenizer leaves out what an assistant says")
        return after

    def _render(self, messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        try:
            return render_chat(self.tokenizer, messages, begin, self.tools, **self._arguments)
        except Exception as error:  # templates raise errors of any kind
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template of the model's tokenizer refuses messages of {roles}: {error}"
            ) from error

    def _encode(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "replace").decode()  # tokenizers reject half a character
        return self.tokenizer.encode(whole, add_special_tokens=False)


_QUESTION = {"role": "user", "content": "."}
_ANSWER = {"role": "assistant", "content": MARK}


def _call_message(
    name: str, arguments: Mapping[str, Any], results: Sequence[Mapping[str, Any]] = ({},)
) -> dict[str, Any]:
    """Return an answer with the calls that led to some results."""
    calls = [
        {
            "id": result.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": result.get("name", name), "arguments": dict(arguments)},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class Dialogue:
    """A chat with the policy.

    It begins with `messages`. `tokens` are the tokens of these messages and of the text that begins an answer, if they
    are known (`Task.prompt_ids`).
    """

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int] | None = None
    ):
        self.template = template
        self.transcript = Transcript(template.opening(messages) if tokens is None else tokens)
        self.answers: list[list[int]] = []  # tokens of each
        self._given = len(self.transcript.tokens)
        self._stopped = False

    def say(self, messages: Sequence[Mapping[str, Any]], most: float = math.inf) -> bool:
        """Add messages after an answer. If the chat would exceed `most` tokens, add none and return False."""
        new = self.template.continuation(messages, self.transcript.tokens, self._stopped)
        if len(self.transcript.tokens) + len(new) > most:
            return False
        self.transcript.add_given(new)
        return True

    async def answer(self, policy: Policy, max_tokens: int | None = None) -> Completion:
        """Generate an answer of at most `max_tokens` tokens; None: the limit of the run."""
        sampling = policy.sampling
        if self.template.end is not None and self.template.end not in sampling.stop_token_ids:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, self.template.end))
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        completion = await policy.generate(self.transcript.tokens, sampling)
        self.answers.append(self.transcript.add_drawn(completion))
        self._stopped = completion.finish_reason == "stop"
        return completion

    def episode(self, score: Score, finish: str = "stop", earlier: Sequence[Segment] = ()) -> Episode:
        """Return the episode so far, with prompt and response texts of the whole dialogue. The arguments become fields
        of the `Episode`."""
        tokens, begin = self.transcript.tokens, self._given
        prompt, response = (self.template.decode(part) for part in (tokens[:begin], tokens[begin:]))
        return self.transcript.episode(score, prompt, response, finish, earlier)

    @property
    def last(self) -> str:
        """Text of the last answer, as `ChatTemplate.text` returns it."""
        return self.template.text(self.answers[-1], self._stopped)
