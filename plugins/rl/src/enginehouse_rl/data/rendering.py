"""From what rows say to tokens: the one way of every command. docs/rows.md says what becomes of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from enginehouse.data.messages import are_messages, check_content, drop_none, join_parts, read_text_or_chat, shorten
from enginehouse.data.templates import render_chat, takes_parts, text_ends, turn_end, writes_calls
from enginehouse.errors import DataError, ModelError
from enginehouse.jsontext import decode_json
from enginehouse_rl.data.files import RowProblems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_AT_ONCE = 1024
_BORDERS = ("\n", "a", "0", ".")
"""Texts that share no token with what follows them, mostly."""
_SPECIAL_TOKENS = 8
"""More than any tokenizer adds to a text."""

Where = Callable[[int], str]
"""Names row `i` in messages."""


class Counted(Protocol):
    """Shows how much of something has come; `enginehouse_rl.runs.Progress.counted` is one."""

    def __call__(self, parts: Iterable[range], what: str, of: int, size: Callable[[range], int]) -> Iterable[range]: ...


def uncounted(parts: Iterable[range], what: str, of: int, size: Callable[[range], int]) -> Iterable[range]:
    """Show nothing."""
    return parts


@dataclass(frozen=True)
class TokenLimit:
    """The most tokens a row may have.

    Attributes:
        tokens: how many.
        option: what sets it, as messages say it: `"data.max_prompt_tokens=1024"`.
        cure: what to do about longer rows.
    """

    tokens: int
    option: str
    cure: str

    @classmethod
    def of(cls, option: str, tokens: int) -> TokenLimit:
        """The limit that a config key sets."""
        return cls(tokens, f"{option}={tokens}", f"drop such rows or raise {option}")


def load_tokenizer(
    path: str, trust_remote_code: bool = False, template_arguments: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with the model in the directory `path`.

    Args:
        path: of the model.
        trust_remote_code: as of transformers.
        template_arguments: what its chat template is given by name, whoever applies it: rows, environments, rewards.

    Raises:
        ModelError: there is none, or it cannot be loaded.
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
        ids: the tokens that follow the prompt's, int32.
        learned: of each whether the model is to write it; false on what others say in between.
    """

    ids: np.ndarray
    learned: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray) -> Response:
        """A response that is learned whole."""
        return cls(ids, np.ones(len(ids), np.bool_))


@dataclass(frozen=True, slots=True)
class _Written:
    """What follows a prompt, as text.

    Attributes:
        text: all of it.
        others: from where to where somebody else than the assistant speaks, in letters.
    """

    text: str
    others: tuple[tuple[int, int], ...] = ()


class _NoTemplate(DataError):
    """There is no chat template to apply: that is so of every row that needs one."""


