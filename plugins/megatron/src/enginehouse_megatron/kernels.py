"""Importing megatron-core without a page of warnings: what it misses is said once.

Every other module of the engine is imported after this one.
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
"""Packages that megatron-core uses where they are installed, and for what."""

log = logging.getLogger(__name__)
logging.getLogger("megatron").setLevel(
    logging.WARNING
)  # else it lists every parameter of every model, and all settings

# Its own remarks on its own modules, and torch's on the names of collectives it calls: nothing a user could act on.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")

with warnings.catch_warnings(action="ignore"):  # "Transformer Engine and Apex are not installed", six times over
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.transformer.moe import moe_utils

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # moe_utils.py:1192 asks for it, and only importing transformer-engine defines it

__all__ = ["missing", "say_missing"]


def missing() -> list[str]:
    """Names of the optional packages that are not installed."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is None]


def say_missing(device: str) -> None:
    """Log one line that names the packages a GPU would be faster with; nothing on a CPU, which has no use of them."""
    if device == "cpu" or has_transformer_engine():
        return
    said = "; ".join(f"{name} ({OPTIONAL[name]})" for name in missing())
    log.warning("megatron-core runs on torch's own operations, slower than it could: not installed are %s", said)
