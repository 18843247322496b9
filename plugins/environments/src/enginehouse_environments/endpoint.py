"""An endpoint with OpenAI's protocol, through which agents use the policy of their episode.

It listens on 127.0.0.1, on the environment's event loop. A random key identifies the requests of an episode, and is
invalid once the episode has ended.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from enginehouse_environments.recording import PolicyRequest, RequestRefused

if TYPE_CHECKING:
    from enginehouse_environments.recording import RecordedAnswer, Recording

MODEL = "policy"
"""Name of the model in `/v1/models`. Requests may use any name."""

HEAD_SECONDS = 10.0
"""Time limit for the head of a request; h11 limits its length."""

BODY_BYTES = 2**25
"""Maximum length of a request's body, in bytes."""

BACKLOG, MOST_CONNECTIONS = 128, 4096
"""Maximum number of connections that wait to be accepted, and maximum number of open connections. At most half of the
files that the process may open are connections. At most a sixteenth of that maximum is accepted at once, because the
server closes an excess connection only some turns of the event loop later."""

UNHEEDED = {
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
    *("safety_identifier", "seed", "service_tier", "store", "user", "verbosity"),
}
"""Parameters that are accepted and ignored, because they do not change the tokens' probabilities. The run sets all
seeds itself."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Parameters that are rejected unless they have one of these neutral values."""


