"""`enginehouse eval`: evaluates a model on held-out prompts without training it."""

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
    help="Directory of a model, directory of a run (its newest model is taken), GGUF file, or name on the hub. "
    "Default: model.path.",
)
@click.option(
    "--benchmark",
    metavar="NAME,...",
    help="Benchmarks to run in addition (evaluation.benchmarks): gsm8k, math500, aime, gpqa, mmlu_pro, ifeval. With "
    "this option the first argument may be a MODEL instead of a CONFIG.",
)
@add_output_options
def evaluate(config: str, overrides: tuple[str, ...], model: str | None, benchmark: str | None, show: Show) -> None:
    """Evaluate a model on the validation prompts of a training config.

    The environment of the config answers the prompts of data.validation, and the reward scores the responses. The keys
    evaluation.* set how responses are generated. OVERRIDES are as for `enginehouse train`.

    \b
    enginehouse eval grpo.yaml --model runs/grpo evaluation.samples_per_prompt=8
    enginehouse eval Qwen/Qwen3-0.6B --benchmark gsm8k,ifeval rollout.engine.backend=vllm

    Exit codes are as for `enginehouse train`. Metrics and files: docs/evaluating.md.
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
        # An evaluation does not train, but the config must name a training file.
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
