"""An engine of this plugin that drops a weight update is found by the suite, though its weights cannot be read back."""

from __future__ import annotations

import dataclasses
import os

import pytest

from enginehouse.plugin import RolloutBackend, plugins
from enginehouse_testing.running import Certifier, cases

RUNTIME = os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["dropping_second", pytest.param("dropping", marks=pytest.mark.exhaustive)])
def test_a_dropped_update_is_found_at_a_learning_rate_of_one_millionth(mutant):
    whole = plugins().get(RolloutBackend, "sglang", elsewhere=True)
    record = dataclasses.replace(whole, engine=f"staged_mutants:sglang_{mutant}")
    (case,) = cases(record, ("single",), ("small_updates",))
    with Certifier(record, RUNTIME) as certifier:
        result = certifier.run(case)
    assert (result.outcome, result.measured) == ("failed", 1.0), result.detail
