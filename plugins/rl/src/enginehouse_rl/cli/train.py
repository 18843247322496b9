"""`enginehouse train`: a reinforcement-learning run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def train(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a model by reinforcement learning, configured by the YAML file CONFIG.

    OVERRIDES are key.of.config=value, with the value in YAML; they win over the file. Paths in the file and in
    OVERRIDES are relative to the current directory.

    \b
    enginehouse train grpo.yaml train.steps=50 rollout.engine.backend=vllm
    enginehouse train grpo.yaml --resume

    Ctrl-C, SIGTERM and SIGHUP stop the run cleanly: it saves a checkpoint and the model, and prints their paths.

    Exit codes: 0 finished, 1 failed, 2 a mistake in the config, the data or the model, 128 plus the signal if
    interrupted. Stopping: docs/operators.md; resuming: docs/resuming.md.
    """
    from enginehouse_rl.cli.session import run_config

    run_config("train", config, overrides, resume=resume, show=show)
