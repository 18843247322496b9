"""PPO with critic, reference and a reward model that was trained here, on two pools, learns the quickstart's task, and
goes on after `kill -9` as if nothing had happened."""

import json
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from .conftest import QUICKSTART, Start
from .run_process import RunFiles, finished

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

STEPS, PATIENCE = 300, 900.0
LEARNING = "weight_decay: 0.0, max_grad_norm: 1.0, schedule: linear"
FOUR_ROLES = (
    f"train.steps={STEPS}",
    "train.checkpoint_every=25",
    "train.validate_every=0",
    f"actor.engine.options={{lr: 1.0e-3, betas: [0.9, 0.99], warmup_steps: 5, {LEARNING}}}",
    "algorithm.advantage={name: gae, arguments: {lam: 0.95}}",
    "algorithm.kl={coefficient: 0.05, place: reward, estimator: k1}",
    f"critic.engine.options={{lr: 2.0e-3, warmup_steps: 5, {LEARNING}}}",
    "critic.processes=1",
    "critic.loss.arguments.clip=null",
    "reference.shares=critic",
    "reward_model={path: runs/judge/model, shares: critic, weight: 0.5}",
    # What is right is measured and not trained on; a response without an end is nothing the reward model has seen.
    "reward={functions: {form: {function: format, arguments: {pattern: '[0-9]{6}'}, weight: 4.0}, "
    "right: {function: 'reward:sorted_digits', weight: 0.0}}}",
)


DIGITS = "0123456789"


def wrong(digits: str, draw: random.Random) -> str:
    """An answer that is wrong: another order, digits or length, or digits that are not the prompt's. Most are near."""
    right = "".join(sorted(digits))
    kind = draw.random()
    while True:
        out = list(right)
        if kind < 0.12:
            out = sorted(draw.choice(DIGITS) if draw.random() < 0.4 else digit for digit in out)
        elif kind < 0.18:
            out = [draw.choice(DIGITS) for _ in out]
        elif kind < 0.22:
            out = [draw.choice(DIGITS)] * 6
        elif kind < 0.30:
            out = out[: draw.randrange(1, 6)] if draw.random() < 0.5 else [*out, draw.choice(DIGITS)]
        elif kind < 0.4:
            for place in range(6):
                if draw.random() < 0.44:
                    out[place] = draw.choice(DIGITS)
        elif kind < 0.6:
            out[draw.randrange(6)] = draw.choice(DIGITS)
        elif kind < 0.8:
            place = draw.randrange(5)
            out[place], out[place + 1] = out[place + 1], out[place]
        else:
            out = list(digits)
            for _ in range(draw.randrange(3)):
                place = draw.randrange(5)
                out[place : place + 2] = sorted(out[place : place + 2])
        if "".join(out) != right:
            return "".join(out)
        kind = draw.random()


def pairs(taken: set[str], draw: random.Random) -> Iterator[str]:
    while True:
        digits = "".join(draw.choice(DIGITS) for _ in range(6))
        if f"s{digits}=" not in taken and len(set(digits)) > 1:
            row = {"prompt": f"s{digits}=", "chosen": "".join(sorted(digits)), "rejected": wrong(digits, draw)}
            yield json.dumps(row) + "\n"


def test_four_roles_on_two_pools_learn_and_survive_a_kill(start: Start, house: Path, warmed_up: RunFiles):
    task = house / QUICKSTART / "work"
    taken = {
        json.loads(line)["prompt"]
        for file in ("train.jsonl", "validation.jsonl")
        for line in (task / file).read_text().splitlines()
    }
    drawn = pairs(taken, random.Random(7))
    (house / "pairs.jsonl").write_text("".join(islice(drawn, 12_800)))
    (house / "held_out_pairs.jsonl").write_text("".join(islice(drawn, 512)))
    (house / "rm.yaml").write_text(
        f"model: {{path: {warmed_up.directory}/model}}\n"
        "data: {train: pairs.jsonl, validation: held_out_pairs.jsonl, max_tokens: 32}\n"
        f"actor: {{engine: {{options: {{lr: 2.0e-3, warmup_steps: 20, {LEARNING}}}}}}}\n"
        "train: {steps: 400, rows_per_step: 128}\n"
        "cluster: {launcher: inline}\n"
        "run: {directory: runs/judge}\n"
    )
    judge = finished(start("rm", config="rm.yaml", name="judge"), PATIENCE)
    assert judge.metrics[-1]["validation/accuracy"] > 0.95

    straight = finished(start("train", *FOUR_ROLES), PATIENCE)
    assert straight.pid("reward_model") == straight.pid("reference") == straight.pid("critic") != straight.pid("actor")
    right = [line["reward/right"] for line in straight.metrics]
    assert fmean(right[:10]) < 0.05
    assert fmean(right[-10:]) > 0.75, right  # 0.84 to 0.9, by the processor's rounding

    killed = start("train", *FOUR_ROLES, "run.directory=runs/killed", name="killed")
    killed.until(lambda: len(killed.metrics) > 140, "step 140", PATIENCE)
    killed.interrupt(signal.SIGKILL)
    killed.finish(PATIENCE)
    again = finished(start("train", *FOUR_ROLES, "run.directory=runs/killed", "--resume", name="killed"), PATIENCE)
    assert again.record["resumed_after"] % 25 == 0
    for ours, theirs in zip(again.metrics, straight.metrics, strict=True):
        for name in ("reward/mean", "reward/right", "reward/model", "kl", "loss", "critic/loss", "critic/grad_norm"):
            assert ours[name] == theirs[name], (ours["step"], name)
