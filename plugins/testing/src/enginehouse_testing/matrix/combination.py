"""Combines all registered backends and transports, and asks `plan` which combinations are possible.

No table says what is possible. Each combination is put into a config and planned. If `plan` rejects a combination, its
row has the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.errors import UserError, nearest
from enginehouse.plugin import Backend, Layout, Transport
from enginehouse.plugin.capabilities import SAME_PROCESS
from enginehouse.plugin.lookup import label
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import Config
from enginehouse_rl.plan.plan import Plan, plan
from enginehouse_testing.matrix.task import MOST_TOKENS, learning_rate
from enginehouse_testing.model_under_test import folder_of

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager

KINDS = ("train", "rollout", "transport")
"""Kinds of records; a combination has one record of each."""


@dataclass(frozen=True, slots=True)
class Combination:
    """A training backend, a rollout backend and a weight transport, by name.

    Attributes:
        model: label of the model in the run; empty: the tiny model in float32.
    """

    train: str
    rollout: str
    transport: str
    model: str = ""

    def __str__(self) -> str:
        return f"{self.train} x {self.rollout} by {self.transport}{self.model and f', {self.model}'}"

    @property
    def folder(self) -> str:
        """Name of the combination's files."""
        return "-".join(filter(None, (self.train, self.rollout, self.transport, folder_of(self.model))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Length of the runs, and their number of processes.

    Attributes:
        steps: number of steps of each run.
        processes: maximum number of training processes; the rollout gets as many replicas.
    """

    steps: int
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A combination that `plan` allows.

    Attributes:
        train: the training backend's layout, which the conformance suite checks.
        rollout: the rollout backend's layout.
        overrides: changes to the shared config for this run.
    """

    plan: Plan
    train: Layout
    rollout: Layout
    overrides: tuple[str, ...]


def names(plugins: PluginManager, kind: str, asked: Sequence[str]) -> list[str]:
    """Return the chosen names of a kind, or all its registered names, usable or not, with core's own names first.

    Raises:
        UserError: no record has a chosen name.
    """
    registered = list(dict.fromkeys(record.name for record in plugins.all(kind)))
    for name in asked:
        if name not in registered:
            raise UserError(f"--{kind}: unknown {label(kind)} {name!r}. {nearest(name, registered)}")
    return [name for name in registered if name in asked] if asked else registered


def combinations(plugins: PluginManager, asked: Mapping[str, Sequence[str]], model: str = "") -> list[Combination]:
    """Return all combinations of the chosen names with a model. If no names of a kind are chosen, all names of that
    kind are combined."""
    parts = product(*(names(plugins, kind, asked.get(kind, ())) for kind in KINDS))
    return [Combination(train, rollout, transport, model) for train, rollout, transport in parts]


def parts_of_plugin(plugins: PluginManager, name: str) -> list[tuple[str, str]]:
    """Return the backends and transports of a plugin, as `(kind, name)`.

    Args:
        plugins: all installed plugins.
        name: name of the plugin, or of its distribution.

    Raises:
        UserError: there is no such plugin, or it declares no backend and no transport.
    """
    named = [plugin for plugin in plugins.plugins if not plugin.internal and plugin.answers_to(name)]
    if not named:
        names = {plugin.name for plugin in plugins.plugins if not plugin.internal}
        raise UserError(f"--plugin: unknown plugin {name!r}. {nearest(name, names)}")
    parts = [(record.kind, record.name) for plugin in named for record in plugin.records if record.kind in KINDS]
    if not parts:
        problem = "; ".join(plugin.problem for plugin in named if plugin.problem)
        raise UserError(f"--plugin: {name} declares no backend and no weight transport{problem and f': {problem}'}")
    return parts


def planned(
    plugins: PluginManager, combination: Combination, setting: Setting, config: Path, directory: Path
) -> Planned:
    """Put a combination into the shared `config`, with run directory `directory`, and check it.

    Each backend gets a layout that the conformance suite checks. The training backend gets its first declared layout
    with `setting.processes` processes, or with the next smaller number. The rollout backend gets its first layout for
    one process. Actor and rollout share processes if the transport works only within a process.

    Raises:
        UserError: the combination is not possible; the message has the reason.
    """
    train = _layout(plugins, "train", combination.train, setting.processes)
    rollout = _layout(plugins, "rollout", combination.rollout, 1)
    overrides = (
        f"actor.engine.backend={combination.train}",
        f"actor.engine.options={json.dumps({'lr': learning_rate(combination.model), **train.options})}",
        f"actor.processes={train.processes}",
        f"rollout.engine.backend={combination.rollout}",
        f"rollout.engine.options={json.dumps({'max_model_tokens': MOST_TOKENS, **rollout.options})}",
        f"rollout.replicas={train.processes}",
        f"rollout.placement={_placement(plugins, combination.transport)}",
        f"weights.transport={combination.transport}",
        f"train.steps={setting.steps}",
        f"run.directory={directory}",
    )
    return Planned(
        plan=plan(load_config(config, overrides, Config), plugins, config_path=config),
        train=train,
        rollout=rollout,
        overrides=overrides,
    )


def _layout(plugins: PluginManager, kind: str, name: str, most: int) -> Layout:
    """Return the first declared layout of `most` processes, or of the next smaller number."""
    record = plugins.providers(kind, name)[0].record
    assert isinstance(record, Backend)
    fitting = [layout for layout in record.layouts if layout.processes <= most and not layout.only]
    return max(fitting, key=lambda layout: layout.processes) if fitting else Layout("default")


def _placement(plugins: PluginManager, transport: str) -> str:
    record = plugins.providers("transport", transport)[0].record
    assert isinstance(record, Transport)
    return "colocated" if set(record.capabilities) == {SAME_PROCESS} else "separate"
