"""What one layout wrote another reads, the `fsdp` engine included; and how rows are dealt changes nothing."""

from types import SimpleNamespace

import pytest
import torch
from megatron_train_cases import dealt, gone_on, taught_padding, with_padding, written
from rank_processes import rank_processes

from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.comparison import largest_difference
from enginehouse_testing.models import tiny_model
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPLIT = {"tensor_parallel": 2, "pipeline_parallel": 2}


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine", "enginehouse_fsdp.engine") as run:
        yield run


@pytest.fixture(scope="module")
def path() -> str:
    return tiny_model("llama", False)


@pytest.fixture(scope="module")
def after_a_step(run_ranks, path, tmp_path_factory):
    """What four ranks, tp2 x pp2, wrote after a step, and their weights after the next."""
    directory = tmp_path_factory.mktemp("written")
    saved, exported = str(directory / "saved"), str(directory / "exported")
    weights, *others = run_ranks(4, written, path, saved, exported, SPLIT)
    assert all(torch.equal(other[name], weight) for other in others for name, weight in weights.items())
    return SimpleNamespace(saved=saved, exported=exported, weights=weights)


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "dp2"])
def test_a_checkpoint_of_tp2_x_pp2_goes_on_alike_without_either(run_ranks, path, after_a_step, ranks):
    for found in run_ranks(ranks, gone_on, "megatron", path, after_a_step.saved, {}):
        assert largest_difference(found["weights"], after_a_step.weights).error < 1e-6


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (2, {"tensor_parallel": 2})], ids=["alone", "sharded", "tp2"]
)
def test_fsdp_goes_on_alike_from_what_megatron_exported(run_ranks, after_a_step, ranks, options):
    """Both begin with a new optimizer: an export has none."""
    ours = run_ranks(4, gone_on, "megatron", after_a_step.exported, "", SPLIT)
    (scored,) = [one["logprobs"] for one in ours if one["logprobs"] is not None]
    for found in run_ranks(ranks, gone_on, "fsdp", after_a_step.exported, "", options):
        if found["logprobs"] is not None:
            assert (found["logprobs"] - scored).abs().max() < 1e-5
        assert largest_difference(found["weights"], ours[0]["weights"]).error < 1e-4


@pytest.fixture(scope="module")
def expected(path):
    oracle = Oracle(path)
    oracle.train(batch(), 1, TRAINING)
    return oracle.weights()


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {"pipeline_parallel": 2})], ids=["dp2", "pp2 x dp2"])
@pytest.mark.parametrize(("sizes", "budget"), [([8, 8], 4096), ([8, 8], 24), ([1, 15], 24), ([16, 0], 40)], ids=str)
def test_ranks_with_few_tokens_run_as_often_as_others_and_nothing_depends_on_it(
    run_ranks, path, expected, ranks, options, sizes, budget
):
    found = run_ranks(ranks, dealt, path, options, sizes, budget)
    passes = {one["passes"] for one in found}
    assert len(passes) == 1
    assert (passes == {1}) == (budget == 4096)
    for one in found:
        assert largest_difference(one["weights"], expected).error < 1e-4


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {"tensor_parallel": 2}), (2, {"tensor_parallel": 2, "sequence_parallel": False})],
    ids=["alone", "tp2", "tp2 without sequence parallelism"],
)
def test_a_padding_token_that_was_drawn_teaches_its_embedding_no_more_than_in_transformers(run_ranks, ranks, options):
    """Its embedding is zero, where a norm's gradient is a thousand times any other."""
    tied = tiny_model()
    oracle = Oracle(tied)
    oracle.train(with_padding(), 1, TRAINING)
    for weights in run_ranks(ranks, taught_padding, tied, options):
        assert largest_difference(weights, oracle.weights()).error < 1e-4
