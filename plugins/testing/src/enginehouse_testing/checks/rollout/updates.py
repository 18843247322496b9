"""Weight updates: the new weights in everything, or the old ones; versions and checksums that say which."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from enginehouse.engines.weights import WeightChunk, WeightState, WeightSyncError
from enginehouse.plugin import capabilities
from enginehouse.weights.checksums import checksum
from enginehouse.weights.effect import Scores, scored_tokens, share_taken, stands_still
from enginehouse_testing.check import PROTOCOL, Check, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, named, of_one, oracle, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.prompts import prompts
from enginehouse_testing.replica import Drawn, Replica, chunks, soon

SMALL_UPDATES = ("tied", "tied, a step", "tied, two steps")
"""As a run's: the first brings what the engine was launched with."""

PROBE = [one for one in prompts(8, seed=12, longest=32) if len(one) > 1]
"""What is scored after each of them."""

Step = tuple[str, int | None, list[Drawn]]
"""What was looked at: the model it must be, the version (None: any), and what was drawn."""

SHARED = prompts(1, seed=9, longest=1)[0] + [5 + number % 20 for number in range(300)]
"""A prompt long enough to fill blocks of any engine's prefix cache."""


async def look(replica: Replica, model: str, version: int | None = None) -> Step:
    """Greedy completions of a few prompts, the same each time: what an engine remembers of one would show."""
    given = [*prompts(3, seed=10), SHARED]
    return model, version, await replica.draw(*given, temperature=0.0, max_tokens=10, ignore_eos=True)


@of_one
def _judge_steps(steps: list[Step]) -> Measured:
    return larger(*(named(f"look {n}, {model}", serves(model, d, v)) for n, (model, v, d) in enumerate(steps, start=1)))


async def _update(replica: Replica) -> list[Step]:
    model = replica.model or ""
    version = replica.version
    steps = [await look(replica, model, version)]
    for name in (f"{model}, new", model, f"{model}, new"):
        version = await replica.update(name)
        steps.append(await look(replica, name, version))
    return steps


async def _small_updates(replica: Replica) -> list[tuple[str, list[list[float]]]]:
    steps = []
    for name in SMALL_UPDATES:
        await replica.update(name)
        results = [await replica.request(one, max_tokens=0, prompt_logprobs=True) for one in PROBE]
        steps.append((name, [[float(one) for one in result.prompt_logprobs or ()] for result in results]))
    return steps


@of_one
def _judge_small_updates(steps: list[tuple[str, list[list[float]]]]) -> Measured:
    found = []
    for name, scored in steps:
        if [len(row) for row in scored] != [len(row) for row in PROBE]:
            return wrong(
                f"prompts of {[len(row) for row in PROBE]} tokens have {[len(row) for row in scored]} logprobs"
            )
        with torch.no_grad():
            right = [oracle(name).row(torch.tensor(row))[0].tolist() for row in PROBE]
        found.append((name, Scores(scored_tokens(right), scored_tokens(scored))))
    worst = Measured(0.0)
    for (_, before), (name, after) in itertools.pairwise(found):
        share = 0.0 if stands_still(before, after) else share_taken(before, after, torch.finfo(torch.float32).eps)
        moved = f"the oracle's logprobs change by {abs(after.trainer - before.trainer).mean():.2g} nats a token"
        if share is None:
            apart = f"{abs(before.trainer - before.replica).mean():.2g}"
            return wrong(f"{name}: {moved}, which cannot be seen in its own: they are {apart} away before")
        taken = Measured(1 - share, f"{name}: {moved}, and {share:.0%} of that is seen in its own")
        if share < 0.5:
            return taken
        worst = larger(worst, taken)
    return worst


async def _prefix_cache(replica: Replica) -> list[Step]:
    async def one(model: str, version: int | None = None) -> Step:
        drawn = await replica.draw(SHARED, [*SHARED, 9], temperature=0.0, max_tokens=4, ignore_eos=True)
        return model, version, drawn

    steps = [await one("tied"), await one("tied")]
    version = await replica.update("tied, new")
    return [*steps, await one("tied, new", version), await one("tied, new", version)]


