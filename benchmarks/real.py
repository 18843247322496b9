"""GRPO on a real small model: enginehouse, controller and Ray included, against TRL and against a hand-written loop.

The model is SmolLM2-135M-Instruct (`make real-model`; 4 bits, made float32), the task the sums of recipe `real/grpo`: 8
prompts a step, 8 samples each of at most 12 tokens, lr 2e-5, one thread. The sides take turns. Each has the same
prompts, sampling, batch, loss and optimizer; TRL and the loop pass 16 rows at a time, ours cuts a batch as it does by
default. Then the sides run with at most 512 tokens (`mixed`), and generation is compared alone (`real_generation`).

- `cpu_seconds_vs_trl`: CPU seconds of a step after the first, in all processes, including Ray's.
- `wall_vs_trl`, `step_vs_handwritten`: seconds of a step.
- `peak_memory_vs_trl`: resident memory of the process that has the model; `all_memory_vs_trl`: of all processes.
- `update_vs_trl`, `update_vs_handwritten`: seconds of a step without the seconds of its generation.
- `generation_vs_transformers`: CPU seconds of transformers divided by ours, for 12 tokens; `..._mixed`: up to 512.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, checkout, environment, versions
from benchmarks.machine import busy_cores
from benchmarks.meter import Meter
from benchmarks.runs import execute, read_metrics, rotated, step_seconds

logger = logging.getLogger(__name__)

WORK = ROOT / "benchmarks" / "out" / "real"
RECIPE = Path("plugins/recipes/src/enginehouse_recipes/real/grpo.yaml")
SYSTEM = "Answer with a number."
REWARD, REWARD_FILE = "benchmarks.sums_task:right_sum", "benchmarks/sums_task.py:right_sum"
OURS, TRL, LOOP = "enginehouse", "TRL", "hand-written loop"
RATIOS = {
    "cpu_seconds_vs_trl": ("cpu_seconds", TRL),
    "wall_vs_trl": ("seconds", TRL),
    "peak_memory_vs_trl": ("largest_gib", TRL),
    "all_memory_vs_trl": ("all_gib", TRL),
    "generate_seconds_vs_trl": ("generate_seconds", TRL),
    "update_vs_trl": ("update_seconds", TRL),
    "step_vs_handwritten": ("seconds", LOOP),
    "update_vs_handwritten": ("update_seconds", LOOP),
    "cpu_seconds_vs_handwritten": ("cpu_seconds", LOOP),
}
"""Figures that are ratios: a column of our row, divided by that column of another program's row."""


