"""Every loss, advantage and offline reward of core's passes the suite that is there for anybody's."""

import pytest

from enginehouse.plugin import Advantage, Loss, Reward, plugins
from enginehouse_rl.losses.aggregate import AGGREGATIONS
from enginehouse_testing.given import Given
from enginehouse_testing.running import Certifier, cases

POLICY = ("cispo", "clipped_policy", "gspo", "policy_gradient", "sapo")
WEIGHED = {"importance_cap": 1.2, "importance_level": "sequence", "kl_coefficient": 0.1, "max_tokens": 8}
ARGUMENTS = [
    *((loss, {}) for loss in plugins().all(Loss)),
    *(
        (plugins().get(Loss, name), {"aggregation": aggregation, **WEIGHED})
        for name in POLICY
        for aggregation in AGGREGATIONS
    ),
    *((plugins().get(Loss, "supervised"), {"aggregation": aggregation}) for aggregation in AGGREGATIONS[1:3]),
    (plugins().get(Loss, "clipped_policy"), {"entropy_coefficient": 0.1}),
    *((advantage, {}) for advantage in plugins().all(Advantage)),
]

PROGRAM = {"tests": ["assert f(1) == 2"], "response": "```python\ndef f(x):\n    return x + 1\n```", "reward": 1.0}
REWARDS = {
    "code": Given(arguments={"asserts_column": "tests"}, examples=[PROGRAM]),
    "exact_match": Given(examples=[{"answer": "4", "response": "4", "reward": 1.0}]),
    "format": Given(arguments={"pattern": ".*4.*"}),
    "length": Given(arguments={"target": 3}),
    "math": Given(examples=[{"answer": "4", "response": "\\boxed{\\frac{8}{2}}", "reward": 1.0}]),
    "numeric": Given(examples=[{"answer": "4", "response": "so 4.0", "reward": 1.0}]),
}


@pytest.mark.parametrize(
    ("record", "arguments"), ARGUMENTS, ids=[f"{record.name}-{list(of.values())}" for record, of in ARGUMENTS]
)
def test_it_passes(record, arguments):
    passes(record, Given(arguments=arguments))


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_passes(name):
    passes(plugins().get(Reward, name), REWARDS[name])


def test_all_rewards_that_need_no_server_are_here():
    assert {reward.name for reward in plugins().all(Reward)} == {*REWARDS, "served"}


def passes(record, given):
    with Certifier(record, given=given) as certifier:
        results = [certifier.run(case) for case in cases(record)]
    said = {one.name: one.detail for one in results if one.outcome == "failed"}
    assert not said
    assert {one.outcome for one in results if one.name != "gpu"} == {"passed"}
