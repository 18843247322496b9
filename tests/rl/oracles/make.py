"""Write `cases.json` beside this file: what verl and TRL compute, for `test_oracles.py` to compare ours with.

To be run where both are installed, with whatever their losses import; enginehouse need not be:

    pip install verl trl && python tests/rl/oracles/make.py

All is float64, but for what a function of theirs makes float32 itself. A batch is padded, as theirs are: `(rows,
tokens)` with a `mask` that has holes, as the turns of an environment leave them; `length` is where padding begins.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

MASK = ["11110000", "11011100", "00111000", "10000000", "11111111", "01101000"]
LENGTH = [4, 6, 6, 1, 8, 7]
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
OUR_CLIP = {"clip_low": 0.1, "clip_high": 0.3}
MODES = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_scaled": "seq-mean-token-sum-norm",
}
TRL_TYPES = {
    "token_mean": "bnpo",
    "sequence_mean_token_mean": "grpo",
    "sequence_mean_token_sum_scaled": "dr_grpo",
}

cases: list[dict[str, Any]] = []


def turns() -> dict[str, Tensor]:
    """Rows of several turns, in two groups whose rows are not adjacent."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.tensor([[float(one) for one in row] for row in MASK], dtype=torch.float64)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(1000).round().div(1000)

    old = -drawn(*mask.shape).abs()
    return {
        "mask": mask,
        "length": torch.tensor(LENGTH),
        "group": torch.tensor([0, 1, 0, 1, 1, 0]),
        "reward": drawn(len(mask)),
        "baseline": drawn(len(mask)),
        "rewards": drawn(len(mask), 3),
        "token_rewards": drawn(*mask.shape),
        "values": drawn(*mask.shape),
        "returns": drawn(*mask.shape),
        "new_values": drawn(*mask.shape),
        "advantages": drawn(*mask.shape),
        "row_advantages": drawn(len(mask)),
        "old_logprobs": old,
        "rollout_logprobs": old + 0.3 * drawn(*mask.shape),
        "reference_logprobs": old + 0.5 * drawn(*mask.shape),
        "logprobs": old + 0.3 * drawn(*mask.shape),
        "entropy": drawn(*mask.shape).abs(),
    }


def of_one_token(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of one token, where a mean over tokens is one over rows."""
    rows = len(batch["mask"])
    kept = {name: batch[name] for name in ("group", "reward", "rewards")}
    return {"mask": torch.ones(rows, 1, dtype=torch.float64), "length": torch.ones(rows, dtype=torch.int64), **kept}


def with_a_silent_group(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A group of rewards that are all 0, which is how verl counts the rows of groups without a gradient."""
    return {**batch, "reward": batch["reward"] * (batch["group"] == 1)}


BATCHES = {"turns": turns(), "one_token": of_one_token(turns()), "silent_group": with_a_silent_group(turns())}


def rounded(value: Any) -> Any:
    """Numbers as they are written: to ten decimals."""
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 10) if isinstance(value, float) else value


def add(kind: str, name: str, theirs: str, batch: str = "turns", ours: dict[str, Any] | None = None, **found: Any):
    """Note a case: what of ours, with which arguments, is to give what they found."""
    numbers = {key: rounded(value) for key, value in found.items()}
    cases.append({"kind": kind, "name": name, "theirs": theirs, "batch": batch, "arguments": ours or {}, **numbers})


