"""Lists the sections of a config that name models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse_rl.config.schema import AnyConfig, AuxiliaryModelConfig


def list_model_paths(config: AnyConfig) -> list[str]:
    """Return the paths of the models from which the roles of a config start, as they stand in the config."""
    sections = list_auxiliaries(config).values()
    return list(dict.fromkeys([config.model.path, *(section.path for section in sections if section.path)]))


def list_auxiliaries(config: AnyConfig) -> dict[str, AuxiliaryModelConfig]:
    """Return the sections of the models of all roles except the actor, by the names of the roles."""
    names = ("critic", "reference", "reward_model")
    stage_models = {f"stages.{name}": section for name, section in getattr(config, "stages", {}).items()}
    return {name: getattr(config, name) for name in names if hasattr(config, name)} | stage_models
