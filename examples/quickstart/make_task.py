"""Make the quickstart's model, tokenizer and data: nothing is downloaded.

    python examples/quickstart/make_task.py --out examples/quickstart/work

writes `model/` (random weights and the tokenizer), `demonstrations.jsonl`, `train.jsonl`, `validation.jsonl` and pairs
for `enginehouse dpo` and `rm`. `enginehouse_recipes.sorting`, whose recipes use the
same task, describes the task and its rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from enginehouse_recipes.sorting import make_task

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the quickstart's model, tokenizer and data.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "work", help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the model's first weights")
    arguments = parser.parse_args()
    make_task(arguments.out, arguments.seed)
