"""What `plan` asks of a model: whether megatron-core's layers do what its config asks, and what else its files hold.

Nothing here imports megatron-core, which may be installed in the engine's runtime alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.weights.names import stored_names
from enginehouse_megatron.architectures import architecture_of
from enginehouse_megatron.check_model import check_known
from enginehouse_torch.modeling.loading import check_kind

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec
    from enginehouse_megatron.options import MegatronOptions


def examine(options: MegatronOptions, spec: ModelSpec) -> list[str]:
    """Check a model's config and the names in its files.

    Returns:
        What is not trained of the files, a sentence each.

    Raises:
        ModelError: it does something that this engine does not, or the files hold tensors that belong to it and have no
            name in its architecture.
    """
    config = check_kind(spec).get_text_config()
    check_known(config, spec.path)
    architecture = architecture_of(config.model_type, options.architecture)
    read = architecture.reads(stored_names(Path(spec.path)), config.num_hidden_layers)
    return architecture.held(spec, read, tied=bool(config.tie_word_embeddings)).notes()
