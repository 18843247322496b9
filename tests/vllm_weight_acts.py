"""What tests of weight updates have a vLLM replica do, in a process of the runtime's interpreter (see `vllm_acts`)."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from vllm_acts import SMALL, begun, request, running

from enginehouse.controller import Worker, register
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import GenerateResult, Health
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightState, WeightUpdate
from enginehouse.weights.host_memory import AnonymousMemory, lay_out
from enginehouse.weights.staging import Version
from enginehouse_testing.models import ADAPTER, stored_adapter
from enginehouse_vllm.engine import VLLMRollout
from enginehouse_vllm.options import VLLMOptions

Weights = dict[str, torch.Tensor]


class UpdatedReplica(Worker):
    """A replica whose weights are updated."""

    def __init__(self) -> None:
        self.engine = VLLMRollout()

    @register
    async def launch(self, path: str, dtype: str = "float32", **options: Any) -> str | None:
        """Launch it; returns the URL for OpenAI clients, if it has one."""
        spec = ModelSpec(path, dtype=dtype, adapter=ADAPTER if stored_adapter(path) else None)  # type: ignore[arg-type]
        return (await self.engine.launch(spec, VLLMOptions(**{**SMALL, **options}), self.context)).url

    @register
    async def act(self, name: str, *args: Any) -> Any:
        """Run an act of this module."""
        return await globals()[name](self.engine, *args)

    async def shutdown(self) -> None:
        """End the engine."""
        await self.engine.shutdown()


def weights_of(path: str, dtype: torch.dtype = torch.float32) -> Weights:
    """The weights in a model directory, or its adapter alone."""
    if adapter := stored_adapter(path):
        return adapter
    found: Weights = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        found |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    return found


class Lent:
    """Memory that a version arrives in, as a transport has it; what nobody holds is spoilt."""

    def __init__(self, version: int, weights: Weights, metas: Sequence[ParamMeta]):
        self.version = version
        self.offsets, size = lay_out(metas)
        self._memory = AnonymousMemory.create("lent", size, "here")
        self.path = self._memory.path
        self._all = torch.frombuffer(self._memory.memory, dtype=torch.uint8)
        self.held = False
        self.tensors = {name: self._at(name, tensor).copy_(tensor) for name, tensor in weights.items()}

    def _at(self, name: str, like: torch.Tensor) -> torch.Tensor:
        begin = self.offsets[name]
        return self._all[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self._all.fill_(255)  # NaN in every dtype


LENT: list[Lent] = []


async def send(
    engine: VLLMRollout, weights: Weights, version: int, announced: Weights | None = None, lend: bool = False
) -> None:
    """Stage `weights`, five tensors at a time, each chunk's memory spoilt after the call, if it is not held."""
    metas = [
        ParamMeta(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in (weights if announced is None else announced).items()
    ]
    await engine.start_weight_update(WeightUpdate(version, metas))
    lent = Lent(version, weights, metas) if lend else None
    if lent is not None:
        LENT.append(lent)
    items = list((weights if lent is None else lent.tensors).items())
    for begin in range(0, len(items), 5):
        chunk = [(name, tensor if lent else tensor.clone()) for name, tensor in items[begin : begin + 5]]
        await engine.update_weights(WeightChunk(chunk, memory=lent))
        for _, tensor in () if lent is not None and lent.held else chunk:
            tensor.fill_(torch.nan)


# Acts


async def score(engine: VLLMRollout, ids: Sequence[int]) -> GenerateResult:
    """Logprobs of a prompt, and of one token after it."""
    return await engine.generate(request("score", ids, max_tokens=1, temperature=0.0, prompt_logprobs=True))


async def draw(engine: VLLMRollout, ids: Sequence[int], tokens: int) -> GenerateResult:
    """A greedy completion; unlike a scored prompt, its prompt may come from the prefix cache."""
    return await engine.generate(request("draw", ids, max_tokens=tokens, temperature=0.0, ignore_eos=True))


async def update(
    engine: VLLMRollout, path: str, version: int, dtype: str = "float32", lend: bool = False
) -> WeightState:
    """A whole update to the weights of another directory."""
    await engine.pause("wait")
    await send(engine, weights_of(path, getattr(torch, dtype)), version, lend=lend)
    await engine.finish_weight_update(version)
    await engine.resume()
    return await engine.weight_state()


async def install_faults(engine: VLLMRollout, installer: str = "install") -> None:
    """Have `weight_faults` applied in vLLM's processes."""
    import weight_faults

    await engine.native.collective_rpc(getattr(weight_faults, installer))


async def save_layer(engine: VLLMRollout, name: str, file: str) -> None:
    """Write the parameters of a layer of vLLM's model to a file."""
    import weight_faults

    await engine.native.collective_rpc(weight_faults.save_layer, args=(name, file))


async def attempt(
    engine: VLLMRollout, path: str, version: int, dtype: str = "float32"
) -> tuple[str, str, tuple[str, ...]]:
    """An update, and what it raises."""
    try:
        await update(engine, path, version, dtype)
    except Exception as error:
        await engine.abort_weight_update()
        await engine.resume()
        return type(error).__name__, str(error), tuple(getattr(error, "parameters", ()))
    return "", "", ()


async def pause(engine: VLLMRollout) -> None:
    await engine.pause("wait")


async def update_while_frozen(engine: VLLMRollout, path: str, version: int) -> GenerateResult:
    """An update under a request that is frozen, goes on with the new weights, and is then aborted."""
    task = await running(engine, "frozen")
    await engine.pause("keep")
    await send(engine, weights_of(path), version)
    await engine.finish_weight_update(version)
    (late,) = await begun(engine.generate(request("late", [3], temperature=0.0, max_tokens=4, ignore_eos=True)))
    await engine.resume()
    await late
    await engine.abort(["frozen"])
    return await task


async def stage_and_give_up(engine: VLLMRollout, path: str, version: int, lend: bool) -> WeightState:
    await engine.pause("wait")
    await send(engine, weights_of(path), version, lend=lend)
    await engine.abort_weight_update()
    await engine.resume()
    return await engine.weight_state()


async def refusals(engine: VLLMRollout, path: str, version: int) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Updates that cannot be; what each raises, by what is wrong with it."""
    whole = weights_of(path)
    first = next(iter(whole))
    one = {first: whole[first]}
    attempts: dict[str, Callable[[], Any]] = {
        "unknown": lambda: send(engine, {**whole, "no.such.weight": torch.zeros(2)}, version),
        "tied": lambda: send(engine, {**whole, "lm_head.weight": whole["model.embed_tokens.weight"]}, version),
        "shape": lambda: send(engine, {**whole, first: whole[first][:-1]}, version),
        "dtype": lambda: send(engine, {**whole, first: whole[first].half()}, version),
        "another shape than announced": lambda: send(engine, {first: whole[first][:-1]}, version, whole),
        "not announced": lambda: send(engine, whole, version, one),
        "missing": lambda: _finish(engine, one, version, version),
        "another version": lambda: _finish(engine, whole, version, version + 1),
        "not newer": lambda: send(engine, whole, 0),
    }
    await engine.pause("wait")
    raised = {}
    for name, attempt in attempts.items():
        try:
            await attempt()
        except Exception as error:
            raised[name] = type(error).__name__, str(error), tuple(getattr(error, "parameters", ()))
        await engine.abort_weight_update()
    for name, call in (
        ("chunk without a start", engine.update_weights(WeightChunk(list(one.items())))),
        ("finish without a start", engine.finish_weight_update(version)),
    ):
        try:
            await call
        except Exception as error:
            raised[name] = type(error).__name__, str(error), ()
    await engine.resume()
    return raised


async def _finish(engine: VLLMRollout, weights: Weights, version: int, finished: int) -> None:
    await send(engine, weights, version)
    await engine.finish_weight_update(finished)


async def fail(
    engine: VLLMRollout, path: str, version: int, fault: str, always: bool = False, lend: bool = False
) -> tuple[str, str, tuple[str, ...]]:
    """An update that goes wrong in vLLM's processes, and with `always` the way back as well; what it raises."""
    await engine.pause("wait")
    await send(engine, weights_of(path), version, lend=lend)
    source = Version.source

    def faulty(self: Version) -> dict[str, Any]:
        told = source(self)
        return FAULTS[fault](told) if always or self.number == version else told

    try:
        with patch.object(Version, "source", faulty):
            await engine.finish_weight_update(version)
    except Exception as error:
        raised = type(error).__name__, str(error), tuple(getattr(error, "parameters", ()))
    with contextlib.suppress(Exception if always else ()):
        await engine.abort_weight_update()
        await engine.resume()
    return raised


def _with_last(told: dict[str, Any], *last: Any) -> dict[str, Any]:
    return {**told, "parameters": [*told["parameters"][:-1], *last]}


FAULTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "changed on the way": lambda told: {  # a matrix: vLLM packs it, so only the check beside the load sees it
        **told,
        "parameters": [[*p[:5], "0" * 16 if "down_proj" in p[0] else p[5]] for p in told["parameters"]],
    },
    "gone": lambda told: {**told, "parameters": [[*p[:3], "/proc/self/fd/9999", *p[4:]] for p in told["parameters"]]},
    "unknown at the end": lambda told: _with_last(told, ["model.nothing.weight", *told["parameters"][-1][1:]]),
    "last one missing": lambda told: _with_last(told),
    "part of a layer missing": lambda told: {
        **told,
        "parameters": [p for p in told["parameters"] if "layers.1.self_attn.k_proj" not in p[0]],
    },
}
"""What a version's whereabouts become, on their way to vLLM's processes."""


async def ask_everything(engine: VLLMRollout) -> dict[str, str]:
    """The kind of error of each call that would serve."""
    raised = {}
    calls = {"generate": draw(engine, [3, 4], 2), "health": engine.health(), "resume": engine.resume()}
    for name, call in calls.items():
        try:
            await call
        except Exception as error:
            raised[name] = type(error).__name__
    return raised


async def health(engine: VLLMRollout) -> Health:
    return await engine.health()


async def held(engine: VLLMRollout) -> list[int]:
    """The versions that are held in the memory they were lent in."""
    return [lent.version for lent in LENT if lent.held]


async def copies(engine: VLLMRollout) -> int:
    """How many versions this process has copied to memory of its own, and keeps."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return len({link for link in links if "enginehouse-weights" in link})


async def shared_files(engine: VLLMRollout) -> list[str]:
    """What lies in /dev/shm and belongs to this plugin, while versions are staged and served."""
    return [name for name in os.listdir("/dev/shm") if "enginehouse" in name]
