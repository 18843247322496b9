"""The kinds of records that a new package may contain, and the code that each kind can start from.

This module imports little, because every command line imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PluginKind:
    """A kind of record, or a command, in a package.

    Attributes:
        says: description for `--help` and the README.
        suite: the class of `enginehouse_testing` that tests it, and the attribute that names the record; or empty.
        starts: values of `--from` that this kind accepts, each with the distributions that the starting code needs.
        contract: oldest plugin contract that has the kind.
        examples: True if its tests use the rows of data in `tests/KIND_examples.jsonl`, which the author changes.
    """

    says: str
    suite: tuple[str, str] | tuple[()] = ()
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contract: tuple[int, int] = (1, 0)
    examples: bool = False


KINDS: dict[str, PluginKind] = {
    "train": PluginKind("a training engine", ("TrainEngineSuite", "backend"), {"torch": ("enginehouse-torch",)}),
    "rollout": PluginKind("a rollout engine", ("RolloutEngineSuite", "backend"), {"transformers": ()}),
    "transport": PluginKind("a way for weights to reach a replica", ("WeightTransportSuite", "transport")),
    "loss": PluginKind("a loss", ("LossSuite", "loss")),
    "advantage": PluginKind("an advantage estimator", ("AdvantageSuite", "advantage")),
    "reward": PluginKind("a reward", ("RewardSuite", "reward"), examples=True),
    "environment": PluginKind("an environment", ("EnvironmentSuite", "environment"), contract=(1, 1), examples=True),
    "tracker": PluginKind("a tracker", ("TrackerSuite", "tracker"), contract=(1, 1)),
    "command": PluginKind("a command of `enginehouse`"),
}
"""Kinds by the value of `--kind`, which is also the name of a folder in `templates`."""

STARTS_CONTRACT = (1, 1)
"""The oldest plugin contract that has every name that the starting code imports."""


def certify_line(module: str, kind: str) -> str:
    """Return the command that certifies a package's record; it is run in the package's folder."""
    examples = f" --examples tests/{kind}_examples.jsonl" if KINDS[kind].examples else ""
    return f"enginehouse certify {module} --kind {kind}{examples} --out certificates/{kind}"
