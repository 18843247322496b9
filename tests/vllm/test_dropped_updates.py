"""An engine of this plugin that drops a weight update is found by the suite, by its logprobs alone."""

import pytest
from dropped_updates import assert_found


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["dropping_second", pytest.param("dropping", marks=pytest.mark.exhaustive)])
def test_a_dropped_update_is_found_at_a_learning_rate_of_one_millionth(mutant):
    assert_found("vllm", mutant)
