"""The sums of `benchmarks.real` with TRL's `GRPOTrainer`. Runs in TRL's own Python environment.

It stands alone: nothing of enginehouse is imported, and the reward function is loaded from its file.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
from pathlib import Path

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES = 8
MICRO_ROWS = 16


class StepLines(TrainerCallback):
    """Writes a line as each step ends: the step's seconds, the seconds of its generation, and its mean reward."""

    def __init__(self, file: Path, model, scores: list[float]) -> None:
        self._scores = scores
        self._file, self._generated, self._ended = file.open("w"), 0.0, 0.0
        generate = model.generate

        def timed(*arguments, **options):
            begun = time.perf_counter()
            try:
                return generate(*arguments, **options)
            finally:
                self._generated += time.perf_counter() - begun

        model.generate = timed

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._ended = self._ended or time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = time.perf_counter()
        reward = sum(self._scores) / max(1, len(self._scores))
        self._scores.clear()
        line = {"seconds": now - self._ended, "generate": self._generated, "reward": reward}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._ended, self._generated = now, 0.0


def load_reward(name: str, noted: list[float]):
    """Return the reward `FILE:FUNCTION` of `(response, answer)` in TRL's form (lists). It adds scores to `noted`."""
    path, function = name.rsplit(":", 1)
    score = runpy.run_path(path)[function]

    def reward(prompts, completions, answer, **columns) -> list[float]:
        scores = [score(turns[0]["content"], answer=right) for turns, right in zip(completions, answer)]
        noted.extend(scores)
        return scores

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="lines of prompt, as messages, and answer")
    parser.add_argument("--reward", required=True, help="FILE:FUNCTION")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, required=True, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, required=True, help="most tokens of a response")
    parser.add_argument("--save", type=Path, required=True, help="directory for steps.jsonl")
    parser.add_argument("--keep-model", action="store_true", help="write the trained model there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.save.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = SAMPLES * arguments.prompts
    at_once = min(MICRO_ROWS, rows)
    config = GRPOConfig(
        output_dir=str(arguments.save),
        use_cpu=True,
        bf16=False,
        seed=arguments.seed,
        # the same step
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        num_generations=SAMPLES,
        max_completion_length=arguments.new_tokens,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over all tokens of the batch
        scale_rewards="group",
        # the same optimizer
        max_steps=arguments.steps,
        learning_rate=2e-5,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        # nothing that costs time or memory and is not needed here
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
    )
    scores: list[float] = []
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=load_reward(arguments.reward, scores),
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in arguments.data.open()]),
        processing_class=tokenizer,
        callbacks=[StepLines(arguments.save / "steps.jsonl", model, scores)],
    )
    trainer.train()
    if arguments.keep_model:
        trainer.save_model(str(arguments.save / "model"))


if __name__ == "__main__":
    main()