class ChatRequest(BaseModel):
    """A request to `/v1/chat/completions`, with OpenAI's fields."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = MODEL
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_policy_request(self, ignored: Sequence[str]) -> PolicyRequest:
        """Return the request to the policy, without the parameters in `ignored`.

        Raises:
            RequestRefused: it asks for something that the policy does not support.
        """

        def refuse(message: str, param: str) -> RequestRefused:
            return RequestRefused(400, message, "unsupported_parameter", param)

        for name, value in (self.model_extra or {}).items():
            if value is None or name in UNHEEDED or name in ignored or value in NEUTRAL.get(name, ()):
                continue
            raise refuse(
                f"{name}={json.dumps(value)[:60]} is not supported: the run trains only on tokens that it samples with "
                "its own parameters. Remove it, or add it to environment.arguments.ignored",
                name,
            )
        if "tool_choice" not in ignored and self.tool_choice not in (None, "none", "auto"):
            raise refuse("tool_choice must be none or auto, because calls cannot be forced", "tool_choice")
        if not all(isinstance(tool.get("function"), dict) for tool in self.tools or ()):
            raise refuse("all tools must be functions", "tools")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        limits = {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}
        return PolicyRequest(
            self.messages,
            self.tools or (),
            self.chat_template_kwargs or {},
            parses=self.tool_choice != "none",
            parallel=self.parallel_tool_calls is not False,
            n=self.n or 1,
            max_tokens=min((most for name, most in limits.items() if most and name not in ignored), default=None),
            stop=[] if "stop" in ignored else stop,
            changed={name: value for name, value in sampling.items() if value is not None and name not in ignored},
        )


class AgentEndpoint:
    """OpenAI's protocol as the ASGI application `app`. It ignores the parameters named in `ignored`."""

    def __init__(self, tokenizer: Any, ignored: Sequence[str] = ()):
        self._tokenizer, self._ignored = tokenizer, tuple(ignored)
        self._recordings: dict[str, tuple[Recording, bool]] = {}  # True: its answers are trained on
        self._names: dict[str, list[str]] = {}  # all names of a key
        self.app = FastAPI(openapi_url=None)
        self.app.add_api_route("/v1/models", self._list_models, methods=["GET"])
        self.app.add_api_route("/v1/models/{name:path}", self._find_model, methods=["GET"])
        self.app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"], response_model=None)
        for kind in (RequestRefused, ValidationError, HTTPException):
            self.app.add_exception_handler(kind, _answer_error)

    @contextmanager
    def record(self, recording: Recording) -> Iterator[str]:
        """Yield a key whose requests go to a recording. On exit, the requests in progress are cancelled."""
        key = f"sk-episode-{secrets.token_urlsafe(24)}"
        self._recordings[key], self._names[key] = (recording, True), [key]
        try:
            yield key
        finally:
            for name in self._names.pop(key):
                self._recordings.pop(name, None)
            recording.end()

    def add_name(self, name: str, key: str, trained: bool) -> None:
        """Let a client send `name` as `X-Session-ID` instead of an episode's key; train on its answers if `trained`.

        The name must be as hard to guess as a key.
        """
        self._recordings[name] = self._recordings[key][0], trained
        self._names[key].append(name)

    def _find(self, request: Request) -> tuple[Recording, bool]:
        _, _, key = request.headers.get("authorization", "").partition(" ")
        for name in (key.strip(), request.headers.get("x-session-id", "")):
            if name in self._recordings:
                return self._recordings[name]
        message = "this key belongs to no episode in progress: its episode has ended, or belongs to another run"
        raise RequestRefused(401, message, "invalid_api_key")

    async def _list_models(self, request: Request) -> Mapping[str, Any]:
        self._find(request)
        return {"object": "list", "data": [_describe_model(MODEL)]}

    async def _find_model(self, request: Request, name: str) -> Mapping[str, Any]:
        self._find(request)
        return _describe_model(name)

    async def _complete(self, request: Request) -> Response:
        recording, trained = self._find(request)  # before reading the body
        chat = ChatRequest.model_validate(await _read_body(request))
        policy_request = replace(chat.to_policy_request(self._ignored), trained=trained)
        answers = await _answer_while_connected(request, recording, policy_request)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": chat.model}
        if chat.stream:
            with_usage = bool((chat.stream_options or {}).get("include_usage"))
            chunks = self._stream({**head, "object": "chat.completion.chunk"}, chat, answers, with_usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        choices = [
            {
                "index": number,
                "message": {"refusal": None, **answer.message},
                "finish_reason": answer.finish_reason,
                "logprobs": self._list_logprobs(answer) if chat.logprobs else None,
            }
            for number, answer in enumerate(answers)
        ]
        return _make_reply({**head, "object": "chat.completion", "choices": choices, "usage": _count_usage(answers)})

    async def _stream(
        self, head: Mapping[str, Any], chat: ChatRequest, answers: Sequence[RecordedAnswer], with_usage: bool
    ) -> AsyncIterator[str]:
        """Yield finished answers as server-sent events. Unfinished answers are not sent, because any part of them may
        still change."""

        def event(number: int, delta: Mapping[str, Any], **fields: Any) -> str:
            choice = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None, **fields}
            return _format_event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        for number, answer in enumerate(answers):
            yield event(number, {"role": "assistant", "content": ""})
            if content := answer.message["content"]:
                logprobs = self._list_logprobs(answer) if chat.logprobs else None
                yield event(number, {"content": content}, logprobs=logprobs)
            for place, call in enumerate(answer.message.get("tool_calls", ())):
                yield event(number, {"tool_calls": [{"index": place, **call}]})
            yield event(number, {}, finish_reason=answer.finish_reason)
        if with_usage:
            yield _format_event({**head, "choices": [], "usage": _count_usage(answers)})
        yield "data: [DONE]\n\n"

    def _list_logprobs(self, answer: RecordedAnswer) -> dict[str, Any]:
        tokens, logprobs = answer.completion.token_ids, answer.completion.logprobs
        texts = [self._tokenizer.decode([int(token)]) for token in tokens]
        return {
            "content": [
                {"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


async def _read_body(request: Request) -> Any:
    """Return the JSON value of a request's body.

    Raises:
        RequestRefused: it is too long, or no JSON.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise RequestRefused(413, f"a request must have at most {BODY_BYTES} bytes", "request_too_large")
        return json.loads(body)
    except ClientDisconnect as error:
        raise RequestRefused(499, "the client has disconnected", "client_closed_request") from error
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is no JSON that can be read: {error}", "invalid_json") from error


async def _answer_while_connected(
    request: Request, recording: Recording, policy_request: PolicyRequest
) -> Sequence[RecordedAnswer]:
    """Return the answers. Cancel their generation if the client disconnects."""
    answering = asyncio.create_task(recording.answer(policy_request))
    leaving = asyncio.create_task(_wait_for_disconnect(request))
    try:
        with suppress(asyncio.CancelledError):  # the loop ends; the server would log a traceback
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise RequestRefused(499, "the client has disconnected", "client_closed_request")
        if answering.cancelled():
            raise RequestRefused(401, "the episode of this key has ended", "episode_ended")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return an error in OpenAI's format."""
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path}: {error.detail}"
        cure = "; let the agent use chat completions, /v1/chat/completions" if error.status_code == 404 else ""
        error = RequestRefused(error.status_code, what + cure, "unknown_url")
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        error = RequestRefused(
            400, f"{param}: {first['msg']}" if param else first["msg"], "invalid_value", param or None
        )
    assert isinstance(error, RequestRefused)
    kind = {401: "authentication_error", 403: "permission_error", 500: "server_error"}
    details = {
        "message": error.message,
        "type": kind.get(error.status, "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    return _make_reply({"error": details}, error.status, {"x-should-retry": "false"})


def _make_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a reply in ASCII, because half a character, which a client may have sent, cannot be encoded in UTF-8."""
    return Response(json.dumps(value), status, headers, "application/json")


def _describe_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "enginehouse"}


def _count_usage(answers: Sequence[RecordedAnswer]) -> dict[str, int]:
    completion_tokens = sum(len(answer.completion.token_ids) for answer in answers)
    prompt_tokens = answers[0].length - len(answers[0].completion.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _format_event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class AppServer:
    """Serves an ASGI application at `url`, on 127.0.0.1, until the running loop ends."""

    def __init__(self, app: Any):
        at_once = min(BACKLOG, _file_limit() // 16)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        options: dict[str, Any] = {"log_config": None, "lifespan": "off", "timeout_keep_alive": 60, "ws": "none"}
        self._server = _Server(uvicorn.Config(app, access_log=False, http=_Connection, backlog=at_once, **options))
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self._server.serve([self._socket])
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()  # so that no client waits for a reply
            self._socket.close()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Restore the backlog, which uvicorn sets to the number of connections that it accepts at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the run."""
        yield


class _Connection(H11Protocol):
    """A connection with a time limit for its request.

    If there are too many connections, the connection that has been idle longest is closed.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._due = self.loop.call_later(HEAD_SECONDS, transport.abort)
        connections = [entry for entry in self.connections if isinstance(entry, _Connection)]
        connections = [connection for connection in connections if not connection.transport.is_closing()]
        if len(connections) > min(MOST_CONNECTIONS, _file_limit() // 2):
            idle = (connection for connection in connections if not connection._at_work)
            min(idle, key=lambda connection: connection._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._at_work:
            self._due.cancel()
        elif (
            self._due.cancelled()
        ):  # the next head has begun, or the client still sends the body of an answered request
            self._due = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._due.cancel()
        super().connection_lost(exc)

    @property
    def _at_work(self) -> bool:
        """True while a request is answered."""
        return self.cycle is not None and not self.cycle.response_complete


def _file_limit() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files
