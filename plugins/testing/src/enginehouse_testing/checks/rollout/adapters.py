"""Checks weight updates that bring an adapter alone, which the engine adds to the model that it was launched with."""

from __future__ import annotations

from functools import partial

import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.control import Paused, judge_kept, keep_cache, pause
from enginehouse_testing.checks.rollout.life import compare_endpoint
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, switched_error
from enginehouse_testing.checks.rollout.updates import Look, check_refusal, describe_difference, judge_looks, look, send
from enginehouse_testing.comparison import larger
from enginehouse_testing.replica import ReplicaTrial, soon

NAMES = "adapted", "adapted, new"
KEPT = 400
"""Number of tokens of a request that will be interrupted: on a CPU, an adapter makes engines several times slower."""

CHECKS = Checks(
    RolloutCheck,
    capability=capabilities.ADAPTER_UPDATES,
    model="adapted",
    since="1.1",
    tolerance=LOGPROB_TOLERANCE,
)


async def _update_adapter(replica: ReplicaTrial) -> tuple[list[Look], list[str]]:
    engine, looks, mistakes = replica.engine, [], []
    new = replica.tensors("adapted, new")

    async def look_at(model: str) -> None:
        state = await soon(engine.weight_state())
        if difference := describe_difference(state, replica.version, replica.tensors(model)):
            mistakes.append(f"{model}: {difference}")
        looks.append(await look(replica, model, replica.version))

    for name in ("adapted", "adapted, new", "adapted, newer"):
        await replica.update(name)
        await look_at(name)
    serving, lost = replica.version, "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    unknown = lost.replace("layers.1", "layers.9")
    for what, tensors, name in (
        ("an adapter that lacks a matrix", {key: tensor for key, tensor in new.items() if key != lost}, lost),
        ("an adapter of another rank", {**new, lost: torch.zeros(384, 3)}, lost),
        ("an adapter of a layer it does not have", {**new, unknown: new[lost]}, unknown),
        ("whole weights", replica.tensors("tied"), "embed_tokens"),
    ):
        await soon(engine.pause("wait"))
        mistakes += await check_refusal(what, send(replica, tensors), name)
        await soon(engine.abort_weight_update())
        await soon(engine.resume())
        looks.append(await look(replica, "adapted, newer", serving))
    await replica.update("adapted")
    await look_at("adapted")
    return looks, mistakes


@CHECKS.judge(_update_adapter)
def adapter_updates(result: tuple[list[Look], list[str]]) -> Measured:
    """After each update that brings an adapter alone, tokens and logprobs are those of the model with this adapter; an
    adapter that does not fit the model is rejected, and the old one is still served."""
    looks, mistakes = result
    return wrong("; ".join(mistakes)) if mistakes else judge_looks(looks)


@CHECKS.judge(partial(pause, mode="keep", tokens=KEPT, new=NAMES[1]), also=capabilities.PAUSE_KEEP)
def adapter_kept(paused: Paused) -> Measured:
    """A request kept over an update of an adapter continues with the new adapter, and with keys and values that are
    computed again."""
    return larger(judge_kept(*paused, *NAMES, KEPT), switched_error(*NAMES, paused[0], keeps_cache=False))


@CHECKS.judge(partial(keep_cache, tokens=KEPT, new=NAMES[1]), also=capabilities.PAUSE_KEEP_CACHE)
def adapter_kept_cache(paused: Paused) -> Measured:
    """A request kept with its cache over an update of an adapter continues with the new adapter and the old keys and
    values; requests that arrive while paused use no keys and values of the old adapter."""
    return larger(judge_kept(*paused, *NAMES, KEPT), switched_error(*NAMES, paused[0], keeps_cache=True))


@CHECKS.act(also=capabilities.OPENAI_ENDPOINT)
async def _adapter_endpoint(replica: ReplicaTrial) -> str:
    """OpenAI clients get answers of the model with the served adapter."""
    await replica.update("adapted, new")
    return await compare_endpoint(replica)
