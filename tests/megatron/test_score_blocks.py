"""Scoring in blocks of logits changes nothing where ranks share the vocabulary."""

import pytest
from megatron_train_cases import STEPS, trained
from rank_processes import rank_processes
from score_blocks import in_blocks

from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.comparison import largest_difference
from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("tied", "vocabulary", "options"),
    [
        (False, 33, {"tensor_parallel": 2}),  # one row of padding
        (True, VOCABULARY_SIZE, {"tensor_parallel": 2, "sequence_parallel": False}),
    ],
    ids=str,
)
def test_blocks_score_and_train_like_the_oracle(tmp_path, tied, vocabulary, options):
    path = tiny_model("llama", tied, vocabulary=vocabulary)
    oracle = Oracle(path)
    right = oracle.scores(batch(), masked=False)["logprobs"]
    oracle.train(batch(), STEPS, TRAINING)
    with rank_processes("enginehouse_megatron.engine") as run_ranks:
        results = run_ranks(2, in_blocks, trained, path, str(tmp_path / "saved"), options)
    scored = [found["logprobs"] for found in results if found["logprobs"] is not None]
    assert len(scored) == 1
    assert (scored[0] - right).abs().max() < 1e-5
    for found in results:
        assert found["goes on alike"]
        assert largest_difference(found["weights"], oracle.weights()).error < 1e-4
