"""Scoring in blocks of logits changes nothing where parameters are sharded, or the vocabulary is split over ranks."""

import pytest
import torch
from fsdp_train_cases import make_sharded, score_and_train
from score_blocks import in_blocks
from torch_train_cases import make_batch, weights_of

from enginehouse_testing.models import VOCABULARY_SIZE, tiny_model

pytestmark = pytest.mark.slow


def _train(rank, world_size, path, sizes, dtype, options):
    engine = make_sharded(path, rank, world_size, dtype=dtype, **options)
    scores, stepped, _ = score_and_train(engine, make_batch(4, 4).split(sizes)[engine.mesh.dp_rank])
    weights = weights_of(engine)
    engine.shutdown()
    return scores, stepped, weights


@pytest.mark.parametrize(
    ("family", "tied", "sizes", "options"),
    [
        ("qwen3", True, [9, 7], {}),
        ("llama", False, [16], {"tensor_parallel": 2}),  # an odd vocabulary
        ("qwen3", True, [9, 7], {"tensor_parallel": 2, "activation_checkpointing": True}),
        ("qwen3", True, [16], {"context_parallel": 2, "share_prompts": "never"}),
    ],
    ids=str,
)
def test_blocks_score_and_train_like_the_oracle(run_ranks, oracle, family, tied, sizes, options):
    path = tiny_model(family, tied, vocabulary=33 if family == "llama" else VOCABULARY_SIZE)
    scores, stepped, _, weights = oracle(path, "causal_lm")
    ranks = len(sizes) * options.get("tensor_parallel", 1) * options.get("context_parallel", 1)
    results = run_ranks(ranks, in_blocks, _train, path, sizes, "float32", options)
    for name in scores.columns:
        found = torch.cat([part[name].values for part, *_ in results if part is not None])
        torch.testing.assert_close(found, scores[name].values, atol=1e-5, rtol=1e-5)
    for _, found, full in results:
        for ours, theirs in zip(found, stepped, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(full[name], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel": 2}], ids=["sharded", "tp2"])
def test_half_precision_in_blocks_is_as_far_off_as_at_once(run_ranks, oracle, options):
    path = tiny_model("qwen3", True)
    scores, stepped, _, _ = oracle(path, "causal_lm")
    sizes = [16] if options else [8, 8]
    off = []
    for scenario in ([_train], [in_blocks, _train]):
        results = run_ranks(2, *scenario, path, sizes, "bfloat16", options)
        found = torch.cat([part["logprobs"].values for part, *_ in results if part is not None])
        off.append(float((found - scores["logprobs"].values).abs().max()))
        (first, *_) = results[0][1]
        assert first["grad_norm"] == pytest.approx(stepped[0]["grad_norm"], rel=0.05)
    assert off[1] == pytest.approx(off[0], rel=0.1)
