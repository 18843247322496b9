"""Records the requests of an agent as training rows with the tokens that the policy generated.

An agent sends the whole conversation with each request. The conversation may begin like the conversation of an earlier
request, up to an answer that the agent got. The tokens of the beginning are then kept, and only the new messages are
rendered. So an episode is a tree of rows. A conversation that continues stays one row. Two requests after the same
answer share the beginning of their rows. If an agent edits the history, a new row begins after the last unchanged
answer.
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
from enginehouse_environments.calls import find_call_format
from enginehouse_environments.dialogue import ChatTemplate

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, Policy, Score
    from enginehouse.engines.rollout import Completion, SamplingParams
    from enginehouse_environments.calls import CallFormat

MOST_TEMPLATES = 64
"""Maximum number of cached templates."""

EDITED, BRANCH, ANOTHER = "edited history", "branch", "another conversation"
"""Reasons why a row other than the first begins."""


class RequestRefused(Exception):
    """An error reply to the agent.

    Args:
        status: HTTP status.
        message: the problem and its solution.
        code: OpenAI's name of the error, for programs.
        param: field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode; None means no limit."""

    calls: int
    drawn_tokens: int | None = None  # generated tokens of all its answers together
    row_tokens: int | None = None  # tokens of one conversation


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    messages: Sequence[Mapping[str, Any]]  # the conversation so far, in OpenAI's form
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas
    arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template, by name
    parses: bool = True  # tool calls are parsed from the answer's text
    parallel: bool = True  # an answer may have several calls; else its message has only the first
    n: int = 1  # number of answers
    max_tokens: int | None = None  # maximum length in tokens of each answer; None: the maximum of the run
    stop: Sequence[str] = ()  # texts that end an answer, in addition to the stop strings of the run
    changed: Mapping[str, Any] = field(default_factory=dict)  # other fields of `SamplingParams` that the request sets
    trained: bool = True  # False: its answers are not trained on


@dataclass(slots=True, eq=False)
class RecordedAnswer:
    """An answer and its place in the tree of rows."""

    before: RecordedAnswer | None  # the answer that it follows; None: it is the first of its row
    given: Sequence[int]  # tokens between the two answers
    completion: Completion
    message: Mapping[str, Any]  # the message to the agent
    finish_reason: str  # as in OpenAI's replies
    trained: bool
    fits: bool  # it was generated at the temperature at which the run trains
    length: int  # tokens of its row up to its end
    begins: str  # reason for a new row, if it begins one
    followed: int = 0  # number of answers that follow it

    def path(self) -> list[RecordedAnswer]:
        """Return the answers of the row that contains this answer, from the row's first answer to this one."""
        path = [self]
        while (before := path[-1].before) is not None:
            path.append(before)
        return path[::-1]

    def tokens(self) -> list[int]:
        """Return the tokens of the row that contains this answer, from the row's start to the end of this answer."""
        parts = [part for answer in self.path() for part in (answer.given, answer.completion.token_ids)]
        return [int(token) for part in parts for token in part]


