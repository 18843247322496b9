"""This process's random states, by kind of device."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def random_states() -> dict[str, torch.Tensor]:
    """The states of torch's generators: `"cpu"`, and `"cuda"` where there is one; uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators there are states of; the others stay as they are."""
    if (state := states.get("cpu")) is not None:
        torch.set_rng_state(state)
    if torch.cuda.is_available() and (state := states.get("cuda")) is not None:
        torch.cuda.set_rng_state(state)
