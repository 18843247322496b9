"""What this plugin declares, and how it observes a run."""

from enginehouse.plugin import (
    Advantage,
    DispatchMode,
    Filter,
    Layout,
    Loss,
    Reward,
    RolloutBackend,
    TrainBackend,
    Transport,
    hookimpl,
)
from enginehouse.plugin.capabilities import COLOCATES, RESHARD_CHECKPOINT, SAME_PROCESS, SEED, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="elder",
            summary="AdamW over all of the model, data parallel",
            engine="plugin_1_0.training:Engine",
            options="plugin_1_0.options:TrainingOptions",
            capabilities={RESHARD_CHECKPOINT},
            requires=("torch", "transformers"),
            layouts=(Layout("single"), Layout("dp2", 2)),
        )
    )
    register(
        RolloutBackend(
            name="elder",
            summary="Each token by a forward pass over everything before it",
            engine="plugin_1_0.rollout:Engine",
            options="plugin_1_0.options:SamplingOptions",
            capabilities={SEED, WEIGHT_CHECKSUMS, COLOCATES},
            requires=("torch", "transformers"),
        )
    )


@hookimpl
def enginehouse_register_transports(register):
    register(
        Transport(
            name="elder",
            summary="Within a process, by core's own mailbox",
            transport="plugin_1_0.transport:Mailbox",
            capabilities={SAME_PROCESS},
        )
    )


@hookimpl
def enginehouse_register_dispatch_modes(register):
    register(DispatchMode(name="elder_first", summary="Rank 0 alone", dispatch="plugin_1_0.dispatch:to_the_first"))


@hookimpl
def enginehouse_register_advantages(register):
    register(
        Advantage(
            name="elder",
            summary="Reward less the mean of its group",
            function="plugin_1_0.algorithm:centred",
            compares_samples=True,
            needs=("reward", "group"),
        )
    )


@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="elder", summary="REINFORCE", function="plugin_1_0.algorithm:reinforce"))


@hookimpl
def enginehouse_register_rewards(register):
    register(Reward(name="elder", summary="1 for the answer", function="plugin_1_0.algorithm:right"))


@hookimpl
def enginehouse_register_filters(register):
    register(Filter(name="elder", summary="Keeps every group", function="plugin_1_0.algorithm:keep"))


@hookimpl
def enginehouse_commands(cli):
    import click

    @cli.command("elder")
    def elder() -> None:
        """Say that the plugin of contract 1.0 is there."""
        click.echo("contract 1.0")


@hookimpl
def enginehouse_pick_transport(train, rollout, cluster, transports):
    return None


@hookimpl(wrapper=True)
def enginehouse_run_step(run, step):
    metrics = yield
    return {**metrics, "elder/steps": float(step)}


def _note(run, line):
    with (run.run_directory.path / "elder.txt").open("a") as file:
        file.write(line + "\n")


@hookimpl
def enginehouse_run_started(run):
    _note(run, "started")


@hookimpl
def enginehouse_step_finished(run, step, metrics):
    _note(run, f"step {step} {metrics['reward/mean']:.3f}")


@hookimpl
def enginehouse_validated(run, step, metrics):
    _note(run, f"validated {step}")


@hookimpl
def enginehouse_weights_updated(run, version, seconds):
    _note(run, f"version {version}")


@hookimpl
def enginehouse_checkpoint_saved(run, step, path, what):
    _note(run, f"saved {what} {step}")


@hookimpl
def enginehouse_run_finished(run, outcome):
    _note(run, outcome)
