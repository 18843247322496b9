"""The quickstart's recipe as a hand-written loop without controller, Ray or engine: the floor for the other sides.

It is written for this task only: responses of one length, prompts of one length, one process.

    python -m benchmarks.bare_grpo --task examples/quickstart/work --model .../work/model --warm-up 100 --steps 250
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 8
PROMPTS = 32
MAX_TOKENS = 7


@dataclass(frozen=True)
class Task:
    """A task directory of `examples/quickstart/make_task.py`, as token ids.

    Attributes:
        train: prompts `(rows, prompt length)`, int64.
        validation: held-out prompts, in the same form.
        demonstrations: prompt and noisy answer with end-of-sequence `(rows, prompt length + 7)`, int64.
        answers: maps prompts `(rows, prompt length)` to right answers with end-of-sequence `(rows, 7)`. None: each even
            token of a response counts, and there is no validation (`benchmarks.words_task`).
    """

    train: torch.Tensor
    validation: torch.Tensor
    demonstrations: torch.Tensor
    answers: Callable[[torch.Tensor], torch.Tensor] | None

    @classmethod
    def load(cls, directory: Path, tokenizer: PreTrainedTokenizerBase) -> Task:
        def ids(name: str) -> torch.Tensor:
            rows = [json.loads(line) for line in (directory / f"{name}.jsonl").open()]
            texts = [
                row["prompt"] + (row["response"] + tokenizer.eos_token if "response" in row else "") for row in rows
            ]
            return torch.tensor(tokenizer(texts)["input_ids"])

        def answers(prompts: torch.Tensor) -> torch.Tensor:
            digits = prompts[:, 1:-1].sort(dim=1).values  # the digits' ids are in the digits' order
            return F.pad(digits, (0, 1), value=tokenizer.eos_token_id)

        train = ids("train")
        if not (directory / "validation.jsonl").exists():
            return cls(train, train[:0], train[:0], None)
        return cls(train, ids("validation"), ids("demonstrations"), answers)


def batches(rows: torch.Tensor, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield batches without end, each pass in a new order."""
    while True:
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[chosen] for chosen in order.split(size) if len(chosen) == size)


def optimizer(model: PreTrainedModel, lr: float, betas: tuple[float, float], warmup: int, total: int | None):
    """Return AdamW, and a schedule of linear warm-up, then linear decay to zero over `total` steps (or constant)."""
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=0.0, fused=True)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 1.0 if total is None else max(0.0, (total - step) / max(1, total - warmup))

    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, factor)


def warm_up(model: PreTrainedModel, task: Task, seed: int, steps: int = 100) -> None:
    """Take supervised steps on 128 noisy demonstrations each, so that the model learns the format."""
    adamw, schedule = optimizer(model, lr=3e-3, betas=(0.9, 0.999), warmup=10, total=None)
    prompt_length = task.train.shape[1]
    rows = batches(task.demonstrations, 128, torch.Generator().manual_seed(seed))
    for _ in range(steps):
        batch = next(rows)
        logits = model(batch[:, :-1]).logits[:, prompt_length - 1 :]
        F.cross_entropy(logits.flatten(0, 1), batch[:, prompt_length:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: torch.Tensor, samples: int, greedy: bool = False, new_tokens: int = MAX_TOKENS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `samples` responses of `new_tokens` tokens at temperature 1 for each prompt, which is prefilled once.

    Returns:
        Tokens and their logprobs, `(prompts * samples, new_tokens)`. Mask what follows an end-of-sequence.
    """
    output = model(prompts, use_cache=True, logits_to_keep=1)
    cache, logits = output.past_key_values, output.logits[:, -1]
    cache.batch_repeat_interleave(samples)
    logits = logits.repeat_interleave(samples, dim=0)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for position in range(new_tokens):
        if position:
            logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        scores = logits.log_softmax(dim=-1)
        token = (scores if greedy else scores - torch.empty_like(scores).exponential_().log()).argmax(-1, keepdim=True)
        tokens.append(token)
        logprobs.append(scores.gather(1, token))
    return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)


def score(task: Task, prompts: torch.Tensor, responses: torch.Tensor, eos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return reward `(rows,)` and mask `(rows, tokens)` of responses: 1 up to the first end-of-sequence, included."""
    ended = (responses == eos).long().cumsum(dim=1)
    mask = (ended == 0) | ((ended == 1) & (responses == eos))
    right = (responses % 2 == 0).float() if task.answers is None else (responses == task.answers(prompts)).all(1, True)
    return right.float().mean(1), mask.float()


def validate(model: PreTrainedModel, task: Task, greedy: bool = False, samples: int = 4, seed: int = 0) -> float:
    """Return the mean reward of sampled (or greedy) answers to the held-out prompts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        prompts = task.validation.repeat_interleave(samples, dim=0)
        responses, _ = sample(model, task.validation, samples, greedy)
    return score(task, prompts, responses, model.config.eos_token_id)[0].mean().item()


def train(
    model: PreTrainedModel,
    task: Task,
    seed: int,
    steps: int,
    prompts_per_step: int = PROMPTS,
    new_tokens: int = MAX_TOKENS,
) -> list[float]:
    """Train by GRPO, one optimizer step per batch, and return the seconds of each step.

    The ratio to the rollout's own logprobs is clipped; there is no KL term.
    """
    torch.manual_seed(seed)
    adamw, schedule = optimizer(model, lr=1e-3, betas=(0.9, 0.99), warmup=5, total=steps)
    eos, prompt_length = model.config.eos_token_id, task.train.shape[1]
    prompt_batches = batches(task.train, prompts_per_step, torch.Generator().manual_seed(seed))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        prompts = next(prompt_batches)
        responses, old_logprobs = sample(model, prompts, SAMPLES, new_tokens=new_tokens)
        prompts = prompts.repeat_interleave(SAMPLES, dim=0)
        reward, mask = score(task, prompts, responses, eos)
        groups = reward.view(-1, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)

        logits = model(torch.cat([prompts, responses[:, :-1]], dim=1)).logits[:, prompt_length - 1 :]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), responses.flatten(), reduction="none").view_as(responses)
        ratio = (logprobs - old_logprobs).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-(objective * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        seconds.append(time.perf_counter() - started)
    return seconds


def load(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart's recipe as a hand-written loop.")
    parser.add_argument("--task", type=Path, required=True, help="directory made by make_task.py")
    parser.add_argument("--model", type=Path, required=True, help="model to start from")
    parser.add_argument("--warm-up", type=int, default=0, help="supervised steps before")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, default=MAX_TOKENS, help="tokens of a response")
    parser.add_argument("--save", type=Path, help="directory for the trained model and step_seconds.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model)
    task = Task.load(arguments.task, tokenizer)
    warm_up(model, task, arguments.seed, arguments.warm_up)
    judged = len(task.validation) > 0
    if judged:
        print(f"sampled reward before: {validate(model, task):.3f}")
    seconds = train(model, task, arguments.seed, arguments.steps, arguments.prompts, arguments.new_tokens)
    if judged:
        print(f"after: {validate(model, task):.3f}, greedy {validate(model, task, greedy=True):.3f}")
    print(f"{statistics.median(seconds or [0]) * 1000:.1f} ms a step")
    if arguments.save:
        model.save_pretrained(arguments.save)
        tokenizer.save_pretrained(arguments.save)
        (arguments.save / "step_seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
