"""What a new package may bring, and what it may start from. Light: every command line imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of thing that a package brings.

    Attributes:
        says: what it is, for `--help` and the README.
        suite: the class of `enginehouse_testing` that tests it, and the attribute that names it; empty: it has none.
        starts: what a package may start from, by the word of `--from`: the distributions that this takes.
        contract: the oldest plugin contract that has it.
    """

    says: str
    suite: tuple[str, str] | tuple[()] = ()
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contract: tuple[int, int] = (1, 0)


KINDS: dict[str, Kind] = {
    "train": Kind("a training engine", ("TrainEngineSuite", "backend"), {"torch": ("enginehouse-torch",)}),
    "rollout": Kind("a rollout engine", ("RolloutEngineSuite", "backend"), {"transformers": ()}),
    "transport": Kind("a way for weights to reach a replica", ("WeightTransportSuite", "transport")),
    "loss": Kind("a loss", ("LossSuite", "loss")),
    "advantage": Kind("an advantage estimator", ("AdvantageSuite", "advantage")),
    "reward": Kind("a reward", ("RewardSuite", "reward")),
    "environment": Kind("an environment", ("EnvironmentSuite", "environment"), contract=(1, 1)),
    "tracker": Kind("a tracker", ("TrackerSuite", "tracker"), contract=(1, 1)),
    "command": Kind("a command of `enginehouse`"),
}
"""By the word of `--kind`; also the names of the folders in `templates`."""
