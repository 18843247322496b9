"""The sections of a config that are of models: the actor's, and those beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse_rl.config.schema import AnyConfig, AuxiliaryModelConfig


def model_paths(config: AnyConfig) -> list[str]:
    """Return where the models are that a config's roles begin from, as it has them."""
    return list(dict.fromkeys([config.model.path, *(one.path for one in beside(config).values() if one.path)]))


def beside(config: AnyConfig) -> dict[str, AuxiliaryModelConfig]:
    """The sections of a config that are of models beside the actor's, by the roles' names."""
    names = ("critic", "reference", "reward_model")
    own = {f"stages.{name}": section for name, section in getattr(config, "stages", {}).items()}
    return {name: getattr(config, name) for name in names if hasattr(config, name)} | own