def verl_advantages() -> None:
    """All estimators of verl that there are here."""

    def outcome(batch: dict[str, Tensor]) -> Tensor:
        rewards = torch.zeros_like(batch["mask"])
        for row, mask in enumerate(batch["mask"]):
            rewards[row, mask.nonzero().max()] = batch["reward"][row]
        return rewards

    b = BATCHES["turns"]
    mask, groups = b["mask"], b["group"].numpy()
    by_token = outcome(b) + b["token_rewards"] * mask
    prefix = "verl.trainer.ppo.core_algos:compute_"

    for gamma, lam in ((1.0, 1.0), (0.9, 0.8)):
        advantages, returns = core_algos.compute_gae_advantage_return(by_token, b["values"], mask, gamma, lam)
        ours = {"gamma": gamma, "lam": lam}
        add("advantage", "gae", prefix + "gae_advantage_return", ours=ours, advantages=advantages, returns=returns)
    for gamma in (1.0, 0.9):
        made, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(by_token, mask, AlgoConfig(gamma=gamma))
        theirs = prefix + "reinforce_plus_plus_outcome_advantage"
        add("advantage", "reinforce_plus_plus", theirs, ours={"gamma": gamma}, advantages=made)
    made, _ = core_algos.compute_remax_outcome_advantage(by_token, b["baseline"], mask)
    add("advantage", "remax", prefix + "remax_outcome_advantage", advantages=made)
    for scale in (True, False):
        made, _ = core_algos.compute_grpo_outcome_advantage(outcome(b), mask, groups, norm_adv_by_std_in_grpo=scale)
        add("advantage", "grpo", prefix + "grpo_outcome_advantage", ours={"scale": scale}, advantages=made)
    for name in ("rloo", "opo", "reinforce_plus_plus_baseline"):
        made, _ = getattr(core_algos, f"compute_{name}_outcome_advantage")(outcome(b), mask, groups)
        add("advantage", name, f"{prefix}{name}_outcome_advantage", advantages=made)
    silent = BATCHES["silent_group"]
    made, _ = core_algos.compute_gpg_outcome_advantage(outcome(silent), mask, groups)
    add("advantage", "gpg", prefix + "gpg_outcome_advantage", "silent_group", advantages=made)

    b = BATCHES["one_token"]
    names, weights = ["first", "second", "third"], [1.0, 0.5, 2.0]
    made, _ = core_algos.compute_gdpo_outcome_advantage(
        b["reward"][:, None],
        b["mask"],
        b["group"].numpy(),
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": weights},
        non_tensor_batch={name: b["rewards"][:, k].numpy() for k, name in enumerate(names)},
        batch={"prompts": torch.zeros(len(groups), 1), "attention_mask": torch.ones(len(groups), 2, dtype=torch.int64)},
    )
    add("advantage", "gdpo", prefix + "gdpo_outcome_advantage", "one_token", {"weights": weights}, advantages=made)


def verl_losses() -> None:
    """All losses of verl that there are here."""
    b = BATCHES["turns"]
    mask = b["mask"]

    def policy(name: str, theirs: str, mode: str, ours: dict[str, Any], weights: Tensor | None = None, **config: Any):
        logprobs = b["logprobs"].clone().requires_grad_()
        actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **config)
        loss = core_algos.get_policy_loss_fn(theirs)(
            b["old_logprobs"], logprobs, b["advantages"], mask, MODES[mode], actor, weights
        )[0]
        (gradient,) = torch.autograd.grad(loss, logprobs)
        label = f"verl.trainer.ppo.core_algos:compute_policy_loss_{theirs}"
        ours = {**ours, "aggregation": mode} | ({"max_tokens": mask.shape[1]} if mode.endswith("scaled") else {})
        add("loss", name, label, ours=ours, loss=loss.item(), gradient=gradient)

    for mode in MODES:
        policy("clipped_policy", "vanilla", mode, OUR_CLIP, **CLIP, clip_ratio_c=1e9)
        policy("policy_gradient", "gpg", mode, {})
        policy("cispo", "cispo", mode, OUR_CLIP, **CLIP)
        policy("gspo", "gspo", mode, OUR_CLIP, **CLIP)
    policy("clipped_policy", "vanilla", "token_mean", {**OUR_CLIP, "dual_clip": 1.2}, **CLIP, clip_ratio_c=1.2)
    ours = {"tau_positive": 0.7, "tau_negative": 1.4}
    policy("sapo", "sapo", "sequence_mean_token_mean", ours, tau_pos=0.7, tau_neg=1.4)

    apart = b["old_logprobs"] - b["rollout_logprobs"]
    for level in ("token", "sequence"):
        for mode, threshold in (("truncate", 1.1), ("mask", "1e-9_1.1")):
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(apart, mask, level, threshold)
            ours = {"importance_cap": 1.1, "importance_level": level, "importance_mode": mode}
            for name, theirs in (("clipped_policy", "vanilla"), ("gspo", "gspo"), ("policy_gradient", "gpg")):
                clip = {} if theirs == "gpg" else {**CLIP, "clip_ratio_c": 1e9}
                policy(name, theirs, "token_mean", (OUR_CLIP if clip else {}) | ours, weights, **clip)

    for clip in (0.2, 0.7):
        values = b["new_values"].clone().requires_grad_()
        loss, fraction = core_algos.compute_value_loss(values, b["returns"], b["values"], mask, clip)
        (gradient,) = torch.autograd.grad(loss, values)
        found = {"loss": loss.item(), "gradient": gradient, "clip_fraction": fraction.item()}
        add("loss", "clipped_value", "verl.trainer.ppo.core_algos:compute_value_loss", ours={"clip": clip}, **found)

    for estimator in ("k1", "k2", "k3"):
        logprobs = b["logprobs"].clone().requires_grad_()
        divergence = core_algos.kl_penalty(logprobs, b["reference_logprobs"], estimator)
        (gradient,) = torch.autograd.grad(divergence.sum(), logprobs)
        label = "verl.trainer.ppo.core_algos:kl_penalty"
        add("kl", estimator, label, divergence=divergence.detach(), gradient=gradient)