async def _interrupted(replica: Replica) -> tuple[list[Step], list[str]]:
    engine, old, new = replica.engine, replica.tensors("tied"), replica.tensors("tied, new")
    steps, said = [], []
    serving = (await soon(engine.weight_state())).version
    half = dict(list(new.items())[: len(new) // 2])
    lost = "model.layers.1.mlp.up_proj.weight"

    async def old_still_serves(what: str) -> None:
        await soon(engine.resume())
        state = await soon(engine.weight_state())
        if unlike := _unlike(state, serving, old):
            said.append(f"after {what}: {unlike}")
        steps.append(await look(replica, "tied", serving))

    await soon(engine.pause("wait"))
    await replica.start(new)
    await replica.stage(half)
    if unlike := _unlike(await soon(engine.weight_state()), serving, old):
        said.append(f"with half of an update staged: {unlike}")
    await soon(engine.abort_weight_update())
    await old_still_serves("half an update that was aborted")

    await soon(engine.pause("wait"))
    version = await replica.start(new)
    await replica.stage({name: tensor for name, tensor in new.items() if name != lost})
    said += await refused("an update that lacks a parameter", engine.finish_weight_update(version), lost)
    await soon(engine.abort_weight_update())
    await old_still_serves("an update that lacked a parameter")

    for what, name, tensor in (
        ("a wrong shape", "model.norm.weight", torch.zeros(31)),
        ("a wrong dtype", "model.norm.weight", torch.zeros(128, dtype=torch.float64)),
        ("a name it does not have", "model.layers.9.mlp.up_proj.weight", torch.zeros(3)),
    ):
        await soon(engine.pause("wait"))
        said += await refused(what, _send(replica, {**new, name: tensor}), name)
        await soon(engine.abort_weight_update())
        await old_still_serves(f"an update with {what}")

    await soon(engine.pause("wait"))
    said += await refused("a version that is not newer", replica.start(new, serving))
    await soon(engine.abort_weight_update())
    await old_still_serves("an update to the version it serves")
    version = await replica.update("tied, new")
    steps.append(await look(replica, "tied, new", version))
    return steps, said


async def _send(replica: Replica, tensors: Mapping[str, torch.Tensor]) -> None:
    version = await replica.start(tensors)
    for chunk in chunks(tensors):
        await soon(replica.engine.update_weights(WeightChunk(chunk)))
    await soon(replica.engine.finish_weight_update(version))


async def refused(what: str, call: Any, parameter: str = "") -> list[str]:
    """What is wrong with how a call was refused: it has to be a `WeightSyncError` that names the parameter."""
    try:
        await soon(call)
    except WeightSyncError as error:
        return [] if parameter in str(error) else [f"{what}: the error does not name {parameter}: {error}"]
    except Exception as error:
        return [f"{what} raised {type(error).__name__}, not a WeightSyncError: {error}"]
    return [f"{what} was taken"]


def _unlike(state: WeightState, version: int | None, tensors: Mapping[str, torch.Tensor]) -> str:
    """In words, how a replica's word differs from the version and, where it gives any, the checksums."""
    if state.version != version:
        return f"weight_state says version {state.version}, not {version}"
    if not state.checksums:
        return ""
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    differing = [name for name in sums if state.checksums.get(name) != sums[name]]
    return (
        f"the checksum of {differing[0]} is not that of what it serves ({len(differing)} in all)" if differing else ""
    )


@of_one
def _judge_interrupted(found: tuple[list[Step], list[str]]) -> Measured:
    steps, said = found
    if said:
        return wrong("; ".join(said))
    return larger(*(named(f"look {n}, {m}", serves(m, drawn, v)) for n, (m, v, drawn) in enumerate(steps, start=1)))


async def _state(replica: Replica) -> list[str]:
    engine = replica.engine
    said = []
    for model in ("tied", "tied, new", "tied"):
        version = replica.version if model == replica.serving else await replica.update(model)
        state, health = await soon(engine.weight_state()), await soon(engine.health())
        if state.version != version or health.version != version:
            said.append(f"version {version} is served; weight_state says {state.version}, health {health.version}")
    return said


async def _checksums(replica: Replica) -> list[str]:
    engine = replica.engine
    name = "model.layers.0.self_attn.k_proj.weight"
    said = []
    for model in ("tied", "tied, new"):
        if model != replica.serving:
            await replica.update(model)
        state = await soon(engine.weight_state())
        if not state.checksums:
            return ["weight_state gives no checksums"]
        if unlike := _unlike(state, replica.version, replica.tensors(model)):
            said.append(f"{model}: {unlike}")
    changed = replica.tensors("tied, new")
    changed[name][3, 4] += 1e-6
    await soon(engine.pause("wait"))
    await _send(replica, changed)
    replica.serving = ""
    await soon(engine.resume())
    if unlike := _unlike(await soon(engine.weight_state()), replica.version, changed):
        said.append(f"one value changed on its way: {unlike}")
    return said


@of_one
def _judge_said(said: list[str]) -> Measured:
    return wrong("; ".join(said)) if said else Measured(0.0)


CHECKS: tuple[Check, ...] = (
    RolloutCheck(
        name="update",
        capability=PROTOCOL,
        claim="After each update, there and back and there, tokens, logprobs and versions are the new weights'",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_update,),
        judge=_judge_steps,
    ),
    RolloutCheck(
        name="small_updates",
        since="1.1",
        capability=capabilities.PROMPT_LOGPROBS,
        claim="Each update of a step at a learning rate of 1e-6 is taken: logprobs of prompts change as the oracle's; "
        "the part of the change that is missing",
        tolerance=0.5,
        acts=(_small_updates,),
        judge=_judge_small_updates,
    ),
    RolloutCheck(
        name="prefix_cache",
        capability=PROTOCOL,
        claim="What was kept of a prompt before an update is not used after it",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_prefix_cache,),
        judge=_judge_steps,
    ),
    RolloutCheck(
        name="interrupted_update",
        capability=PROTOCOL,
        claim="After an update that was aborted, lacks a parameter or has a wrong one, the old weights go on serving",
        tolerance=LOGPROB_TOLERANCE,
        acts=(_interrupted,),
        judge=_judge_interrupted,
    ),
    RolloutCheck(
        name="weight_version",
        capability=PROTOCOL,
        claim="weight_state and health say the version that is served",
        tolerance=0.0,
        acts=(_state,),
        judge=_judge_said,
    ),
    RolloutCheck(
        name="weight_checksums",
        capability=capabilities.WEIGHT_CHECKSUMS,
        claim="weight_state has the checksum of each parameter as it is served, down to one changed value",
        tolerance=0.0,
        acts=(_checksums,),
        judge=_judge_said,
    ),
)

UNTIED = RolloutCheck(
    name="update_untied",
    capability=PROTOCOL,
    claim="The same of a model whose output layer is its own",
    tolerance=LOGPROB_TOLERANCE,
    acts=(_update,),
    judge=_judge_steps,
    model="untied",
)
EXPERTS = RolloutCheck(
    name="update_experts",
    capability=capabilities.EXPERTS,
    claim="The same of a mixture of experts",
    tolerance=LOGPROB_TOLERANCE,
    acts=(_update,),
    judge=_judge_steps,
    model="experts",
)
