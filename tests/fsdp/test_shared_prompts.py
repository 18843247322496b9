"""The `fsdp` engine computes a shared prompt once under the same terms as an engine that holds the model whole."""

from __future__ import annotations

from unittest import mock

import pytest
from fsdp_train_cases import make_sharded
from torch_train_cases import batch_of

from enginehouse_testing.models import tiny_model

ROWS = [[*range(3, 27), last] for last in range(4)]
MASKS = [[False] * 24 + [True]] * 4


@pytest.mark.parametrize(("dtype", "shares"), [("float32", False), ("bfloat16", True)])
def test_rounding_of_the_dtype_it_computes_in_is_no_reason_against_it(dtype, shares):
    with mock.patch("enginehouse_torch.modeling.sharing._probe", return_value=(0.05, 1.0)):  # as on a GPU in bfloat16
        engine = make_sharded(tiny_model(), dtype=dtype, tokens_per_microbatch=200)
    (part,) = engine._token_model.microbatches(batch_of(ROWS, MASKS))
    engine.shutdown()
    assert (part.layout.tokens.size < len(ROWS) * 24) == shares  # a row's last token is no input
