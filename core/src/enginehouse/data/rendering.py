"""From what rows say to tokens: the one way of every command. docs/rows.md says what becomes of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from enginehouse.data.files import RowProblems
from enginehouse.data.messages import are_messages, check_content, read_said, shown, with_text, without_none
from enginehouse.errors import DataError, ModelError
from enginehouse.jsontext import decoded

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
    """Shows how much of something has come; `enginehouse.runs.Progress.counted` is one."""

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


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with the model in the directory `path`.

    Raises:
        ModelError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"cannot load a tokenizer from {path}: {error}") from error


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
        prompts = [read_said(prompt) for prompt in prompts]
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
    ) -> list[np.ndarray]:
        """Tokenize what follows prompts, as it follows them: the tokens after the prompt's in both together.

        A string ends with the tokenizer's end of sequence, if it has one; chat messages are what the template writes
        for them.

        Args:
            prompts: as `prompts` got them.
            rendered: as `prompts` returned it; a text is "" where something was wrong.
            completions: strings, or lists of messages of the assistant.
            column: where they stand, for messages.
            where: as for `prompts`.
            problems: as for `prompts`.

        Returns:
            The token ids of each (int32); none where something is wrong.

        Raises:
            DataError: naming the rows whose completion is neither, cannot be rendered or has no tokens.
        """
        found = RowProblems() if problems is None else problems
        texts, prompt_ids = rendered
        asked = [read_said(prompt) for prompt in prompts]
        given = [read_said(completion) for completion in completions]
        replies: list[str] = []
        for row, completion in enumerate(given):
            text = completion if isinstance(completion, str) else ""
            if isinstance(completion, list) and texts[row]:
                text = self._reply(asked[row], texts[row], completion, where(row), column, found)
            elif not isinstance(completion, str | list):
                kind = type(completion).__name__
                found.add(
                    f"{where(row)}: the response in column {column!r} is a {kind}, expected a string or chat messages"
                )
            replies.append(text)
        tokens: list[np.ndarray] = [np.empty(0, np.int32)] * len(given)
        plain = [self._is_plain(prompt) for prompt in asked]
        for special in (True, False):
            rows = [row for row in range(len(given)) if plain[row] == special]
            wholes = self.tokens([texts[row] + replies[row] for row in rows], special)
            for row, whole in zip(rows, wholes, strict=True):
                tokens[row] = self._following(texts[row], prompt_ids[row], replies[row], whole)
        end = getattr(self.tokenizer, "eos_token_id", None)
        for row, completion in enumerate(given):
            if isinstance(completion, list):
                tokens[row] = self._ended(tokens[row])
            elif end is not None and (not len(tokens[row]) or tokens[row][-1] != end):
                tokens[row] = np.append(tokens[row], np.int32(end))
            elif not len(tokens[row]) and isinstance(completion, str):
                found.add(f"{where(row)}: the response in column {column!r} has no tokens")
        if problems is None:
            found.raise_any()
        return tokens

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
        """A reply without what a template writes after its end of sequence: nobody draws that."""
        (ends,) = np.nonzero(ids == self.tokenizer.eos_token_id)
        if len(ends) and not self.tokenizer.decode(ids[ends[-1] + 1 :]).strip():
            return ids[: ends[-1] + 1]
        return ids

    def _reply(self, prompt: Any, text: str, reply: list[Any], place: str, column: str, problems: RowProblems) -> str:
        """What the template writes for the messages of a reply after the prompt's; "" if it cannot."""
        said = f"{place}: the response in column {column!r}"
        if self._is_plain(prompt):
            problems.add(f"{said} is a list of chat messages, and the prompt a string: give both in the same form")
        elif not are_messages(reply):
            problems.add(f"{said} is {shown(reply)}; expected a string, or chat messages with 'role' and 'content'")
        elif others := [message["role"] for message in reply if message["role"] != "assistant"]:
            problems.add(
                f"{said} has a turn of the {others[0]}, whose words the model is not to learn: give the turns before "
                "the assistant's last as the prompt"
            )
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            try:
                whole = self._templated([*messages, *reply], add_generation_prompt=False)
            except DataError as error:
                problems.add(f"{said}: {error}")
                return ""
            if whole.startswith(text) and len(whole) > len(text):
                return whole.removeprefix(text)
            problems.add(f"{said}: the chat template writes the prompt otherwise where a reply follows it")
        return ""

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Chat messages as the template gets them.

        Raises:
            DataError: one says nothing, or says what the template does not take.
        """
        given = [dict(message) for message in messages]
        for message in given:
            check_content(message)
        if any(isinstance(message.get("content"), list) for message in given) and not self._takes_parts:
            given = [with_text(message) for message in given]
        if self.system is None or given[0]["role"] in ("system", "developer"):
            return given
        return [{"role": "system", "content": self.system}, *given]

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes a content of parts as it writes the same text."""
        said = "enginehouse"
        written = []
        for content in (said, [{"type": "text", "text": said}]):
            try:
                written.append(
                    self.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
                )
            except Exception:  # templates raise what they like
                return False
        return written[0] == written[1]

    def messages(self, prompt: Any) -> list[dict[str, Any]] | None:
        """The messages of which the template renders a prompt; None for a string to which it is not applied."""
        given = read_said(prompt)
        if isinstance(given, str):
            return self.chat([{"role": "user", "content": given}]) if self.chat_template else None
        return self.chat(given)

    def _templated(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str:
        chat = self.chat(messages)
        try:
            return self.tokenizer.apply_chat_template(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
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
            if self.system is not None or tools:
                raise _NoTemplate(
                    f"the prompt is a string, to which no chat template is applied, and {self._asked(tools)}: set "
                    "data.chat_template=true, or give chat messages"
                )
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not are_messages(messages):
            raise DataError(
                f"the prompt is {shown(prompt)} "
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
        return "data.system is set" if self.system is not None else "it has tools (data.tools)"


def _tools(given: Any) -> list[Any] | None:
    """A row's tools, of which there may be none."""
    tools = given
    if isinstance(given, str) and given.strip():
        try:
            tools = decoded(given)
        except ValueError as error:
            raise DataError(f"its tools (data.tools) are not valid JSON: {error}: {shown(given)}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"its tools (data.tools) are {shown(tools)} ({type(tools).__name__}); expected a list of JSON schemas, or "
            "its text"
        )
    return tools if isinstance(given, str) else without_none(tools)  # Arrow gives every object the keys of any


def begun_turn(tokenizer: Any) -> str:
    """Return what a chat template has written of an answer where the model begins: `<think>` and a line break, say.

    It is the model's turn that a reward judges, and this is its beginning; "" where there is none, or no telling.
    """
    asked, said = {"role": "user", "content": "a"}, "enginehouse"
    apply = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        before = apply([asked])
        prompt, whole = (
            apply([asked], add_generation_prompt=True),
            apply([asked, {"role": "assistant", "content": said}]),
        )
    except Exception:  # templates raise what they like
        return ""
    head = whole.partition(said)[0].removeprefix(before)
    asking = prompt.removeprefix(before)
    return asking.removeprefix(head) if head and asking.startswith(head) else ""


def is_surely_short(prompt: Any, tokens: int) -> bool:
    """Whether a string has at most so many tokens whatever the tokenizer."""
    return isinstance(read_said(prompt), str) and bool(prompt.strip()) and most_tokens(prompt) <= tokens


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