def trl_losses() -> None:
    """The losses of TRL's GRPO trainer, by its own method, on a trainer that has nothing else."""
    b = BATCHES["turns"]
    mask = b["mask"]

    def policy(name: str, ours: dict[str, Any], by_row: bool = False, entropy: float = 0.0, **settings: Any):
        logprobs = b["logprobs"].clone().requires_grad_()
        options = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 0.7} | settings
        options = {"sapo_temperature_neg": 1.4, "entropy_target": 0.0, **options}
        weights = options.pop("weights", None)
        trainer = SimpleNamespace(
            args=SimpleNamespace(**options, steps_per_generation=1),
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True
            ),
            current_gradient_accumulation_steps=1,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=options.get("level", "token"),
            beta=options.get("beta", 0.0),
            loss_type=options["loss_type"],
            epsilon_low=options.get("epsilon_low", 0.1),
            epsilon_high=options.get("epsilon_high", 0.3),
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=True,
            max_completion_length=mask.shape[1],
            use_adaptive_entropy=False,
            entropy_coef=entropy,
            _entropy_bonus_enabled=bool(entropy),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, b["entropy"], None),
        )
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": b["row_advantages"] if by_row else b["advantages"],
            "old_per_token_logps": b["old_logprobs"],
            "ref_per_token_logps": b["reference_logprobs"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": weights,
        }
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        label = f"trl.trainer.grpo_trainer:GRPOTrainer._compute_loss ({options['loss_type']})"
        found = {"loss": loss.item(), "gradient": gradient} | ({"by_row": True} if by_row else {})
        add("loss", name, label, ours=ours, **found)

    for mode, kind in TRL_TYPES.items():
        ours = {**OUR_CLIP, "aggregation": mode, "max_tokens": mask.shape[1]}
        policy("clipped_policy", ours, loss_type=kind)
    policy("clipped_policy", OUR_CLIP, loss_type="dapo")
    policy("clipped_policy", {**OUR_CLIP, "dual_clip": 1.5}, loss_type="dapo", delta=1.5)
    policy("clipped_policy", {**OUR_CLIP, "kl_coefficient": 0.3}, loss_type="dapo", beta=0.3)
    ours = {**OUR_CLIP, "kl_coefficient": 0.3, "kl_estimator": "k3_unbiased"}
    policy("clipped_policy", ours, loss_type="dapo", beta=0.3, use_bias_correction_kl=True)
    policy("clipped_policy", {**OUR_CLIP, "entropy_coefficient": 0.2}, loss_type="dapo", entropy=0.2)
    policy("gspo", OUR_CLIP, by_row=True, loss_type="grpo", level="sequence")
    policy("cispo", {"clip_high": 0.2}, loss_type="cispo", epsilon_high=1.2)
    policy("sapo", {"tau_positive": 0.7, "tau_negative": 1.4}, loss_type="sapo")
    weights = (b["old_logprobs"] - b["rollout_logprobs"]).exp().clamp(max=1.1)
    policy("clipped_policy", {**OUR_CLIP, "importance_cap": 1.1}, loss_type="dapo", weights=weights)


def trl_distillation() -> None:
    """TRL's sampled-token distillation, with a weight of 1 for each token: the advantage and `policy_gradient`."""
    b = BATCHES["turns"]
    mask = b["mask"].bool()
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    logprobs = (-b["logprobs"].abs() - 0.01).requires_grad_()  # of the first of two tokens
    logits = torch.stack([logprobs, (-torch.expm1(logprobs)).log()], dim=-1)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    loss = IWOPDTrainer._compute_iw_opd_loss(
        trainer, logits, ids, torch.where(mask, ids, -100), b["reference_logprobs"], b["rollout_logprobs"]
    )
    label = "trl.experimental.iw_opd.iw_opd_trainer:IWOPDTrainer._compute_iw_opd_loss"
    (gradient,) = torch.autograd.grad(loss, logprobs)
    found = {"loss": loss.item(), "gradient": gradient, "logprobs": logprobs.detach()}
    add("advantage and loss", "distillation", label, **found)


if __name__ == "__main__":
    verl_advantages()
    verl_losses()
    trl_losses()
    trl_distillation()
    packages = {name: version(name) for name in ("verl", "trl")}
    batches = {name: {key: rounded(value) for key, value in batch.items()} for name, batch in BATCHES.items()}
    lines = ",\n".join(json.dumps(case) for case in cases)
    shown = f'{{"packages": {json.dumps(packages)},\n"batches": {json.dumps(batches)},\n"cases": [\n{lines}\n]}}\n'
    Path(__file__).with_name("cases.json").write_text(shown, encoding="utf-8")
