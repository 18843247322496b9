"""`enginehouse train`: a reinforcement-learning run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def train(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a model by reinforcement learning, as the YAML file CONFIG says.

    OVERRIDES are dotted.key=value, the value in YAML; they win over the file. Paths in both are relative to the current
    directory. Everything is checked before a process starts; `enginehouse plan` does only that.

    \b
    enginehouse train examples/quickstart/grpo.yaml
    enginehouse train grpo.yaml train.steps=50 rollout.engine.backend=vllm
    enginehouse train grpo.yaml 'rollout.sampling.stop=["</answer>"]' run.overwrite=true
    enginehouse train grpo.yaml --resume

    Ctrl-C, SIGTERM (what schedulers send) and SIGHUP (a closed terminal) end the run in order: a checkpoint is
    written, then the model, and what was saved is said. After Ctrl-C that takes as long as it takes, and a second one
    ends it at once; after the others at most run.grace_seconds. A run that fails saves the same where its actor lives.
    With --resume such a run, or one killed after a checkpoint (train.checkpoint_every, train.checkpoint_minutes),
    goes on as if nothing had happened; train.steps, processes and engines may differ, and what must not differ is
    checked. Exit codes: 0 finished, 1 failed, 2 a mistake in the config, the data or the model; interrupted: 128
    and the number of the signal, so 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """
    from enginehouse_rl.cli.session import run_config

    run_config("train", config, overrides, resume=resume, show=show)
