"""The quickstart with TRL's `PPOTrainer`, set up to be as fast as it can be on a CPU. Runs in a separate environment.

TRL 1.12 is the last release that has it. Nothing of enginehouse is imported, and the reward function is loaded from the
quickstart's file. The value head begins with zeros, as ours does. With random weights, as in transformers, the first
advantages are noise, and the reward was 0 after 250 steps.

What differs from our step, and cannot be made the same:

- `PPOTrainer` does not clip gradients (ours: norm 1), and counts a value after the last token of a response that ended
  early.
- It computes a reference's logprobs even if nothing needs them: here they are zeros, from a module that costs nothing.
- It asks a module for rewards: here a module that calls the function once per batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

SAMPLES = 8


class StepTimes(TrainerCallback):
    """Seconds of each step, from the end of one to the end of the next, which leave nothing out."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self.marks)]


class FunctionAsModel(torch.nn.Module):
    """The reward `FILE:FUNCTION` of `(prompt, response, finish_reason)` in the form that `PPOTrainer` needs: a backbone
    whose last hidden states are scored. Every position's score is the row's."""

    base_model_prefix = "backbone"

    def __init__(self, name: str, tokenizer, prompt_tokens: int) -> None:
        super().__init__()
        path, function = name.rsplit(":", 1)
        self.function = runpy.run_path(path)[function]
        self.tokenizer, self.prompt_tokens = tokenizer, prompt_tokens

    def backbone(self, input_ids: torch.Tensor, **given) -> SimpleNamespace:
        prompts, responses = input_ids[:, : self.prompt_tokens], input_ids[:, self.prompt_tokens :]
        ended = (responses == self.tokenizer.eos_token_id).any(1).tolist()
        texts = zip(*(self.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (prompts, responses)))
        rewards = [
            self.function(prompt, response, finish_reason="stop" if stopped else "length")
            for (prompt, response), stopped in zip(texts, ended)
        ]
        return SimpleNamespace(hidden_states=[torch.tensor(rewards)[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class NoReference(torch.nn.Module):
    """A reference model of which nothing is needed, for a KL term of weight 0."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words

    def forward(self, input_ids: torch.Tensor, **given) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.words))


def optimizer(policy, critic, steps: int):
    """Return AdamW and its schedule: linear warm-up of 5 steps, then linear decay to zero."""
    adamw = torch.optim.AdamW(
        [
            {"params": list(policy.parameters()), "lr": 1.5e-3, "betas": (0.9, 0.99)},
            {"params": list(critic.parameters()), "lr": 3e-3, "betas": (0.9, 0.999)},
        ],
        weight_decay=0.0,
        fused=True,
    )

    def factor(step: int) -> float:
        return (step + 1) / 5 if step < 5 else max(0.0, (steps - step) / max(1, steps - 5))

    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True, help="directory made by make_task.py")
    parser.add_argument("--reward", required=True, help="FILE:FUNCTION")
    parser.add_argument("--model", type=Path, required=True, help="model to start from, the critic's too")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=7, help="tokens of a response")
    parser.add_argument("--save", type=Path, required=True, help="directory for model and step_seconds.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(critic.score.weight)
    texts = [json.loads(line)["prompt"] for line in (arguments.task / "train.jsonl").open()]
    prompts = torch.tensor(tokenizer(texts)["input_ids"])
    rows = SAMPLES * arguments.prompts

    def collate(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the prompts of a step, each repeated for its samples. The loader passes one prompt per sample."""
        return {"input_ids": torch.stack(prompts[: arguments.prompts]).repeat_interleave(SAMPLES, dim=0)}

    config = PPOConfig(
        output_dir=str(arguments.save),
        bf16=False,
        seed=arguments.seed,
        # the same step
        total_episodes=rows * arguments.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=arguments.new_tokens,
        stop_token="eos",
        temperature=1.0,
        gamma=1.0,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.5,
        vf_coef=1.0,
        kl_coef=0.0,
        # nothing that costs time and is not needed here
        local_rollout_forward_batch_size=rows,
        num_sample_generations=0,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    times = StepTimes()
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=NoReference(policy.config.vocab_size),
        reward_model=FunctionAsModel(arguments.reward, tokenizer, prompts.shape[1]),
        train_dataset=list(prompts),
        value_model=critic,
        data_collator=collate,
        eval_dataset=[],
        optimizers=optimizer(policy, critic, arguments.steps),
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    gc.collect()
    gc.freeze()  # it collects garbage twice a step, and would look at everything that was ever imported
    trainer.train()
    policy.save_pretrained(arguments.save)
    tokenizer.save_pretrained(arguments.save)
    (arguments.save / "step_seconds.json").write_text(json.dumps(times.seconds()))


if __name__ == "__main__":
    main()
