"""Requests that SGLang's server answers, one method each, whether a worker started the server or it ran already.

The protocol belongs to SGLang 0.5.21 and later.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from enginehouse_sglang.http import Address, NoAnswer
from enginehouse_sglang.process import ServerProcess, SGLangFailed

T = TypeVar("T")

Row = Mapping[str, Any]
"""One sequence for SGLang to continue: `input_ids`, `sampling_params`, `logprob_start_len`, `rid`, `extra_key`."""


class SGLangServer:
    """A server at a base URL.

    Args:
        process: The server's process, if this worker started it.
        api_key: Key for users; default: `SGLANG_API_KEY` of the environment.
        admin_key: Key for clients that may change the server; default: `SGLANG_ADMIN_API_KEY`, else the users' key.
    """

    def __init__(
        self,
        url: str,
        where: str,
        process: ServerProcess | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
    ):
        self.address = Address(url)
        self.process = process
        self._where = where
        self._key = api_key or os.environ.get("SGLANG_API_KEY")
        self._admin_key = admin_key or os.environ.get("SGLANG_ADMIN_API_KEY") or self._key

    async def wait_while_alive(self, call: Awaitable[T]) -> T:
        """Return the result of a call; raises `SGLangFailed` if a process that this worker started ends first."""
        return await (call if self.process is None else self.process.wait_while_alive(call))

    async def _ask(self, method: Literal["GET", "POST"], path: str, body: Any, key: str | None) -> Any:
        """Return the server's answer; raises `SGLangFailed` if there is none, `HTTPStatusError` for a rejection."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            return await self.wait_while_alive(self.address.call(method, path, body, headers))
        except NoAnswer as error:
            if self.process is None:
                raise SGLangFailed(f"{self._where}: the sglang server is lost: {error}") from error
            if self.process.is_alive():  # it, or one of its processes, is just ending
                await self.process.end()
            raise SGLangFailed(self.process.describe_death()) from error

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path, None, self._key)

    async def _control(self, path: str, **body: Any) -> None:
        """Send a request that needs the administrator's key, if the server has one."""
        await self._ask("POST", path, body, self._admin_key)

    async def model(self) -> dict[str, Any]:
        """Return `model_path`, `model_type`, `architectures`, `weight_version`, ... of the model."""
        return dict(await self._get("/model_info"))

    async def settings(self) -> dict[str, Any]:
        """Return the server's arguments, and `version`."""
        return dict(await self._get("/server_info"))

    async def context(self) -> int:
        """Return the context length in tokens."""
        return int((await self._get("/v1/models"))["data"][0]["max_model_len"])

    async def generate(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Generate for all rows, and return their answers, in their order, once all have ended."""
        body: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        return list(await self._ask("POST", "/generate", {**body, "return_logprob": True}, self._key))

    async def load_now(self) -> list[tuple[Any, Any]]:
        """Return each scheduler's latest count of cached tokens and of running rows."""
        loads = (await self._get("/v1/loads?include=core"))["loads"]
        return [(load.get("num_used_tokens"), load.get("num_running_reqs")) for load in loads]

    async def abort(self, rid: str) -> None:
        """End a row, if the server has it."""
        await self._control("/abort_request", rid=rid)

    async def hold(self, in_place: bool = False) -> None:
        """Stop generating until `go_on`. Unless `in_place`, running rows lose their keys and values, which are then
        recomputed."""
        await self._control("/pause_generation", mode="in_place" if in_place else "retract")

    async def go_on(self) -> None:
        """Generate again."""
        await self._control("/continue_generation")

    async def release(self, parts: Sequence[str]) -> None:
        """Free `"weights"` or `"kv_cache"`; the content is lost.

        Must not be called while the server generates, or if the parts are free already: the server would crash.
        """
        await self._control("/release_memory_occupation", tags=list(parts))

    async def take_back(self, parts: Sequence[str]) -> None:
        """Take released memory back. Must not be called if it was not released: the server would crash."""
        await self._control("/resume_memory_occupation", tags=list(parts))

    async def add_adapter(self, name: str, settings: Mapping[str, Any], ranks: int) -> None:
        """Add an adapter that changes nothing."""
        nothing = base64.b64encode(pickle.dumps({}, protocol=4)).decode()
        await self._control(
            "/load_lora_adapter_from_tensors",
            lora_name=name,
            config_dict=dict(settings),
            serialized_named_tensors=[nothing] * ranks,
            pinned=True,
        )

    async def begin_update(self) -> None:
        """Tell the server to expect new weights."""
        await self._control("/begin_weight_update")

    async def load(
        self,
        tensors: Sequence[Any],
        ranks: int,
        load_format: str | None,
        label: str | None,
        keeps_cache: bool = False,
    ) -> None:
        """Load tensors.

        Args:
            tensors: Names and tensors; each tensor owns its memory.
            load_format: SGLang's name for the way to load them.
            label: Name of the new weights; None if more tensors follow.
            keeps_cache: Do not drop cached keys and values at the last tensors.
        """
        payload = await asyncio.to_thread(lambda: base64.b64encode(pickle.dumps(list(tensors), protocol=4)).decode())
        await self._control(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload] * ranks,
            load_format=load_format,
            flush_cache=label is not None and not keeps_cache,
            weight_version=label,
        )

    async def end_update(self) -> None:
        """Tell the server that no more weights will come."""
        await self._control("/end_weight_update")
