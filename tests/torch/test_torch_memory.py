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
    run = subprocess.run(
        [sys.executable, "-c", program, tiny_model(**shape or {"hidden": HIDDEN})], capture_output=True, text=True, check=True,
        env=None, cwd="tests",
    )  # fmt: skip
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
