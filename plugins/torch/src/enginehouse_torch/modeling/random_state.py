"""This process's random states, by kind of device."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators, uint8: `"cpu"`, and `"cuda"` if there is a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators that `states` has; all other generators stay as they are."""
    if (state := states.get("cpu")) is not None:
        torch.set_rng_state(state)
    if torch.cuda.is_available() and (state := states.get("cuda")) is not None:
        torch.cuda.set_rng_state(state)
