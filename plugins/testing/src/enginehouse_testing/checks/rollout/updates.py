"""Checks weight updates: all tokens come from the new or from the old weights, and versions and checksums agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from enginehouse.engines.weights import Loan, LoanOver, WeightChunk, WeightState, WeightSyncError
from enginehouse.plugin import capabilities
from enginehouse.weights.checksums import checksum, mixed_checksum
from enginehouse.weights.effect import Scores, scored_tokens, share_taken, stands_still
from enginehouse_testing.check import EXACT, Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, oracle, prefixed, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.prompts import prompts
from enginehouse_testing.replica import ReplicaTrial, SampledCompletion, chunks, sampled, soon

SMALL_UPDATES = ("tied", "tied, a step", "tied, two steps")
"""Models of a run's updates. The first update brings the weights with which the engine was launched."""

PROBE = [prompt for prompt in prompts(8, seed=12, longest=32) if len(prompt) > 1]
"""Prompts that are scored after each of these updates."""

Look = tuple[str, int | None, list[SampledCompletion]]
"""The model that must be served, its version (None: any), and completions."""

SHARED = prompts(1, seed=9, longest=1)[0] + [5 + number % 20 for number in range(300)]
"""A prompt that is long enough to fill blocks of any engine's prefix cache."""

CHECKS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)
OTHER_MODELS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)


async def look(replica: ReplicaTrial, model: str, version: int | None = None) -> Look:
    """Complete the same few prompts greedily, so that anything an engine remembers of an earlier prompt would show."""
    rows = [*prompts(3, seed=10), SHARED]
    return model, version, await replica.draw(*rows, temperature=0.0, max_tokens=10, ignore_eos=True)


def judge_looks(looks: list[Look]) -> Measured:
    return larger(
        *(
            prefixed(f"look {number}, {model}", serves(model, completions, version))
            for number, (model, version, completions) in enumerate(looks, start=1)
        )
    )


async def _update_and_return(replica: ReplicaTrial) -> list[Look]:
    model = replica.model or ""
    looks = [await look(replica, model, replica.version)]
    for name in (f"{model}, new", model, f"{model}, new"):
        version = await replica.update(name)
        looks.append(await look(replica, name, version))
    return looks


@CHECKS.judge(_update_and_return)
def update(looks: list[Look]) -> Measured:
    """After each of three updates (to new weights, back, and again), tokens, logprobs and versions match the served
    weights."""
    return judge_looks(looks)


@OTHER_MODELS.judge(_update_and_return, capability=capabilities.EXPERTS, model="experts")
def update_experts(looks: list[Look]) -> Measured:
    """After each of three updates of a mixture of experts, tokens, logprobs and versions match the served weights."""
    return judge_looks(looks)


@OTHER_MODELS.judge(_update_and_return, model="untied")
def update_untied(looks: list[Look]) -> Measured:
    """After each of three updates of a model with a separate output layer, tokens, logprobs and versions match the
    served weights."""
    return judge_looks(looks)


async def _update_by_steps(replica: ReplicaTrial) -> list[tuple[str, list[list[float]]]]:
    steps = []
    for name in SMALL_UPDATES:
        await replica.update(name)
        results = [await replica.request(prompt, max_tokens=0, prompt_logprobs=True) for prompt in PROBE]
        steps.append((name, [[float(logprob) for logprob in result.prompt_logprobs or ()] for result in results]))
    return steps


