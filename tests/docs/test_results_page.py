"""The figures of README.md and docs/results.md are those of the kept result."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGES = {"README.md": "| enginehouse, `torch` for both engines |", "docs/results.md": "| enginehouse |"}
RESULT = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text())
ENGINES = json.loads((ROOT / "benchmarks" / "results" / "learning_engines.json").read_text())
PARITY = json.loads((ROOT / "benchmarks" / "results" / "parity_bfloat16.json").read_text())
TRAIN, ROLLOUT = ("torch", "fsdp", "megatron"), ("torch", "vllm", "sglang")


def cells(page: str, begins: str) -> list[str]:
    (line,) = (line for line in (ROOT / page).read_text().splitlines() if line.startswith(begins))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def percent(value: float) -> str:
    return f"{value:.0%}"


@pytest.mark.parametrize("side", ["enginehouse", "TRL"])
def test_the_tables_have_the_figures_of_the_kept_result(side):
    row, metrics = RESULT["sides"][side], RESULT["metrics"]
    solved, seconds, memory = percent(row["held_out"]), f"{row['seconds']:.1f}", f"{row['largest_gib']:.1f} GiB"
    seeds = f"{row['least']:.0%} to {row['most']:.0%}".replace("% to", " to")
    begins = PAGES if side == "enginehouse" else dict.fromkeys(PAGES, "| TRL 1.16 |")
    assert cells("README.md", begins["README.md"]) == [f"{solved} ({seeds})", seconds, memory]
    gain = f"{metrics[f'gain_in_standard_errors/{side.lower()}']:.1f}"
    cpu, everything = f"{row['cpu_seconds']:.1f}", f"{row['all_gib']:.1f} GiB"
    assert cells("docs/results.md", begins["docs/results.md"]) == [
        solved,
        seeds,
        gain,
        seconds,
        cpu,
        memory,
        everything,
    ]


def test_the_gain_is_at_least_three_standard_errors_and_what_the_model_solved_before_is_said():
    metrics = RESULT["metrics"]
    assert metrics["gain_in_standard_errors/enginehouse"] > 3.0
    assert f"solved {percent(metrics['held_out_before'])} of 64" in (ROOT / "README.md").read_text()
    assert cells("docs/results.md", "| before training |")[0] == percent(metrics["held_out_before"])


@pytest.mark.parametrize("rollout", ROLLOUT)
def test_what_is_said_of_the_pairs_of_engines_is_in_the_kept_result(rollout):
    sides = [f"{train} x {rollout}" for train in TRAIN]
    held_out = [ENGINES["sides"][side]["held_out"] for side in sides]
    assert cells("docs/results.md", f"| rollout `{rollout}` |") == [percent(value) for value in held_out]
    least, most = (RESULT["sides"]["enginehouse"][which] for which in ("least", "most"))
    assert all(least <= value <= most for value in held_out)
    torch, *others = (ENGINES["curves"][side][0] for side in sides)
    for curve in others:
        differences = {step: (a - b) * 64 for step, (a, b) in enumerate(zip(torch, curve, strict=True), 1) if a != b}
        assert differences == ({9: 1.0} if rollout == "torch" else {})


@pytest.mark.parametrize("rollout", ROLLOUT)
def test_what_bfloat16_changes_is_in_the_kept_result(rollout):
    pairs = [PARITY["pairs"][f"{rollout} {train}"] for train in TRAIN]
    assert cells("docs/results.md", f"| from `{rollout}` |") == [
        f"{pair['mean']:.3f}, {pair['kl']:.4f}" for pair in pairs
    ]
