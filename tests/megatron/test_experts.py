"""Experts shared out over ranks, beside what the conformance suite's models and layouts show."""

import pytest
import torch
from expert_models import expert_model
from megatron_train_cases import STEPS, held, precise_values, trained
from rank_processes import rank_processes

from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.comparison import largest_difference
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine", "enginehouse_testing.oracle") as run:
        yield run


@pytest.fixture(scope="module")
def path() -> str:
    """A model whose last layer has no experts, unlike the suite's, and whose chosen experts' weights sum to one."""
    return expert_model(experts=4, norm_topk_prob=True, mlp_only_layers=(1,), tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"expert_parallel": 2, "recompute": "full"}),
        (2, {"expert_parallel": 2, "context_parallel": 2}),
        (4, {"expert_parallel": 2, "tensor_parallel": 2}),  # two groups of ranks with the same experts
    ],
    ids=str,
)
def test_shared_out_experts_train_as_transformers_does(run_ranks, tmp_path, path, processes, options):
    oracle = Oracle(path)
    scores = oracle.scores(batch(), masked=False)
    oracle.train(batch(), STEPS, TRAINING)
    ranks = run_ranks(processes, trained, path, str(tmp_path / "saved"), options)
    answers = [rank["logprobs"] for rank in ranks if rank["logprobs"] is not None]
    assert answers
    for logprobs in answers:
        assert (logprobs - scores["logprobs"]).abs().max() < 1e-5
    for rank in ranks:
        assert largest_difference(rank["weights"], oracle.weights()).error < 1e-4
        assert rank["goes on alike"]


@pytest.mark.parametrize(("processes", "options"), [(2, {"expert_parallel": 2}), (2, {"tensor_parallel": 2})], ids=str)
def test_training_in_bfloat16_begins_from_the_files_own_values(run_ranks, path, processes, options):
    for copies, rounded in run_ranks(processes, precise_values, path, options):
        assert copies == 0.0
        assert rounded > 1e-4


def test_a_rank_holds_its_own_experts_and_no_others(run_ranks, path):
    ranks = run_ranks(4, held, path, {"expert_parallel": 2, "tensor_parallel": 2})
    experts = {meta.name: meta for meta in ranks[0]["metadata"] if ".mlp.experts." in meta.name}
    assert len(experts) == 4 * 3
    for name, meta in experts.items():
        number = int(name.split(".experts.")[1].split(".")[0])
        assert meta.owners == ((0, 2) if number < 2 else (1, 3))
        for rank, one in enumerate(ranks):
            assert (name in one["local"]) == (rank in meta.owners)
    for one in ranks:
        assert one["expert numbers"] * 2 == sum(torch.Size(meta.shape).numel() for meta in experts.values())
