"""The `fsdp` engine computes a shared prompt once under the same terms as an engine that holds the model whole."""

from unittest import mock

import pytest
import torch
from fsdp_train_cases import make_sharded, score_and_train
from packed_attention import stand_ins
from torch_train_cases import batch_of, make_batch, weights_of

from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.attention import AttentionChoices

ROWS = [[*range(3, 27), last] for last in range(4)]
MASKS = [[False] * 24 + [True]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "shares"), [("float32", False), ("bfloat16", True)])
def test_rounding_of_the_dtype_it_computes_in_is_no_reason_against_it(dtype, shares):
    with mock.patch("enginehouse_torch.modeling.sharing._probe", return_value=(0.05, 1.0)):  # as on a GPU in bfloat16
        engine = make_sharded(tiny_model(), dtype=dtype, tokens_per_microbatch=200)
    (part,) = engine._token_model.microbatches(batch_of(ROWS, MASKS))
    engine.shutdown()
    assert (part.layout.tokens.size < len(ROWS) * 24) == shares  # a row's last token is no input


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [AttentionChoices("rows_apart", "blocks"), AttentionChoices("rows_apart")], ids=str)
def test_sharded_ranks_train_on_packed_rows_like_the_oracle(run_ranks, oracle, chosen):
    path = tiny_model()
    scores, stepped, _, weights = oracle(path, "causal_lm")
    results = run_ranks(2, _train, path, [16, 0], chosen)  # a rank without rows runs along on a token
    torch.testing.assert_close(results[0][0]["logprobs"].values, scores["logprobs"].values, atol=1e-5, rtol=1e-5)
    for _, steps, full in results:
        for ours, theirs in zip(steps, stepped, strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(full[name], weight, atol=1e-4, rtol=0)


def _train(rank, world_size, path, sizes, chosen):
    with stand_ins(), mock.patch("enginehouse_torch.modeling.sharing.choose_attention", return_value=chosen):
        shares = "auto" if chosen.trees else "never"
        engine = make_sharded(path, rank, world_size, share_prompts=shares, activation_checkpointing=True)
        batch = make_batch(4, 4).split(sizes)[rank]
        assert all(part.layout.packed is not None for part in engine._token_model.microbatches(batch))
        scores, stepped, _ = score_and_train(engine, batch)
        weights = weights_of(engine)
        engine.shutdown()
    return scores, stepped, weights
