"""Every loss and advantage of core's passes the suite that is there for anybody's."""

from __future__ import annotations

import pytest

from enginehouse.plugin import Advantage, Loss, plugins
from enginehouse_testing.given import Given
from enginehouse_testing.running import Certifier, cases

ARGUMENTS = [
    *((loss, {}) for loss in plugins().all(Loss)),
    *(
        (plugins().get(Loss, name), {"importance_cap": 1.2, "importance_level": "sequence", "kl_coefficient": 0.1})
        for name in ("cispo", "clipped_policy", "gspo", "policy_gradient", "sapo")
    ),
    *(
        (plugins().get(Loss, "clipped_policy"), {"aggregation": name, "max_tokens": 8, "entropy_coefficient": 0.1})
        for name in ("sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_scaled")
    ),
    *((advantage, {}) for advantage in plugins().all(Advantage)),
]


@pytest.mark.parametrize(
    ("record", "arguments"), ARGUMENTS, ids=lambda one: getattr(one, "name", None) or "-".join(one)
)
def test_it_passes(record, arguments):
    with Certifier(record, given=Given(arguments=arguments)) as certifier:
        results = [certifier.run(case) for case in cases(record)]
    said = {one.name: one.detail for one in results if one.outcome == "failed"}
    assert not said
    assert {one.outcome for one in results if one.name != "gpu"} == {"passed"}
