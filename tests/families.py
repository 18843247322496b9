"""Families of models, tiny, by transformers' own classes, and what each engine makes of them: docs/models.md.

`make models` writes it.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_forms import TEXT, made, saved, tower_beside, tower_within

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse.errors import EnginehouseError, UserError
from enginehouse_testing.models import EOS_ID, PAD_ID, VOCABULARY_SIZE

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [6.0] * 16, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DEEPSEEK = {
    **{name: TEXT[name] for name in TEXT if name != "head_dim"}, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": 16, "qk_rope_head_dim": 64, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",  # as each checkpoint has them: vLLM asks for them
}  # fmt: skip
SMALL = {
    name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id", "pad_token_id")
}


def text(name: str, **settings: Any) -> Callable[[Path], Path]:
    """A family of which a decoder is all."""
    return lambda to: saved(made(name, {**TEXT, **settings}), to)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "Llama 2, 3": text("Llama"),
    "Mistral": text("Mistral", sliding_window=None),
    "Mistral, with a window": text("Mistral", sliding_window=8),
    "Qwen 2, 2.5": text("Qwen2", hidden_size=128, tie_word_embeddings=True),
    "Qwen 3": text("Qwen3", tie_word_embeddings=True),
    "Qwen 3 MoE": text("Qwen3Moe", **EXPERTS),
    "Qwen 3.5": tower_beside,
    "Mixtral": text("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "Gemma 2": text("Gemma2", sliding_window=8, query_pre_attn_scalar=16),
    "Gemma 3": tower_within,
    "Phi 3": text("Phi3", hidden_size=128, rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "Phi 4": text("Phi3", hidden_size=128, rope_parameters=PARTIAL),
    "GLM 4": text("Glm4", rope_parameters=PARTIAL),
    "DeepSeek 3": lambda to: saved(made("DeepseekV3", DEEPSEEK), to),
    "OLMo 2": text("Olmo2"),
    "Granite": text("Granite", embedding_multiplier=2.0, logits_scaling=4.0),
    "gpt-oss": text("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "GPT-2": lambda to: saved(
        made("GPT2", {"vocab_size": VOCABULARY_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128,
                      "eos_token_id": EOS_ID, "bos_token_id": EOS_ID, "pad_token_id": PAD_ID}, "LMHeadModel"), to
    ),
    "Mamba": lambda to: saved(made("Mamba", {**SMALL, "state_size": 4}), to),
    "T5": lambda to: saved(
        made("T5", {"vocab_size": VOCABULARY_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
                    "num_heads": 4, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "decoder_start_token_id": PAD_ID},
             "ForConditionalGeneration"), to
    ),
    "BERT": lambda to: saved(
        made("Bert", {**SMALL, "num_attention_heads": 4, "intermediate_size": 64}, "ForMaskedLM"), to
    ),
}  # fmt: skip


@functools.cache
def directory(family: str) -> Path:
    """A tiny model of a family, made once."""
    return FAMILIES[family](Path(tempfile.mkdtemp(prefix="family-")) / "model")


def engine_of(backend: str) -> tuple[Any, Any]:
    """A training engine that is not set up, and options for it."""
    if backend == "torch":
        from enginehouse_torch.options import TorchTrainOptions
        from enginehouse_torch.train import TorchTrainEngine

        return TorchTrainEngine(), TorchTrainOptions(lr=1e-2)
    if backend == "fsdp":
        from enginehouse_fsdp.engine import FSDPEngine
        from enginehouse_fsdp.options import FSDPOptions

        return FSDPEngine(), FSDPOptions(lr=1e-2)
    from enginehouse_megatron.engine import MegatronEngine
    from enginehouse_megatron.options import MegatronOptions

    return MegatronEngine(), MegatronOptions(lr=1e-2)


@dataclass(frozen=True)
class Cell:
    """What an engine made of a family.

    Attributes:
        refused: what it is refused with; empty: it is not.
        apart: largest difference of a logprob from transformers' own, at first and after an update, from the export.
    """

    refused: str = ""
    apart: float = 0.0

    @property
    def agreement(self) -> str:
        """What the page says of an engine that was not refused."""
        return "yes" if self.apart < MOST_APART else f"{self.apart:.1g} apart"


def trained(family: str, backend: str) -> Cell:
    """Let a training engine score a family, take a step, export it, and load the export by transformers again."""
    from torch_train_cases import POLICY, make_batch

    path, batch = directory(family), make_batch(3, 2)
    spec = ModelSpec(str(path))
    engine, options = engine_of(backend)
    try:
        options.check_model(_config(path))
        options.check_files(spec)
    except UserError as error:
        return Cell(_short(error, path))
    engine.setup(spec, options, ProcessContext("actor"))  # what was not refused is not refused here
    first = _apart(engine, path, batch)
    engine.forward_backward(batch, POLICY)
    engine.optim_step()
    with tempfile.TemporaryDirectory() as export:
        engine.export_hf(export)
        second = _apart(engine, Path(export), batch)
    engine.shutdown()
    return Cell(apart=max(first, second))


def _config(path: Path) -> Any:
    import json

    config = json.loads((path / "config.json").read_text())
    return config.get("text_config") or config


def _apart(engine: Any, path: Path, batch: Any) -> float:
    """Largest difference of a logprob from a forward pass of transformers over each row alone."""
    from torch_train_cases import oracle_outputs, plain_model

    model = plain_model(str(path))
    found = engine.forward(batch.drop(["loss_mask"]), Outputs())
    rows = [oracle_outputs(model, batch.row(row)["input_ids"])[0].detach() for row in range(len(batch))]
    return float((found.ragged("logprobs").values - torch.cat(rows)).abs().max())


def sampled(family: str) -> Cell:
    """Let the torch rollout engine sample a family, and compare what it says of its tokens with transformers."""
    from torch_rollout_driver import generate_once, plain_logprobs

    from enginehouse_torch.options import TorchRolloutOptions

    path, prompt = directory(family), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    try:
        TorchRolloutOptions().check_files(ModelSpec(str(path)))
    except UserError as error:
        return Cell(_short(error, path))
    (result,) = generate_once(str(path), prompt, max_tokens=8)
    (completion,) = result.completions
    expected = plain_logprobs(str(path), [*prompt, *completion.token_ids])[len(prompt) - 1 :]
    return Cell(apart=float((torch.tensor(completion.logprobs) - expected).abs().max()))


def served(family: str) -> Cell:
    """Let a vLLM replica serve what `exported` returns, then the weights before that, sent in an update.

    Compared are logprobs of a prompt, of both, and of tokens that it draws.
    """
    from replica_processes import runtime_of
    from torch_rollout_driver import plain_logprobs
    from vllm_weights_replica import updated_replica

    from enginehouse.controller import RemoteError, start_ray

    export, before = str(exported(family)), str(directory(family))
    prompt = list(range(5, 29))
    try:
        with start_ray(num_cpus=2), updated_replica(runtime_of("vllm"), export) as act:
            scored, drawn = act("score", prompt), act("draw", prompt[:11], 8)
            act("update", before, 1)
            updated = act("score", prompt)
    except RemoteError as error:
        if not isinstance(error.cause, EnginehouseError):
            raise
        return Cell(_short(error.cause, Path(export)))
    (completion,) = drawn.completions
    own = plain_logprobs(export, [*prompt[:11], *completion.token_ids])[10:]
    expected = torch.cat([plain_logprobs(export, prompt), own, plain_logprobs(before, prompt)])
    found = [*scored.prompt_logprobs[1:], *completion.logprobs, *updated.prompt_logprobs[1:]]
    return Cell(apart=float((torch.tensor(found) - expected).abs().max()))


def exported(family: str) -> Path:
    """The torch engine's export of a family after a step; the family as it is, where torch does not train it."""
    from torch_train_cases import POLICY, make_batch, make_engine

    from enginehouse_torch.options import TorchTrainOptions

    path = directory(family)
    try:
        TorchTrainOptions().check_files(ModelSpec(str(path)))
    except UserError:
        return path
    engine, export = make_engine(str(path), lr=1e-2), path.with_name("export")
    engine.forward_backward(make_batch(3, 2), POLICY)
    engine.optim_step()
    engine.export_hf(str(export))
    engine.shutdown()
    return export


