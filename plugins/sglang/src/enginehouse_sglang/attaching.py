"""Checks that a server that runs already is SGLang and serves the run's model."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginehouse.engines.model import ModelSpec
from enginehouse.errors import ConfigError, ModelError
from enginehouse_sglang.http import HTTPStatusError
from enginehouse_sglang.process import SGLangFailed
from enginehouse_sglang.server import SGLangServer

log = logging.getLogger(__name__)

ANSWER_SECONDS = 120.0
"""Time in which a server must describe itself, also if it is busy."""

SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "tie_word_embeddings",
)  # fmt: skip
"""Keys of `config.json` that are equal in two models if the weights of one can be loaded into the other."""


async def attach(server: SGLangServer, spec: ModelSpec) -> dict[str, Any]:
    """Check that a server can be used for a model, and return its settings.

    A model that cannot be compared is rejected, because a weight update with other shapes would end the server.

    Raises:
        ConfigError: There is no SGLang server of a version that this backend knows.
        ModelError: The server has another model, or another dtype.
    """
    url = server.address.url
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            info, settings = await server.model(), await server.settings()
        served, _ = info["model_path"], info["weight_version"]
    except SGLangFailed as error:
        raise ConfigError(f"endpoint: there is no sglang server at {url}: {error}") from error
    except TimeoutError as error:
        raise ConfigError(f"endpoint: the server at {url} did not answer within {ANSWER_SECONDS:g} s") from error
    except HTTPStatusError as error:
        if error.status in (401, 403):
            raise ConfigError(
                f"endpoint: the server at {url} needs a key; set SGLANG_API_KEY (and SGLANG_ADMIN_API_KEY, if it has "
                f"one) in the environment of the run: {error}"
            ) from error
        raise ConfigError(f"endpoint: what answers at {url} is not an sglang server: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"endpoint: what answers at {url} is not an sglang server: it has no /model_info") from error
    _compare(url, spec, info, served)
    dtype = _find_dtype(settings.get("dtype"), spec)
    if dtype != spec.dtype:
        raise ModelError(
            f"endpoint: the server at {url} computes in {dtype}, and model.dtype is {spec.dtype}; start it with "
            f"--dtype {spec.dtype}, or set model.dtype"
        )
    if int(settings.get("dp_size") or 1) > 1:
        raise ConfigError(
            f"endpoint: the server at {url} must have dp_size 1, not {settings['dp_size']}; start one server for each "
            "replica"
        )
    if not settings.get("enable_deterministic_inference"):
        log.warning(
            "the sglang server at %s was not started with --enable-deterministic-inference: samples are not seeded", url
        )
    return settings


def _find_dtype(argument: str | None, spec: ModelSpec) -> str:
    """Return the dtype of a server with this argument `--dtype`; `auto` is SGLang's choice for the model."""
    if argument not in (None, "auto"):
        return str(argument)
    config = json.loads(Path(spec.path, "config.json").read_text())
    config = config.get("text_config", config)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return "float16" if stored == "float32" else str(stored)  # configs/model_config.py:2303


def _compare(url: str, spec: ModelSpec, info: Mapping[str, Any], served: str) -> None:
    run_config = json.loads(Path(spec.path, "config.json").read_text())
    mismatch = f"endpoint: the server at {url} serves another model ({served}) than the run's ({spec.path})"
    classes = info.get("architectures")
    if classes and run_config.get("architectures") and list(classes) != list(run_config["architectures"]):
        raise ModelError(f"{mismatch}: {', '.join(classes)}, not {', '.join(run_config['architectures'])}")
    config = Path(served, "config.json")
    if config.is_file():
        server_config = json.loads(config.read_text())
        for name in SHAPE:
            if server_config.get(name) != run_config.get(name):
                raise ModelError(f"{mismatch}: its {name} is {server_config.get(name)}, not {run_config.get(name)}")
    elif Path(served).name != Path(spec.path).name:
        raise ModelError(
            f"{mismatch}, as far as this host can tell: it cannot read the server's directory, and the names differ. "
            f"Start the server with a directory called {Path(spec.path).name!r}, or with one that this host can read"
        )
