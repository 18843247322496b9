"""vLLM's own OpenAI-compatible server over the engine of this process, for clients other than the run itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ConfigError, EnginehouseError, describe_os_error

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    Application = Callable[[MutableMapping[str, Any], Callable[..., Any], Callable[..., Any]], Awaitable[None]]

API = "/v1"
"""Prefix of the served paths. vLLM's other paths are not served, because they need no key and some of them scale or
pause the engine."""

GRACE_SECONDS = 1
"""Seconds that a request may continue once the server is asked to end."""


class OpenAIServer:
    """Serves clients at `url`, on the event loop of the engine's other requests.

    The engine holds or ends their requests when it is paused, and answers them from the weights that it serves.
    Requests of the run have no priority.
    """

    def __init__(self, host: str):
        """Listen at a free port of `host`. Clients wait for `start`.

        Raises:
            ConfigError: This machine does not have the address.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise ConfigError(f"no OpenAI endpoint can be opened on {host}: {describe_os_error(error)}") from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}{API}"
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, llm: AsyncLLMEngine, arguments: AsyncEngineArgs, check: Callable[[], object]) -> None:
        """Answer clients. While `check` raises an `EnginehouseError`, each client gets the message of this error."""
        import uvicorn
        from vllm.entrypoints.launchers.api_server.entry import build_app, init_app_state
        from vllm.entrypoints.launchers.cli_args import FrontendArgs

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the worker handles signals

        settings = Namespace(**{**vars(arguments), **vars(FrontendArgs())})
        if isinstance(settings.served_model_name, str):
            settings.served_model_name = [settings.served_model_name]  # the server takes several
        tasks = await llm.get_supported_tasks()
        app = build_app(settings, tasks, llm.model_config)
        await init_app_state(llm, app.state, settings, tasks)
        self._server = app.state.server = Server(
            uvicorn.Config(
                _restrict(app, check),
                lifespan="off",  # vLLM's would freeze the garbage collector's heap of the whole worker
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def end(self) -> None:
        """Close the port, and cancel open requests after `GRACE_SECONDS`. May be called again."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            await serving
        self._socket.close()


def _restrict(app: Application, check: Callable[[], object]) -> Application:
    """Return an application that only answers under `API`, and only while `check` does not raise."""

    async def answer(scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        from starlette.responses import JSONResponse

        if scope["type"] != "http" or not scope["path"].startswith(f"{API}/"):
            return await JSONResponse(_error(f"only paths under {API} are served", 404), 404)(scope, receive, send)
        try:
            check()
        except EnginehouseError as error:
            return await JSONResponse(_error(str(error), 503), 503)(scope, receive, send)
        return await app(scope, receive, send)

    return answer


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "enginehouse", "param": None, "code": code}}
