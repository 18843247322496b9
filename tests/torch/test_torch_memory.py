"""What the torch engines give up they give back to the system, on a CPU too: measured in a process of its own."""

import json
import subprocess
import sys

import pytest

from enginehouse_testing.models import tiny_model

HIDDEN = 1024

TRAINED = """
import json, sys, psutil
from torch_train_cases import POLICY, make_batch, make_engine
engine, batch = make_engine(sys.argv[1]), make_batch(4, 2)
for _ in range(2):
    engine.forward_backward(batch, POLICY)
    engine.optim_step()
size = sum(p.numel() * 4 for p in engine._model.parameters())
def held():
    return psutil.Process().memory_info().rss
full = held()
engine.offload()
away = held()
engine.onload()
back = held()
engine.forward_backward(batch, POLICY)
engine.optim_step()
print(json.dumps([size, full - away, back - away]))
"""

SERVED = """
import asyncio, json, sys, psutil
from torch_rollout_driver import generate, launched
async def main():
    async with launched(sys.argv[1]) as engine:
        def held():
            return psutil.Process().memory_info().rss
        await generate(engine, [3, 4], max_tokens=4)
        size = sum(p.numel() * 4 for p in engine._weights._parameters.values())
        full = held()
        await engine.sleep()
        print(json.dumps([size, full - held(), 0]))
asyncio.run(main())
"""


STEPPED = """
import json, resource, sys, psutil
from torch_train_cases import POLICY, batch_of, make_engine
engine = make_engine(sys.argv[1])
rows = [[3 + (row + place) % 20 for place in range(64)] for row in range(8)]
batch = batch_of(rows, [[place > 0 for place in range(64)] for _ in rows])
engine.forward_backward(batch_of(rows[:1], [[True] * 64]), POLICY)
engine.optim_step()
before = psutil.Process().memory_info().rss
engine.forward_backward(batch, POLICY)
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
engine.optim_step()
size = sum(p.numel() * 4 for p in engine._model.parameters())
print(json.dumps([size, most, psutil.Process().memory_info().rss - before]))
"""

UPDATED = """
import asyncio, json, sys, psutil
from torch_rollout_driver import generate, launched
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightUpdate
async def main():
    async with launched(sys.argv[1]) as engine:
        def held():
            return psutil.Process().memory_info().rss
        await generate(engine, [3, 4], max_tokens=4)
        weights = {name: tensor.clone() for name, tensor in engine._weights._parameters.items()}
        size = sum(tensor.nbytes for tensor in weights.values())
        before, during = held(), 0
        for version in (1, 2):
            await engine.pause()
            metas = [ParamMeta.of(name, tensor) for name, tensor in weights.items()]
            await engine.start_weight_update(WeightUpdate(version, metas))
            await engine.update_weights(WeightChunk(list(weights.items())))
            during = held() - before
            await engine.finish_weight_update(version)
            await engine.resume()
        await generate(engine, [3, 4], max_tokens=4)
        print(json.dumps([size, during, held() - before]))
asyncio.run(main())
"""

GRADIENT = """
import json, resource, sys
import torch
from torch_train_cases import POLICY, batch_of, make_engine
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
engine = make_engine(sys.argv[1])
rows = [[3 + (row + place) % 20 for place in range(64)] for row in range(64)]
masks = [[place > 0 for place in range(64)] for _ in rows]
engine.forward_backward(batch_of(rows[:1], masks[:1]), POLICY)
before = peak()
engine.forward_backward(batch_of(rows, masks), POLICY)
print(json.dumps([before, peak() - before, 0]))
"""


def _measured(program: str, **shape: int) -> tuple[int, int, int]:
    command = [sys.executable, "-c", program, tiny_model(**shape or {"hidden": HIDDEN})]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=None, cwd="tests")
    size, freed, taken = json.loads(run.stdout.splitlines()[-1])
    return size, freed, taken


@pytest.mark.slow
def test_a_training_engine_that_is_offloaded_gives_back_weights_gradients_and_moments():
    size, freed, taken = _measured(TRAINED)
    assert size > 80 * 2**20
    assert freed >= 0.9 * 4 * size
    assert taken >= 0.7 * 4 * size  # gradients are zero, and come as they are touched


@pytest.mark.slow
def test_a_rollout_engine_that_sleeps_gives_back_its_weights():
    size, freed, _ = _measured(SERVED)
    assert size > 80 * 2**20
    assert freed >= 0.9 * size


@pytest.mark.slow
def test_a_batch_of_64_rows_is_not_one_piece_on_a_cpu():
    _, growth, _ = _measured(GRADIENT, hidden=64, layers=160)
    assert growth < 1.3 * 2**30  # in one piece: 3.4 GiB


@pytest.mark.slow
def test_a_rollout_engine_gives_back_what_it_staged_a_large_update_in():
    size, during, after = _measured(UPDATED)
    assert size > 80 * 2**20
    assert during > 0.9 * size
    assert after < 0.5 * size


@pytest.mark.slow
def test_a_training_engine_gives_back_what_the_passes_of_a_large_model_took():
    size, most, after = _measured(STEPPED, hidden=256, layers=48)
    assert size > 80 * 2**20
    assert most > 400 * 2**20
    assert after < 0.3 * most
