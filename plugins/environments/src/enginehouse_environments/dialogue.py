"""A chat with the policy whose answers are kept, token for token, as they were drawn.

A chat template renders a whole conversation. To render it anew at each turn would decode what was drawn and tokenise it
again, which may give other tokens: nobody drew those. So a template is asked for the part after an answer alone: what
closes the answer, the new messages, and what begins the next answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from enginehouse.engines.transcript import Transcript
from enginehouse.errors import UserError

if TYPE_CHECKING:
    from enginehouse.engines.environment import Policy
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
        closing = self._encoded(self._after_answer([], False))
        self.end: int | None = closing[0] if closing else None

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of the first messages, and of what begins an answer."""
        return self._encoded(self._rendered(messages, True))

    def continuation(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        """Tokens of what follows an answer: what closes it, new messages, and what begins the next answer.

        Args:
            messages: the new ones; none of them an answer of the policy's.
            before: tokens so far, the answer the last of them. Where it has closed itself, that is not done again.
        """
        tokens = self._encoded(self._after_answer(messages, True))
        return tokens[1:] if tokens and before and tokens[0] == before[-1] else tokens

    def text(self, answer: Sequence[int]) -> str:
        """An answer's text, special tokens in it, without what closed it."""
        tokens = list(map(int, answer))
        closed = tokens and tokens[-1] in (self.end, self.tokenizer.eos_token_id)
        return self.tokenizer.decode(tokens[:-1] if closed else tokens, skip_special_tokens=False)

    def _after_answer(self, messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        before = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
        _, mark, after = self._rendered([*before, *messages], begin).partition(MARK)
        if not mark:
            raise UserError("the chat template of the model's tokenizer leaves out what an assistant says")
        return after

    def _rendered(self, messages: Sequence[Mapping[str, Any]], begin: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self.tools,
                add_generation_prompt=begin,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:  # templates raise what they like
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UserError(
                f"the chat template of the model's tokenizer refuses messages of {roles}: {error}"
            ) from error

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


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

    def say(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages after an answer: what tools gave, or the next question."""
        self.transcript.add_given(self.template.continuation(messages, self.transcript.tokens))

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
        return completion

    @property
    def last(self) -> str:
        """The last answer's text; see `ChatTemplate.text`."""
        return self.template.text(self.answers[-1])
