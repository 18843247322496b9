"""A chat with the policy whose answers are kept, token for token, as they were drawn.

A chat template renders a whole conversation. To render it anew at each turn would decode what was drawn and tokenise it
again, which may give other tokens: nobody drew those. So a template is asked for the part after an answer alone: what
closes the answer, the new messages, and what begins the next answer.
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
"""Stands for an answer where a template is asked for what follows one."""


class ChatTemplate:
    """What a tokenizer's chat template writes, a part at a time.

    Args:
        tokenizer: as of `transformers`.
        tools: JSON schemas of what may be called, as OpenAI's `tools`; None: nothing may.
        arguments: given to the template by name, as `enable_thinking`.

    Attributes:
        begin: the text that begins an answer.
        end: the token that closes an answer, as `<|im_end|>`; None where the template writes nothing after one.

    Raises:
        UserError: the tokenizer has no template, or it refuses a question and an answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer of the model has no chat template, by which messages are rendered: take one that has, "
                "or set its tokenizer's chat_template"
            )
        self.tokenizer, self.tools = tokenizer, list(tools) if tools else None
        self._arguments = dict(arguments or {})
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(number for number, one in added.items() if one.special)}
        texts = sorted((one.content for one in added.values() if one.special), key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self.begin = self._rendered([_QUESTION], True).removeprefix(self._rendered([_QUESTION], False))
        self._closing = self._after(_ANSWER, [], False)
        closing = self._encoded(self._closing)
        self.end: int | None = closing[0] if closing else None

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of the first messages, and of what begins an answer."""
        return self._encoded(self._rendered(messages, True))

    def continuation(
        self, messages: Sequence[Mapping[str, Any]], before: Sequence[int], stopped: bool = False
    ) -> list[int]:
        """Tokens of what follows an answer: what closes it, new messages, and what begins the next answer.

        Args:
            messages: the new ones; none of them an answer of the policy's.
            before: tokens so far, the answer the last of them. Where it has closed itself, that is not done again.
            stopped: whether the answer ended by itself: then any special token at its end has closed it, as
                `<|eom_id|>` where a template writes `<|eot_id|>`.
        """
        text = self._following(messages)
        tokens = self._encoded(text)
        if tokens and len(before) and tokens[0] == before[-1]:
            return tokens[1:]
        if not tokens or self.end is None or not self._closed(before, stopped):
            return tokens
        if tokens[0] in (self.end, *self._special):
            return tokens[1:]
        return self._encoded(text.removeprefix(self.decoded([self.end])))  # it begins a longer token

    def text(self, answer: Sequence[int], stopped: bool = False) -> str:
        """An answer's text, special tokens in it, without what closed it; arguments as of `continuation`."""
        tokens = list(map(int, answer))
        return self.decoded(tokens[:-1] if self._closed(tokens, stopped) else tokens)

    def plain(self, text: str) -> str:
        """A text in which special tokens are broken up, so that they are read as text."""
        return self._special_texts.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer that the template writes for a call, without what closes it; empty where it writes none."""
        try:
            question = self._rendered([_QUESTION], False)
            answer = self._rendered([_QUESTION, _calling(name, arguments)], False)
        except UserError:
            return ""
        answer = answer.removeprefix(question).removeprefix(self.begin)
        end = "" if self.end is None else self.decoded([self.end])
        return answer.rpartition(end)[0] if end and end in answer else answer

    def _closed(self, tokens: Sequence[int], stopped: bool) -> bool:
        return len(tokens) > 0 and int(tokens[-1]) in (
            self.end,
            self.tokenizer.eos_token_id,
            *(self._special if stopped else ()),
        )

    def _following(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What follows an answer. Before what a tool says, the answer is one that calls, if the template writes that.

        Some templates refuse a tool's message else, or write it otherwise. Some take one call only. What closes an
        answer is then taken from one that does not call.
        """
        results = [message for message in messages if message.get("role") == "tool"]
        for called in filter(None, (results, results[:1])):
            answer = _calling("", {"answer": MARK}, called)
            with suppress(UserError):
                before, after = self._after(answer, [], False), self._after(answer, messages, True)
                if after.startswith(before):
                    return self._closing + after.removeprefix(before)
        return self._after(_ANSWER, messages, True)

    def _after(self, answer: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        """What is written after `MARK` in an answer."""
        _, mark, after = self._rendered([_QUESTION, answer, *messages], begin).partition(MARK)
        if not mark:
            raise UserError("the chat template of the model's tokenizer leaves out what an assistant says")
        return after

    def _rendered(self, messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        try:
            return render_chat(self.tokenizer, messages, begin, self.tools, **self._arguments)
        except Exception as error:  # templates raise what they like
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template of the model's tokenizer refuses messages of {roles}: {error}"
            ) from error

    def _encoded(self, text: str) -> list[int]:
        whole = text.encode("utf-8", "replace").decode()  # of half a character no tokenizer makes anything
        return self.tokenizer.encode(whole, add_special_tokens=False)

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


_QUESTION = {"role": "user", "content": "."}
_ANSWER = {"role": "assistant", "content": MARK}


def _calling(name: str, arguments: Mapping[str, Any], results: Sequence[Mapping[str, Any]] = ({},)) -> dict[str, Any]:
    """An answer that calls what gave these results."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": result.get("tool_call_id", "call00000"),
                "type": "function",
                "function": {"name": result.get("name", name), "arguments": dict(arguments)},
            }
            for result in results
        ],
    }


class Dialogue:
    """A chat with the policy.

    Args:
        template: renders what is given.
        messages: the first ones.
        tokens: of these and of what begins the first answer, as `Task.prompt_ids`. None: the template's.

    Attributes:
        transcript: all tokens so far.
        answers: each answer's tokens.
    """

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int] | None = None
    ):
        self.template = template
        self.transcript = Transcript(template.opening(messages) if tokens is None else tokens)
        self.answers: list[list[int]] = []
        self._given = len(self.transcript.tokens)
        self._stopped = False

    def say(self, messages: Sequence[Mapping[str, Any]], most: float = math.inf) -> bool:
        """Add messages after an answer: what tools gave, or the next question.

        Args:
            messages: these.
            most: so many tokens there may be then.

        Returns:
            Whether they were added; not if there would be more tokens.
        """
        new = self.template.continuation(messages, self.transcript.tokens, self._stopped)
        if len(self.transcript.tokens) + len(new) > most:
            return False
        self.transcript.add_given(new)
        return True

    async def answer(self, policy: Policy, max_tokens: int | None = None) -> Completion:
        """Have the policy answer.

        Args:
            policy: of this episode.
            max_tokens: most tokens of the answer; None: as the run is configured.
        """
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
        """The episode as it is now, its texts the whole dialogue; arguments as of `Episode`."""
        tokens, begin = self.transcript.tokens, self._given
        prompt, response = (self.template.decoded(part) for part in (tokens[:begin], tokens[begin:]))
        return self.transcript.episode(score, prompt, response, finish, earlier)

    @property
    def last(self) -> str:
        """The last answer's text; see `ChatTemplate.text`."""
        return self.template.text(self.answers[-1], self._stopped)
