"""Pipeline ranks that hold several parts of the layers, of a model with more layers than the conformance suite's."""

import pytest
from megatron_train_cases import STEPS, trained
from rank_processes import rank_processes

from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.comparison import largest_difference
from enginehouse_testing.models import tiny_model
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine", "enginehouse_testing.oracle") as run:
        yield run


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_two_parts_a_rank_train_as_transformers_does(run_ranks, tmp_path, family, tied):
    path = tiny_model(family, tied, layers=4)
    oracle = Oracle(path)
    scores = oracle.scores(batch(), masked=False)
    oracle.train(batch(), STEPS, TRAINING)
    options = {"pipeline_parallel": 2, "virtual_stages": 2}
    first, last = run_ranks(2, trained, path, str(tmp_path / "saved"), options)
    assert first["logprobs"] is None
    assert (last["logprobs"] - scores["logprobs"]).abs().max() < 1e-5
    for rank in (first, last):
        assert largest_difference(rank["weights"], oracle.weights()).error < 1e-4
        assert rank["goes on alike"]
