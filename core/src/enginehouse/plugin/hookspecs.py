"""Every hook enginehouse offers, on one page.

Hooks declare and observe; objects do. Declaring hooks are called once, when plugins are loaded. Observers are called a
few times a step, on the controller, one by one: one that fails is logged and dropped (`strict_plugins` re-raises).
Nothing in a step's hot path, nothing asynchronous and nothing in a worker goes through a hook.

The contract version changes with this file and the records: a plugin runs if its major version is the same and
its minor version not newer than `CONTRACT`. A plugin module says the oldest that has all it uses:
`enginehouse_protocol = "1.0"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from enginehouse.plugin import records
    from enginehouse.plugin.placement import Placement

PROJECT = "enginehouse"
CONTRACT = (1, 1)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# Declaring. Historic: called for each plugin inside its own registration, so a failure has an owner.


@hookspec(historic=True)
def enginehouse_register_backends(register: Callable[[records.Backend], None]) -> None:
    """Declare training and rollout backends. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_transports(register: Callable[[records.Transport], None]) -> None:
    """Declare weight transports. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_dispatch_modes(register: Callable[[records.DispatchMode], None]) -> None:
    """Declare dispatch modes for worker groups. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_advantages(register: Callable[[records.Advantage], None]) -> None:
    """Declare advantage estimators. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_losses(register: Callable[[records.Loss], None]) -> None:
    """Declare losses. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_rewards(register: Callable[[records.Reward], None]) -> None:
    """Declare reward functions. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_filters(register: Callable[[records.Filter], None]) -> None:
    """Declare filters of groups. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_trackers(register: Callable[[records.Tracker], None]) -> None:
    """Declare trackers, what a run's metrics are sent to. Called once, when the plugin is loaded. Since 1.1."""


@hookspec(historic=True)
def enginehouse_register_environments(register: Callable[[records.Environment], None]) -> None:
    """Declare environments. Called once, when the plugin is loaded. Since 1.1."""


@hookspec(historic=True)
def enginehouse_register_stages(register: Callable[[records.Stage], None]) -> None:
    """Declare stages of a step. Called once, when the plugin is loaded. Since 1.1."""


@hookspec
def enginehouse_commands(cli: Any) -> None:
    """Add sub-commands to the command line's click group.

    Called for `--help` and for a command that is not one of core's own. Since 1.0.
    """


# Deciding, once a run.


@hookspec(firstresult=True)
def enginehouse_pick_transport(
    train: records.TrainBackend,
    rollout: records.RolloutBackend,
    cluster: Placement,
    transports: Sequence[records.Transport],
) -> str | None:
    """Name the weight transport of a run, or None to leave it to others; core's own answer comes last.

    `cluster` says where the two roles are; `transports` are all there is to choose from, core's own first. Called
    once, when a run is planned and no transport is named in the config. Since 1.0.
    """


@hookspec(firstresult=True)
def enginehouse_run_step(run: Any, step: int) -> Mapping[str, float] | None:
    """Run one step and return its metrics; core's own answer, `run.run_step(step)`, comes last.

    The one hook open to `wrapper=True`, for profilers and tracing. Called once a step. Since 1.0.
    """


# Observing, on the controller.


@hookspec
def enginehouse_run_started(run: Any) -> None:
    """Called once when all workers are up, before the first step. Since 1.0."""


@hookspec
def enginehouse_step_finished(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Called after each step, once its metrics are written. Since 1.0."""


@hookspec
def enginehouse_validated(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Called after each validation, once its metrics are written; `step` 0 is before the first step. One that an engine
    of its own made beside later steps comes after them. Since 1.0."""


@hookspec
def enginehouse_weights_updated(run: Any, version: int, seconds: float) -> None:
    """Called after every rollout replica was verified to serve `version`. Since 1.0."""


@hookspec
def enginehouse_checkpoint_saved(run: Any, step: int, path: str, what: str) -> None:
    """Called after a model (`what` is `"model"`) or a checkpoint to resume from (`"state"`) is wholly on disk.

    Since 1.0.
    """


@hookspec
def enginehouse_run_finished(run: Any, outcome: str) -> None:
    """Called once at the end; `outcome` is `"finished"`, `"interrupted"` or `"failed"`. Since 1.0."""


@hookspec
def enginehouse_run_recorded(directory: str, outcome: str) -> None:
    """Called once all files of a run are written and `run.json` says how it ended; `outcome` as above.

    Whoever interrupted the run waits for it: be quick then. No error of it changes how the run ended. Since 1.1.
    """


@hookspec
def enginehouse_call_dispatched(group: str, method: str, call: int) -> None:
    """Called when a worker-group call is sent. `call` numbers calls of this controller. Since 1.0."""


@hookspec
def enginehouse_call_collected(group: str, method: str, call: int, seconds: float) -> None:
    """Called when a worker-group call's results are in. Since 1.0."""