@dataclass
class Side:
    """A program on the task.

    Attributes:
        command: the command line, from an output directory and a seed.
        marks: file in that directory to which it writes a line as each step ends.
        read: function that reads the seconds of each step after the first, and of its generation, from that directory.
        rounds: a row of figures for each round.
    """

    command: Callable[[Path, int], Sequence[object]]
    marks: str
    read: Callable[[Path], tuple[Sequence[float], Sequence[float]]]
    rounds: list[dict[str, float]] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return the median of each figure over the rounds, and the largest number of busy cores."""
        columns = {name: [each[name] for each in self.rounds] for name in self.rounds[0]}
        busy = max(columns.pop("cores_busy_before"))
        return {name: statistics.median(values) for name, values in columns.items()} | {
            "slowest_round": max(columns["seconds"]),
            "rounds": len(self.rounds),
            "cores_busy_before": busy,
        }


def measure(
    rounds: int = 3,
    steps: int = 5,
    mixed_steps: int = 2,
    generation_rounds: int = 5,
    seed: int = 0,
    prompts: int = 8,
    model: str = "",
    layers: int = 0,
    trl: bool = True,
    own_environment: bool = True,
) -> dict[str, Any]:
    """Run every side `rounds` times in turn, then once with long responses, then generation alone.

    Args:
        rounds: runs of each side; round `i` uses seed `seed + i`.
        steps: optimizer steps of a run; the first is not timed.
        mixed_steps: optimizer steps of a run with responses of up to 512 tokens; 0: no such run.
        generation_rounds: turns of generation alone; 0: none.
        seed: seed of the samples.
        prompts: prompts of a step of the short runs; runs with long responses have an eighth of this number.
        model: directory of a chat model; empty: the real model.
        layers: number of first layers to keep, for a rehearsal; 0: all.
        trl: True to run TRL too.
        own_environment: True to make a Python environment for enginehouse; otherwise the running one is used.

    Raises:
        ValueError: there are too few steps.
        RuntimeError: a side failed (the message has the last lines that it printed), or there is no such model.
    """
    if steps < 2 or mixed_steps == 1:
        raise ValueError(f"steps={steps} mixed_steps={mixed_steps}: at least 2, as the first is not timed")
    ours = checkout() if own_environment else Path(sys.executable)
    peer = environment("trl", ["torch"], ["trl==1.16.*"]) if trl else None
    shutil.rmtree(WORK, ignore_errors=True)
    start = prepare(find_model(model), layers, WORK)
    short = run_sides(build_sides(ours, peer, start, steps, prompts, 12, WORK), WORK / "short", rounds, seed)
    result: dict[str, Any] = {"metrics": ratios(short), "sides": short}
    if mixed_steps:
        sides = build_sides(ours, peer, start, mixed_steps, max(1, prompts // 8), 512, WORK)
        mixed = run_sides(sides, WORK / "mixed", 1, seed)
        result["metrics"] |= {f"mixed/{name}": value for name, value in ratios(mixed).items()}
        result["sides"] |= {f"{name}, up to 512 tokens": row for name, row in mixed.items()}
    if generation_rounds:
        from benchmarks.real_generation import compare_generation

        result["metrics"] |= compare_generation(start, WORK / "train.jsonl", generation_rounds)
    result["versions"] = {"enginehouse": versions(ours, "torch", "transformers", "ray")}
    if peer is not None:
        result["versions"]["trl"] = versions(peer, "torch", "transformers", "trl", "accelerate")
    return result


def find_model(path: str) -> Path:
    """Return the directory of the model.

    Raises:
        RuntimeError: there is no such model.
    """
    from enginehouse_recipes.real_model import real_model

    directory = Path(path) if path else real_model()
    if not (directory / "config.json").is_file():
        raise RuntimeError(f"there is no model in {directory}: run `make real-model` first")
    return directory


def prepare(model: Path, layers: int, work: Path) -> Path:
    """Write the prompts to `work`, and the model's first layers unless `layers` is 0; return the model's directory."""
    from enginehouse_recipes.sums import make_sums

    make_sums(work / "sums")
    with (work / "train.jsonl").open("w") as file:
        for line in (work / "sums" / "train.jsonl").open():
            row = json.loads(line)
            row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
            file.write(json.dumps(row) + "\n")
    if not layers:
        return model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = layers
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(work / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(work / "model")
    return work / "model"


def build_sides(
    ours: Path, trl: Path | None, model: Path, steps: int, prompts: int, tokens: int, work: Path
) -> dict[str, Side]:
    """Return the sides by name, in the order of the first round. If `trl` is None, TRL has no side.

    `work` holds the prompts.
    """
    data = work / "train.jsonl"

    def enginehouse(directory: Path, seed: int) -> Sequence[object]:
        return [
            ours.parent / "enginehouse", "train", RECIPE, f"model.path={model}", f"data.train={data}",
            "data.validation=null", "data.system=null", f"train.steps={steps}", "train.validate_every=0",
            "train.samples_every=0", f"train.prompts_per_step={prompts}", f"train.seed={seed}",
            f"reward.function={REWARD}", f"rollout.sampling.max_tokens={tokens}", "rollout.sampling.stop=[]",
            "cluster.threads_per_process=1", f"run.directory={directory}",
        ]  # fmt: skip

    def script(*words: object) -> Side:
        def command(directory: Path, seed: int) -> Sequence[object]:
            sizes = ["--steps", steps, "--prompts", prompts, "--new-tokens", tokens]
            return [*words, "--data", data, "--model", model, *sizes, "--seed", seed, "--save", directory]

        return Side(command, "steps.jsonl", read_lines)

    sides = {OURS: Side(enginehouse, "metrics.jsonl", read_ours)}
    if trl is not None:
        sides[TRL] = script(trl, "benchmarks/trl_real.py", "--reward", REWARD_FILE)
    return sides | {LOOP: script(ours, "-m", "benchmarks.bare_real")}


def read_ours(run: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Read a run directory of `enginehouse train`."""
    lines = read_metrics(run)
    return step_seconds(lines), [line["busy/generate"] for line in lines[1:]]


def read_lines(directory: Path) -> tuple[Sequence[float], Sequence[float]]:
    """Read the lines that the scripts write."""
    lines = [json.loads(line) for line in (directory / "steps.jsonl").open()][1:]
    return [line["seconds"] for line in lines], [line["generate"] for line in lines]


def run_sides(sides: Mapping[str, Side], work: Path, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Run every side once a round, with `seed` plus the round's number; return a row of figures of each."""
    work.mkdir(parents=True)
    for number in range(rounds):
        for name, side in rotated(sides, number):
            directory, busy = work / f"{name.replace(' ', '_')}-{number}", busy_cores()
            logger.info("round %d of %d, %s: %s", number + 1, rounds, work.name, name)
            meter = Meter(directory / side.marks)
            variables = {"RAY_worker_niceness": "0"}  # Ray's workers at the other sides' priority
            execute(side.command(directory, seed + number), directory.with_suffix(".log"), 1, variables, meter)
            seconds, generate = side.read(directory)
            side.rounds.append(figures(seconds, generate, meter) | {"cores_busy_before": busy})
    return {name: side.row() for name, side in sides.items()}


def figures(seconds: Sequence[float], generate: Sequence[float], meter: Meter) -> dict[str, float]:
    """Return the figures of one run, from the seconds of its steps after the first, and of their generation."""
    return {
        "seconds": statistics.median(seconds),
        "generate_seconds": statistics.median(generate),
        "update_seconds": statistics.median(whole - part for whole, part in zip(seconds, generate, strict=True)),
        "cpu_seconds": meter.cpu_seconds_a_step(),
        "largest_gib": meter.largest_bytes / 2**30,
        "all_gib": meter.all_bytes / 2**30,
    }


def ratios(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures to keep: our figures divided by those of each program that ran, and our figures.

    If the meter could not tell steps apart, as in a rehearsal, CPU seconds are 0, and their ratio is left out.
    """
    ours = rows[OURS]
    metrics = {
        name: ours[column] / rows[program][column]
        for name, (column, program) in RATIOS.items()
        if program in rows and rows[program][column]
    }
    return metrics | {"step_seconds": ours["seconds"], "step_cpu_seconds": ours["cpu_seconds"]}
