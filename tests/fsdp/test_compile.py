"""The option `compile`: the same numbers, and compiled anew only a few times however lengths change."""

import pytest
import torch
from fsdp_train_cases import OPTIONS, OUTPUTS, make_sharded, score_and_train
from torch_train_cases import make_batch, make_engine, weights_of

from enginehouse_testing.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (3, 5, 6, 8, 9, 11, 12, 14, 17, 19)
"""Longest parts of rows, of batches that are computed one after the other."""


def _train(rank, world_size, path, sizes):
    from torch._dynamo.utils import counters

    engine = make_sharded(path, rank, world_size, compile=True, share_prompts="never")
    scores, stepped, _ = score_and_train(engine, make_batch(4, 4).split(sizes)[rank])
    weights = weights_of(engine)
    began = counters["stats"]["unique_graphs"]
    for longest in LENGTHS:
        engine.forward(make_batch(2, 2, seed=longest, longest=longest), OUTPUTS)
    again = counters["stats"]["unique_graphs"]
    engine.shutdown()
    return scores, stepped, weights, began, again


def test_compiled_blocks_compute_the_same_and_bear_any_length(run_ranks):
    path, sizes = tiny_model(layers=1), [9, 7]  # compiling is what takes the time
    oracle = make_engine(path, **OPTIONS)
    scores, stepped, _ = score_and_train(oracle, make_batch(4, 4))
    results = run_ranks(len(sizes), _train, path, sizes)
    found = torch.cat([part["logprobs"].values for part, *_ in results])
    torch.testing.assert_close(found, scores["logprobs"].values, atol=1e-5, rtol=1e-5)
    for _, steps, weights, began, again in results:
        for ours, theirs in zip(steps, stepped, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name, weight in weights_of(oracle).items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
        assert began > 0, "nothing was compiled"
        assert again - began <= 2, "compiled anew for a length"
