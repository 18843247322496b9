"""Every option trains: each advantage, loss, place of the KL term and aggregation, in float32 and in bfloat16.

A few steps on a tiny model, in this process, with a tokenizer of a real kind and its chat template. Rewards vary, every
parameter changes, all figures are finite, and where nothing has moved since the samples were drawn nothing is clipped.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import QWEN, make_tokenizer
from inline_runs import run_inline
from safetensors.torch import load_file

from enginehouse.engines.environment import Scored
from enginehouse.engines.transcript import Transcript

STEPS = 2
QUESTIONS = ["What is 3 + 4?", "Say the alphabet.", "Is a whale a fish?", "Wie heißt du?"]
VARIANTS = [  # advantage, loss, KL term, aggregation, dtype
    ("grpo", "clipped_policy", None, "token_mean", "bfloat16"),
    ("grpo", "gspo", None, "sequence_mean_token_mean", "bfloat16"),
    ("grpo", "gspo", ("loss", "k3"), "token_mean", "float32"),
    ("grpo", "clipped_policy", ("loss", "k3"), "sequence_mean_token_sum", "bfloat16"),
    ("grpo", "gspo", ("reward", None), "sequence_mean_token_mean", "bfloat16"),
    ("grpo", "clipped_policy", ("loss", "k3_unbiased"), "token_mean", "float32"),
    ("rloo", "policy_gradient", ("reward", "k1"), "sequence_mean_token_sum", "bfloat16"),
    ("rloo", "sapo", ("loss", "k2"), "sequence_mean_token_mean", "float32"),
    ("gae", "clipped_policy", ("reward", "k1"), "token_mean", "bfloat16"),
    ("gpg", "policy_gradient", None, "sequence_mean_token_sum_scaled", "bfloat16"),
    ("opo", "cispo", ("loss", "k3"), "sequence_mean_token_mean", "bfloat16"),
    ("process_rewards", "clipped_policy", ("reward", None), "sequence_mean_token_sum_scaled", "float32"),
    ("reinforce_plus_plus", "clipped_policy", ("reward", "k1"), "sequence_mean_token_sum", "bfloat16"),
    ("reinforce_plus_plus_baseline", "sapo", ("loss", "k2"), "token_mean", "bfloat16"),
    ("remax", "cispo", ("reward", "k1"), "token_mean", "float32"),
    ("gdpo", "gspo", None, "sequence_mean_token_mean", "bfloat16"),
    ("distillation", "policy_gradient", None, "token_mean", "bfloat16"),
]
BY_TOKEN = ("gae", "process_rewards", "reinforce_plus_plus", "remax")


class Game:
    """Two answers to each question, whose rewards depend on what was drawn, or are `equal`; `by_token`: each has one,
    too."""

    def __init__(self, by_token: bool = False, equal: bool = False):
        self.by_token, self.equal = by_token, equal

    async def run(self, task, policy, context):
        async def play(number, policy):
            said = Transcript(task.prompt_ids)
            for _ in range(2):
                drawn = said.add_drawn(await policy.generate(said.tokens))
                if self.by_token:
                    said.add_reward(sum(drawn) % 5 / 5)
                said.add_given([number])
            return said.episode(Scored(0.5 if self.equal else sum(said.tokens) % 7 / 7))

        return await context.each(play)


def sentencepiece_like() -> Any:
    """A tokenizer as of Llama 2: words begin with a blank, and what has no token of its own is bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=[*special, *bytes_], show_progress=False)
    tokenizer.train_from_iterator([f"{question} {QWEN}" for question in QUESTIONS], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>"
    )
    made.chat_template = QWEN
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by their tokenizers' kinds, and another of each, for a reference."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    made = {}
    kinds = {"bytes": make_tokenizer(), "pieces": sentencepiece_like()}
    for seed, (kind, tokenizer) in enumerate({**kinds, **{f"{kind}-other": of for kind, of in kinds.items()}}.items()):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=kind.startswith("bytes"),
            eos_token_id=tokenizer.eos_token_id,
        )
        made[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(made[kind])
        tokenizer.save_pretrained(made[kind])
    return made


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_tokenizer_gives_back_what_it_was_given(kind: str, models: dict[str, Path]):
    from enginehouse_rl.data.rendering import load_tokenizer

    tokenizer = load_tokenizer(str(models[kind]), False)
    for text in QUESTIONS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert 2 < len(tokens) <= len(text.encode()) + 1
        assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
    ("advantage", "loss", "kl", "aggregation", "dtype"), VARIANTS, ids=["-".join(map(str, one)) for one in VARIANTS]
)
def test_it_trains(advantage, loss, kl, aggregation, dtype, models: dict[str, Path], tmp_path: Path):
    kind = "pieces" if dtype == "float32" or advantage in ("gae", "gdpo", "opo") else "bytes"
    rows = [{"prompt": [{"role": "user", "content": question}], "answer": ""} for question in QUESTIONS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm: dict[str, Any] = {
        "advantage": {"name": advantage},
        "loss": {"name": loss, "arguments": {"aggregation": aggregation}},
    }
    config: dict[str, Any] = {
        "model": {"path": str(models[kind]), "dtype": dtype},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 100},
        "environment": {"name": f"{__name__}:Game", "arguments": {"by_token": advantage in BY_TOKEN}},
        "actor": {"engine": {"options": {"lr": 1e-2, "weight_decay": 0.0}}},
        "rollout": {"samples_per_prompt": 4, "sampling": {"max_tokens": 6}},
        "algorithm": algorithm,
        "train": {"steps": STEPS, "prompts_per_step": len(QUESTIONS), "samples_every": 0},
    }
    if kl:
        algorithm["kl"] = {"coefficient": 0.1, "place": kl[0], "estimator": kl[1]}
    if advantage == "distillation":
        config["reference"] = {"path": str(models[f"{kind}-other"])}
    if advantage == "gdpo":
        config["reward"] = {"function": "exact_match"}  # whose scores the game's stand for
    trainer = run_inline(config, tmp_path)

    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == STEPS
    for line in metrics:
        assert all(value is None or math.isfinite(value) for value in line.values()), line
        assert line.get("clip_fraction", 0.0) == 0, "the policy has not moved since it drew"
        assert line["ratio"] == pytest.approx(1, abs=1e-4 if dtype == "float32" else 0.05)
        assert line["grad_norm"] > 0
        assert line["skipped"] == 0
        assert line["reward/std"] > 0
    if kl:
        assert metrics[0]["kl"] == pytest.approx(
            0, abs=1e-5 if dtype == "float32" else 0.05
        )  # the reference itself yet
        assert metrics[-1]["kl"] > 1e-3
    saved = load_file(trainer.run_directory.models.newest / "model.safetensors")
    begun = load_file(models[kind] / "model.safetensors")
    assert saved.keys() == begun.keys()
    assert [name for name in begun if torch.equal(saved[name].float(), begun[name].to(saved[name].dtype).float())] == []
    assert {str(weight.dtype) for weight in saved.values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_with_equal_rewards_a_kl_term_in_the_reward_pulls_by_its_coefficient(advantage, models, tmp_path):
    """Divided by its own deviation, it would pull fully at any."""
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pulls = []
    for coefficient in (1e-6, 1e-4, 1e-2):
        here = tmp_path / str(coefficient)
        here.mkdir()
        config = {
            "model": {"path": str(models["bytes"]), "dtype": "float32"},
            "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 100},
            "environment": {"name": f"{__name__}:Game", "arguments": {"equal": True}},
            "reference": {"path": str(models["bytes-other"])},
            "rollout": {"samples_per_prompt": 4, "sampling": {"max_tokens": 6}},
            "algorithm": {"advantage": {"name": advantage}, "kl": {"coefficient": coefficient, "place": "reward"}},
            "train": {"steps": 1, "prompts_per_step": len(QUESTIONS), "samples_every": 0},
        }
        run_inline(config, here)
        (line,) = (json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines())
        assert line["reward/groups_all_equal"] == 1.0
        pulls.append(line["grad_norm"] / coefficient)
    assert pulls == pytest.approx([pulls[-1]] * 3, rel=0.05)  # 1e-6 of it is near float32's rounding of a reward