class Renderer:
    """Turns prompts into text and tokens with a Hugging Face tokenizer.

    Args:
        tokenizer: a `transformers` tokenizer.
        chat_template: apply the tokenizer's chat template: None to lists of messages only; True also to plain
            strings, each as one message of the user; False never, then messages are an error.
        system: the system message of chats that begin with none; None: they have none.

    Attributes:
        merged: of how many rows a token of the whole text has letters of the prompt and of the response.
    """

    def __init__(self, tokenizer: Any, chat_template: bool | None = None, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.system = system
        self.merged = 0
        self._writes_tools: bool | None = None

    def prompts(
        self,
        prompts: Sequence[Any],
        where: Where,
        counted: Counted = uncounted,
        problems: RowProblems | None = None,
        tools: Sequence[Any] | None = None,
    ) -> tuple[list[str], list[np.ndarray]]:
        """Render and tokenize prompts.

        Args:
            prompts: strings, or lists of `{"role": ..., "content": ...}`.
            where: names row `i` in messages.
            counted: shows how many are done.
            problems: takes in what is wrong with rows, for the caller to raise; None: it is raised here.
            tools: of each prompt, what the model may call: a list of JSON schemas, or its text; None: there are none.

        Returns:
            The text of each prompt, as given or as the template renders it, and its token ids (int32).

        Raises:
            DataError: naming the rows whose prompts have a wrong type, cannot be rendered or have no tokens.
        """
        found = RowProblems() if problems is None else problems
        texts: list[str] = []
        tokens: list[np.ndarray] = []
        prompts = [read_text_or_chat(prompt) for prompt in prompts]
        chunks = [range(at, min(at + _ROWS_AT_ONCE, len(prompts))) for at in range(0, len(prompts), _ROWS_AT_ONCE)]
        for rows in counted(chunks, "prompts", len(prompts), len):
            rendered = [self._rendered(prompts[row], tools[row] if tools else None, row, where, found) for row in rows]
            texts += [text or "" for text in rendered]
            tokens += self._tokens_of([prompts[row] for row in rows], rendered, where, rows.start, found)
        if problems is None:
            found.raise_any()
        return texts, tokens

    def _is_plain(self, prompt: Any) -> bool:
        """Whether a prompt is a string to which no chat template is applied."""
        return isinstance(prompt, str) and not self.chat_template

    def _tokens_of(
        self, prompts: Sequence[Any], texts: Sequence[str | None], where: Where, start: int, problems: RowProblems
    ) -> list[np.ndarray]:
        """Token ids of each prompt, whose text is None where it could not be rendered."""
        tokens: list[np.ndarray] = [np.empty(0, np.int32)] * len(texts)
        plain = [row for row, prompt in enumerate(prompts) if self._is_plain(prompt)]
        templated = sorted(set(range(len(texts))).difference(plain))
        # A template writes the special tokens itself; a plain string gets those the tokenizer adds by default.
        for rows, special in ((plain, True), (templated, False)):
            for row, ids in zip(rows, self.tokens([texts[row] or "" for row in rows], special), strict=True):
                tokens[row] = ids
                if not len(ids) and texts[row] is not None:
                    problems.add(f"{where(start + row)}: the prompt has no tokens: {prompts[row]!r}")
        return tokens

    def tokens(self, texts: Sequence[str], special: bool) -> list[np.ndarray]:
        """Tokenize texts.

        Args:
            texts: of which each begins a row.
            special: whether a row begins with what the tokenizer puts before a text, once: a text may have it already.
                What the tokenizer puts behind a text ends no prompt.

        Returns:
            The token ids of each, int32.
        """
        begins = self._begins if special else ()
        found: list[np.ndarray] = []
        for start in range(0, len(texts), _ROWS_AT_ONCE):
            for ids in self._encoded(list(texts[start : start + _ROWS_AT_ONCE]), special and begins is None):
                lacks_it = begins is not None and tuple(ids[: len(begins)]) != begins
                found.append(np.array([*(begins or ()), *ids] if lacks_it else ids, dtype=np.int32))
        return found

    def _encoded(self, texts: list[str], special: bool = False) -> list[list[int]]:
        encoded = self.tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )
        return encoded["input_ids"]

    @functools.cached_property
    def _begins(self) -> tuple[int, ...] | None:
        """The ids that the tokenizer puts before a text; None where they cannot be told from the text's own."""
        for text in ("a", "0", "."):
            (alone,), (whole,) = self._encoded([text]), self._encoded([text], True)
            for place in range(len(whole) - len(alone) + 1):
                if alone and whole[place : place + len(alone)] == alone:
                    return tuple(whole[:place])
        return None

    def completions(
        self,
        prompts: Sequence[Any],
        rendered: tuple[Sequence[str], Sequence[np.ndarray]],
        completions: Sequence[Any],
        column: str,
        where: Where,
        problems: RowProblems | None = None,
        tools: Sequence[Any] | None = None,
    ) -> list[Response]:
        """Tokenize what follows prompts, as it follows them: the tokens after the prompt's in both together.

        Chat messages are what the template writes for them, of which the assistant's turns are learned. A string ends
        with the end of a turn where the template wrote its prompt, else with the tokenizer's end of sequence.

        Args:
            prompts: as `prompts` got them.
            rendered: as `prompts` returned it; a text is "" where something was wrong.
            completions: strings, or lists of messages, the first and the last of the assistant.
            column: where they stand, for messages.
            where: as for `prompts`.
            problems: as for `prompts`.
            tools: as for `prompts`.

        Returns:
            Each response; it has no tokens where something is wrong.

        Raises:
            DataError: naming the rows whose completion is neither, cannot be rendered or has no tokens.
        """
        found = RowProblems() if problems is None else problems
        texts, prompt_ids = rendered
        asked = [read_text_or_chat(prompt) for prompt in prompts]
        given = [read_text_or_chat(completion) for completion in completions]
        replies = [_Written("")] * len(given)
        for row, completion in enumerate(given):
            if isinstance(completion, str):
                replies[row] = _Written(completion)
            elif not isinstance(completion, list):
                kind = type(completion).__name__
                found.add(
                    f"{where(row)}: the response in column {column!r} is a {kind}, expected a string or chat messages"
                )
            elif texts[row]:
                try:
                    replies[row] = self._reply(asked[row], texts[row], completion, tools[row] if tools else None)
                except DataError as error:
                    found.add(f"{where(row)}: the response in column {column!r} {error}")
        responses = [Response.of(np.empty(0, np.int32))] * len(given)
        plain = [self._is_plain(prompt) for prompt in asked]
        for special in (True, False):
            rows = [row for row in range(len(given)) if plain[row] == special]
            wholes = self.tokens([texts[row] + replies[row].text for row in rows], special)
            for row, whole in zip(rows, wholes, strict=True):
                ids = self._following(texts[row], prompt_ids[row], replies[row].text, whole)
                end = self.tokenizer.eos_token_id if special else self._turn_end
                if isinstance(given[row], str):
                    ids = self._ended(ids)
                    if end is not None and (not len(ids) or ids[-1] not in text_ends(self.tokenizer)):
                        ids = np.append(ids, np.int32(end))
                    responses[row] = Response.of(ids)
                elif not replies[row].others:
                    responses[row] = self._closed(Response.of(self._ended(ids)))
                else:
                    try:
                        turns = self._by_turns(texts[row], len(prompt_ids[row]), replies[row], whole)
                        responses[row] = self._closed(turns)
                    except DataError as error:
                        found.add(f"{where(row)}: the response in column {column!r} {error}")
                if not len(ids) and isinstance(given[row], str):
                    found.add(f"{where(row)}: the response in column {column!r} has no tokens")
        if problems is None:
            found.raise_any()
        return responses

    @functools.cached_property
    def _turn_end(self) -> int | None:
        """The token that ends a text behind a prompt that the template wrote."""
        end = turn_end(self.tokenizer)
        return self.tokenizer.eos_token_id if end is None else end

    def _by_turns(self, prompt: str, given: int, reply: _Written, whole: np.ndarray) -> Response:
        """A response of several turns, of which only the assistant's are learned.

        Args:
            prompt: its text.
            given: how many tokens it has.
            reply: what follows.
            whole: the tokens of both.

        Raises:
            DataError: a token has letters of two turns.
        """
        borders = self._encoded([prompt + reply.text[:at] for part in reply.others for at in part])
        if any(ids != whole[: len(ids)].tolist() for ids in borders):
            raise DataError("has a turn that begins or ends within a token: give each turn of the assistant as a row")
        starts, ends = [given, *map(len, borders[1::2])], [*map(len, borders[::2]), len(whole)]
        learned = np.zeros(len(whole), np.bool_)
        for start, end in zip(starts, ends, strict=True):
            learned[start : start + len(self._ended(whole[start:end]))] = True
        last = int(np.flatnonzero(learned)[-1]) + 1 if learned.any() else len(whole)
        return Response(whole[given:last], learned[given:last])

    def _following(self, text: str, prompt: np.ndarray, reply: str, whole: np.ndarray) -> np.ndarray:
        """The tokens of a reply behind its prompt's, given those of both together.

        Where one token of the whole has letters of both, the reply's are those behind a text with which it shares none:
        a model that is asked the prompt has the prompt's own tokens before it.
        """
        if np.array_equal(whole[: len(prompt)], prompt):
            return whole[len(prompt) :]
        self.merged += 1
        for before in dict.fromkeys((text[-1:], *_BORDERS)):
            first, both = self._encoded([before, before + reply])
            if first and both[: len(first)] == first:
                return np.array(both[len(first) :], dtype=np.int32)
        return np.array(self._encoded([reply])[0], dtype=np.int32)

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        """A turn without what a template writes after its end: nobody draws that."""
        is_end = np.isin(ids, text_ends(self.tokenizer))
        for place in np.flatnonzero(is_end[:-1] & ~is_end[1:]) + 1:
            if not self.tokenizer.decode(ids[place:][~is_end[place:]]).strip():
                return ids[:place]
        return ids

    def _closed(self, response: Response) -> Response:
        """A response of messages, with an end of sequence where the template writes no end of a turn."""
        end = self.tokenizer.eos_token_id
        if end is None or turn_end(self.tokenizer) is not None or (len(response.ids) and response.ids[-1] == end):
            return response
        return Response(np.append(response.ids, np.int32(end)), np.append(response.learned, True))

    def _reply(self, prompt: Any, text: str, reply: list[Any], tools: Any) -> _Written:
        """What the template writes for the messages of a reply after the prompt's.

        Raises:
            DataError: it cannot, or not so that the assistant's words could be told from others'.
        """
        if self._is_plain(prompt):
            raise DataError("is a list of chat messages, and the prompt a string: give both in the same form")
        if not are_messages(reply):
            raise DataError(f"is {shorten(reply)}; expected a string, or chat messages with 'role' and 'content'")
        for message, does in ((reply[0], "begins"), (reply[-1], "ends")):
            if message["role"] != "assistant":
                raise DataError(
                    f"{does} with a turn of the {message['role']}, whose words the model is not to learn: it has to "
                    "begin and end with the assistant's; what stands before belongs to the prompt"
                )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        given = _tools(tools)

        def written(number: int, begin: bool) -> str:
            try:
                return self._templated([*messages, *reply[:number]], begin, given)
            except DataError as error:
                raise DataError(f"cannot be rendered: {error}") from error

        whole = written(len(reply), False)
        if not whole.startswith(text) or len(whole) == len(text):
            raise DataError(
                f"follows no prompt: the prompt ends with {text[-30:]!r}, which the chat template writes otherwise "
                "where this reply follows: give each turn of the assistant as a row of its own, and as a text, which "
                "stands behind the prompt as it is"
            )
        others: list[tuple[int, int]] = []
        start = len(text)
        for number in range(1, len(reply)):
            if reply[number]["role"] != "assistant":
                continue
            back = next(back for back in range(number, 0, -1) if reply[back - 1]["role"] == "assistant")
            before, after = self._through_its_turn(written(back, False), whole, start), written(number, True)
            if not before or not whole.startswith(after):
                raise DataError(
                    "has turns that the chat template writes otherwise once others follow (as where it leaves out "
                    "earlier thoughts): give each turn of the assistant as a row of its own"
                )
            others.append((len(before) - len(text), len(after) - len(text)))
            start = len(after)
        return _Written(whole.removeprefix(text), tuple(others))

    def _through_its_turn(self, before: str, whole: str, start: int) -> str:
        """What a chat has in common with a longer one, to the end of its last turn, which begins at `start`.

        A template may write more behind the end of a chat, `<|endoftext|>` say. Returns "" where the turn differs.
        """
        if not whole.startswith(before) and self._turn_end is not None:
            turn, end, _ = before.rpartition(self.tokenizer.decode([self._turn_end]))
            before = turn + end if len(turn) >= start else ""
        return before if whole.startswith(before) else ""

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages as the template gets them.

        Raises:
            DataError: one says nothing, or says what the template does not take.
        """
        given = [dict(message) for message in messages]
        for message in given:
            check_content(message)
        if any(message.get("tool_calls") for message in given) and not writes_calls(self.tokenizer):
            raise DataError(
                "a turn calls tools, which the chat template of the model's tokenizer leaves out: take a model whose "
                "template writes them, or write the calls in the content"
            )
        if any(isinstance(message.get("content"), list) for message in given):
            texts = [join_parts(message) for message in given]  # a picture would be its mark alone
            given = given if takes_parts(self.tokenizer) else texts
        if self.system is None or given[0]["role"] in ("system", "developer"):
            return given
        return [{"role": "system", "content": self.system}, *given]

    def messages(self, prompt: Any) -> list[dict[str, Any]] | None:
        """The messages of which the template renders a prompt; None for a string to which it is not applied."""
        given = read_text_or_chat(prompt)
        if isinstance(given, str):
            return self.chat([{"role": "user", "content": given}]) if self.chat_template else None
        return self.chat(given)

    def _templated(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str:
        chat = self.chat(messages)
        try:
            return render_chat(self.tokenizer, chat, add_generation_prompt, tools)
        except Exception as error:  # templates raise what they like
            said = ", the first of which is data.system" if len(chat) > len(messages) else ""
            raise DataError(f"the chat template refuses the messages{said}: {error}") from error

    def _rendered(self, prompt: Any, tools: Any, row: int, where: Where, problems: RowProblems) -> str | None:
        try:
            return self._text(prompt, _tools(tools))
        except _NoTemplate as error:
            problems.add_alike(where(row), str(error))
        except DataError as error:
            problems.add(f"{where(row)}: {error}")
        return None

    def _text(self, prompt: Any, tools: list[Any] | None) -> str:
        if self._is_plain(prompt):
            if self.system is not None or tools or self._has_arguments:
                raise _NoTemplate(
                    f"the prompt is a string, to which no chat template is applied, and {self._asked(tools)}: set "
                    "data.chat_template=true, or give chat messages"
                )
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not are_messages(messages):
            raise DataError(
                f"the prompt is {shorten(prompt)} "
                f"({type(prompt).__name__}); expected a string, or a list of chat messages with 'role' and 'content'"
            )
        if messages[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with a turn of the assistant, which is what the model is to write: "
                "leave that turn out; for `enginehouse sft` it belongs in the column of responses (data.response)"
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
        text = self._templated(messages, True, tools)
        if tools and self._writes_tools is None:
            self._writes_tools = text != self._templated(messages, True)
        if tools and not self._writes_tools:
            raise _NoTemplate(
                "the row has tools (data.tools), but the chat template of the model's tokenizer writes none: take a "
                "model whose template does, or unset data.tools"
            )
        return text

    def _asked(self, tools: list[Any] | None) -> str:
        """What is set that only a chat template writes."""
        if self.system is None and not tools:
            return "data.template_arguments are set"
        return "data.system is set" if self.system is not None else "it has tools (data.tools)"

    @functools.cached_property
    def _has_arguments(self) -> bool:
        return bool(getattr(getattr(self.tokenizer, "apply_chat_template", None), "keywords", None))


def _tools(given: Any) -> list[Any] | None:
    """A row's tools, of which there may be none."""
    tools = given
    if isinstance(given, str) and given.strip():
        try:
            tools = decode_json(given)
        except ValueError as error:
            raise DataError(f"its tools (data.tools) are not valid JSON: {error}: {shorten(given)}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"its tools (data.tools) are {shorten(tools)} ({type(tools).__name__}); expected a list of JSON schemas, "
            "or its text"
        )
    return tools if isinstance(given, str) else drop_none(tools)  # Arrow gives every object the keys of any