def _short(error: EnginehouseError, path: Path) -> str:
    said = re.sub(r"\s+", " ", str(error).replace(repr(str(path)), "MODEL"))
    said = re.sub(r"^\w+ rank \S+ on \S+: ", "", said)  # where it was said
    return said.partition(". ")[0].rstrip(".")  # what to write comes after it


COLUMNS: dict[str, Callable[[str], Cell]] = {
    "torch": lambda family: trained(family, "torch"),
    "fsdp": lambda family: trained(family, "fsdp"),
    "megatron": lambda family: trained(family, "megatron"),
    "torch, sampling": sampled,
    "vllm, sampling": served,
}

MOST_APART = 1e-4

INTRODUCTION = """# Models

For users who want to know which engine trains or serves their model. `make models` wrote this page from what it
measured, on a tiny random model of each family's class in transformers.

| cell | meaning |
|---|---|
| yes | training: log-probabilities agree with transformers to 1e-4, before an optimizer step and in its export |
| yes | sampling: the log-probabilities that the engine reports for its tokens agree to 1e-4 |
| 2 apart | nothing rejects the model, but a log-probability is 2 nats off: do not train it with this engine |
| [1] | `plan` rejects the model with message 1 below, before any process starts; vLLM does so at launch or update |

Transformers computes the log-probabilities of each row separately, and loads the export for the second comparison.
vLLM, in its runtime for CPUs, serves the torch engine's export after the step, or the original model if torch cannot
train it. A weight update then brings back the original weights. vLLM must agree before and after this update. `plan`
makes the same checks for model classes that are not listed, but their log-probabilities have not been compared.

Parts of a checkpoint that the class does not read, such as vision towers or heads that predict further tokens, are not
trained. The export contains them unchanged. `fsdp` and `megatron` train adapters (LoRA); peft's
`AutoPeftModelForCausalLM` loads the adapter that `train.export=adapter` saves.
"""


def page(cells: dict[str, dict[str, Cell]]) -> str:
    """The page of docs, from what was seen."""
    reasons: list[str] = []

    def shown(cell: Cell) -> str:
        if not cell.refused:
            return cell.agreement
        if cell.refused not in reasons:
            reasons.append(cell.refused)
        return f"[{reasons.index(cell.refused) + 1}]"

    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    lines += [f"| {family} | {' | '.join(shown(found[name]) for name in COLUMNS)} |" for family, found in cells.items()]
    listed = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([INTRODUCTION, *lines, "", "Refused:", "", *listed, ""])


PAGE = Path(__file__).parents[1] / "docs" / "models.md"

if __name__ == "__main__":
    from enginehouse.controller import start_ray

    with start_ray():
        found = {family: {name: run(family) for name, run in COLUMNS.items()} for family in FAMILIES}
    PAGE.write_text(page(found), encoding="utf-8")
