"""PPO of the quickstart as a hand-written loop: `bare_grpo` with a critic. It is the floor for the other sides.

python -m benchmarks.bare_ppo --task examples/quickstart/work --model .../work/model --save out
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchmarks.bare_grpo import MAX_TOKENS, PROMPTS, SAMPLES, Task, batches, load, optimizer, sample, score, validate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAM = 0.95


def load_critic(directory: Path) -> PreTrainedModel:
    """Load the model in a directory, with a value head of zeros in place of its own head."""
    from transformers import AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(critic.score.weight)
    return critic


def values_of(critic: PreTrainedModel, inputs: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return the values `(rows, tokens)` of the states from which the tokens after the prompt are sampled."""
    hidden = getattr(critic, critic.base_model_prefix)(inputs).last_hidden_state[:, prompt_length - 1 :]
    return critic.score(hidden)[..., 0]


def credits(reward: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GAE without a discount, with rewards at the last counted token.

    Args:
        reward: reward of each row, `(rows,)`.
        values: value of each state, `(rows, tokens)`.
        mask: True at the counted tokens, the first ones of each row.

    Returns:
        Advantages, normalised over all counted tokens, and the critic's targets; both are 0 where nothing counts.
    """
    values = values * mask
    following = F.pad(values[:, 1:], (0, 1))
    errors = following - values + F.one_hot(mask.sum(1).long() - 1, mask.shape[1]) * reward[:, None]
    sums = torch.zeros_like(errors)
    carried = torch.zeros_like(reward)
    for position in reversed(range(mask.shape[1])):
        carried = (errors[:, position] + LAM * carried) * mask[:, position]
        sums[:, position] = carried
    counted = sums[mask.bool()]
    return (sums - counted.mean()) / (counted.std() + 1e-8) * mask, sums + values


def train(model: PreTrainedModel, critic: PreTrainedModel, task: Task, seed: int, steps: int) -> list[float]:
    """Train by PPO, one step of actor and critic per batch, and return the seconds of each step.

    The ratio to the rollout's own logprobs is clipped; there is no KL term.
    """
    torch.manual_seed(seed)
    trained = [
        (model, *optimizer(model, lr=1.5e-3, betas=(0.9, 0.99), warmup=5, total=steps)),
        (critic, *optimizer(critic, lr=3e-3, betas=(0.9, 0.999), warmup=5, total=steps)),
    ]
    eos, prompt_length = model.config.eos_token_id, task.train.shape[1]
    prompt_batches = batches(task.train, PROMPTS, torch.Generator().manual_seed(seed))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        prompts = next(prompt_batches)
        responses, old_logprobs = sample(model, prompts, SAMPLES, new_tokens=MAX_TOKENS)
        prompts = prompts.repeat_interleave(SAMPLES, dim=0)
        reward, mask = score(task, prompts, responses, eos)
        inputs = torch.cat([prompts, responses[:, :-1]], dim=1)
        with torch.no_grad():
            old_values = values_of(critic, inputs, prompt_length)
        advantages, returns = credits(reward, old_values, mask)

        logits = model(inputs).logits[:, prompt_length - 1 :]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), responses.flatten(), reduction="none").view_as(responses)
        ratio = (logprobs - old_logprobs).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-(objective * mask).sum() / mask.sum()).backward()
        values = values_of(critic, inputs, prompt_length)
        clipped = values.clamp(old_values - 0.5, old_values + 0.5)
        errors = torch.maximum((values - returns).square(), (clipped - returns).square()) / 2
        ((errors * mask).sum() / mask.sum()).backward()
        for each, adamw, schedule in trained:
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            adamw.step()
            schedule.step()
            adamw.zero_grad()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO of the quickstart as a hand-written loop.")
    parser.add_argument("--task", type=Path, required=True, help="directory made by make_task.py")
    parser.add_argument("--model", type=Path, required=True, help="model to start from, the critic's too")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path, required=True, help="directory for the model and step_seconds.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model)
    critic, task = load_critic(arguments.model), Task.load(arguments.task, tokenizer)
    seconds = train(model, critic, task, arguments.seed, arguments.steps)
    print(f"sampled reward after: {validate(model, task):.3f}; {statistics.median(seconds) * 1000:.1f} ms a step")
    model.save_pretrained(arguments.save)
    tokenizer.save_pretrained(arguments.save)
    (arguments.save / "step_seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
