"""An endpoint that speaks OpenAI's protocol, behind which agents ask the policy of their episode.

It waits at 127.0.0.1, on the event loop of the environment. Each episode has a key of its own, by which its requests
are known; a key is drawn at random, and is good for nothing once its episode has ended.
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

from enginehouse_environments.recording import Asked, Refused

if TYPE_CHECKING:
    from enginehouse_environments.recording import Answer, Recording

MODEL = "policy"
"""What the model is called, by `/v1/models`. Requests may call it anything."""

HEAD_SECONDS = 10.0
"""Longest time for the head of a request; how long it may be, h11 says."""

BODY_BYTES = 2**25
"""Longest body of a request."""

BACKLOG, MOST_CONNECTIONS = 128, 4096
"""Connections that wait to be taken, and that are held; these are also at most half of the files a process may open,
and as many as a sixteenth are taken at once, since some turns of the loop go by before one too many is closed."""

UNHEEDED = {
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort"),
    *("safety_identifier", "seed", "service_tier", "store", "user", "verbosity"),
}
"""Parameters that are taken and not heeded: they do not say which tokens are likely. Seeds are the run's."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Parameters that are refused unless they have one of these values, which ask for nothing."""


class ChatRequest(BaseModel):
    """What `/v1/chat/completions` is asked; fields as OpenAI's."""

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

    def asked(self, ignored: Sequence[str]) -> Asked:
        """What it means.

        Args:
            ignored: names of parameters that are not to be heeded.

        Raises:
            Refused: it asks for what the policy does not do.
        """
        for name, value in (self.model_extra or {}).items():
            if value is None or name in UNHEEDED or name in ignored or value in NEUTRAL.get(name, ()):
                continue
            raise Refused(
                400,
                f"{name}={json.dumps(value)[:60]} is not supported: what is trained on is drawn by the run's sampling. "
                f"Leave it away, or have it ignored (environment.arguments.ignored)",
                "unsupported_parameter",
                name,
            )
        if "tool_choice" not in ignored and self.tool_choice not in (None, "none", "auto"):
            raise Refused(
                400, "tool_choice is none or auto: nothing forces a call", "unsupported_parameter", "tool_choice"
            )
        if not all(isinstance(tool.get("function"), dict) for tool in self.tools or ()):
            raise Refused(400, "tools are functions: the policy knows no others", "unsupported_parameter", "tools")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        said = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        limits = {"max_tokens": self.max_tokens, "max_completion_tokens": self.max_completion_tokens}
        return Asked(
            self.messages,
            self.tools or (),
            self.chat_template_kwargs or {},
            parses=self.tool_choice != "none",
            parallel=self.parallel_tool_calls is not False,
            n=self.n or 1,
            max_tokens=min((most for name, most in limits.items() if most and name not in ignored), default=None),
            stop=[] if "stop" in ignored else stop,
            changed={name: value for name, value in said.items() if value is not None and name not in ignored},
        )