def joined(prompts: Sequence[np.ndarray], responses: Sequence[Response]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of prompts with their responses, and of each token whether it is learned."""
    pairs = list(zip(prompts, responses, strict=True))
    return (
        [np.concatenate((prompt, response.ids)) for prompt, response in pairs],
        [np.concatenate((np.zeros(len(prompt), np.bool_), response.learned)) for prompt, response in pairs],
    )


def is_surely_short(prompt: Any, tokens: int) -> bool:
    """Whether a string has at most so many tokens whatever the tokenizer."""
    return isinstance(read_text_or_chat(prompt), str) and bool(prompt.strip()) and most_tokens(prompt) <= tokens


def most_tokens(text: str) -> int:
    """How many tokens a text has at most: a tokenizer gives each byte one at most."""
    return len(text.encode()) + _SPECIAL_TOKENS


def check_length(lengths: Sequence[int], limit: TokenLimit, what: str, where: Where) -> None:
    """Refuse rows longer than `limit`.

    Raises:
        DataError: naming the first such row, its length, how many there are, and what sets the limit.
    """
    longer = [row for row, length in enumerate(lengths) if length > limit.tokens]
    if longer:
        others = f" ({len(longer):,} rows are longer; the longest has {max(lengths)})" if len(longer) > 1 else ""
        said = f"{what} has {lengths[longer[0]]} tokens, more than {limit.option}{others}"
        raise DataError(f"{where(longer[0])}: {said}: {limit.cure}")


def all_too_long(prompts: int, shortest: int, limit: TokenLimit) -> DataError:
    """That dropping prompts leaves none; `shortest` is the length of the shortest in tokens."""
    return DataError(
        f"data.overlong_prompts=drop leaves none of {prompts:,} prompts: the shortest has {shortest} tokens, more than "
        f"{limit.option}"
    )
