"""Turns rows into tokens, in the same way for every command. docs/rows.md describes the rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from enginehouse.data.messages import read_text_or_chat
from enginehouse.data.templates import text_ends, turn_end
from enginehouse.errors import DataError, ModelError
from enginehouse_rl.data.files import RowProblems
from enginehouse_rl.data.prompt_text import PromptWriter, Where
from enginehouse_rl.data.reply_text import Reply, ReplyWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024
_BORDERS = ("\n", "a", "0", ".")
"""Texts that seldom share a token with the text after them."""
_SPECIAL_TOKENS = 8
"""Upper bound on the number of special tokens that a tokenizer adds to a text."""


class Counted(Protocol):
    """Shows how many `parts` are done, like `enginehouse_rl.runs.Progress.count`."""

    def __call__(self, parts: Iterable[range], what: str, of: int, size: Callable[[range], int]) -> Iterable[range]: ...


def skip_counting(parts: Iterable[range], what: str, of: int, size: Callable[[range], int]) -> Iterable[range]:
    return parts


@dataclass(frozen=True)
class TokenLimit:
    """The maximum number of tokens of a row.

    Attributes:
        option: the name of the limit in messages: `"data.max_prompt_tokens=1024"`.
    """

    tokens: int
    option: str
    cure: str

    @classmethod
    def from_option(cls, option: str, tokens: int | TokenLimit) -> TokenLimit:
        """Return the limit that a config key sets; a `TokenLimit` is returned unchanged."""
        if isinstance(tokens, TokenLimit):
            return tokens
        return cls(tokens, f"{option}={tokens}", f"drop such rows or raise {option}")


def load_tokenizer(
    path: str, trust_remote_code: bool = False, template_arguments: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a model's directory.

    Args:
        trust_remote_code: as in transformers.
        template_arguments: arguments by name that the tokenizer then passes to its chat template in every call.

    Raises:
        ModelError: there is no tokenizer, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"cannot load a tokenizer from {path}: {error}") from error
    if template_arguments:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **template_arguments)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Response:
    """The tokens of a response.

    Attributes:
        ids: the tokens after the prompt's tokens, int32.
        learned: true for each token that the loss counts, false for the tokens of other speakers.
    """

    ids: np.ndarray
    learned: np.ndarray

    @classmethod
    def from_ids(cls, ids: np.ndarray) -> Response:
        """Return a response in which the loss counts all tokens."""
        return cls(ids, np.ones(len(ids), np.bool_))


class Renderer:
    """Turns prompts into text and tokens with a Hugging Face tokenizer.

    Args:
        tokenizer: a `transformers` tokenizer.
        chat_template: use of the tokenizer's chat template. None: only for lists of messages; True: also for plain
            strings, each as one user message; False: never, so that messages are an error.
        system: the system message for chats that begin without one; None: none is added.

    Attributes:
        merged: the number of rows in which one token contains letters of both the prompt and the response.
    """

    def __init__(self, tokenizer: Any, chat_template: bool | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.merged = 0
        self.writer = PromptWriter(tokenizer, chat_template, system)
        self._replies = ReplyWriter(self.writer)

    def render_prompts(
        self,
        prompts: Sequence[Any],
        where: Where,
        counted: Counted = skip_counting,
        problems: RowProblems | None = None,
        tools: Sequence[Any] | None = None,
    ) -> tuple[list[str], list[np.ndarray]]:
        """Render and tokenize prompts.

        Args:
            prompts: strings, or lists of `{"role": ..., "content": ...}`.
            where: names row `i` in messages.
            problems: gets the problems of rows, which the caller raises; None: they are raised here.
            tools: the tools of each prompt, a list of JSON schemas, as a list or as text; None: there are none.

        Returns:
            The text of each prompt, as the template renders it or unchanged, and its token ids (int32).

        Raises:
            DataError: a prompt has a wrong type, cannot be rendered or has no tokens.
        """
        row_problems = RowProblems() if problems is None else problems
        texts: list[str] = []
        tokens: list[np.ndarray] = []
        prompts = [read_text_or_chat(prompt) for prompt in prompts]
        chunks = [range(at, min(at + _ROWS_AT_ONCE, len(prompts))) for at in range(0, len(prompts), _ROWS_AT_ONCE)]
        for rows in counted(chunks, "prompts", len(prompts), len):
            rendered = [
                self.writer.render_row(prompts[row], tools[row] if tools else None, row, where, row_problems)
                for row in rows
            ]
            texts += [text or "" for text in rendered]
            tokens += self._tokenize_prompts([prompts[row] for row in rows], rendered, where, rows.start, row_problems)
        if problems is None:
            row_problems.raise_any()
        return texts, tokens

    def _tokenize_prompts(
        self, prompts: Sequence[Any], texts: Sequence[str | None], where: Where, start: int, problems: RowProblems
    ) -> list[np.ndarray]:
        """Return the token ids of each prompt. A text is None if its prompt could not be rendered."""
        tokens: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        plain = [row for row, prompt in enumerate(prompts) if self.writer.is_plain(prompt)]
        templated = sorted(set(range(len(texts))).difference(plain))
        # A template writes the special tokens itself; a plain string gets those that the tokenizer adds by default.
        for rows, special in ((plain, True), (templated, False)):
            for row, ids in zip(rows, self.tokenize([texts[row] or "" for row in rows], special), strict=True):
                tokens[row] = ids
                if not len(ids) and texts[row] is not None:
                    problems.add(f"{where(start + row)}: the prompt has no tokens: {prompts[row]!r}")
        return tokens

    def tokenize(self, texts: Sequence[str], special: bool) -> list[np.ndarray]:
        """Return the token ids (int32) of texts that begin rows.

        With `special`, a row begins with the tokens that the tokenizer puts before a text; they are not repeated if the
        text has them already. The tokens that the tokenizer puts after a text are left out, because they do not end a
        prompt.
        """
        begins = self._begins if special else ()
        tokens: list[np.ndarray] = []
        for start in range(0, len(texts), _ROWS_AT_ONCE):
            for ids in self._encode(list(texts[start : start + _ROWS_AT_ONCE]), special and begins is None):
                lacks_it = begins is not None and tuple(ids[: len(begins)]) != begins
                tokens.append(np.array([*(begins or ()), *ids] if lacks_it else ids, dtype=np.int32))
        return tokens

    def _encode(self, texts: list[str], special: bool = False) -> list[list[int]]:
        encoded = self.tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )
        return encoded["input_ids"]

    @functools.cached_property
    def _begins(self) -> tuple[int, ...] | None:
        """The ids that the tokenizer puts before a text; None if they cannot be told apart from the text's tokens."""
        for text in ("a", "0", "."):
            (plain,), (marked,) = self._encode([text]), self._encode([text], True)
            for place in range(len(marked) - len(plain) + 1):
                if plain and marked[place : place + len(plain)] == plain:
                    return tuple(marked[:place])
        return None

    def render_completions(
        self,
        prompts: Sequence[Any],
        rendered: tuple[Sequence[str], Sequence[np.ndarray]],
        completions: Sequence[Any],
        column: str,
        where: Where,
        problems: RowProblems | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[Response]:
        """Tokenize the responses to prompts. Prompt and response are tokenized together, and the prompt's tokens are
        cut off.

        The chat template writes chat messages, and the loss counts only the turns of the assistant. A string gets an
        end token: the end of a turn if the template wrote the prompt, otherwise the tokenizer's end of sequence.

        Args:
            rendered: the result of `render_prompts`; the text of a prompt with a problem is "".
            completions: strings, or lists of messages that begin and end with the assistant.
            column: the name of the column of completions, for messages.
            where, problems, tools: as for `render_prompts`.

        Returns:
            The responses. The response of a row with a problem has no tokens.

        Raises:
            DataError: a completion is neither a string nor such a list, cannot be rendered, or has no tokens.
        """
        row_problems = RowProblems() if problems is None else problems
        texts, prompt_ids = rendered
        chats = [read_text_or_chat(prompt) for prompt in prompts]
        contents = [read_text_or_chat(completion) for completion in completions]
        replies = [Reply("")] * len(contents)
        for row, content in enumerate(contents):
            if not isinstance(content, list) or texts[row]:
                try:
                    replies[row] = self._replies.write(chats[row], texts[row], content, tools[row] if tools else None)
                except DataError as error:
                    row_problems.add(f"{where(row)}: the response in column {column!r} {error}")
        responses = [Response.from_ids(np.empty(0, np.int32))] * len(contents)
        plain = [self.writer.is_plain(prompt) for prompt in chats]
        for special in (True, False):
            rows = [row for row in range(len(contents)) if plain[row] == special]
            wholes = self.tokenize([texts[row] + replies[row].text for row in rows], special)
            for row, whole in zip(rows, wholes, strict=True):
                try:
                    responses[row] = self._cut_reply(texts[row], prompt_ids[row], replies[row], whole, special)
                except DataError as error:
                    row_problems.add(f"{where(row)}: the response in column {column!r} {error}")
        if problems is None:
            row_problems.raise_any()
        return responses

    def _cut_reply(self, text: str, prompt: np.ndarray, reply: Reply, whole: np.ndarray, special: bool) -> Response:
        """Return the response for a reply: the tokens that follow the tokens of its prompt, with the end token.

        `whole` has the tokens of prompt and reply together. `special` is true if no chat template wrote the prompt.

        Raises:
            DataError: the reply has no tokens, or a token has letters of two turns.
        """
        ids = self._cut_prompt(text, prompt, reply.text, whole)
        if reply.others:
            return self._add_end(self._learn_by_turns(text, len(prompt), reply, whole))
        ids = self._cut_after_end(ids)
        if not reply.is_plain:
            return self._add_end(Response.from_ids(ids))
        end = self.tokenizer.eos_token_id if special else self._replies.turn_end
        if end is not None and (not len(ids) or ids[-1] not in text_ends(self.tokenizer)):
            ids = np.append(ids, np.int32(end))
        if not len(ids):
            raise DataError("has no tokens")
        return Response.from_ids(ids)

    def _learn_by_turns(self, prompt: str, prompt_tokens: int, reply: Reply, whole: np.ndarray) -> Response:
        """Return a response of several turns, in which the loss counts only the turns of the assistant.

        Raises:
            DataError: a token has letters of two turns.
        """
        borders = self._encode([prompt + reply.text[:at] for part in reply.others for at in part])
        if any(ids != whole[: len(ids)].tolist() for ids in borders):
            raise DataError(
                "has a turn that begins or ends within a token: make a separate row of each turn of the assistant"
            )
        starts, ends = [prompt_tokens, *map(len, borders[1::2])], [*map(len, borders[::2]), len(whole)]
        learned = np.zeros(len(whole), np.bool_)
        for start, end in zip(starts, ends, strict=True):
            learned[start : start + len(self._cut_after_end(whole[start:end]))] = True
        last = int(np.flatnonzero(learned)[-1]) + 1 if learned.any() else len(whole)
        return Response(whole[prompt_tokens:last], learned[prompt_tokens:last])

    def _cut_prompt(self, text: str, prompt: np.ndarray, reply: str, whole: np.ndarray) -> np.ndarray:
        """Return the tokens of a reply, given the tokens `whole` of prompt and reply together.

        When the model generates, it gets exactly the tokens of the prompt. Therefore no token may contain letters of
        both prompt and reply. If one does, the reply is tokenized after another text, with which it shares no token.
        """
        if np.array_equal(whole[: len(prompt)], prompt):
            return whole[len(prompt) :]
        self.merged += 1
        for before in dict.fromkeys((text[-1:], *_BORDERS)):
            first, pair_ids = self._encode([before, before + reply])
            if first and pair_ids[: len(first)] == first:
                return np.array(pair_ids[len(first) :], dtype=np.int32)
        return np.array(self._encode([reply])[0], dtype=np.int32)

    def _cut_after_end(self, ids: np.ndarray) -> np.ndarray:
        """Cut off the tokens that a template writes after the end of a turn, because no model generates them."""
        is_end = np.isin(ids, text_ends(self.tokenizer))
        for place in np.flatnonzero(is_end[:-1] & ~is_end[1:]) + 1:
            if not self.tokenizer.decode(ids[place:][~is_end[place:]]).strip():
                return ids[:place]
        return ids

    def _add_end(self, response: Response) -> Response:
        """Append an end of sequence to a response of messages if the template does not mark the end of a turn."""
        end = self.tokenizer.eos_token_id
        if end is None or turn_end(self.tokenizer) is not None or (len(response.ids) and response.ids[-1] == end):
            return response
        return Response(np.append(response.ids, np.int32(end)), np.append(response.learned, True))


def join(prompts: Sequence[np.ndarray], responses: Sequence[Response]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of each prompt with its response, and a mask of the tokens that the loss counts."""
    pairs = list(zip(prompts, responses, strict=True))
    return (
        [np.concatenate((prompt, response.ids)) for prompt, response in pairs],
        [np.concatenate((np.zeros(len(prompt), np.bool_), response.learned)) for prompt, response in pairs],
    )


def is_surely_short(prompt: Any, tokens: int) -> bool:
    """True if a prompt is a string that has at most `tokens` tokens with any tokenizer."""
    return isinstance(read_text_or_chat(prompt), str) and bool(prompt.strip()) and bound_tokens(prompt) <= tokens


def bound_tokens(text: str) -> int:
    """Return an upper bound on the number of tokens of a text. A tokenizer makes at most one token of each byte."""
    return len(text.encode()) + _SPECIAL_TOKENS


def check_length(lengths: Sequence[int], limit: TokenLimit, what: str, where: Where) -> None:
    """Check that no row is longer than `limit`.

    Raises:
        DataError: a row is longer. The message names the first such row, its length, and the number of such rows.
    """
    longer = [row for row, length in enumerate(lengths) if length > limit.tokens]
    if longer:
        more = f" ({len(longer):,} rows are longer; the longest has {max(lengths)})" if len(longer) > 1 else ""
        problem = f"{what} has {lengths[longer[0]]} tokens, more than {limit.option}{more}"
        raise DataError(f"{where(longer[0])}: {problem}: {limit.cure}")


def make_length_error(prompts: int, shortest: int, limit: TokenLimit) -> DataError:
    """Return the error for the case that all prompts are too long. `shortest` is the length of the shortest prompt."""
    return DataError(
        f"data.overlong_prompts=drop leaves none of {prompts:,} prompts: the shortest has {shortest} tokens, more than "
        f"{limit.option}"
    )
