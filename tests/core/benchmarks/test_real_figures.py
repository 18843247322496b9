"""The benchmark of the real model: its loop does the task right, its meter sees what programs take."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import bare_real, real
from benchmarks.bare_grpo import load
from benchmarks.bare_real import Padded, accumulate, render, sample
from benchmarks.meter import Meter
from benchmarks.real import OURS, TRL, ratios
from benchmarks.sums_task import right_sum

from enginehouse_rewards.builtin.numeric import numeric
from enginehouse_testing.models import EOS_ID, tiny_model

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model("llama", max_positions=1024), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def asked(tokenizer) -> Padded:
    return render(tokenizer, [[{"role": "user", "content": text}] for text in ("1 + 2 =", "10 + 20 =", "3 + 14 =")])


def test_sampled_logprobs_are_those_of_a_plain_pass_over_each_row_alone(chat_model: Path):
    model, tokenizer = load(chat_model)
    prompts = asked(tokenizer)
    tokens, logprobs, mask = sample(model, prompts, 4, 6, EOS_ID)
    for row in range(12):
        prompt = prompts.ids[row // 4][prompts.mask[row // 4].bool()]
        drawn = tokens[row][mask[row].bool()]
        with torch.no_grad():
            scores = model(torch.cat([prompt, drawn])[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        torch.testing.assert_close(
            logprobs[row][mask[row].bool()], scores.gather(1, drawn[:, None])[:, 0], atol=1e-4, rtol=0
        )


def test_the_gradient_does_not_depend_on_how_many_rows_pass_at_once(chat_model: Path, monkeypatch: pytest.MonkeyPatch):
    model, tokenizer = load(chat_model)
    prompts = asked(tokenizer)
    tokens, logprobs, mask = sample(model, prompts, 4, 6, EOS_ID)
    gradients = []
    for rows in (12, 5):
        monkeypatch.setattr(bare_real, "MICRO_ROWS", rows)
        model.zero_grad()
        accumulate(model, prompts.repeat(4), tokens, logprobs, mask, torch.linspace(-1, 1, 12)[:, None])
        gradients.append(model.lm_head.weight.grad.clone())
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_its_reward_is_that_of_the_recipe():
    for text in ("11 + 17 = 28, which", "28", "28 or 29", "none", "= 28\n\nSo"):
        assert right_sum(text, "28") == numeric(text, answer="28")["reward"]


CHILD = """
import time
memory = bytearray(200 << 20)
until = time.process_time() + 0.4
while time.process_time() < until:
    memory[::4096] = memory[::4096]
"""
PARENT = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", sys.argv[2]], check=True)
    open(sys.argv[1], "a").write("{}\\n")
input()
"""


def test_a_meter_sees_cpu_seconds_of_each_step_and_the_memory_of_processes_below(tmp_path: Path):
    marks, meter = tmp_path / "marks", Meter(tmp_path / "marks", 0.01, 0.05)
    with subprocess.Popen([sys.executable, "-c", PARENT, marks, CHILD], stdin=subprocess.PIPE) as program:
        while len(meter.cpu_seconds) < 2:
            meter(program.pid)
        program.communicate(b"\n")
    assert 0.3 <= meter.cpu_seconds_a_step() < 1.5
    assert meter.largest_bytes > 200 << 20
    assert meter.all_bytes > 200 << 20


def test_ratios_are_ours_by_theirs_and_only_of_programs_that_ran():
    columns = ("seconds", "generate_seconds", "update_seconds", "cpu_seconds", "largest_gib", "all_gib")
    rows = {OURS: dict.fromkeys(columns, 1.0), TRL: dict.fromkeys(columns, 4.0) | {"largest_gib": 2.0}}
    metrics = ratios(rows)
    assert (metrics["cpu_seconds_vs_trl"], metrics["wall_vs_trl"], metrics["peak_memory_vs_trl"]) == (0.25, 0.25, 0.5)
    assert not any("handwritten" in name for name in metrics)
    rows[TRL]["cpu_seconds"] = 0.0
    assert "cpu_seconds_vs_trl" not in ratios(rows)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match=r"steps=1 .*at least 2"):
        real.measure(steps=1)


@pytest.mark.slow
def test_it_can_be_rehearsed_on_a_tiny_model(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(real, "WORK", tmp_path / "real")
    result = real.measure(
        rounds=1, steps=2, mixed_steps=2, generation_rounds=1, prompts=2, model=str(chat_model), layers=1, trl=False,
        own_environment=False,
    )  # fmt: skip
    assert {"step_vs_handwritten", "mixed/step_vs_handwritten", "generation_vs_transformers_mixed"} <= set(
        result["metrics"]
    )
    assert all(value > 0 for name, value in result["metrics"].items() if "cpu_seconds" not in name)
    json.dumps(result)
