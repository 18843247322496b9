"""Options of the `vllm` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from enginehouse.engines.memory import PROCESS_BYTES, MemoryDemand, MemoryUse, server_memory
from enginehouse.engines.model import Device
from enginehouse.engines.options import LoraOptions, SplitRolloutOptions, adapts_output, check_native, has_experts
from enginehouse.errors import ConfigError

OURS = {
    "model": "use model.path",
    "tokenizer": "use model.path",
    "dtype": "use model.dtype",
    "quantization": "use the option quantization",
    "quantization_config": "use the option quantization",
    "trust_remote_code": "use model.trust_remote_code",
    "seed": "use the run's seed",
    "max_model_len": "use the option max_model_tokens",
    "max_num_seqs": "use the option max_running",
    "tensor_parallel_size": "use the option tensor_parallel",
    "logprobs_mode": "every logprob that leaves the engine depends on it",
    "max_logprobs": "every logprob that leaves the engine depends on it",
    "weight_transfer_config": "weights come by the run's transport",
    "worker_cls": "on a CPU vLLM's own worker cannot sleep",
    "enable_sleep_mode": "use rollout.placement",
    "worker_extension_cls": "logprobs under top_p and top_k need the backend's class",
    "logits_processors": "the logprobs would not include what they change",
    "skip_tokenizer_init": "the tokenizer is loaded if the model has one",
    "disable_log_stats": "health and metrics are read from the statistics",
    "data_parallel_size": "use rollout.replicas",
    "enable_lora": "use weights.adapter",
    "max_loras": "a replica serves one adapter",
    "max_cpu_loras": "a replica serves one adapter",
    "max_lora_rank": "use lora.rank of the actor",
    "lora_target_modules": "use lora.targets of the actor",
    "lora_dtype": "adapters have model.dtype",
    "fully_sharded_loras": "what is served is compared with what was sent, as vLLM splits it by default",
    "speculative_config": "speculative decoding has other logprobs and seeds than the backend promises",
}
"""Arguments of vLLM's engine that this backend sets itself, each with the setting to use instead, or the reason why
there is none."""

CPU_KV_CACHE_MIB = 1024

MOST_RANK = 512
"""The largest rank of an adapter."""

SHARE, SHARE_IN_TURNS = 0.92, 0.85
"""Fraction of a GPU's memory that vLLM uses: vLLM's own default, and our default if roles take turns on the GPU."""

V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable; `"0"` selects Model Runner V1."""


class VLLMOptions(SplitRolloutOptions):
    """Options of the `vllm` rollout engine. `native` goes to vLLM's `AsyncEngineArgs`."""

    native_sources: ClassVar[tuple[str, ...]] = ("vllm/engine/arg_utils.py",)

    kv_cache_mib: int | None = Field(
        None,
        gt=0,
        description="Memory for keys and values on each GPU, in MiB. Unset: 1024 on a CPU; on a GPU what is free.",
    )
    truncated_logprobs: Literal["exact", "renormalized"] = Field(
        "exact",
        description="Log-probabilities with top_p or top_k. exact: over the whole distribution, as with all engines; "
        "renormalized: vLLM's own, over the kept tokens only, which are faster and of no use to a trainer.",
    )

    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="Form in which linear layers are served. fp8: weights of 8 bits with a scale for each output "
        "channel, which vLLM makes anew from each update, and activations of 8 bits with a scale for each token. Needs "
        "model.dtype=bfloat16. On a GPU it has not been run yet.",
    )
    openai_endpoint: Literal["loopback", "node"] | None = Field(
        None,
        description="Endpoint that also serves the model to OpenAI clients, at a free port. loopback: at 127.0.0.1; "
        "node: at the node's address, which other machines on the network can reach. Unset: no endpoint.",
    )

    def quantizes(self) -> bool:
        return self.quantization != "none"

    def check_device(self, device: Device, dtype: str) -> None:
        if self.quantizes() and dtype != "bfloat16":
            raise ConfigError(
                f"quantization={self.quantization}: vllm quantizes weights of bfloat16, not of {dtype}: set "
                "model.dtype=bfloat16 or quantization=none"
            )

    def check_model(self, config: Mapping[str, Any]) -> None:
        super().check_model(config)
        if self.quantizes() and has_experts(config):
            raise ConfigError(
                f"quantization={self.quantization}: a mixture of experts has not been tried in 8 bits; set "
                "quantization=none"
            )

    def check_adapter(self, adapter: LoraOptions, config: Mapping[str, Any], device: Device, dtype: str) -> None:
        if adapts_output(adapter):
            raise ConfigError("it adapts the output layer (lora.targets)")
        if adapter.rank > MOST_RANK:
            raise ConfigError(f"its rank is above {MOST_RANK}")
        if self.quantizes():
            raise ConfigError("its weights are quantized (quantization)")
        if device == "cpu" and has_experts(config):
            raise ConfigError("a mixture of experts with an adapter ends vllm's CPU build at the first token")
        if device == "cuda" and dtype == "float32":
            raise ConfigError("vllm's kernels for adapters on GPUs compute only in half precision")

    def check_sampling(self, top_p: float, top_k: int, device: str, variables: Mapping[str, str]) -> None:
        """Reject top-p and top-k if exact logprobs are needed: Model Runner V2, the default on GPUs, has none."""
        cut = top_p < 1 or top_k > 0
        if cut and self.truncated_logprobs == "exact" and device != "cpu" and variables.get(V2_RUNNER) != "0":
            raise ConfigError(
                f"with top_p={top_p:g} and top_k={top_k}, vllm on a GPU gives only logprobs within the kept tokens. "
                "Set truncated_logprobs=renormalized and algorithm.old_logprobs=actor, which computes logprobs of "
                f"the whole distribution; or engine.env.{V2_RUNNER}=0, which is slower; or top_p=1 and top_k=0"
            )

    def memory(self, demand: MemoryDemand) -> MemoryUse:
        return server_memory(
            demand,
            split=self.tensor_parallel,
            running=self.max_running,
            share=self.native.get("gpu_memory_utilization", SHARE_IN_TURNS if demand.takes_turns else SHARE),
            cache_mib=self.kv_cache_mib,
            cpu_cache_mib=CPU_KV_CACHE_MIB,
            process=PROCESS_BYTES,
            block_itemsize=1 if self.quantizes() else None,
        )

    def surprises(self) -> Sequence[str]:
        notes = []
        if self.quantizes():
            notes.append(
                f"quantization is {self.quantization}: the rollout's logprobs differ from the trainer's by more than "
                "rounding. Set the loss's importance_cap with algorithm.old_logprobs=actor, which corrects for this, "
                "and watch mismatch/*"
            )
        if self.truncated_logprobs == "renormalized":
            notes.append(
                "truncated_logprobs is renormalized: with top_p or top_k the rollout's logprobs are those within the "
                "kept tokens, but the trainer's are those of the whole distribution. So mismatch/* and, with "
                "algorithm.old_logprobs=rollout, the ratio of the policies compare different quantities"
            )
        if self.openai_endpoint == "node":
            notes.append(
                "openai_endpoint is node: everyone who reaches the rollout's nodes can use the model, unless "
                "VLLM_API_KEY is in the workers' environment"
            )
        return notes

    @field_validator("native")
    @classmethod
    def _reject_ours(cls, native: dict[str, Any]) -> dict[str, Any]:
        check_native(native, OURS, "vllm")
        return native
