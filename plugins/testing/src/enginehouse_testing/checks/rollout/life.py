"""Launch, sleep, the endpoint, the end: and a death that is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from pathlib import Path
from typing import Any

from enginehouse.engines.train import ALL
from enginehouse.errors import EnginehouseError, ModelError
from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.control import GREEDY, LONG, PROMPT
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, of_one, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.models import CHARACTERS, SPECIAL_TOKENS
from enginehouse_testing.replica import WAIT_SECONDS, Drawn, Replica, end_this_process, soon

PROCESS_SECONDS = 30.0
"""How long after a shutdown its processes may still be there."""
LOST = "model.layers.1.mlp.up_proj.weight"


async def _sleep(replica: Replica) -> tuple[list[Drawn], list[str]]:
    """What is drawn with the model's own weights, after the cache slept, and with those of an update after all slept,
    twice; and what else went wrong."""
    engine, drawn, said = replica.engine, list[Drawn](), list[str]()

    async def refuses(what: str) -> None:
        try:
            await replica.draw(PROMPT, max_tokens=8, **GREEDY)
        except EnginehouseError:
            return
        said.append(f"it draws {what}")

    await soon(engine.sleep(("kv_cache",)))
    await refuses("while its cache sleeps")
    await soon(engine.health())
    await soon(engine.wake_up(("kv_cache",)))
    drawn += await replica.draw(PROMPT, max_tokens=8, **GREEDY)
    for model in ("tied", "tied, new"):
        await soon(engine.sleep(ALL))
        await soon(engine.sleep(ALL))
        await refuses("while all of it sleeps")
        await soon(engine.health())
        await soon(engine.wake_up(("weights",)))
        await refuses("while its cache sleeps, and no weights have come")
        if (version := (await soon(engine.weight_state())).version) is not None:
            said.append(f"it says that it serves version {version} when it has slept and no weights have come")
        await replica.update(model)
        await soon(engine.wake_up(("kv_cache",)))
        await soon(engine.wake_up(ALL))
        drawn += await replica.draw(PROMPT, max_tokens=8, **GREEDY)
    return drawn, said


@of_one
def _judge_sleep(found: tuple[list[Drawn], list[str]]) -> Measured:
    drawn, said = found
    if said:
        return wrong("; ".join(said))
    return larger(*(serves(model, [one]) for model, one in zip(("tied", "tied", "tied, new"), drawn, strict=True)))


@of_one
def _judge_tied(drawn: list[Drawn]) -> Measured:
    return serves("tied", drawn)


async def _endpoint(replica: Replica) -> tuple[str, list[Drawn]]:
    url = (replica.endpoint.url or "").rstrip("/")
    if not url:
        return "", []

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    model = (await asyncio.to_thread(ask, "/models"))["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = await asyncio.to_thread(ask, "/completions", body)
    return answer["choices"][0]["text"], await replica.draw(PROMPT, max_tokens=8, **GREEDY)


@of_one
def _judge_endpoint(found: tuple[str, list[Drawn]]) -> Measured:
    text, drawn = found
    if not drawn:
        return wrong("the launch returned no url")
    first = len(SPECIAL_TOKENS)
    expected = "".join(CHARACTERS[token - first] for token in drawn[0].tokens if token >= first)
    return Measured(0.0) if text == expected else wrong(f"/completions gives {text!r}, generate {expected!r}")


async def _shutdown(replica: Replica) -> list[str]:
    import psutil

    started = [psutil.Process(pid) for pid in replica.processes()]
    running = await replica.under_way(PROMPT, max_tokens=LONG, **GREEDY)
    await soon(replica.engine.shutdown())
    said = []
    try:
        await soon(running)
    except TimeoutError:
        said.append("a request that ran was never answered")
    except EnginehouseError:
        pass
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, timeout=PROCESS_SECONDS)
    if alive:
        said.append(f"{len(alive)} of {len(started)} processes it had started still run")
    try:
        await soon(replica.request(PROMPT))
        said.append("a request after it was served")
    except TimeoutError:
        said.append("a request after it was never answered")
    except EnginehouseError:
        pass
    return said


@of_one
def _judge_said(said: list[str]) -> Measured:
    return wrong("; ".join(said)) if said else Measured(0.0)


async def _killed(replica: Replica) -> list[str]:
    running = await replica.under_way(PROMPT, max_tokens=LONG, **GREEDY)
    processes = replica.processes()
    if not processes:
        end_this_process()
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    said = []
    for what, call in (
        ("a request that ran", running),
        ("health", replica.engine.health()),
        ("a later request", replica.request(PROMPT, max_tokens=2)),
        ("weight_state", replica.engine.weight_state()),
    ):
        try:
            await soon(call)
            said.append(f"{what} was answered as if nothing had happened")
        except TimeoutError:
            said.append(f"{what} was not answered within {WAIT_SECONDS:g} s")
        except EnginehouseError:
            pass
        except Exception as error:
            said.append(f"{what} raised {type(error).__name__}, not an EnginehouseError: {error}")
    try:
        await soon(replica.engine.shutdown())
    except Exception as error:
        said.append(f"shutdown raised {type(error).__name__}: {error}")
    return said


@of_one
def _judge_killed(seen: Any) -> Measured:
    """An engine in its worker's process dies with it, which the controller has reported."""
    if isinstance(seen, Exception):
        return Measured(0.0)
    return wrong("; ".join(seen)) if seen else Measured(0.0)


async def _unloadable(replica: Replica) -> list[str]:
    from safetensors.torch import load_file, save_file

    empty, half = Path(replica.directory, "empty"), Path(replica.directory, "half")
    empty.mkdir()
    shutil.copytree(replica.models["untied"], half)
    file = half / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if name != LOST}, file, metadata={"format": "pt"})
    said = []
    for what, path in (("a directory without a model", empty), (f"a model without its {LOST}", half)):
        try:
            engine, _ = await replica.launched(str(path))
            said.append(f"{what} was launched")
            await soon(engine.shutdown())
        except ModelError:
            pass
        except Exception as error:
            said.append(f"{what} raised {type(error).__name__}, not a ModelError: {error}")
    return said


SLEEP = RolloutCheck(
    name="sleep",
    capability=capabilities.SLEEP,
    claim="Asleep it draws nothing and says how it is; once the cache is awake it serves as before, and once all is, "
    "what an update brought since",
    tolerance=LOGPROB_TOLERANCE,
    acts=(_sleep,),
    judge=_judge_sleep,
)
ENDPOINT = RolloutCheck(
    name="endpoint",
    capability=capabilities.OPENAI_ENDPOINT,
    claim="Under its url an OpenAI client finds the model, and gets the text of the tokens that generate draws",
    tolerance=0.0,
    acts=(_endpoint,),
    judge=_judge_endpoint,
)
SHUTDOWN = RolloutCheck(
    name="shutdown",
    capability=PROTOCOL,
    claim="A shutdown answers what runs, ends every process it started, and refuses what comes later",
    tolerance=0.0,
    acts=(_shutdown,),
    judge=_judge_said,
    breaks=True,
)
KILLED = RolloutCheck(
    name="killed",
    capability=PROTOCOL,
    claim="An engine whose processes were killed answers every call with an error, and ends",
    tolerance=0.0,
    acts=(_killed,),
    judge=_judge_killed,
    model="untied",
    breaks=True,
    ends=True,
)
UNLOADABLE = RolloutCheck(
    name="unloadable",
    capability=PROTOCOL,
    claim="A model that is not there, or lacks a parameter, is a ModelError at launch",
    tolerance=0.0,
    acts=(_unloadable,),
    judge=_judge_said,
    model=None,
)