class Templates:
    """Caches the chat template and the format of tool calls for each list of tools.

    `format` names a format of calls, or is `"auto"`. `arguments` are defaults for the template's arguments.
    """

    def __init__(self, tokenizer: Any, format: str = "auto", arguments: Mapping[str, Any] | None = None):
        self._tokenizer, self._format, self._arguments = tokenizer, format, dict(arguments or {})
        self._cache: dict[bytes, tuple[ChatTemplate, CallFormat | None]] = {}

    def get(
        self, tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[ChatTemplate, CallFormat | None]:
        """Return the template with these tools, and the format of their calls, which is None without tools.

        Raises:
            UserError: the tokenizer has no template, or the template writes calls in no known format.
        """
        key = _encode_json([list(tools), dict(arguments)])
        if key not in self._cache:
            template = ChatTemplate(self._tokenizer, tools or None, {**self._arguments, **arguments})
            while len(self._cache) >= MOST_TEMPLATES:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = template, find_call_format(template, self._format) if tools else None
        return self._cache[key]


class Recording:
    """Answers the requests of one episode's agent, and makes the episode from the answers."""

    def __init__(self, policy: Policy, templates: Templates, limits: Limits):
        self.edits = 0  # requests whose history differs from what was sent
        self.limit = ""  # message of the first limit that was reached
        self.temperature: float | None = None  # the first requested one that differs from the run's
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises the policy's error
        self.failed.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._policy, self._templates, self._limits = policy, templates, limits
        self._by_digest: dict[bytes, list[RecordedAnswer]] = {}  # by the digest of the conversation so far
        self._times_asked: Counter[bytes] = Counter()
        self._calls = self._drawn = self._count = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._slots: list[list[RecordedAnswer]] = []  # answers of each request
        self._ended = False

    async def answer(self, request: PolicyRequest) -> Sequence[RecordedAnswer]:
        """Generate and record `request.n` answers.

        Raises:
            RequestRefused: the request cannot be answered.
            CancelledError: the episode ended meanwhile.
        """
        with self._count_call():
            messages = [normalise(message, number) for number, message in enumerate(request.messages)]
            template, form = self._get_template(request)
            digest, known_count, before = self._find_known(request, messages)
            tokens = before.tokens() if before else []
            new = _add_tool_names(messages)[known_count:]
            new_tokens = self._render(template, new, tokens, before)
            begins = self._reason_to_begin(new, before)
            sampling = self._choose_sampling(request, template, len(tokens) + len(new_tokens))
            fits = _are_equal(sampling.temperature, self._policy.sampling.temperature)
            if self.temperature is None and not fits:
                self.temperature = sampling.temperature
            self._slots.append(slot := [])
            completions = await self._draw(digest, [*tokens, *new_tokens], request.n, sampling)
            for completion in completions:
                message, finish = self._parse_message(request, template, form, completion)
                self._count += 1
                length = len(tokens) + len(new_tokens) + len(completion.token_ids)
                answer = RecordedAnswer(
                    before, new_tokens, completion, message, finish, request.trained, fits, length, begins
                )
                slot.append(answer)
                (end := digest.copy()).update(_encode_content(normalise(message)))
                self._by_digest.setdefault(end.digest(), []).append(answer)
                if before is not None:
                    before.followed += 1
            return slot

    def end(self) -> None:
        """Cancel the requests in progress, and reject further requests."""
        self._ended = True
        for call in self._running:
            call.cancel()
        if not self.failed.done():
            self.failed.cancel()

    @property
    def answers(self) -> list[RecordedAnswer]:
        """All answers, in the order of their requests."""
        return [answer for slot in self._slots for answer in slot]

    def episode(self, score: Score, finish: str) -> Episode:
        """Return the rows as one episode. Its metrics include the number of requests, of rows, and of requests with an
        edited history. At least one answer must be trained on."""
        *earlier, (last, first, begins) = rows = self._make_rows()
        figures = {"calls": self._count, "segments": len(rows), "edits": self.edits}
        scored = Scored(score.reward, {**figures, **score.figures}, score.failure, score.answer)
        segments = [
            row.segment(*self._decode_texts(row, prompt_tokens, reason)) for row, prompt_tokens, reason in earlier
        ]
        return last.episode(scored, *self._decode_texts(last, first, begins), finish, segments)

    def _decode_texts(self, row: Transcript, prompt_tokens: int, reason: str) -> tuple[str, str]:
        """Return a row's prompt and response as readable texts."""
        parts = row.tokens[:prompt_tokens], row.tokens[prompt_tokens:]
        prompt, response = (self._policy.tokenizer.decode(part, skip_special_tokens=False) for part in parts)
        return (f"[{reason}]\n" if reason else "") + prompt, response

    def _make_rows(self) -> list[tuple[Transcript, int, str]]:
        """Return each row, the number of its prompt tokens, and the reason why it begins. A generated token is trained
        on only in the first row that contains it."""
        answers = self.answers
        trained = [answer for answer in answers if answer.trained]
        in_mask = {id(answer) for answer in trained if answer.fits and len(answer.completion.token_ids)}
        in_mask = in_mask or set(map(id, trained))  # if none fits, the check of episodes reports it
        rows: list[tuple[Transcript, int, str]] = []
        in_rows: set[int] = set()
        for leaf in answers:
            path = leaf.path()
            new_answers = [answer for answer in path if id(answer) not in in_rows]
            if leaf.followed or not any(id(answer) in in_mask for answer in new_answers):
                continue
            row = Transcript(())
            for answer in path:
                row.add_given(answer.given)
                if id(answer) in in_mask and id(answer) not in in_rows:
                    row.add_drawn(answer.completion)
                else:
                    row.add_given(answer.completion.token_ids)
            in_rows.update(map(id, path))
            rows.append((row, len(path[0].given), new_answers[0].begins if rows else ""))
        return rows

    # One request

    @contextmanager
    def _count_call(self) -> Iterator[None]:
        """Count a request. If the policy raises an error, pass it to the episode."""
        if self._ended:
            raise RequestRefused(401, "the episode of this key has ended", "episode_ended")
        if self._calls >= self._limits.calls:
            raise self._limit_error(
                403, f"an episode may send at most {self._limits.calls} requests (max_calls)", "too_many_calls"
            )
        self._calls += 1
        call = asyncio.current_task()
        assert call is not None
        self._running.add(call)
        try:
            yield
        except RequestRefused:
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise RequestRefused(500, f"the policy cannot answer: {error}", "policy_failed") from error
        finally:
            self._running.discard(call)

    def _limit_error(self, status: int, message: str, code: str) -> RequestRefused:
        self.limit = self.limit or message
        return RequestRefused(status, message, code)

    def _get_template(self, request: PolicyRequest) -> tuple[ChatTemplate, CallFormat | None]:
        try:
            return self._templates.get(request.tools, request.arguments)
        except UserError as error:
            raise RequestRefused(400, str(error), param="tools") from error

    def _find_known(
        self, request: PolicyRequest, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, int, RecordedAnswer | None]:
        """Return the conversation's digest, the number of messages already in a row, and the answer they end with."""
        digest = hashlib.blake2b(_encode_json([list(request.tools), dict(request.arguments)]), digest_size=16)
        known_count, candidates = 0, None
        for number, message in enumerate(messages, 1):
            digest.update(_encode_content(message))
            if answers := self._by_digest.get(digest.digest()):
                known_count, candidates = number, answers
        return digest, known_count, _choose_answer(candidates, messages[known_count - 1]) if candidates else None

    def _reason_to_begin(self, new: Sequence[Mapping[str, Any]], before: RecordedAnswer | None) -> str:
        if self._by_digest and any(message["role"] == "assistant" for message in new):
            self.edits += 1
            return EDITED
        return BRANCH if before is not None else ANOTHER

    def _render(
        self,
        template: ChatTemplate,
        new: Sequence[Mapping[str, Any]],
        tokens: Sequence[int],
        before: RecordedAnswer | None,
    ) -> list[int]:
        """Return the tokens of new messages after a row's tokens. Special tokens in a tool's result are broken up."""
        messages = list(new)
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                messages[place] = {**message, "content": template.break_special_tokens(message["content"])}
        try:
            if before is None:
                return template.opening(messages)
            return template.continuation(messages, tokens, before.completion.finish_reason == "stop")
        except UserError as error:
            raise RequestRefused(400, str(error), param="messages") from error

    def _choose_sampling(self, request: PolicyRequest, template: ChatTemplate, tokens: int) -> SamplingParams:
        """Return the sampling parameters of answers after `tokens` tokens.

        From now on, the maximum length of the answers counts as generated. Concurrent requests thus keep the limit of
        the episode together.
        """
        defaults, limits = self._policy.sampling, self._limits
        most = [defaults.max_tokens if request.max_tokens is None else min(defaults.max_tokens, request.max_tokens)]
        if limits.row_tokens is not None:
            most.append(limits.row_tokens - tokens)
            if most[-1] < 1:
                limit = (
                    f"with an answer it may have at most {limits.row_tokens} (max_row_tokens; if unset, the context "
                    "length of the models)"
                )
                message = f"the conversation has {tokens} tokens, but {limit}"
                raise self._limit_error(400, message, "context_length_exceeded")
        if limits.drawn_tokens is not None:
            most.append((limits.drawn_tokens - self._drawn) // request.n)
            if most[-1] < 1:
                message = f"an episode may generate at most {limits.drawn_tokens} tokens (max_tokens)"
                raise self._limit_error(403, message, "too_many_tokens")
        self._drawn += min(most) * request.n  # `_draw` subtracts tokens that are not generated
        ends = defaults.stop_token_ids
        if template.end is not None and template.end not in ends:
            ends = (*ends, template.end)
        stop = (*defaults.stop, *request.stop)
        return replace(defaults, stop_token_ids=ends, stop=stop, max_tokens=min(most), **request.changed)

    async def _draw(self, digest: Any, tokens: Sequence[int], n: int, sampling: SamplingParams) -> Sequence[Completion]:
        """Generate answers. Their seeds depend only on the conversation and on how often it was already sent."""
        key = digest.digest()
        number, self._times_asked[key] = self._times_asked[key], self._times_asked[key] + 1
        tokens_drawn = 0
        try:
            completions = await self._policy.branch(f"{key.hex()[:12]}-{number}").samples(tokens, n, sampling)
            tokens_drawn = sum(len(completion.token_ids) for completion in completions)
            return completions
        finally:
            self._drawn += tokens_drawn - sampling.max_tokens * n

    def _parse_message(
        self, request: PolicyRequest, template: ChatTemplate, form: CallFormat | None, completion: Completion
    ) -> tuple[dict[str, Any], str]:
        """Return the message to the agent, and its finish reason."""
        stopped = completion.finish_reason == "stop"
        text, finish = template.text(completion.token_ids, stopped), "stop" if stopped else "length"
        if form is not None and request.parses:
            parsed = form.parse(text, self._count)
            if calls := parsed.calls if request.parallel else parsed.calls[:1]:
                entries = [call.entry() for call in calls]
                return {"role": "assistant", "content": parsed.content or None, "tool_calls": entries}, "tool_calls"
        ends = [place for end in request.stop if (place := text.find(end)) >= 0]
        return {"role": "assistant", "content": text[: min(ends)] if ends else text}, finish


def normalise(message: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """Return a message as chat templates read it: content as text, arguments of calls as objects, no empty fields.

    Raises:
        RequestRefused: the message cannot be rendered.
    """
    where = f"messages[{number}]"

    def refuse(problem: str) -> RequestRefused:
        return RequestRefused(400, f"{where} has {problem}", None, where)

    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant", "tool"):
        raise refuse(f"the role {role!r}, which must be system, developer, user, assistant or tool")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
        if content is None:
            raise refuse("content that is no text, which this model does not read")
    if not isinstance(content or "", str):
        raise refuse(f"content that is no text: {type(content).__name__}")
    fields = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    if calls := fields.get("tool_calls"):
        try:
            fields["tool_calls"] = [{**call, "function": _parse_arguments(call["function"])} for call in calls]
        except (TypeError, KeyError) as error:
            raise refuse("tool_calls that are not a list of function calls") from error
    ids = {
        "tool_calls": [call.get("id") for call in fields.get("tool_calls", ())],
        "tool_call_id": [fields.get("tool_call_id")],
    }
    for name, values in ids.items():
        if not all(isinstance(value, str | None) for value in values):
            raise refuse(f"{name} with an id that is no text")
    return {"role": role, "content": content or "", **fields}


def _add_tool_names(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Add the tools' names to their messages. OpenAI's messages lack them, but some templates need them."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call.get("id"): call["function"].get("name") for call in calls}
    return [
        {"name": names.get(message.get("tool_call_id")) or "tool", **message} if message["role"] == "tool" else message
        for message in messages
    ]


def _parse_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        arguments = function["arguments"]
    return {**function, "arguments": arguments}


def _encode_content(message: Mapping[str, Any]) -> bytes:
    """Return the content by which messages are compared. For an answer: its text, and its calls in any order, without
    ids. Other fields of an answer do not count, because libraries add some."""
    if message["role"] != "assistant":
        return _encode_json({name: value for name, value in message.items() if name != "tool_call_id"})
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [[function.get("name"), function["arguments"]] for function in functions]
    return _encode_json(["assistant", message["content"].strip(), sorted(calls, key=_encode_json)])


def _choose_answer(answers: Sequence[RecordedAnswer], message: Mapping[str, Any]) -> RecordedAnswer:
    """Return the answer that a message repeats. Prefer an answer with the same call ids, then an answer that no other
    answer follows."""
    ids = _call_ids(message)
    candidates = [answer for answer in answers if ids and _call_ids(answer.message) == ids] or answers
    return next((answer for answer in candidates if not answer.followed), candidates[-1])


def _call_ids(message: Mapping[str, Any]) -> set[Any]:
    return {call.get("id") for call in message.get("tool_calls") or ()}


def _are_equal(temperature: float, second: float) -> bool:
    return abs(temperature - second) <= 1e-6 * max(temperature, second)


def _encode_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode() + b"\n"
