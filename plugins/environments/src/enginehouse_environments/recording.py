"""What an agent asked the policy, as rows whose answers are kept, token for token, as they were drawn.

An agent sends the whole conversation with each request. Where that begins as an earlier one did, up to an answer that
it was given, the tokens so far are those of the earlier one, and only what is new is rendered. So an episode is a tree:
a conversation that goes on is one row, two requests after the same answer are two that begin alike, and where an agent
edits what was said, another row begins, at the last answer that still stands as it was given.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from enginehouse.engines.environment import Scored
from enginehouse.engines.transcript import Transcript
from enginehouse.errors import UserError
from enginehouse_environments.calls import call_format
from enginehouse_environments.dialogue import ChatTemplate

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, Policy, Score
    from enginehouse.engines.rollout import Completion, SamplingParams
    from enginehouse_environments.calls import CallFormat

MOST_TEMPLATES = 64
"""Lists of tools whose templates are kept."""

EDITED, BRANCH, ANOTHER = "edited history", "branch", "another conversation"
"""Why a row begins that is not the first."""


class Refused(Exception):
    """A request that is not answered, as the agent is told.

    Args:
        status: HTTP's.
        message: what is wrong, and what would be right.
        code: as OpenAI names it, for programs.
        param: which part of the request.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an episode may ask for.

    Attributes:
        calls: answers.
        drawn_tokens: tokens of all its answers together. None: any number.
        row_tokens: tokens of one conversation. None: any number.
    """

    calls: int
    drawn_tokens: int | None = None
    row_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request.

    Attributes:
        messages: the conversation so far, as OpenAI's.
        tools: JSON schemas of what may be called.
        arguments: of the chat template, by name.
        parses: whether calls are told from the answer's text.
        parallel: whether there may be several calls in an answer; else those after the first are left out of the
            message.
        n: answers.
        max_tokens: most tokens of each. None: as the run is configured.
        stop: texts that end an answer, besides the run's.
        changed: other fields of `SamplingParams` that it says.
        trained: whether who asks is trained; else the answers are in no mask.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parses: bool = True
    parallel: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    changed: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True


@dataclass(slots=True, eq=False)
class Answer:
    """An answer, and where it stands.

    Attributes:
        before: the answer that it follows. None: it is the first of its row.
        given: the tokens between the two.
        completion: what was drawn.
        message: it as the agent is given it.
        finish_reason: as OpenAI's.
        trained: whether who asked is trained.
        fits: whether it was drawn as the run trains.
        length: tokens of its row up to its end.
        begins: why it would be the first of a row that is not the first.
        followed: how many answers follow it.
    """

    before: Answer | None
    given: Sequence[int]
    completion: Completion
    message: Mapping[str, Any]
    finish_reason: str
    trained: bool
    fits: bool
    length: int
    begins: str
    followed: int = 0

    def path(self) -> list[Answer]:
        """The answers of its row up to it."""
        path = [self]
        while (before := path[-1].before) is not None:
            path.append(before)
        return path[::-1]

    def tokens(self) -> list[int]:
        """The tokens of its row up to its end."""
        return [int(token) for one in self.path() for part in (one.given, one.completion.token_ids) for token in part]


class Templates:
    """The chat template for each list of tools, with the form in which it has calls written.

    Args:
        tokenizer: the model's.
        format: name of a form of tool calls, or `"auto"`.
        arguments: given to the template by name, but for what a request says.
    """

    def __init__(self, tokenizer: Any, format: str = "auto", arguments: Mapping[str, Any] | None = None):
        self._tokenizer, self._format, self._arguments = tokenizer, format, dict(arguments or {})
        self._kept: dict[bytes, tuple[ChatTemplate, CallFormat | None]] = {}

    def of(self, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> tuple[ChatTemplate, Any]:
        """The template that is told of some tools, and what parses their calls; None where there are none.

        Raises:
            UserError: the tokenizer has no template, or none that tells how a call is written.
        """
        key = _canonical([list(tools), dict(arguments)])
        if key not in self._kept:
            template = ChatTemplate(self._tokenizer, tools or None, {**self._arguments, **arguments})
            while len(self._kept) >= MOST_TEMPLATES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = template, call_format(template, self._format) if tools else None
        return self._kept[key]


class Recording:
    """What the agent of one episode asks.

    Args:
        policy: of the episode.
        templates: render messages.
        limits: of the episode.

    Attributes:
        edits: how many requests had a history that is not as it was told.
        limit: the limit at which a request was refused; empty while none was.
        temperature: the first that is not the run's, of those that it was asked to draw at; None while there is none.
        failed: done with the error of the policy, if it raised one.
    """

    def __init__(self, policy: Policy, templates: Templates, limits: Limits):
        self.edits = 0
        self.limit = ""
        self.temperature: float | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._policy, self._templates, self._limits = policy, templates, limits
        self._after: dict[bytes, list[Answer]] = {}  # by the digest of a conversation that ends with them
        self._asked: Counter[bytes] = Counter()
        self._calls = self._drawn = self._count = 0
        self._under_way: set[asyncio.Task[Any]] = set()
        self._slots: list[list[Answer]] = []  # of each request
        self._ended = False

    async def answer(self, asked: Asked) -> Sequence[Answer]:
        """Answer a request: `asked.n` answers, which stand in the rows from now on.

        Raises:
            Refused: it cannot be answered.
            CancelledError: the episode ended meanwhile.
        """
        with self._one_more():
            messages = [normalised(message, number) for number, message in enumerate(asked.messages)]
            template, form = self._template(asked)
            digest, known, before = self._known(asked, messages)
            tokens = before.tokens() if before else []
            new = _with_names(messages)[known:]
            given = self._rendered(template, new, tokens, before)
            begins = self._why(new, before)
            sampling = self._sampling(asked, template, len(tokens) + len(given))
            fits = _same(sampling.temperature, self._policy.sampling.temperature)
            if self.temperature is None and not fits:
                self.temperature = sampling.temperature
            self._slots.append(slot := [])
            completions = await self._draw(digest, [*tokens, *given], asked.n, sampling)
            for completion in completions:
                message, finish = self._said(asked, template, form, completion)
                self._count += 1
                length = len(tokens) + len(given) + len(completion.token_ids)
                answer = Answer(before, given, completion, message, finish, asked.trained, fits, length, begins)
                slot.append(answer)
                (ended := digest.copy()).update(_digested(normalised(message)))
                self._after.setdefault(ended.digest(), []).append(answer)
                if before is not None:
                    before.followed += 1
            return slot

    def end(self) -> None:
        """Give up what is under way; nothing is answered any more."""
        self._ended = True
        for call in self._under_way:
            call.cancel()
        if not self.failed.done():
            self.failed.cancel()

    @property
    def answers(self) -> list[Answer]:
        """All answers, by the order in which they were asked for."""
        return [answer for slot in self._slots for answer in slot]

    def episode(self, score: Score, finish: str) -> Episode:
        """The rows as one episode, whose score has figures of them too. There has to be an answer that is trained."""
        *earlier, (last, first, begins) = rows = self._rows()
        figures = {"calls": self._count, "segments": len(rows), "edits": self.edits}
        scored = Scored(score.reward, {**figures, **score.figures}, score.failure, score.answer)
        segments = [said.segment(*self._texts(said, given, why)) for said, given, why in earlier]
        return last.episode(scored, *self._texts(last, first, begins), finish, segments)

    def _texts(self, said: Transcript, given: int, why: str) -> tuple[str, str]:
        """A row's first given tokens, and the others, for people."""
        parts = said.tokens[:given], said.tokens[given:]
        begin, rest = (self._policy.tokenizer.decode(part, skip_special_tokens=False) for part in parts)
        return (f"[{why}]\n" if why else "") + begin, rest

    def _rows(self) -> list[tuple[Transcript, int, str]]:
        """Each row, how many tokens it begins with that were given, and why it begins.

        Each drawn token is chosen in the first row that has it.
        """
        answers = self.answers
        trained = [one for one in answers if one.trained]
        trains = {id(one) for one in trained if one.fits and len(one.completion.token_ids)}
        trains = trains or set(map(id, trained))  # none as the run trains: whoever checks that says so
        rows: list[tuple[Transcript, int, str]] = []
        taken: set[int] = set()
        for leaf in answers:
            path = leaf.path()
            own = [one for one in path if id(one) not in taken]
            if leaf.followed or not any(id(one) in trains for one in own):
                continue
            said = Transcript(())
            for one in path:
                said.add_given(one.given)
                if id(one) in trains and id(one) not in taken:
                    said.add_drawn(one.completion)
                else:
                    said.add_given(one.completion.token_ids)
            taken.update(map(id, path))
            rows.append((said, len(path[0].given), own[0].begins if rows else ""))
        return rows

    # Of one request

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        if self._ended:
            raise Refused(401, "the episode of this key has ended", "episode_ended")
        if self._calls >= self._limits.calls:
            raise self._at_limit(403, f"an episode may ask {self._limits.calls} times (max_calls)", "too_many_calls")
        self._calls += 1
        call = asyncio.current_task()
        assert call is not None
        self._under_way.add(call)
        try:
            yield
        except Refused:
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise Refused(500, f"the policy cannot answer: {error}", "policy_failed") from error
        finally:
            self._under_way.discard(call)

    def _at_limit(self, status: int, message: str, code: str) -> Refused:
        self.limit = self.limit or message
        return Refused(status, message, code)

    def _template(self, asked: Asked) -> tuple[ChatTemplate, Any]:
        try:
            return self._templates.of(asked.tools, asked.arguments)
        except UserError as error:
            raise Refused(400, str(error), param="tools") from error

    def _known(self, asked: Asked, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, int, Answer | None]:
        """The digest of a conversation, how many of its first messages are known, and the answer that they end with."""
        digest = hashlib.blake2b(_canonical([list(asked.tools), dict(asked.arguments)]), digest_size=16)
        known, found = 0, None
        for number, message in enumerate(messages, 1):
            digest.update(_digested(message))
            if answers := self._after.get(digest.digest()):
                known, found = number, answers
        return digest, known, _fitting(found, messages[known - 1]) if found else None

    def _why(self, new: Sequence[Mapping[str, Any]], before: Answer | None) -> str:
        if self._after and any(message["role"] == "assistant" for message in new):
            self.edits += 1
            return EDITED
        return BRANCH if before is not None else ANOTHER

    def _rendered(
        self, template: ChatTemplate, new: Sequence[Mapping[str, Any]], tokens: Sequence[int], before: Answer | None
    ) -> list[int]:
        """Tokens of new messages, after those so far. What a tool gave cannot end its message."""
        new = [{**one, "content": template.plain(one["content"])} if one["role"] == "tool" else one for one in new]
        try:
            if before is None:
                return template.opening(new)
            return template.continuation(new, tokens, before.completion.finish_reason == "stop")
        except UserError as error:
            raise Refused(400, str(error), param="messages") from error

    def _sampling(self, asked: Asked, template: ChatTemplate, tokens: int) -> SamplingParams:
        """How to draw what follows so many tokens."""
        own, limits = self._policy.sampling, self._limits
        most = [own.max_tokens if asked.max_tokens is None else min(own.max_tokens, asked.max_tokens)]
        if limits.row_tokens is not None:
            most.append(limits.row_tokens - tokens)
            if most[-1] < 1:
                limit = f"{limits.row_tokens} are the most with an answer (max_row_tokens; unset, what the models read)"
                said = f"the conversation has {tokens} tokens, and {limit}"
                raise self._at_limit(400, said, "context_length_exceeded")
        if limits.drawn_tokens is not None:
            most.append((limits.drawn_tokens - self._drawn) // asked.n)
            if most[-1] < 1:
                said = f"an episode may draw {limits.drawn_tokens} tokens (max_tokens)"
                raise self._at_limit(403, said, "too_many_tokens")
        self._drawn += min(most) * asked.n  # those that are not drawn are given back
        ends = own.stop_token_ids
        if template.end is not None and template.end not in ends:
            ends = (*ends, template.end)
        stop = (*own.stop, *asked.stop)
        return replace(own, stop_token_ids=ends, stop=stop, max_tokens=min(most), **asked.changed)

    async def _draw(self, digest: Any, tokens: Sequence[int], n: int, sampling: SamplingParams) -> Sequence[Completion]:
        """Seeds depend on the conversation, and on how often it was asked, not on what else is asked meanwhile."""
        key = digest.digest()
        number, self._asked[key] = self._asked[key], self._asked[key] + 1
        drawn = 0
        try:
            completions = await self._policy.branch(f"{key.hex()[:12]}-{number}").samples(tokens, n, sampling)
            drawn = sum(len(one.token_ids) for one in completions)
            return completions
        finally:
            self._drawn += drawn - sampling.max_tokens * n

    def _said(
        self, asked: Asked, template: ChatTemplate, form: CallFormat | None, completion: Completion
    ) -> tuple[dict[str, Any], str]:
        """A message as the agent is given it, and why it ended."""
        stopped = completion.finish_reason == "stop"
        text, finish = template.text(completion.token_ids, stopped), "stop" if stopped else "length"
        if form is not None and asked.parses:
            parsed = form.parse(text, self._count)
            if calls := parsed.calls if asked.parallel else parsed.calls[:1]:
                entries = [call.entry() for call in calls]
                return {"role": "assistant", "content": parsed.content or None, "tool_calls": entries}, "tool_calls"
        ends = [place for one in asked.stop if (place := text.find(one)) >= 0]
        return {"role": "assistant", "content": text[: min(ends)] if ends else text}, finish


def normalised(message: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """A message as chat templates read it: its content text, arguments of its calls objects, and nothing that is empty.

    Raises:
        Refused: it is none that can be rendered.
    """
    where = f"messages[{number}]"
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(400, f"{where} has the role {role!r}: system, developer, user, assistant or tool", None, where)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
        if content is None:
            raise Refused(400, f"{where} has content that is no text, which this model does not read", None, where)
    if not isinstance(content or "", str):
        raise Refused(400, f"{where} has content that is no text: {type(content).__name__}", None, where)
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    if calls := rest.get("tool_calls"):
        try:
            rest["tool_calls"] = [{**one, "function": _with_object(one["function"])} for one in calls]
        except (TypeError, KeyError) as error:
            raise Refused(400, f"{where} has tool_calls that are none", None, where) from error
    ids = {
        "tool_calls": [one.get("id") for one in rest.get("tool_calls", ())],
        "tool_call_id": [rest.get("tool_call_id")],
    }
    for name, given in ids.items():
        if not all(isinstance(one, str | None) for one in given):
            raise Refused(400, f"{where} has {name} with an id that is no text", None, where)
    return {"role": role, "content": content or "", **rest}


def _with_names(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages of tools with the names of these, which OpenAI's have not and some templates want."""
    names = {
        one.get("id"): one["function"].get("name") for message in messages for one in message.get("tool_calls", ())
    }
    return [
        {"name": names.get(message.get("tool_call_id")) or "tool", **message} if message["role"] == "tool" else message
        for message in messages
    ]


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        arguments = function["arguments"]
    return {**function, "arguments": arguments}


def _digested(message: Mapping[str, Any]) -> bytes:
    """What two messages have alike that say the same: of an answer, its text, and its calls whatever their order and
    ids; libraries add fields of their own to answers."""
    if message["role"] != "assistant":
        rest = {name: value for name, value in message.items() if name != "tool_call_id"}
        return _canonical(rest)
    called = [[one["function"].get("name"), one["function"]["arguments"]] for one in message.get("tool_calls", ())]
    return _canonical(["assistant", message["content"].strip(), sorted(called, key=_canonical)])


def _fitting(answers: Sequence[Answer], message: Mapping[str, Any]) -> Answer:
    """Of answers that say the same the one that is meant: by the ids of its calls, else one that nothing follows."""
    ids = _ids(message)
    meant = [one for one in answers if ids and _ids(one.message) == ids] or answers
    return next((one for one in meant if not one.followed), meant[-1])


def _ids(message: Mapping[str, Any]) -> set[Any]:
    return {one.get("id") for one in message.get("tool_calls") or ()}


def _same(temperature: float, other: float) -> bool:
    return abs(temperature - other) <= 1e-6 * max(temperature, other)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
