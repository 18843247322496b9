"""Prompts as text and as tokens: plain strings, chat messages, templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enginehouse.errors import DataError

_ROWS_AT_ONCE = 1024


class Renderer:
    """Turns prompts into text and tokens with a Hugging Face tokenizer.

    Args:
        tokenizer: a `transformers` tokenizer.
        chat_template: apply the tokenizer's chat template: None to lists of messages only; True also to plain
            strings, each as one message of the user; False never, then messages are an error.
    """

    def __init__(self, tokenizer: Any, chat_template: bool | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    def prompts(self, prompts: Sequence[Any], where: Callable[[int], str]) -> tuple[list[str], list[np.ndarray]]:
        """Render and tokenize prompts.

        Args:
            prompts: strings, or lists of `{"role": ..., "content": ...}`.
            where: names row `i` in messages.

        Returns:
            The text of each prompt, as given or as the template renders it, and its token ids (int32).

        Raises:
            DataError: naming the row whose prompt has a wrong type, cannot be rendered or has no tokens.
        """
        texts = [self._text(prompt, row, where) for row, prompt in enumerate(prompts)]
        plain = [row for row, prompt in enumerate(prompts) if isinstance(prompt, str) and not self.chat_template]
        tokens: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        templated = set(range(len(texts))).difference(plain)
        # A template writes the special tokens itself; a plain string gets those the tokenizer adds by default.
        for rows, special in ((plain, True), (sorted(templated), False)):
            for row, ids in zip(rows, self.tokens([texts[row] for row in rows], special), strict=True):
                tokens[row] = ids
        for row, ids in enumerate(tokens):
            if not len(ids):
                raise DataError(f"{where(row)}: the prompt has no tokens: {prompts[row]!r}")
        return texts, tokens

    def tokens(self, texts: Sequence[str], special: bool) -> list[np.ndarray]:
        """Token ids of each text, int32; `special`: with the special tokens the tokenizer adds by default."""
        found: list[np.ndarray] = []
        for start in range(0, len(texts), _ROWS_AT_ONCE):
            chunk = list(texts[start : start + _ROWS_AT_ONCE])
            encoded = self.tokenizer(chunk) if special else self.tokenizer(chunk, add_special_tokens=False)
            found.extend(np.array(ids, dtype=np.int32) for ids in encoded["input_ids"])
        return found

    def _text(self, prompt: Any, row: int, where: Callable[[int], str]) -> str:
        if isinstance(prompt, str) and not self.chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not _are_messages(messages):
            shown = repr(prompt)
            raise DataError(
                f"{where(row)}: the prompt is {shown[:80] + '...' if len(shown) > 80 else shown} "
                f"({type(prompt).__name__}); expected a string, or a list of chat messages with 'role' and 'content'"
            )
        if self.chat_template is False:
            raise DataError(
                f"{where(row)}: the prompt is a list of chat messages, but data.chat_template is false: "
                "unset it, or give plain strings"
            )
        if not getattr(self.tokenizer, "chat_template", None):
            reason = (
                "data.chat_template is true" if isinstance(prompt, str) else "the prompt is a list of chat messages"
            )
            raise DataError(
                f"{where(row)}: {reason}, but the model's tokenizer has no chat template: "
                "give plain strings, or a model whose tokenizer has one"
            )
        # Arrow gives every message all keys that any message has; templates take an absent key better than a None.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise DataError(f"{where(row)}: the chat template refuses the messages: {error}") from error


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def check_length(lengths: Sequence[int], most: int, what: str, option: str, where: Callable[[int], str]) -> None:
    """Refuse rows longer than `most` tokens.

    Raises:
        DataError: naming the first such row, its length, how many there are, and the option that sets the limit.
    """
    longer = [row for row, length in enumerate(lengths) if length > most]
    if longer:
        others = f" ({len(longer)} rows are longer; the longest has {max(lengths)})" if len(longer) > 1 else ""
        raise DataError(
            f"{where(longer[0])}: {what} has {lengths[longer[0]]} tokens, more than {option}={most}{others}: "
            f"drop such rows or raise {option}"
        )
