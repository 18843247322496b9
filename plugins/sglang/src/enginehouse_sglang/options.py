"""Options of the `sglang` backend. Light to import: configs are checked before any engine is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from enginehouse.engines.memory import MemoryDemand, MemoryUse, server_memory
from enginehouse.engines.model import Device
from enginehouse.engines.options import LoraOptions, SplitRolloutOptions, check_native, has_experts
from enginehouse.errors import ConfigError
from enginehouse_sglang.served_adapter import check_layers

OURS = {
    "model": "use model.path",
    "model_path": "use model.path",
    "tokenizer_path": "use model.path",
    "dtype": "use model.dtype",
    "trust_remote_code": "use model.trust_remote_code",
    "random_seed": "use the run's seed",
    "device": "use cluster.device",
    "context_length": "use the option max_model_tokens",
    "max_running_requests": "use the option max_running",
    "max_total_tokens": "use the option kv_cache_mib",
    "tp": "use the option tensor_parallel",
    "tp_size": "use the option tensor_parallel",
    "pp_size": "a replica cannot split its layers into stages",
    "pipeline_parallel_size": "a replica cannot split its layers into stages",
    "dp": "use rollout.replicas",
    "tensor_parallel_size": "use the option tensor_parallel",
    "dp_size": "use rollout.replicas",
    "data_parallel_size": "use rollout.replicas",
    "host": "use the option openai_endpoint",
    "port": "a free port is chosen",
    "api_key": "use SGLANG_API_KEY in the worker's environment",
    "admin_api_key": "it is chosen at random",
    "enable_deterministic_inference": "use the option deterministic",
    "enable_memory_saver": "use rollout.placement",
    "enable_weights_cpu_backup": "after sleep, a weight update brings the weights",
    "skip_tokenizer_init": "the tokenizer is loaded if the model has one",
    "custom_weight_loader": "weights come by the run's transport",
    "weight_version": "the run counts the versions",
    "quantization": "how sglang quantizes the weights of an update has not been tried",
    "enable_lora": "use weights.adapter",
    "max_lora_rank": "use lora.rank of the actor",
    "lora_target_modules": "use lora.targets of the actor",
    "lora_paths": "the adapter comes by the run's transport",
    "max_loras_per_batch": "a replica serves one adapter",
    "lora_backend": "it depends on the device",
    "enable_lora_overlap_loading": "the adapter comes by the run's transport",
    "max_loaded_loras": "a replica serves one adapter",
    "tokenizer_worker_num": "one process names the adapter in requests",
    "speculative_algorithm": "speculative decoding has other logprobs and seeds than the backend promises",
}
"""Arguments of SGLang's server that this backend sets itself, each with the setting to use instead, or the reason why
there is none."""

CPU_KV_CACHE_MIB = 1024


class SGLangOptions(SplitRolloutOptions):
    """Options of the `sglang` rollout engine. `native` goes to SGLang's server: `{"schedule_policy": "lpm"}` is
    `--schedule-policy lpm`, true a flag without a value."""

    native_sources: ClassVar[tuple[str, ...]] = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py")

    endpoint: list[str] = Field(
        default_factory=list,
        description="URLs of running SGLang servers, one for each replica. The run uses and updates them, and leaves "
        "them running. Unset: each replica starts its own server.",
    )
    kv_cache_mib: int | None = Field(
        None,
        gt=0,
        description="Memory for keys and values on each GPU, in MiB. Unset: 1024 on a CPU; on a GPU what is free.",
    )
    deterministic: bool | None = Field(
        None,
        description="Use SGLang's deterministic inference, without which it ignores the seeds of requests. It costs "
        "speed on a GPU. Unset: on CPUs only.",
    )
    openai_endpoint: Literal["loopback", "node"] | None = Field(
        None,
        description="Address at which the server also answers OpenAI clients. loopback: a port of 127.0.0.1; node: a "
        "port of the node's address, which other machines on the network can reach. Unset: the server answers this "
        "run only.",
    )

    def for_device(self, device: Device) -> Self:
        if self.deterministic is not None or self.endpoint:
            return self
        return self.model_copy(update={"deterministic": device == "cpu"})

    def check_device(self, device: Device, dtype: str) -> None:
        """Reject float32 with deterministic inference on GPUs: its default attention (fa3 on Hopper) cannot do it."""
        names_attention = any(name.replace("-", "_") == "attention_backend" for name in self.native)
        if self.deterministic and dtype == "float32" and device == "cuda" and not names_attention:
            raise ConfigError(
                "deterministic: SGLang's deterministic inference uses flash-attention on GPUs, which computes only in "
                "half precision: set model.dtype=bfloat16 or deterministic=false, or native={attention_backend: triton}"
            )

    def check(self, processes: int) -> None:
        if self.endpoint and len(self.endpoint) != processes:
            urls, replicas = len(self.endpoint), f"replica{'' if len(self.endpoint) == 1 else 's'}"
            raise ConfigError(
                f"endpoint must have one URL for each replica, but has {urls} for {processes} replica(s): change the "
                f"URLs, or start {urls} {replicas}"
            )

    def check_adapter(self, adapter: LoraOptions, config: Mapping[str, Any], device: Device, dtype: str) -> None:
        if self.endpoint:
            raise ConfigError("servers that run already get whole weights (endpoint)")
        if has_experts(config):
            raise ConfigError("adapters of a mixture of experts have not been tried in sglang")
        if adapter.targets != "all-linear":
            check_layers(target.rpartition(".")[2] for target in adapter.targets)

    def servers(self) -> Sequence[str]:
        return self.endpoint

    @property
    def moves_experts(self) -> bool:
        """True if SGLang moves experts between processes, so that their places change from update to update."""
        return any(name.replace("-", "_") == "enable_eplb" and value for name, value in self.native.items())

    def memory(self, demand: MemoryDemand) -> MemoryUse | None:
        """Estimate the memory of a rank, or return None if the servers run already."""
        if self.endpoint:
            return None
        return server_memory(
            demand,
            split=self.tensor_parallel,
            running=self.max_running,
            share=self.native.get("mem_fraction_static", 0.85),  # SGLang chooses it by the GPU; about this
            cache_mib=self.kv_cache_mib,
            cpu_cache_mib=CPU_KV_CACHE_MIB,
        )

    def surprises(self) -> Sequence[str]:
        notes = []
        if self.endpoint:
            notes.append(
                "endpoint names servers that run already: the run changes their weights, and its samples are seeded "
                "only if they were started with --enable-deterministic-inference"
            )
        elif self.deterministic is False:
            notes.append(
                "deterministic is false, which is the default on GPUs: SGLang ignores seeds, so two runs with the same "
                "train.seed have the same prompts but different responses; true costs speed"
            )
        if self.openai_endpoint == "node":
            notes.append(
                "openai_endpoint is node: everyone who reaches the rollout's nodes can use the model, unless "
                "SGLANG_API_KEY is in the workers' environment"
            )
        return notes

    @field_validator("native")
    @classmethod
    def _reject_ours(cls, native: dict[str, Any]) -> dict[str, Any]:
        check_native(native, OURS, "sglang")
        return native

    @field_validator("endpoint")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        from urllib.parse import urlsplit

        for url in urls:
            parts = urlsplit(url)
            try:
                valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:  # the port is no number, or too large
                valid = False
            if not valid or parts.query or parts.fragment:
                raise ValueError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:30000")
        urls = [url.rstrip("/") for url in urls]
        if len(set(urls)) != len(urls):
            raise ValueError("two replicas cannot share a server, because each has its own weights; give each URL once")
        return urls

    @model_validator(mode="after")
    def _reject_settings_of_running_servers(self) -> SGLangOptions:
        if self.endpoint:
            for name in ("tensor_parallel", "kv_cache_mib", "deterministic", "openai_endpoint", "native"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(f"{name} is only for servers that a run starts, but endpoint names running ones")
        return self
