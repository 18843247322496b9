"""What tests have a vLLM replica do, under the interpreter of its runtime: only core and the plugin are imported.

An act is an async function of a launched engine; it returns plain data, and tests judge it in the driver.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from enginehouse.controller import Worker, register
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import GenerateRequest, GenerateResult, Health, SamplingParams
from enginehouse.errors import EnginehouseError
from enginehouse_vllm.engine import VLLMRollout
from enginehouse_vllm.options import VLLMOptions

SMALL = {"kv_cache_mib": 64, "max_running": 64}
PROMPT = [5, 6, 7]
LONG = {"temperature": 0.0, "max_tokens": 16000, "ignore_eos": True}
"""Half a minute of generation and more: not done before what a test does to it."""


class VLLMReplica(Worker):
    """A replica, and acts on it."""

    def __init__(self) -> None:
        self.engine = VLLMRollout()

    @register
    async def launch(self, path: str, options: dict[str, Any], head: str = "causal_lm") -> str | None:
        """Launch it; returns the URL for OpenAI clients, if it has one."""
        checked = VLLMOptions(**{**SMALL, **options})
        endpoint = await self.engine.launch(ModelSpec(path, head=head), checked, self.context)  # type: ignore[arg-type]
        return endpoint.url

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


def request(name: str, prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, SamplingParams(**sampling))


async def begun(*calls: Any) -> list[asyncio.Task[Any]]:
    """Start calls, and let each come as far as it can without waiting."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


async def running(engine: VLLMRollout, name: str, prompt: Sequence[int] = PROMPT) -> asyncio.Task[GenerateResult]:
    """A long request that has drawn tokens: a short one that came after it is done."""
    (task,) = await begun(engine.generate(request(name, prompt, **LONG)))
    await engine.generate(request("short", [3], temperature=0.0, max_tokens=2, ignore_eos=True))
    assert not task.done()
    return task


async def until(engine: VLLMRollout, holds: Callable[[Health], bool]) -> Health:
    while not holds(health := await engine.health()):
        await asyncio.sleep(0)
    return health


# Acts


async def generate(
    engine: VLLMRollout, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]
) -> list[GenerateResult]:
    """One request a prompt, all at once."""
    calls = [engine.generate(request(str(row), prompt, **sampling)) for row, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*calls))


async def abort(engine: VLLMRollout) -> dict[str, GenerateResult]:
    """One request of two aborted, by id."""
    aborted, other = await running(engine, "aborted"), await running(engine, "other", [9, 8])
    await engine.abort(["aborted"])
    first = await aborted
    still = not other.done()
    await engine.abort()
    return {"aborted": first, "other": await other, "other_ran_on": still}  # type: ignore[dict-item]


async def abort_at_once(engine: VLLMRollout) -> list[GenerateResult]:
    """Two requests of one id, aborted in the turn of the event loop in which they came, and before that."""
    tasks = [asyncio.create_task(engine.generate(request("twin", PROMPT, **LONG))) for _ in range(2)]
    await asyncio.sleep(0)
    await engine.abort(["twin"])
    return list(await asyncio.gather(*tasks))


async def cancel(engine: VLLMRollout) -> Health:
    """A call that is cancelled; what the engine has left of it."""
    task = await running(engine, "cancelled")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return await until(engine, lambda health: health.running == 0)


async def sleep(engine: VLLMRollout, tags: Sequence[str]) -> int:
    """Bytes by which less is resident, of this process and those beneath, once it sleeps."""

    def held() -> int:
        this = psutil.Process()
        return sum(process.memory_info().rss for process in (this, *this.children(recursive=True)))

    await engine.generate(request("awake", PROMPT, max_tokens=2))
    before = held()
    await engine.sleep(tuple(tags))
    return before - held()


async def wake_up(engine: VLLMRollout) -> None:
    await engine.wake_up()


async def sleep_while_drawing(engine: VLLMRollout) -> str:
    """What is said to who has it sleep in the midst of a request."""
    task = await running(engine, "drawing")
    try:
        await engine.sleep()
    except EnginehouseError as error:
        return str(error)
    finally:
        await engine.abort()
        await task
    return ""


