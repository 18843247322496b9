"""What SGLang's server can be asked, one method a thing: the same for a server of ours and for one that ran already.

The protocol is that of SGLang 0.5.21 and later.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from enginehouse_sglang.http import Address, NoAnswer
from enginehouse_sglang.process import ServerProcess, SGLangFailed

Row = Mapping[str, Any]
"""One sequence to generate: `input_ids`, `sampling_params`, `logprob_start_len`, `rid`."""

CONTROL = frozenset(
    {
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weights_from_tensor",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    }
)
"""What SGLang asks the administrator's key for, where there is one."""


class SGLangServer:
    """A server, by its URL.

    Args:
        url: its base URL.
        where: names this replica in messages.
        process: what it runs in, if that is ours.
        api_key: by which it knows its users, if it does; `SGLANG_API_KEY` of the environment, if not given.
        admin_key: by which it knows who may change it; `SGLANG_ADMIN_API_KEY`, if not given.
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

    async def ask(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> Any:
        """Its answer.

        Raises:
            SGLangFailed: it does not answer, or has died.
            Refused: it does not do it.
        """
        key = self._admin_key if path in CONTROL else self._key
        call = self.address.call(method, path, body, {"Authorization": f"Bearer {key}"} if key else {})
        try:
            return await (call if self.process is None else self.process.outlived(call))
        except NoAnswer as error:
            if self.process is None:
                raise SGLangFailed(f"{self._where}: the sglang server is lost: {error}") from error
            if self.process.lives():  # it is just ending, or one of its processes has
                await self.process.end()
            raise SGLangFailed(self.process.death()) from error

    async def model(self) -> dict[str, Any]:
        """What it serves: `model_path`, `model_type`, `architectures`, `weight_version`, ..."""
        return dict(await self.ask("GET", "/model_info"))

    async def settings(self) -> dict[str, Any]:
        """Its arguments, and `version`."""
        return dict(await self.ask("GET", "/server_info"))

    async def context(self) -> int:
        """Its context length, tokens."""
        return int((await self.ask("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def generate(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Draw all rows, in their order; answered when all have ended."""
        body: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        return list(await self.ask("POST", "/generate", {**body, "return_logprob": True}))

    async def load_now(self) -> list[tuple[Any, Any]]:
        """Return tokens whose keys and values it holds, and rows that run, as each of its schedulers told them last."""
        loads = (await self.ask("GET", "/v1/loads?include=core"))["loads"]
        return [(load.get("num_used_tokens"), load.get("num_running_reqs")) for load in loads]

    async def abort(self, rid: str) -> None:
        """End a row, if it is there."""
        await self.ask("POST", "/abort_request", {"rid": rid})

    async def hold(self) -> None:
        """Draw nothing more until `go_on`. Rows that run lose their keys and values, which are then computed anew."""
        await self.ask("POST", "/pause_generation", {"mode": "retract"})

    async def go_on(self) -> None:
        """Draw again."""
        await self.ask("POST", "/continue_generation", {})

    async def release(self, parts: Sequence[str]) -> None:
        """Free the memory of its `"weights"`, which are lost, or `"kv_cache"`. It ends if it draws or has them not."""
        await self.ask("POST", "/release_memory_occupation", {"tags": list(parts)})

    async def take_back(self, parts: Sequence[str]) -> None:
        """Take memory back that was released; any other ends it."""
        await self.ask("POST", "/resume_memory_occupation", {"tags": list(parts)})

    async def begin_update(self) -> None:
        """Take new weights from now on."""
        await self.ask("POST", "/begin_weight_update", {})

    async def load(self, tensors: Sequence[Any], ranks: int, load_format: str | None, label: str | None) -> None:
        """Load tensors.

        Args:
            tensors: name and tensor, each of which owns its memory.
            ranks: processes that the model is split over.
            load_format: how, by SGLang's name for it.
            label: what the weights are called from now on; None: more come. With it, keys and values are dropped.
        """
        payload = await asyncio.to_thread(_packed, tensors)
        body = {
            "serialized_named_tensors": [payload] * ranks,
            "load_format": load_format,
            "flush_cache": label is not None,
            "weight_version": label,
        }
        await self.ask("POST", "/update_weights_from_tensor", body)

    async def end_update(self) -> None:
        """All weights are there."""
        await self.ask("POST", "/end_weight_update", {})


def _packed(tensors: Sequence[Any]) -> str:
    return base64.b64encode(pickle.dumps(list(tensors), protocol=4)).decode()