@CHECKS.judge(_update_by_steps, since="1.1", capability=capabilities.PROMPT_LOGPROBS, tolerance=0.5)
def small_updates(steps: list[tuple[str, list[list[float]]]]) -> Measured:
    """Updates as small as a step at a learning rate of 1e-6 take effect: logprobs of prompts change as in the oracle.
    The error is the fraction of the oracle's change that is missing."""
    scores = []
    lengths = [len(row) for row in PROBE]
    for name, scored in steps:
        if [len(row) for row in scored] != lengths:
            return wrong(f"prompts of {lengths} tokens have {[len(row) for row in scored]} logprobs")
        with torch.no_grad():
            right = [oracle(name).row(torch.tensor(row))[0].tolist() for row in PROBE]
        scores.append((name, Scores(scored_tokens(right), scored_tokens(scored))))
    worst = Measured(0.0)
    for (_, before), (name, after) in itertools.pairwise(scores):
        share = 0.0 if stands_still(before, after) else share_taken(before, after, torch.finfo(torch.float32).eps)
        moved = f"the oracle's logprobs change by {abs(after.trainer - before.trainer).mean():.2g} nats a token"
        if share is None:
            away = f"{abs(before.trainer - before.replica).mean():.2g}"
            return wrong(f"{name}: {moved}, which cannot be seen in its own: they are {away} away before")
        missing = Measured(1 - share, f"{name}: {moved}, and {share:.0%} of that is seen in its own")
        if share < 0.5:
            return missing
        worst = larger(worst, missing)
    return worst


async def _update_behind_cache(replica: ReplicaTrial) -> list[Look]:
    async def look(model: str, version: int | None = None) -> Look:
        completions = await replica.draw(SHARED, [*SHARED, 9], temperature=0.0, max_tokens=4, ignore_eos=True)
        return model, version, completions

    looks = [await look("tied"), await look("tied")]
    version = await replica.update("tied, new")
    return [*looks, await look("tied, new", version), await look("tied, new", version)]


@CHECKS.judge(_update_behind_cache)
def prefix_cache(looks: list[Look]) -> Measured:
    """After an update, the engine uses no prompt states that it cached before the update."""
    return judge_looks(looks)


