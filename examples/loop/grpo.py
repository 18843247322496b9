"""GRPO in a page: a model learns to sort six digits, from a mean reward of 0.02 to above 0.9.

python examples/loop/warm_up.py    # the model to begin with: runs/loop/model
python examples/loop/grpo.py       # other engines: change the two words "torch" in `main`, as to "fsdp" and "vllm"
"""

import sys

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import enginehouse.library as eh

MODEL, PROMPTS, SAMPLES = "runs/loop/model", 32, 8
ADAMW = {"lr": 1.0e-3, "betas": (0.9, 0.99), "warmup_steps": 5, "schedule": "linear"}


def reward(prompt: str, response: str) -> float:
    """Return 1 if the response is the prompt's digits in order, and then ends."""
    return float(response == "".join(sorted(prompt[1:-1])) + "<eos>")


def play(fleet: eh.RolloutFleet, tokenizer: PreTrainedTokenizerFast, step: int) -> tuple[eh.Batch, torch.Tensor]:
    """Draw responses to the prompts of a step, and reward each."""
    prompts = [f"s{(step * PROMPTS + i) * 611_953 % 10**6:06}=" for i in range(PROMPTS)]  # of a million, none twice
    batch = fleet.draw(tokenizer(prompts).input_ids, eh.SamplingParams(max_tokens=7, n=SAMPLES), seed=step)
    responses = [tokenizer.decode(row[mask]) for row, mask in zip(batch["input_ids"], batch["loss_mask"])]
    return batch, torch.tensor([reward(prompts[i // SAMPLES], response) for i, response in enumerate(responses)])


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Compute how much better each response is than the others to its prompt (Shao et al. 2024)."""
    groups = rewards.view(-1, SAMPLES)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def clipped_policy(tokens: eh.TokenView, clip: float = 0.2) -> eh.LossValue:
    """Compute the clipped policy loss of PPO (Schulman et al. 2017), the mean over all tokens of responses."""
    mask, advantage = tokens.columns["loss_mask"], tokens.columns["advantages"]
    ratio = (tokens.outputs["logprobs"] - tokens.columns["rollout_logprobs"]).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return eh.LossValue(losses[mask].sum(), float(mask.sum()))


def main(steps: int = 250) -> None:
    """Train, and print the metrics of each step."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    options = {**ADAMW, "total_steps": steps}
    with eh.start_engines(MODEL, actor=eh.Engine("torch", options), rollout=eh.Engine("torch")) as roles:
        actor, fleet, weights = roles.actor, roles.rollout, roles.sync
        for step in range(1, steps + 1):
            weights.publish(step)  # the fleet now serves the actor's weights as version `step`, verified
            batch, rewards = play(fleet, tokenizer, step)
            batch = batch.with_columns(advantages=advantages(rewards))
            metrics = actor.update(batch, eh.LossSpec("grpo:clipped_policy"))
            print(f"step {step}  reward {rewards.mean():.3f}  loss {metrics['loss'].value:.4f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
