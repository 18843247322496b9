"""Measures whether GRPO improves a real small model: enginehouse and TRL on several seeds, each engine pair on one.

The model and the task are those of `benchmarks.real`: SmolLM2-135M-Instruct at 4 bits, made float32, and sums of two
numbers from 1 to 30. Both programs have the same prompts, sampling, batch, loss and optimizer. Each trained model, and
the model before training, answers 64 held-out sums greedily. Transformers generates all these answers.

- `held_out_before`, `held_out_after/...`: fraction of the held-out sums answered right, the mean over the seeds.
- `gain_in_standard_errors/...`: the gain divided by its standard error. All seeds have the same 64 sums. The error
  includes the spread over sums and the spread over seeds.
- `reward_last/...`: mean reward of the last three steps.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import real
from benchmarks.environments import draw, environment, plotting, versions
from benchmarks.meter import Meter
from benchmarks.real import OURS, TRL
from benchmarks.runs import execute, read_metrics
from benchmarks.sums_task import right_sum

logger = logging.getLogger(__name__)

WORK = real.WORK.parent / "learning"
PICTURE = real.ROOT / "docs" / "pictures" / "learning.png"
TOKENS = 12
PAIRS = [(train, rollout) for train in ("torch", "fsdp", "megatron") for rollout in ("torch", "vllm", "sglang")]


def measure(
    seeds: int = 3,
    steps: int = 10,
    prompts: int = 8,
    pairs: Sequence[str] | None = None,
    model: str = "",
    layers: int = 0,
    trl: bool = True,
) -> dict[str, Any]:
    """Train by both programs with each seed, and by each pair of engines with the first; draw the curves.

    Args:
        seeds: runs of each program, with seeds from 0.
        steps: optimizer steps of a run.
        prompts: prompts of a step.
        pairs: pairs of engines, `train x rollout`; None: all but the first, with which enginehouse runs all seeds.
        model: directory of a chat model; empty: the real model.
        layers: number of first layers to keep, for a rehearsal; 0: all.
        trl: True to run TRL too. Otherwise the picture is `learning-engines.png`.

    Raises:
        RuntimeError: a side failed (the message has the last lines that it printed), or there is no such model.
    """
    ours = Path(sys.executable)
    peer = environment("trl", ["torch"], ["trl==1.16.*"]) if trl else None
    shutil.rmtree(WORK, ignore_errors=True)
    start = real.prepare(real.find_model(model), layers, WORK)
    questions = [json.loads(line) for line in (WORK / "sums" / "validation.jsonl").open()]
    before = answer_right(start, questions)
    sides = real.build_sides(ours, peer, start, steps, prompts, TOKENS, WORK)
    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for name in (OURS, TRL)[: 1 + trl]:
            more = ["--keep-model"] if name == TRL else []
            runs.setdefault(name, []).append(_train(sides[name], name, seed, more, questions))
    named = [" x ".join(pair) for pair in PAIRS[1:]] if pairs is None else list(pairs)
    for name in named:
        train, rollout = name.split(" x ")
        engines = [f"actor.engine.backend={train}", f"rollout.engine.backend={rollout}"]
        runs[name] = [_train(sides[OURS], name, 0, engines, questions)]
    result = summarize(runs, before)
    result["versions"] = {"enginehouse": versions(ours, "torch", "transformers", "ray")}
    if peer is not None:
        result["versions"]["trl"] = versions(peer, "torch", "transformers", "trl", "accelerate")
    curves = dict(result["curves"])
    if not trl and seeds == 1:  # the first pair is one of all
        curves = {" x ".join(PAIRS[0]): curves.pop(OURS), **curves}
    picture = PICTURE if trl else PICTURE.with_name("learning-engines.png")
    draw(plotting(), "benchmarks.learning_plot", curves=curves, path=str(picture))
    return result


def _train(
    side: real.Side, name: str, seed: int, more: Sequence[str], questions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Train by one side; return its rewards, the answers of its model, and what a step costs."""
    directory = WORK / f"{name.replace(' ', '_')}-{seed}"
    logger.info("%s, seed %d", name, seed)
    meter = Meter(directory / side.marks)
    execute([*side.command(directory, seed), *more], directory.with_suffix(".log"), 1, None, meter)
    lines = read_metrics(directory) if side.marks == "metrics.jsonl" else _read_lines(directory / side.marks)
    rewards = [line.get("reward/mean", line.get("reward")) for line in lines]
    figures = real.figures(*side.read(directory), meter)
    return {"rewards": rewards, "right": answer_right(directory / "model", questions), **figures}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open()]


def answer_right(model: Path, questions: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each question 1.0 if the model answers it right, else 0.0."""
    import torch

    from benchmarks.bare_grpo import load
    from benchmarks.bare_real import render

    torch.set_num_threads(1)
    loaded, tokenizer = load(model)
    system = {"role": "system", "content": real.SYSTEM}
    asked = render(tokenizer, [[system, *question["prompt"]] for question in questions])
    tokens = loaded.generate(
        asked.ids,
        attention_mask=asked.mask,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    texts = tokenizer.batch_decode(tokens[:, asked.ids.shape[1] :], skip_special_tokens=True)
    return [right_sum(text, question["answer"]) for text, question in zip(texts, questions, strict=True)]


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]], before: Sequence[float]) -> dict[str, Any]:
    """Return the metrics, a row for each side, and the curves.

    Args:
        runs: runs of each side, as `_train` returns them.
        before: for each question, 1.0 if the model answered it right before training, else 0.0.
    """
    metrics: dict[str, float] = {"held_out_before": statistics.mean(before)}
    rows = {}
    for name, of_side in runs.items():
        after = [statistics.mean(run["right"]) for run in of_side]
        key = name.lower().replace(" ", "_")
        metrics[f"held_out_after/{key}"] = statistics.mean(after)
        metrics[f"gain_in_standard_errors/{key}"] = measure_gain(before, [run["right"] for run in of_side])
        metrics[f"reward_last/{key}"] = statistics.mean(statistics.mean(run["rewards"][-3:]) for run in of_side)
        columns = ("seconds", "cpu_seconds", "largest_gib", "all_gib")
        rows[name] = {
            "held_out": statistics.mean(after),
            "least": min(after),
            "most": max(after),
            **{column: statistics.median(run[column] for run in of_side) for column in columns},
            "runs": len(of_side),
        }
    curves = {name: [run["rewards"] for run in of_side] for name, of_side in runs.items()}
    return {"metrics": metrics, "sides": rows, "curves": curves}


def measure_gain(before: Sequence[float], after: Sequence[Sequence[float]]) -> float:
    """Return the mean gain divided by its standard error; 0 without any difference.

    Args:
        before: score of each question before training.
        after: for each seed, the score of each question after training. All seeds have the same questions, so the
            mean of a question over the seeds counts once. The spread between the seeds is added to the variance.

    >>> round(measure_gain([0, 0, 0, 1], [[1, 1, 0, 1], [1, 1, 0, 1]]), 3)
    1.732
    """
    gains = [statistics.mean(scores) - was for was, *scores in zip(before, *after, strict=True)]
    variance = statistics.variance(gains) / len(gains)
    if len(after) > 1:
        variance += statistics.variance([statistics.mean(scores) for scores in after]) / len(after)
    return statistics.mean(gains) / variance**0.5 if variance else 0.0
