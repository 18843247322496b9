"""The `megatron` engine on GPUs, compared with transformers on the CPU. Where there is no GPU these are not run."""

import pytest
import torch
from megatron_train_cases import STEPS, trained
from rank_processes import rank_processes

from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.comparison import largest_difference
from enginehouse_testing.models import tiny_model
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine", "enginehouse_testing.oracle") as run:
        yield run


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (1, {"recompute": "full"}),
        (2, {"tensor_parallel": 2}),
        (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
        (2, {"context_parallel": 2}),
    ],
    ids=str,
)
def test_gpus_train_as_transformers_does(run_ranks, tmp_path, world_size, options):
    if torch.cuda.device_count() < world_size:
        pytest.skip("needs two GPUs")
    path = tiny_model("qwen3", tied=True, layers=4)
    oracle = Oracle(path)
    scores = oracle.scores(batch(), masked=False)
    oracle.train(batch(), STEPS, TRAINING)
    ranks = run_ranks(world_size, trained, path, str(tmp_path / "saved"), options, "cuda")
    found = next(rank["logprobs"] for rank in ranks if rank["logprobs"] is not None)
    assert (found.cpu() - scores["logprobs"]).abs().max() < 1e-4  # sums are taken in another order
    for rank in ranks:
        assert largest_difference(rank["weights"], oracle.weights()).error < 1e-3
        assert rank["goes on alike"]
