"""Checks launch, sleep, endpoint and shutdown of a rollout engine, and that the death of its processes is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from enginehouse.engines.train import ALL
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.control import GREEDY, LONG, PROMPT
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.models import CHARACTERS, SPECIAL_TOKENS
from enginehouse_testing.replica import WAIT_SECONDS, ReplicaTrial, SampledCompletion, kill_this_process, soon

PROCESS_SECONDS = 30.0
"""Longest time that the engine's processes may still run after a shutdown."""
LOST = "model.layers.1.mlp.up_proj.weight"

CHECKS = Checks(RolloutCheck)
LAST = Checks(RolloutCheck)
"""Checks that leave no engine behind. They run after the checks that share an engine."""


async def _sleep(replica: ReplicaTrial) -> tuple[list[SampledCompletion], list[str]]:
    """Put the cache to sleep and wake it. Then put the whole engine to sleep and wake it, twice.

    Returns:
        The completions after each of the three wakings, and descriptions of mistakes. Before the last completion, the
        engine gets the weights of another model.
    """
    engine, completions, mistakes = replica.engine, list[SampledCompletion](), list[str]()

    async def check_refusal(what: str) -> None:
        try:
            await replica.draw(PROMPT, max_tokens=8, **GREEDY)
        except EnginehouseError:
            return
        mistakes.append(f"it generates {what}")

    await soon(engine.sleep(("kv_cache",)))
    await check_refusal("while its cache sleeps")
    await soon(engine.health())
    await soon(engine.wake_up(("kv_cache",)))
    completions += await replica.draw(PROMPT, max_tokens=8, **GREEDY)
    for model in ("tied", "tied, new"):
        await soon(engine.sleep(ALL))
        await soon(engine.sleep(ALL))
        await check_refusal("while all of it sleeps")
        await soon(engine.health())
        await soon(engine.wake_up(("weights",)))
        await check_refusal("while its cache sleeps, and no weights have come")
        if (version := (await soon(engine.weight_state())).version) is not None:
            mistakes.append(f"it reports version {version}, although no weights have come since it slept")
        await replica.update(model)
        await soon(engine.wake_up(("kv_cache",)))
        await soon(engine.wake_up(ALL))
        completions += await replica.draw(PROMPT, max_tokens=8, **GREEDY)
    return completions, mistakes


@CHECKS.judge(_sleep, capability=capabilities.SLEEP, tolerance=LOGPROB_TOLERANCE)
def sleep(result: tuple[list[SampledCompletion], list[str]]) -> Measured:
    """While asleep, the engine generates nothing and reports its state. Once the cache is awake again, it serves as
    before; after a sleep of the whole engine, it serves the weights that an update brought."""
    completions, mistakes = result
    if mistakes:
        return wrong("; ".join(mistakes))
    models = ("tied", "tied", "tied, new")
    return larger(*(serves(model, [completion]) for model, completion in zip(models, completions, strict=True)))


@CHECKS.act(capability=capabilities.OPENAI_ENDPOINT)
async def _endpoint(replica: ReplicaTrial) -> str:
    """At the engine's url an OpenAI client finds the model, and gets the text of the tokens that generate returns."""
    return await compare_endpoint(replica)


async def compare_endpoint(replica: ReplicaTrial) -> str:
    """Describe how the answers to an OpenAI client differ from those of `generate`; empty if they do not."""
    url = (replica.endpoint.url or "").rstrip("/")
    if not url:
        return "the launch returned no url"

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    model = (await asyncio.to_thread(ask, "/models"))["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    text = (await asyncio.to_thread(ask, "/completions", body))["choices"][0]["text"]
    (completion,) = await replica.draw(PROMPT, max_tokens=8, **GREEDY)
    first = len(SPECIAL_TOKENS)
    expected = "".join(CHARACTERS[token - first] for token in completion.tokens if token >= first)
    return "" if text == expected else f"/completions returned {text!r}, but generate returned {expected!r}"


@CHECKS.act(breaks=True)
async def _shutdown(replica: ReplicaTrial) -> str:
    """A shutdown answers running requests, ends every process that the engine started, and rejects later requests."""
    import psutil

    started = [psutil.Process(pid) for pid in replica.processes()]
    running = await replica.start_request(PROMPT, max_tokens=LONG, **GREEDY)
    await soon(replica.engine.shutdown())
    mistakes = []
    try:
        await soon(running)
    except TimeoutError:
        mistakes.append("the running request was never answered")
    except EnginehouseError:
        pass
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, timeout=PROCESS_SECONDS)
    if alive:
        mistakes.append(f"{len(alive)} of the {len(started)} processes that it started still run")
    try:
        await soon(replica.request(PROMPT))
        mistakes.append("a request after the shutdown was served")
    except TimeoutError:
        mistakes.append("a request after the shutdown was never answered")
    except EnginehouseError:
        pass
    return "; ".join(mistakes)


async def _kill(replica: ReplicaTrial) -> str:
    running = await replica.start_request(PROMPT, max_tokens=LONG, **GREEDY)
    processes = replica.processes()
    if not processes:
        kill_this_process()
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    mistakes = []
    calls: dict[str, Awaitable[Any]] = {
        "the running request": running,
        "health": replica.engine.health(),
        "a later request": replica.request(PROMPT, max_tokens=2),
        "weight_state": replica.engine.weight_state(),
    }
    for what, call in calls.items():
        try:
            await soon(call)
            mistakes.append(f"{what} was answered as if nothing had happened")
        except TimeoutError:
            mistakes.append(f"{what} was not answered within {WAIT_SECONDS:g} s")
        except EnginehouseError:
            pass
        except Exception as error:
            mistakes.append(f"{what} raised {type(error).__name__}, not an EnginehouseError: {error}")
    try:
        await soon(replica.engine.shutdown())
    except Exception as error:
        mistakes.append(f"shutdown raised {type(error).__name__}: {error}")
    return "; ".join(mistakes)


@LAST.judge(_kill, model="untied", breaks=True, ends=True)
def killed(result: str | Exception) -> Measured:
    """An engine whose processes were killed answers every call with an error, and shuts down."""
    # An engine that runs in its worker's process dies with it, and the controller has reported that.
    return wrong(result) if result and not isinstance(result, Exception) else Measured(0.0)


@LAST.act(model=None)
async def _unloadable(replica: ReplicaTrial) -> str:
    """A model that does not exist, or lacks a parameter, raises a ModelError at launch."""
    from safetensors.torch import load_file, save_file

    empty, half = Path(replica.directory, "empty"), Path(replica.directory, "half")
    empty.mkdir()
    shutil.copytree(replica.models["untied"], half)
    file = half / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if name != LOST}, file, metadata={"format": "pt"})
    mistakes = []
    for what, path in (("a directory without a model", empty), (f"a model without its {LOST}", half)):
        try:
            engine, _ = await replica.launch_engine(str(path))
            mistakes.append(f"{what} was launched")
            await soon(engine.shutdown())
        except ModelError:
            pass
        except Exception as error:
            mistakes.append(f"{what} raised {type(error).__name__}, not a ModelError: {error}")
    return "; ".join(mistakes)
