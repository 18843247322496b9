"""Sends weights to rollout replicas: the stages and checks of an update, and its transports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse.weights.buckets import in_plan_order, plan_transfer
    from enginehouse.weights.checksums import checksum
    from enginehouse.weights.form import ModelForm
    from enginehouse.weights.names import stored_names, tied_names, unique_state
    from enginehouse.weights.staged_update import StagedUpdate

__all__ = [
    "ModelForm",
    "StagedUpdate",
    "checksum",
    "in_plan_order",
    "plan_transfer",
    "stored_names",
    "tied_names",
    "unique_state",
]

__getattr__ = exports(
    __name__,
    {
        "buckets": ["in_plan_order", "plan_transfer"],
        "checksums": ["checksum"],
        "form": ["ModelForm"],
        "names": ["stored_names", "tied_names", "unique_state"],
        "staged_update": ["StagedUpdate"],
    },
)