class Endpoint:
    """The protocol; see the module.

    Args:
        tokenizer: the model's, for the text of single tokens.
        ignored: names of parameters that are not heeded.

    Attributes:
        app: an ASGI application.
    """

    def __init__(self, tokenizer: Any, ignored: Sequence[str] = ()):
        self._tokenizer, self._ignored = tokenizer, tuple(ignored)
        self._recordings: dict[str, tuple[Recording, bool]] = {}  # and whether who asks is trained
        self._names: dict[str, list[str]] = {}  # by which a key is known
        self.app = FastAPI(openapi_url=None)
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        self.app.add_api_route("/v1/models/{name:path}", self._model, methods=["GET"])
        self.app.add_api_route("/v1/chat/completions", self._completions, methods=["POST"], response_model=None)
        for kind in (Refused, ValidationError, HTTPException):
            self.app.add_exception_handler(kind, _as_openai)

    @contextmanager
    def recorded(self, recording: Recording) -> Iterator[str]:
        """Have the requests of an episode recorded; gives its key. On the way out its requests are given up."""
        key = f"sk-episode-{secrets.token_urlsafe(24)}"
        self._recordings[key], self._names[key] = (recording, True), [key]
        try:
            yield key
        finally:
            for name in self._names.pop(key):
                self._recordings.pop(name, None)
            recording.end()

    def also(self, name: str, key: str, trained: bool) -> None:
        """Have `name` be known as the key, where a client sends it as `X-Session-ID`; it is to be as hard to guess.

        Args:
            name: of who asks.
            key: of an episode.
            trained: whether what is drawn for it is trained on.
        """
        self._recordings[name] = self._recordings[key][0], trained
        self._names[key].append(name)

    def _of(self, request: Request) -> tuple[Recording, bool]:
        _, _, key = request.headers.get("authorization", "").partition(" ")
        for name in (key.strip(), request.headers.get("x-session-id", "")):
            if name in self._recordings:
                return self._recordings[name]
        said = "this key is of no episode that is under way: it has ended, or is not of this run"
        raise Refused(401, said, "invalid_api_key")

    async def _models(self, request: Request) -> Mapping[str, Any]:
        self._of(request)
        return {"object": "list", "data": [_model(MODEL)]}

    async def _model(self, request: Request, name: str) -> Mapping[str, Any]:
        self._of(request)
        return _model(name)

    async def _completions(self, request: Request) -> Response:
        recording, trained = self._of(request)  # before anything of the body is held
        chat = ChatRequest.model_validate(await _body(request))
        asked = replace(chat.asked(self._ignored), trained=trained)
        answers = await _while_connected(request, recording, asked)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": chat.model}
        if chat.stream:
            with_usage = bool((chat.stream_options or {}).get("include_usage"))
            chunks = self._chunks({**head, "object": "chat.completion.chunk"}, chat, answers, with_usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        choices = [
            {
                "index": number,
                "message": {"refusal": None, **answer.message},
                "finish_reason": answer.finish_reason,
                "logprobs": self._logprobs(answer) if chat.logprobs else None,
            }
            for number, answer in enumerate(answers)
        ]
        return _json({**head, "object": "chat.completion", "choices": choices, "usage": _usage(answers)})

    async def _chunks(
        self, head: Mapping[str, Any], chat: ChatRequest, answers: Sequence[Answer], with_usage: bool
    ) -> AsyncIterator[str]:
        """Answers as server-sent events. They are drawn by then: nothing of one is known to be final before its end."""

        def event(number: int, delta: Mapping[str, Any], **rest: Any) -> str:
            choice = {"index": number, "delta": delta, "finish_reason": None, "logprobs": None, **rest}
            return _event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

        for number, answer in enumerate(answers):
            yield event(number, {"role": "assistant", "content": ""})
            if content := answer.message["content"]:
                logprobs = self._logprobs(answer) if chat.logprobs else None
                yield event(number, {"content": content}, logprobs=logprobs)
            for place, call in enumerate(answer.message.get("tool_calls", ())):
                yield event(number, {"tool_calls": [{"index": place, **call}]})
            yield event(number, {}, finish_reason=answer.finish_reason)
        if with_usage:
            yield _event({**head, "choices": [], "usage": _usage(answers)})
        yield "data: [DONE]\n\n"

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        tokens, logprobs = answer.completion.token_ids, answer.completion.logprobs
        texts = [self._tokenizer.decode([int(token)]) for token in tokens]
        return {
            "content": [
                {"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ],
            "refusal": None,
        }


async def _body(request: Request) -> Any:
    """Return what a request's body says.

    Raises:
        Refused: it is too long, or no JSON.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise Refused(413, f"a request has at most {BODY_BYTES} bytes", "request_too_large")
        return json.loads(body)
    except ClientDisconnect as error:
        raise Refused(499, "nobody waits for this any more", "client_closed_request") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON that can be read: {error}", "invalid_json") from error


async def _while_connected(request: Request, recording: Recording, asked: Asked) -> Sequence[Answer]:
    """The answers, unless whoever asked goes away: then they are given up."""
    answering = asyncio.create_task(recording.answer(asked))
    leaving = asyncio.create_task(_left(request))
    try:
        with suppress(asyncio.CancelledError):  # the loop ends; the server would tell of it, with a traceback
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Refused(499, "nobody waits for this any more", "client_closed_request")
        if answering.cancelled():
            raise Refused(401, "the episode of this key has ended", "episode_ended")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _as_openai(request: Request, error: Exception) -> Response:
    """An error as OpenAI's clients expect one."""
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path}: {error.detail}"
        cure = "; there is /v1/chat/completions: have it ask by chat completions" if error.status_code == 404 else ""
        error = Refused(error.status_code, what + cure, "unknown_url")
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        error = Refused(400, f"{param}: {first['msg']}" if param else first["msg"], "invalid_value", param or None)
    assert isinstance(error, Refused)
    kind = {401: "authentication_error", 403: "permission_error", 500: "server_error"}
    said = {
        "message": error.message,
        "type": kind.get(error.status, "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    return _json({"error": said}, error.status, {"x-should-retry": "false"})


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in ASCII: half a character, which a client may have sent, has no UTF-8."""
    return Response(json.dumps(value), status, headers, "application/json")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "enginehouse"}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    drawn = sum(len(answer.completion.token_ids) for answer in answers)
    given = answers[0].length - len(answers[0].completion.token_ids)
    return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Served:
    """An application that is served at 127.0.0.1, on the running loop, until that ends.

    Args:
        app: an ASGI application.

    Attributes:
        url: where it is.
    """

    def __init__(self, app: Any):
        at_once = min(BACKLOG, _files() // 16)
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
                connection.transport.abort()  # nobody is to wait for an answer that will not come
            self._socket.close()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Let as many wait as before: what asyncio is told is how many it takes at once, too."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the run's."""
        yield


class _Connection(H11Protocol):
    """A connection that is to say what it wants, in time. Of too many the one is closed that has waited longest."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._due = self.loop.call_later(HEAD_SECONDS, transport.abort)
        held = [one for one in self.connections if isinstance(one, _Connection) and not one.transport.is_closing()]
        if len(held) > min(MOST_CONNECTIONS, _files() // 2):
            min((one for one in held if not one._at_work), key=lambda one: one._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._at_work:
            self._due.cancel()
        elif self._due.cancelled():  # the next head has begun, or what it answered goes on to send its body
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


def _files() -> int:
    """Return how many files this process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2 * MOST_CONNECTIONS if files == resource.RLIM_INFINITY else files
