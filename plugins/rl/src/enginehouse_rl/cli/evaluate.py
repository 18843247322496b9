"""`enginehouse eval`: a model's answers to held-out prompts, without training it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from enginehouse_rl.cli.output import add_output_options

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@click.command("eval")
@click.argument("config", metavar="CONFIG|MODEL", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option(
    "--model",
    type=click.Path(),
    help="Directory of a model, or of a run, whose newest model it is then; a GGUF file; or a name on the hub. "
    "Default: model.path.",
)
@click.option(
    "--benchmark",
    metavar="NAME,...",
    help="Benchmarks to answer besides, as evaluation.benchmarks: gsm8k,math500,aime,gpqa,mmlu_pro,ifeval. With it a "
    "MODEL may stand in the place of CONFIG, a directory or a name on the hub.",
)
@add_output_options
def evaluate(config: str, overrides: tuple[str, ...], model: str | None, benchmark: str | None, show: Show) -> None:
    """Have a model answer the held-out prompts of CONFIG, one for `enginehouse train`, and measure the answers.

    Prompts are those of data.validation, played by the config's environment and scored by its reward; how they are
    answered, and which figures there are, evaluation.* says: greedily unless it says otherwise. It runs on
    evaluation.engine, or else rollout.engine, in rollout.replicas; nothing is trained, and no trainer is started.
    OVERRIDES are as of `enginehouse train`.

    \b
    enginehouse eval examples/quickstart/grpo.yaml --model runs/quickstart
    enginehouse eval grpo.yaml --model runs/grpo/models/best evaluation.by=data_source
    enginehouse eval grpo.yaml evaluation.samples_per_prompt=8 evaluation.sampling.temperature=1
    enginehouse eval grpo.yaml data.validation=sums.jsonl rollout.engine.backend=vllm
    enginehouse eval Qwen/Qwen3-0.6B --benchmark gsm8k,ifeval rollout.engine.backend=vllm

    What a validation of a run writes is in run.directory, if that is given here; else in a new directory, eval-MODEL,
    beside the config's own: validation.jsonl, samples/, run.json, config.yaml. A model of a run has the figures of
    that run's validation at its step, also where answers are drawn: the seeds are the same.

    Exit codes: 0 finished, 1 failed, 2 a mistake in the config, the data or the model; interrupted: 128 and the number
    of the signal, and no figures.
    """
    from enginehouse_rl.cli.session import run_plan
    from enginehouse_rl.config.load import load_config, make_config
    from enginehouse_rl.config.schema import Config
    from enginehouse_rl.plan.plan import plan_eval

    path: str | None = config
    if benchmark is not None:
        overrides = (*overrides, f"evaluation.benchmarks=[{benchmark}]")
    if benchmark is not None and not config.lower().endswith((".yaml", ".yml")):
        path = None
        # An evaluation trains on nothing, but a config names a file for that.
        loaded = make_config({"model": {"path": config}, "data": {"train": os.devnull}}, overrides, Config)
    else:
        loaded = load_config(config, overrides, Config)
    planned = plan_eval(loaded, config_path=path, overrides=overrides, model=model)
    print_figures = []

    def build(run, progress):
        from enginehouse_rl.evaluation.evaluation import StandaloneEvaluation

        evaluation = StandaloneEvaluation(planned, run, progress)
        print_figures.append(lambda: progress.print("\n" + "\n".join(evaluation.table())))
        return evaluation

    run_plan(planned, build, show=show)
    if show is None:
        print_figures[0]()