async def sleep_while_paused(engine: VLLMRollout) -> tuple[GenerateResult, GenerateResult]:
    """Of what is asked for once it is awake and still paused: what was aborted later, and what was drawn after the
    resume."""
    await engine.pause()
    await engine.sleep(("kv_cache",))
    await engine.wake_up()
    assert await engine.native.is_paused(), "clients of the endpoint would be answered"
    aborted, drawn = await begun(
        engine.generate(request("aborted", PROMPT, **LONG)), engine.generate(request("drawn", PROMPT, max_tokens=2))
    )
    for _ in range(20):  # in which vLLM would draw, if it did
        await engine.weight_state()
    await engine.abort(["aborted"])
    first = await aborted
    await engine.resume()
    return first, await drawn


async def pause_abort(engine: VLLMRollout) -> tuple[GenerateResult, Health]:
    task = await running(engine, "paused")
    await engine.pause("abort")
    result, health = await task, await engine.health()
    await engine.resume()
    return result, health


async def pause_wait(engine: VLLMRollout) -> tuple[GenerateResult, Health, bool]:
    """A pause that lets a request finish; whether one that came meanwhile waited for the end of the pause."""
    (task,) = await begun(engine.generate(request("running", PROMPT, temperature=0.0, max_tokens=300, ignore_eos=True)))
    await engine.generate(request("short", [3], temperature=0.0, max_tokens=2, ignore_eos=True))
    (pausing,) = await begun(engine.pause("wait"))
    (late,) = await begun(engine.generate(request("late", PROMPT, temperature=0.0, max_tokens=2)))
    await pausing
    result, health, waited = await task, await engine.health(), not late.done()
    await engine.resume()
    await late
    return result, health, waited


async def pause_keep(engine: VLLMRollout) -> tuple[GenerateResult, Health, bool]:
    """A pause that freezes a request; it is ended after it has gone on. Whether it was frozen."""
    task = await running(engine, "frozen")
    await engine.pause("keep")
    (late,) = await begun(engine.generate(request("late", [3], temperature=0.0, max_tokens=2)))
    health = await engine.health()
    frozen = not task.done() and not late.done()
    await engine.resume()
    await late  # the frozen one goes on as well
    await engine.abort(["frozen"])
    return await task, health, frozen


async def load(engine: VLLMRollout) -> tuple[Health, dict[str, float], Health]:
    """Health and figures with one request of two samples running, and with none."""
    (task,) = await begun(engine.generate(request("two", PROMPT, n=2, **{**LONG, "temperature": 1.0})))
    await until(engine, lambda health: health.running == 2)
    busy, figures = await engine.health(), dict(engine.metrics())
    await engine.abort()
    await task
    return busy, figures, await engine.health()


async def lose_engine_core(engine: VLLMRollout) -> list[tuple[str, str]]:
    """vLLM's process is killed while a request runs; what each call then raises."""
    task = await running(engine, "lost")
    for pid in engine.processes():
        os.kill(pid, 9)
    # Neither may hang that was called before the loss was noticed.
    lost, *_ = await asyncio.gather(task, engine.pause("keep"), engine.weight_state(), return_exceptions=True)
    later = await asyncio.gather(
        engine.health(), engine.pause(), engine.abort(), engine.generate(request("x", PROMPT)), return_exceptions=True
    )
    return [(type(error).__name__, str(error)) for error in (lost, *later)]


async def imported(engine: VLLMRollout, *modules: str) -> list[str]:
    """Which of some modules this process has imported."""
    return [name for name in modules if name in sys.modules]


async def processes(engine: VLLMRollout) -> list[int]:
    return engine.processes()


async def end(engine: VLLMRollout) -> tuple[GenerateResult, list[int]]:
    """Shut down while a request runs; returns it, and the processes that still run."""
    task = await running(engine, "last")
    await engine.shutdown()
    return await task, engine.processes()
