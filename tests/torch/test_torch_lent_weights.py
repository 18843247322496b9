"""The torch rollout engine on weights that a trainer in its process lends: where they lie, and never as they change."""

import json
import subprocess
import sys

import pytest
import torch
from torch_rollout_driver import Gate, generate, launched, plain_greedy, plain_model, posted

from enginehouse.engines.weights import Loan, LoanOver, ParamMeta, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.weights.checksums import checksum
from enginehouse_testing.models import EOS_ID, tiny_model
from enginehouse_torch.rollout import TorchRolloutEngine

PROMPT = [5, 6, 7]

Weights = dict[str, torch.Tensor]


def weights_of(path: str, flat: bool = True) -> Weights:
    """The model's weights by checkpoint name: in one buffer, as a trainer has them, or each for itself."""
    named = {name: parameter.detach() for name, parameter in plain_model(path).named_parameters()}
    if not flat:
        return {name: tensor.clone() for name, tensor in named.items()}
    buffer = torch.cat([tensor.flatten() for tensor in named.values()])
    parts = buffer.split([tensor.numel() for tensor in named.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(named.items(), parts, strict=True)}


def write(target: Weights, source: Weights) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])


async def update(engine: TorchRolloutEngine, weights: Weights, version: int, loan: Loan | None = None) -> None:
    await engine.pause()
    await engine.start_weight_update(WeightUpdate(version, [ParamMeta.of(n, t) for n, t in weights.items()]))
    items = list(weights.items())
    for first in range(0, len(items), 2):
        await engine.update_weights(WeightChunk(items[first : first + 2], loan=loan))
    await engine.finish_weight_update(version)
    await engine.resume()


async def greedy(engine: TorchRolloutEngine) -> list[int]:
    (result,) = await generate(engine, PROMPT, temperature=0, max_tokens=8)
    return list(result.completions[0].token_ids)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("family", "tied", "fused"), [("qwen3", True, True), ("llama", False, True), ("llama", True, False)]
)
async def test_lent_weights_are_served_and_so_are_those_that_the_trainer_makes_of_them(family, tied, fused, flat):
    old, new = tiny_model(family, tied), tiny_model(family, tied, seed=1)
    lent = weights_of(old, flat)
    async with launched(old, fused=fused) as engine:
        for version, path in enumerate((new, old, new), start=1):
            write(lent, weights_of(path))
            loan = Loan()
            await update(engine, lent, version, loan)
            assert await greedy(engine) == plain_greedy(path, PROMPT, 8, [EOS_ID])
            state = await engine.weight_state()
            assert (state.version, state.checksums) == (version, {name: checksum(t) for name, t in lent.items()})
            loan.end()


async def test_once_the_trainer_has_ended_the_loan_nothing_is_drawn_or_scored_until_an_update():
    old, new = tiny_model(), tiny_model(seed=1)
    lent, loan = weights_of(new), Loan()
    async with launched(old) as engine:
        await update(engine, lent, 1, loan)
        loan.end()
        for sampling in ({"max_tokens": 4}, {"max_tokens": 0, "prompt_logprobs": True}):
            with pytest.raises(LoanOver, match="it needs a weight update first"):
                await generate(engine, PROMPT, **sampling)
        assert (await engine.weight_state()).version is None
        await update(engine, lent, 2, Loan())
        assert await greedy(engine) == plain_greedy(new, PROMPT, 8, [EOS_ID])


async def test_what_is_under_way_when_the_loan_ends_is_refused_and_never_drawn_from_changed_weights():
    lent, loan = weights_of(tiny_model(seed=1)), Loan()
    async with launched(tiny_model()) as engine:
        await update(engine, lent, 1, loan)
        gate = Gate(engine, after=2)
        running = await posted(generate(engine, PROMPT, temperature=0, max_tokens=20, ignore_eos=True))
        await gate.reached()
        loan.end()
        write(lent, weights_of(tiny_model()))
        gate.open()
        with pytest.raises(LoanOver):
            await running
        await update(engine, lent, 2, Loan())
        assert await greedy(engine) == plain_greedy(tiny_model(), PROMPT, 8, [EOS_ID])


