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
        examples: whether it is tried with rows of data, which its author changes: `tests/KIND_examples.jsonl`.
    """

    says: str
    suite: tuple[str, str] | tuple[()] = ()
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contract: tuple[int, int] = (1, 0)
    examples: bool = False


KINDS: dict[str, Kind] = {
    "train": Kind("a training engine", ("TrainEngineSuite", "backend"), {"torch": ("enginehouse-torch",)}),
    "rollout": Kind("a rollout engine", ("RolloutEngineSuite", "backend"), {"transformers": ()}),
    "transport": Kind("a way for weights to reach a replica", ("WeightTransportSuite", "transport")),
    "loss": Kind("a loss", ("LossSuite", "loss")),
    "advantage": Kind("an advantage estimator", ("AdvantageSuite", "advantage")),
    "reward": Kind("a reward", ("RewardSuite", "reward"), examples=True),
    "environment": Kind("an environment", ("EnvironmentSuite", "environment"), contract=(1, 1), examples=True),
    "tracker": Kind("a tracker", ("TrackerSuite", "tracker"), contract=(1, 1)),
    "command": Kind("a command of `enginehouse`"),
}
"""By the word of `--kind`; also the names of the folders in `templates`."""


def certify_line(module: str, kind: str) -> str:
    """The command that certifies what a package brings, in the package's folder."""
    examples = f" --examples tests/{kind}_examples.jsonl" if KINDS[kind].examples else ""
    return f"enginehouse certify {module} --kind {kind}{examples} --out certificates/{kind}"
