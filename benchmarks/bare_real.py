"""The sums of `benchmarks.real` as a hand-written loop without controller, Ray or engine: the floor for others.

python -m benchmarks.bare_real --data .../train.jsonl --model MODEL --steps 5 --prompts 8 --new-tokens 12 --save DIR
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from benchmarks.bare_grpo import batches, load
from benchmarks.sums_task import right_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 8
MICRO_ROWS = 16


@dataclass(frozen=True)
class Padded:
    """Rows of tokens, padded on the left.

    Attributes:
        ids: `(rows, tokens)` int64.
        mask: 1 where there is a token, `(rows, tokens)` int64.
    """

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)

    def repeat(self, times: int) -> Padded:
        return Padded(self.ids.repeat_interleave(times, 0), self.mask.repeat_interleave(times, 0))

    def extend(self, ids: torch.Tensor, mask: torch.Tensor) -> Padded:
        return Padded(torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1))


def render(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Any]) -> Padded:
    """Return conversations as the tokens that come before a response."""
    texts = [
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns in conversations
    ]
    rows = [torch.tensor(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    length = max(map(len, rows))
    ids = torch.stack([F.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (length - len(row), 0)) for row in rows])
    return Padded(ids, mask)


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Padded, samples: int, new_tokens: int, eos: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample responses at temperature 1 until all have ended. Each prompt is computed once.

    Returns:
        Tokens, their logprobs, and a mask that is 1 up to the first end, included; all `(prompts * samples, tokens)`.
    """
    output = model(
        prompts.ids, attention_mask=prompts.mask, position_ids=prompts.positions, use_cache=True, logits_to_keep=1
    )
    cache, logits = output.past_key_values, output.logits[:, -1].repeat_interleave(samples, 0)
    cache.batch_repeat_interleave(samples)
    seen = prompts.repeat(samples)
    mask, position = seen.mask, seen.positions[:, -1:]
    alive = torch.ones(len(mask), 1, dtype=torch.long)
    tokens, logprobs, masks = [], [], []
    while len(tokens) < new_tokens and alive.any():
        if tokens:
            mask, position = torch.cat([mask, torch.ones_like(alive)], 1), position + 1
            logits = model(
                tokens[-1], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
            ).logits[:, -1]
        scores = logits.log_softmax(-1)
        token = (scores - torch.empty_like(scores).exponential_().log()).argmax(-1, keepdim=True)
        tokens.append(token)
        logprobs.append(scores.gather(1, token))
        masks.append(alive)
        alive = alive * (token != eos)
    return torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.cat(masks, 1)


def accumulate(
    model: PreTrainedModel,
    prompts: Padded,
    responses: torch.Tensor,
    old_logprobs: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
) -> None:
    """Add the gradient of the clipped objective's mean over all tokens, for `MICRO_ROWS` rows at a time."""
    whole, count, total = prompts.extend(responses, mask), responses.shape[1], mask.sum()
    for rows in torch.arange(len(responses)).split(MICRO_ROWS):
        logits = model(
            whole.ids[rows],
            attention_mask=whole.mask[rows],
            position_ids=whole.positions[rows],
            use_cache=False,
            logits_to_keep=count + 1,
        ).logits[:, :-1]
        targets = responses[rows]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        ratio = (logprobs - old_logprobs[rows]).exp()
        objective = torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.28) * advantages[rows])
        (-(objective * mask[rows]).sum() / total).backward()


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    seed: int,
    steps: int,
    prompts: int,
    new_tokens: int,
    file: Path,
) -> None:
    """Take steps of GRPO, and write the seconds of each step when it ends."""
    torch.manual_seed(seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0, fused=True)
    order = batches(torch.arange(len(rows)), prompts, torch.Generator().manual_seed(seed))
    with file.open("w") as lines:
        for _ in range(steps):
            begun = time.perf_counter()
            chosen = [rows[int(row)] for row in next(order)]
            asked = render(tokenizer, [row["prompt"] for row in chosen])
            responses, old_logprobs, mask = sample(model, asked, SAMPLES, new_tokens, tokenizer.eos_token_id)
            generated = time.perf_counter()
            kept = [row[part.bool()] for row, part in zip(responses, mask, strict=True)]
            texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
            answers = [row["answer"] for row in chosen for _ in range(SAMPLES)]
            rewards = torch.tensor([right_sum(text, answer) for text, answer in zip(texts, answers, strict=True)])
            groups = rewards.view(-1, SAMPLES)
            advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
            accumulate(model, asked.repeat(SAMPLES), responses, old_logprobs, mask, advantages.view(-1, 1))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
            ended = time.perf_counter()
            figures = {"seconds": ended - begun, "generate": generated - begun, "reward": rewards.mean().item()}
            lines.write(json.dumps(figures) + "\n")
            lines.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="The sums of the real model as a hand-written loop.")
    parser.add_argument("--data", type=Path, required=True, help="lines of prompt, as messages, and answer")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, required=True, help="prompts of a step")
    parser.add_argument("--new-tokens", type=int, required=True, help="most tokens of a response")
    parser.add_argument("--save", type=Path, required=True, help="directory for steps.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.save.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(arguments.model)
    rows = [json.loads(line) for line in arguments.data.open()]
    sizes = (arguments.seed, arguments.steps, arguments.prompts, arguments.new_tokens)
    train(model, tokenizer, rows, *sizes, arguments.save / "steps.jsonl")


if __name__ == "__main__":
    main()
