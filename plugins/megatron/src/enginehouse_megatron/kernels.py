"""Imports megatron-core without its many warnings, and logs once which packages it lacks.

Every module that may be the first to import megatron-core imports this module before it.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings

from enginehouse_megatron.options import has_transformer_engine

OPTIONAL = {
    "transformer_engine": "fused attention, linear layers and norms",
    "apex": "fused gradient accumulation and optimizer steps, which transformer-engine has as well",
}
"""Packages that megatron-core uses if they are installed, and their purpose."""

log = logging.getLogger(__name__)
logging.getLogger("megatron").setLevel(logging.WARNING)  # at INFO it lists every parameter and all settings

# Warnings about megatron-core's own modules, and torch's about its collectives: a user cannot act on them.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")

with warnings.catch_warnings(action="ignore"):  # "Transformer Engine and Apex are not installed", six times
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.transformer.moe import moe_utils

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # moe_utils.py:1192 asks for it, and only importing transformer-engine defines it


def missing() -> list[str]:
    """Return the names of the optional packages that are not installed."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]


def say_missing(device: str) -> None:
    """Log the missing packages that would make a GPU faster; a CPU cannot use them."""
    if device == "cpu" or has_transformer_engine():
        return
    packages = "; ".join(f"{name} ({OPTIONAL[name]})" for name in missing())
    log.warning("megatron-core runs on torch's own operations, which are slower; not installed: %s", packages)
