"""Every hook that enginehouse offers, on one page.

Declaring hooks are called once for each plugin, when it is loaded. Observing hooks are called a few times per step, on
the controller, one after another. An observer that fails is logged and dropped; `strict_plugins` re-raises its error.
No hook runs in a worker, asynchronously, or in the hot path of a step.

`CONTRACT` is the version of the plugin contract: this file and the records. A plugin's module states the oldest version
that has everything that the plugin uses: `enginehouse_protocol = "1.0"`. The plugin is loaded only if the stated major
version equals that of `CONTRACT`, and the stated minor version is not newer.
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

# Declaring. Historic: pluggy calls them during the registration of a plugin, so a failure is attributed to that plugin.


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
    """Declare filters, which choose the groups to train on. Called once, when the plugin is loaded. Since 1.0."""


@hookspec(historic=True)
def enginehouse_register_trackers(register: Callable[[records.Tracker], None]) -> None:
    """Declare trackers, which receive the metrics of a run. Called once, when the plugin is loaded. Since 1.1."""


@hookspec(historic=True)
def enginehouse_register_environments(register: Callable[[records.Environment], None]) -> None:
    """Declare environments. Called once, when the plugin is loaded. Since 1.1."""


@hookspec(historic=True)
def enginehouse_register_stages(register: Callable[[records.Stage], None]) -> None:
    """Declare stages of a step. Called once, when the plugin is loaded. Since 1.1."""


@hookspec
def enginehouse_commands(cli: Any) -> None:
    """Add sub-commands to `cli`, the click group of the command line.

    Called for `--help` and for every command that core does not have. Since 1.0.
    """


# Deciding: the first answer that is not None counts.


@hookspec(firstresult=True)
def enginehouse_pick_transport(
    train: records.TrainBackend,
    rollout: records.RolloutBackend,
    cluster: Placement,
    transports: Sequence[records.Transport],
) -> str | None:
    """Return the name of the weight transport for a run, or None to let other plugins choose. Core answers last.

    `cluster` describes where the two roles run. `transports` are the choices, core's own first. Called once when a run
    is planned, unless the config names a transport. Since 1.0.
    """


@hookspec(firstresult=True)
def enginehouse_run_step(run: Any, step: int) -> Mapping[str, float] | None:
    """Run one step and return its metrics. Core answers last, with `run.run_step(step)`.

    Only this hook accepts `wrapper=True`, for profilers and tracing. Called once per step. Since 1.0.
    """


# Observing, on the controller.


@hookspec
def enginehouse_run_started(run: Any) -> None:
    """Called once, when all workers run and before the first step. Since 1.0."""


@hookspec
def enginehouse_step_finished(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Called after each step, when its metrics are written. Since 1.0."""


@hookspec
def enginehouse_validated(run: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Called after each validation, when its metrics are written.

    `step` is 0 for a validation before the first step. A validation by a separate engine runs beside later steps and
    is reported after them. Since 1.0.
    """


@hookspec
def enginehouse_weights_updated(run: Any, version: int, seconds: float) -> None:
    """Called when every rollout replica is verified to serve `version`. The update took `seconds`. Since 1.0."""


@hookspec
def enginehouse_checkpoint_saved(run: Any, step: int, path: str, what: str) -> None:
    """Called when `path` is complete on disk. `what` is `"model"`, or `"state"` for a checkpoint. Since 1.0."""


@hookspec
def enginehouse_run_finished(run: Any, outcome: str) -> None:
    """Called once at the end of a run. `outcome` is `"finished"`, `"interrupted"` or `"failed"`. Since 1.0."""


@hookspec
def enginehouse_run_recorded(directory: str, outcome: str) -> None:
    """Called once, as the last hook, when all files of the run are written and `run.json` contains `outcome`.

    `outcome` has the values of `enginehouse_run_finished`. Return quickly after `"interrupted"`, because a user waits.
    An error raised here does not change how the run ended. Since 1.1.
    """


@hookspec
def enginehouse_call_dispatched(group: str, method: str, call: int) -> None:
    """Called when a call of a worker group is sent. `call` is the call's number on this controller. Since 1.0."""


@hookspec
def enginehouse_call_collected(group: str, method: str, call: int, seconds: float) -> None:
    """Called when the results of a call have arrived, `seconds` after it was sent. Since 1.0."""
