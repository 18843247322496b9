"""Checks of sleeping parts, for all rollout engines with the capability `sleep`."""

from __future__ import annotations

from collections.abc import Set

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import EnginehouseError

__all__ = ["check_awake", "check_weights_awake", "sleeping"]

PARTS = ("weights", "kv_cache")


def sleeping(tags: tuple[str, ...]) -> frozenset[str]:
    """Return the parts that the tags of `RolloutEngine.sleep` or `wake_up` name.

    Raises:
        EnginehouseError: if a tag is unknown.
    """
    if unknown := sorted(set(tags) - {*PARTS, "*"}):
        raise EnginehouseError(
            f"unknown tag {unknown[0]!r}: each tag of sleep and wake_up must be {', '.join(PARTS)} or '*'"
        )
    return frozenset(PARTS) if "*" in tags else frozenset(tags)


def check_awake(asleep: Set[str], has_no_weights: bool) -> None:
    """Check that an engine can generate.

    Args:
        asleep: the parts that sleep.
        has_no_weights: True if the weights slept and no update has brought any since.

    Raises:
        EnginehouseError: if a part sleeps, or the engine has no weights.
    """
    if asleep:
        named = " and ".join(part for part in PARTS if part in asleep)
        raise EnginehouseError(f"the engine cannot generate while its {named} sleep: call wake_up first")
    if has_no_weights:
        raise EnginehouseError("the engine has had no weights since it slept: send a weight update first")


def check_weights_awake(asleep: Set[str]) -> None:
    """Check that an engine can take a weight update.

    Raises:
        WeightSyncError: if its weights sleep.
    """
    if "weights" in asleep:
        raise WeightSyncError("the engine cannot take a weight update while its weights sleep: call wake_up first")