async def test_kept_sequences_go_on_with_the_weights_of_the_next_loan():
    lent, loan = weights_of(tiny_model()), Loan()
    async with launched(tiny_model()) as engine:
        await update(engine, lent, 1, loan)
        gate = Gate(engine, after=2)
        running = await posted(generate(engine, PROMPT, temperature=0, max_tokens=9, ignore_eos=True))
        await gate.reached()
        pausing = await posted(engine.pause("keep"))
        gate.open()
        await pausing
        loan.end()
        await engine.start_weight_update(WeightUpdate(2, [ParamMeta.of(n, t) for n, t in lent.items()]))
        await engine.update_weights(WeightChunk(list(lent.items()), loan=Loan()))
        await engine.finish_weight_update(2)
        await engine.resume()
        (result,) = await running
    assert result.completions[0].token_ids == plain_greedy(tiny_model(), PROMPT, 9)


@pytest.mark.parametrize("fused", [True, False])
async def test_an_update_that_is_not_lent_leaves_the_tensors_alone_that_were(fused):
    old, new = tiny_model(), tiny_model(seed=1)
    lent, loan = weights_of(old), Loan()
    async with launched(old, fused=fused) as engine:
        await update(engine, lent, 1, loan)
        await update(engine, weights_of(new), 2)
        assert all(torch.equal(tensor, weights_of(old)[name]) for name, tensor in lent.items())
        loan.end()
        write(lent, {name: torch.zeros_like(tensor) for name, tensor in lent.items()})
        assert await greedy(engine) == plain_greedy(new, PROMPT, 8, [EOS_ID])


async def test_an_engine_that_sleeps_frees_no_tensors_of_the_trainer():
    path = tiny_model()
    lent = weights_of(path)
    async with launched(path) as engine:
        await update(engine, lent, 1, Loan())
        await engine.sleep()
        assert all(torch.equal(tensor, weights_of(path)[name]) for name, tensor in lent.items())
        await engine.wake_up()
        await update(engine, lent, 2, Loan())
        assert await greedy(engine) == plain_greedy(path, PROMPT, 8, [EOS_ID])


async def test_an_update_that_fails_leaves_nothing_to_serve_where_the_version_before_it_was_lent():
    path = tiny_model()
    lent, loan = weights_of(path), Loan()
    async with launched(path) as engine:
        await update(engine, lent, 1, loan)
        loan.end()
        await engine.pause()
        await engine.start_weight_update(WeightUpdate(2, [ParamMeta.of(n, t) for n, t in lent.items()]))
        await engine.update_weights(WeightChunk(list(lent.items())[:3], loan=Loan()))
        with pytest.raises(WeightSyncError, match="lacks"):
            await engine.finish_weight_update(2)
        await engine.abort_weight_update()
        await engine.resume()
        with pytest.raises(LoanOver):
            await generate(engine, PROMPT, max_tokens=4)


async def test_a_loan_that_ends_before_the_switch_refuses_the_update():
    path = tiny_model()
    lent, loan = weights_of(tiny_model(seed=1)), Loan()
    async with launched(path) as engine:
        await engine.pause()
        await engine.start_weight_update(WeightUpdate(1, [ParamMeta.of(n, t) for n, t in lent.items()]))
        await engine.update_weights(WeightChunk(list(lent.items()), loan=loan))
        loan.end()
        with pytest.raises(LoanOver):
            await engine.finish_weight_update(1)
        await engine.abort_weight_update()
        await engine.resume()
        assert await greedy(engine) == plain_greedy(path, PROMPT, 8, [EOS_ID])


MEASURED = """
import asyncio, json, sys, psutil
from test_torch_lent_weights import Loan, generate, launched, update, weights_of
async def main():
    lent = weights_of(sys.argv[1])
    size = sum(tensor.nbytes for tensor in lent.values())
    def held():
        return psutil.Process().memory_info().rss
    async with launched(sys.argv[1]) as engine:
        await generate(engine, [3, 4], max_tokens=4)
        before = held()
        await update(engine, lent, 1, Loan())
        await generate(engine, [3, 4], max_tokens=4)
        print(json.dumps([size, before - held()]))
asyncio.run(main())
"""


@pytest.mark.slow
def test_lent_weights_are_there_once():
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'torch')\n{MEASURED}", tiny_model(hidden=1024)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="tests")
    size, freed = json.loads(run.stdout.splitlines()[-1])
    assert size > 80 * 2**20
    assert freed > 0.9 * size
