"""The quickstart with TRL's `GRPOTrainer`, as fast as it can be on a CPU. Runs in TRL's Python environment.

It imports nothing of enginehouse, and loads the reward function from the quickstart's file.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
from itertools import pairwise
from pathlib import Path

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Seconds of each step, from the start of one to the start of the next, which leave nothing out."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self.marks)]


def load_reward(name: str, eos: int):
    """Return the reward `FILE:FUNCTION` of `(prompt, response, finish_reason)` in TRL's form: lists in, list out."""
    path, function = name.rsplit(":", 1)
    score = runpy.run_path(path)[function]

    def reward(prompts, completions, completion_ids, **columns) -> list[float]:
        return [
            score(prompt, response, finish_reason="stop" if ids and ids[-1] == eos else "length")
            for prompt, response, ids in zip(prompts, completions, completion_ids)
        ]

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True, help="directory made by make_task.py")
    parser.add_argument("--reward", required=True, help="FILE:FUNCTION")
    parser.add_argument("--model", type=Path, required=True, help="model to start from")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=7, help="tokens of a response")
    parser.add_argument("--save", type=Path, required=True, help="directory for model and step_seconds.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = [json.loads(line) for line in (arguments.task / "train.jsonl").open()]
    config = GRPOConfig(
        output_dir=str(arguments.save),
        use_cpu=True,
        bf16=False,
        seed=arguments.seed,
        # the same step
        per_device_train_batch_size=8 * arguments.prompts,
        num_generations=8,
        max_completion_length=arguments.new_tokens,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        # the same optimizer
        max_steps=arguments.steps,
        learning_rate=1e-3,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        warmup_steps=5,
        lr_scheduler_type="linear",
        # nothing that costs time and is not needed here
        gradient_checkpointing=False,
        pad_to_multiple_of=None,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )
    times = StepTimes()
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=load_reward(arguments.reward, tokenizer.eos_token_id),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    model.save_pretrained(arguments.save)
    tokenizer.save_pretrained(arguments.save)
    (arguments.save / "step_seconds.json").write_text(json.dumps(times.seconds()))


if __name__ == "__main__":
    main()
