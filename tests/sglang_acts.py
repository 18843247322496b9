"""What tests have an SGLang replica do, under the interpreter of its runtime: only core and the plugin are imported.

An act is an async function of a launched engine; it returns plain data, and tests judge it in the driver.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import psutil
from safetensors.torch import load_file

from enginehouse.controller import Worker, register
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import Completion, GenerateRequest, SamplingParams
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightUpdate
from enginehouse.errors import EnginehouseError
from enginehouse.weights.staging import Version
from enginehouse_sglang.engine import SGLangRollout
from enginehouse_sglang.options import SGLangOptions
from enginehouse_testing.models import ADAPTER, stored_adapter

SMALL = {"kv_cache_mib": 64, "max_running": 64}
PROMPT = [5, 6, 7]


class SGLangReplica(Worker):
    """A replica, and acts on it."""

    def __init__(self) -> None:
        self.engine = SGLangRollout()

    @register
    async def launch(self, path: str, options: dict[str, Any]) -> str:
        """Launch it; returns the engine's name and version."""
        checked = SGLangOptions(**{**SMALL, **options})
        spec = ModelSpec(path, adapter=ADAPTER if stored_adapter(path) else None)
        return (await self.engine.launch(spec, checked, self.context)).engine

    @register
    async def launch_with_faults(self, path: str, options: dict[str, Any]) -> str:
        """Launch it so that `weight_faults` are applied in SGLang's processes."""
        import weight_faults

        for user in ("starting", "weight_updates"):
            patch(f"enginehouse_sglang.{user}.LOADER", weight_faults.LOADER).start()
        return await self.launch(path, options)

    @register
    async def act(self, name: str, *args: Any) -> Any:
        """Run an act of this module."""
        return await globals()[name](self.engine, *args)

    @register
    async def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def shutdown(self) -> None:
        """End the engine."""
        await self.engine.shutdown()


# Acts


async def draw(engine: SGLangRollout, tokens: int = 8, **sampling: Any) -> Completion:
    """A greedy completion."""
    params = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return (await engine.generate(GenerateRequest("draw", PROMPT, params))).completions[0]


async def draw_with(engine: SGLangRollout, sampling: dict[str, Any]) -> Completion:
    """A completion."""
    return await draw(engine, **sampling)


async def refused_beside_served(engine: SGLangRollout, odd: dict[str, Any]) -> tuple[str, int]:
    """A request that SGLang itself refuses, and one of the same sampling beside it."""
    row = engine.server.generate

    async def generate(rows: Any) -> Any:
        return await row([{**one, **odd} if one["input_ids"][-1] == 9 else one for one in rows])

    with patch.object(engine.server, "generate", generate):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        calls = [engine.generate(GenerateRequest(str(last), [5, last], params)) for last in (8, 9)]
        good, bad = await asyncio.gather(*calls, return_exceptions=True)
    return f"{type(bad).__name__}: {bad}", len(good.completions[0].token_ids)  # type: ignore[union-attr]


FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "changed on the way": lambda told: {**told, "parameters": [[*p[:5], "0" * 16] for p in told["parameters"]]},
    "gone": lambda told: {**told, "parameters": [[*p[:3], "/proc/self/fd/9999", *p[4:]] for p in told["parameters"]]},
    "not known by its name": lambda told: {
        **told,
        "parameters": [[p[0].replace("k_norm", "key_norm"), *p[1:]] for p in told["parameters"]],
    },
    "of another shape": lambda told: {
        **told,
        "parameters": [
            [*p[:2], [31, 128], *p[3:5], p[5]] if p[0].endswith("embed_tokens.weight") else p
            for p in told["parameters"]
        ],
    },
}


async def update(engine: SGLangRollout, path: str, version: int, fault: str = "") -> tuple[str, str]:
    """Serve another model's weights; with a fault, SGLang is told so of where they are. What was raised."""
    weights = stored_adapter(path) or load_file(f"{path}/model.safetensors")
    metas = [ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()]
    await engine.pause("wait")
    await engine.start_weight_update(WeightUpdate(version, metas))
    await engine.update_weights(WeightChunk(list(weights.items())))
    source = Version.source

    def faulty(self: Version) -> dict[str, Any]:
        return FAULTS[fault](source(self)) if fault and self.number == version else source(self)

    raised = ("", "")
    try:
        with patch.object(Version, "source", faulty):
            await engine.finish_weight_update(version)
    except Exception as error:
        raised = type(error).__name__, str(error)
        await engine.abort_weight_update()
    await engine.resume()
    return raised


async def sleep(engine: SGLangRollout, tags: list[str]) -> int:
    """Bytes by which less is resident, of this process and those beneath, once it sleeps."""

    def held() -> int:
        this = psutil.Process()
        return sum(process.memory_info().rss for process in (this, *this.children(recursive=True)))

    await draw(engine)
    before = held()
    await engine.sleep(tuple(tags))
    return before - held()


async def wake_up(engine: SGLangRollout) -> None:
    await engine.wake_up()


async def sleep_while_drawing(engine: SGLangRollout) -> str:
    """What is said to who has it sleep in the midst of a request."""
    task = asyncio.create_task(draw(engine, 1900))
    await draw(engine, 2)
    try:
        await engine.sleep()
    except EnginehouseError as error:
        return str(error)
    finally:
        await engine.abort()
        await task
    return ""


async def sleep_while_paused(engine: SGLangRollout) -> tuple[bool, Completion]:
    """Whether what is asked for once it is awake and still paused waits, and what is drawn of it after the resume."""
    await engine.pause()
    await engine.sleep(("kv_cache",))
    await engine.wake_up()
    task = asyncio.create_task(draw(engine, 2))
    for _ in range(20):  # in which SGLang would draw, if it did
        health = await engine.health()
    await engine.resume()
    return (health.running, health.waiting) == (0, 1), await task


async def state(engine: SGLangRollout) -> int:
    """The version that SGLang says it serves."""
    return (await engine.weight_state()).version


async def command_lines(engine: SGLangRollout) -> str:
    """The command lines of the server and all beneath it, which every user of the machine can read."""
    process = psutil.Process(engine.server.process.pid)
    return " ".join(word for one in (process, *process.children(recursive=True)) for word in one.cmdline())


async def told(engine: SGLangRollout) -> set[str]:
    """What the server says of itself to everyone."""
    return set(await engine.server.settings())


async def read_back(engine: SGLangRollout) -> tuple[int, int]:
    """How many parameters are read back, and how many are not."""
    told = await engine.weight_state()
    return len(told.checksums), len(told.unread)
