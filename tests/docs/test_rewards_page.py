"""The pages on rewards: their examples, and that of docs/from-verl.md, run, and they name what a reward really gets."""

from pathlib import Path

import pytest
import yaml
from plugin_pages import blocks

from enginehouse.plugin import Reward as RewardRecord
from enginehouse.plugin import load_plugins
from enginehouse_rewards.pool import RewardPool
from enginehouse_rl.config.schema import NamedRewardConfig, RewardConfig
from enginehouse_rl.plan.rewards import RESERVED, RESERVED_BEGINNINGS, REWARD_GETS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("rewards.md", "built-in-rewards.md"))
FROM_VERL = (DOCS / "from-verl.md").read_text(encoding="utf-8")
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "pred": solution_str} if data_source == "dict" else right
"""
ROW = {
    "prompt": "<one?>",
    "messages": [{"role": "user", "content": "one?"}],
    "response": "1",
    "response_tokens": 1,
    "finish_reason": "stop",
    "answer": "1",
    "data_source": "dict",
    "reward_model": {"style": "rule", "ground_truth": "1"},
    "extra_info": {"split": "train"},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("score", (1.0, {})),
        ("graded", (1.1, {"right": 1.0, "tidy": 1.0})),
        ("judged", (0.1, {})),
        ("modelled", (1.0, {})),
        ("adapted", (1.0, {"score": 1.0, "acc": 1.0})),
        ("lettered", (1.0, {})),
    ],
)
def test_the_examples_on_the_page_of_rewards_are_rewards(tmp_path: Path, name: str, expected: tuple[float, object]):
    (tmp_path / "my_verl_rewards.py").write_text(VERL)
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks(PAGE, "python") + blocks(FROM_VERL, "python")))
    pool = RewardPool(f"my_rewards:{name}", python_path=[str(tmp_path)])
    try:
        (score,) = pool.score([ROW])
    finally:
        pool.close()
    assert (score.reward, score.figures) == expected


def test_the_page_of_rewards_names_what_there_is():
    for block in blocks(PAGE, "yaml"):
        RewardConfig(**yaml.safe_load(block)["reward"])
    for name in NamedRewardConfig.model_fields:
        assert name in PAGE
    for record in (one.record for one in load_plugins(enabled=[]).providers(RewardRecord)):
        assert f"| `{record.name}` |" in PAGE
    for name in REWARD_GETS:
        assert f"| `{name}` |" in PAGE
    for name in ("arguments", *sorted(set(RewardConfig.model_fields) - {"function", "functions", "arguments"})):
        assert f"`reward.{name}`" in PAGE
    assert ", ".join(f"`{name}`" for name in RESERVED) in PAGE
    assert " or ".join(f"`{name}`" for name in RESERVED_BEGINNINGS) in PAGE