async def _interrupt_updates(replica: ReplicaTrial) -> tuple[list[Look], list[str]]:
    engine, old, new = replica.engine, replica.tensors("tied"), replica.tensors("tied, new")
    looks, mistakes = [], []
    serving = (await soon(engine.weight_state())).version
    half = dict(list(new.items())[: len(new) // 2])
    lost = "model.layers.1.mlp.up_proj.weight"

    async def look_at_old(what: str) -> None:
        """Abort the update, and note whether the old weights are still served."""
        await soon(engine.abort_weight_update())
        await soon(engine.resume())
        state = await soon(engine.weight_state())
        if difference := describe_difference(state, serving, old):
            mistakes.append(f"after {what}: {difference}")
        looks.append(await look(replica, "tied", serving))

    await soon(engine.pause("wait"))
    await replica.start(new)
    await replica.stage(half)
    if difference := describe_difference(await soon(engine.weight_state()), serving, old):
        mistakes.append(f"with half of an update staged: {difference}")
    await look_at_old("half an update that was aborted")

    await soon(engine.pause("wait"))
    version = await replica.start(new)
    await replica.stage({name: tensor for name, tensor in new.items() if name != lost})
    mistakes += await check_refusal("an update that lacks a parameter", engine.finish_weight_update(version), lost)
    await look_at_old("an update that lacked a parameter")

    for what, name, tensor in (
        ("a wrong shape", "model.norm.weight", torch.zeros(31)),
        ("a wrong dtype", "model.norm.weight", torch.zeros(128, dtype=torch.float64)),
        ("a name it does not have", "model.layers.9.mlp.up_proj.weight", torch.zeros(3)),
    ):
        await soon(engine.pause("wait"))
        mistakes += await check_refusal(what, send(replica, {**new, name: tensor}), name)
        await look_at_old(f"an update with {what}")

    await soon(engine.pause("wait"))
    mistakes += await check_refusal("a version that is not newer", replica.start(new, serving))
    await look_at_old("an update to the version it serves")
    version = await replica.update("tied, new")
    looks.append(await look(replica, "tied, new", version))
    return looks, mistakes


@CHECKS.judge(_interrupt_updates)
def interrupted_update(result: tuple[list[Look], list[str]]) -> Measured:
    """After an update that was aborted, lacks a parameter or has a wrong one, the old weights are still served."""
    looks, mistakes = result
    return wrong("; ".join(mistakes)) if mistakes else judge_looks(looks)


async def _stage_while_generating(replica: ReplicaTrial) -> tuple[list[Look], list[str]]:
    engine, old, new = replica.engine, replica.tensors("tied"), replica.tensors("tied, new")
    looks, mistakes = [], []
    serving = (await soon(engine.weight_state())).version
    running = await replica.start_request(SHARED, max_tokens=100, temperature=0.0, ignore_eos=True)
    middle = len(new) // 2
    for ending in ("aborted", "served"):
        version = await replica.start(new)
        for items in (list(new.items())[:middle], list(new.items())[middle:]):
            await replica.stage(dict(items))
            looks.append(await look(replica, "tied", serving))
        if difference := describe_difference(await soon(engine.weight_state()), serving, old):
            mistakes.append(f"with an update staged: {difference}")
        if ending == "aborted":
            await soon(engine.abort_weight_update())
            looks.append(await look(replica, "tied", serving))
    (whole,) = sampled(SHARED, await running)
    if (len(whole.tokens), whole.reason) != (100, "length"):
        mistakes.append(f"a request that ran meanwhile ended with {len(whole.tokens)} of 100 tokens, {whole.reason!r}")
    looks.append(("tied", serving, [whole]))
    await soon(engine.pause("wait"))
    await soon(engine.finish_weight_update(version))
    replica.serving = "tied, new"
    await soon(engine.resume())
    looks.append(await look(replica, "tied, new", version))
    return looks, mistakes


@CHECKS.judge(_stage_while_generating, since="1.1", capability=capabilities.STAGES_WHILE_GENERATING)
def staged_while_generating(result: tuple[list[Look], list[str]]) -> Measured:
    """While an update is staged or aborted, requests are answered with the old weights, without a pause."""
    looks, mistakes = result
    return wrong("; ".join(mistakes)) if mistakes else judge_looks(looks)


async def _borrow(replica: ReplicaTrial) -> tuple[list[Look], list[str]]:
    looks, mistakes = [], []
    lent, new = replica.tensors("tied"), replica.tensors("tied, new")
    for name in ("tied", "tied, new", "tied"):
        for parameter, tensor in lent.items():
            tensor.copy_(replica.tensors(name)[parameter])
        await soon(replica.engine.pause("wait"))
        version, loan = await replica.start(lent), Loan()
        await soon(replica.engine.update_weights(WeightChunk(list(lent.items()), loan=loan)))
        await soon(replica.engine.finish_weight_update(version))
        await soon(replica.engine.resume())
        replica.serving = ""
        looks.append(await look(replica, name, version))
        loan.end()
        for tensor in lent.values():
            tensor.fill_(0.01)
        try:
            await replica.request([3, 4], max_tokens=2)
        except LoanOver:
            continue
        mistakes.append(f"with weights of version {version} that were lent, and had changed, it drew")
    await replica.update("tied, new")
    looks.append(await look(replica, "tied, new", replica.version))
    if not all((tensor == 0.01).all() for tensor in lent.values()):
        mistakes.append("an update whose weights were not lent was written to those that had been")
    if difference := describe_difference(await soon(replica.engine.weight_state()), replica.version, new):
        mistakes.append(difference)
    return looks, mistakes


@CHECKS.judge(_borrow, since="1.1", capability=capabilities.LENT_WEIGHTS)
def lent_weights(result: tuple[list[Look], list[str]]) -> Measured:
    """Lent weights are served until the loan ends; then nothing is generated until an update."""
    looks, mistakes = result
    return wrong("; ".join(mistakes)) if mistakes else judge_looks(looks)


async def send(
    replica: ReplicaTrial, tensors: Mapping[str, torch.Tensor], sums: Mapping[str, str] | None = None
) -> None:
    version = await replica.start(tensors)
    for chunk in chunks(tensors):
        arrived = {name: sums[name] for name, _ in chunk} if sums else {}
        await soon(replica.engine.update_weights(WeightChunk(chunk, arrived)))
    await soon(replica.engine.finish_weight_update(version))


async def check_refusal(what: str, call: Any, parameter: str = "") -> list[str]:
    """Return the mistakes in a rejection, which must be a `WeightSyncError` that names the parameter."""
    try:
        await soon(call)
    except WeightSyncError as error:
        return [] if parameter in str(error) else [f"{what}: the error does not name {parameter}: {error}"]
    except Exception as error:
        return [f"{what} raised {type(error).__name__}, not a WeightSyncError: {error}"]
    return [f"{what} was taken"]


def describe_difference(
    state: WeightState,
    version: int | None,
    tensors: Mapping[str, torch.Tensor],
    sum_of: Callable[[torch.Tensor], str] = checksum,
) -> str:
    """Describe how a replica's state differs from the expected version and tensors; empty if it does not.

    Tensors are compared by their checksums, if the state has checksums, except those that it says are not read back.
    """
    if state.version != version:
        return f"weight_state says version {state.version}, not {version}"
    if not state.checksums:
        return ""
    unread = set(state.unread)
    if unknown := sorted(unread.difference(tensors)):
        return f"weight_state does not read back {unknown[0]}, which is no parameter ({len(unknown)} in all)"
    read = {name: tensor for name, tensor in tensors.items() if name not in unread}
    differing = [name for name, tensor in read.items() if state.checksums.get(name) != sum_of(tensor)]
    if not differing:
        return ""
    return f"the checksum of {differing[0]} is not that of what it serves ({len(differing)} in all)"


@CHECKS.act(tolerance=EXACT)
async def _weight_version(replica: ReplicaTrial) -> Measured:
    """weight_state and health report the version that is served, and the checksums of what is read back of it."""
    engine = replica.engine
    mistakes, read = [], ""  # a certificate says how much is read back
    for model in ("tied", "tied, new", "tied"):
        version = replica.version if model == replica.serving else await replica.update(model)
        state, health = await soon(engine.weight_state()), await soon(engine.health())
        if state.version != version or health.version != version:
            mistakes.append(f"version {version} is served; weight_state says {state.version}, health {health.version}")
        tensors = replica.tensors(model)
        if difference := describe_difference(state, version, tensors):
            mistakes.append(difference)
        read = f"reads back {len(state.checksums)} of {len(tensors)} parameters"
        if state.checksums:
            unread = sum(tensors[name].nbytes for name in state.unread)
            read += f", {1 - unread / sum(tensor.nbytes for tensor in tensors.values()):.0%} of the bytes"
    return wrong("; ".join(mistakes)) if mistakes else Measured(0.0, read)


@CHECKS.act(capability=capabilities.WEIGHT_CHECKSUMS, tolerance=EXACT)
async def _weight_checksums(replica: ReplicaTrial) -> str:
    """weight_state has the checksum of each parameter as it is served, sensitive to a single changed value."""
    engine = replica.engine
    mistakes = []
    for model in ("tied", "tied, new"):
        if model != replica.serving:
            await replica.update(model)
        state = await soon(engine.weight_state())
        if not state.reads_all:
            return f"weight_state has no checksum of {state.unread[0]}" if state.unread else "it gives no checksums"
        if difference := describe_difference(state, replica.version, replica.tensors(model)):
            mistakes.append(f"{model}: {difference}")
    changed = replica.tensors("tied, new")
    changed["model.layers.0.self_attn.k_proj.weight"][3, 4] += 1e-6
    await soon(engine.pause("wait"))
    await send(replica, changed)
    replica.serving = ""
    await soon(engine.resume())
    if difference := describe_difference(await soon(engine.weight_state()), replica.version, changed):
        mistakes.append(f"one value changed on its way: {difference}")
    return "; ".join(mistakes)


@CHECKS.act(since="1.1", capability=capabilities.DEVICE_CHECKSUMS, tolerance=EXACT)
async def _device_checksums(replica: ReplicaTrial) -> str:
    """After an update with checksums that a device computes, weight_state has such checksums of what is served, and
    after the next update without them, others."""
    engine = replica.engine
    for model, sum_of in (("tied, new", mixed_checksum), ("tied", checksum)):
        tensors = replica.tensors(model)
        sums = {name: mixed_checksum(tensor) for name, tensor in tensors.items()} if sum_of is mixed_checksum else {}
        await soon(engine.pause("wait"))
        await send(replica, tensors, sums)
        replica.serving = model
        await soon(engine.resume())
        if difference := describe_difference(await soon(engine.weight_state()), replica.version, tensors, sum_of):
            return f"{model}: {difference}"
    return ""
