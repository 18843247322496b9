"""Forward passes for the decode loop: the model's own with our cache, or a fused pass with the same results."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Protocol

import torch

from enginehouse.errors import ModelError
from enginehouse_torch.cache import KVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Largest accepted difference between two ways to compute a logit, relative to the largest logit (or 1)."""


class Forward(Protocol):
    """A forward pass over new tokens, right-aligned with what the cache holds."""

    def __call__(
        self, tokens: torch.Tensor, padding: torch.Tensor | None, cache: KVCache, all_logits: bool = False
    ) -> torch.Tensor:
        """Compute logits and append the tokens to the cache.

        Args:
            tokens: `(rows, new)` int64; `new` must be 1 unless the cache is empty.
            padding: `(rows,)` int64, number of leading padding columns of each row; None if no row has any.
            cache: holds the earlier columns, with room for `new` more.
            all_logits: return the logits of every new token instead of the last one.

        Returns:
            `(rows, new or 1, vocabulary)` float32.
        """
        ...

    def rebind(self) -> None:
        """Read the model's parameters again after they have moved to other memory."""
        ...


class ModelForward:
    """The model's own `forward`.

    Attributes:
        positions: number of positions that the model has. The positions of finished rows that are still in the batch
            may exceed it, and are clamped.
    """

    def __init__(self, model: PreTrainedModel, positions: int):
        self.model = model
        self.positions = positions
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.24 renamed the argument.
        self._cache = "cache" if "cache" in parameters else "past_key_values"

    def __call__(
        self, tokens: torch.Tensor, padding: torch.Tensor | None, cache: KVCache, all_logits: bool = False
    ) -> torch.Tensor:
        mask = positions = None
        if padding is not None:
            used, new = cache.used, tokens.shape[1]
            columns = torch.arange(used + new, device=tokens.device)
            mask = (columns >= padding[:, None]).long()
            positions = (columns[used:] - padding[:, None]).clamp_(0, self.positions - 1)
        return self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
            **{self._cache: cache},
        ).logits.float()

    def rebind(self) -> None:
        """Do nothing: the model finds its parameters itself."""


def choose_forward(model: PreTrainedModel, positions: int, fused: bool) -> Forward:
    """Return the fastest forward pass that agrees with the model's plain forward pass on random tokens.

    Raises:
        ModelError: the model's own forward pass gives other logits with our cache than without it. An example is an
            architecture with state other than keys and values.
    """
    from enginehouse_torch.fused import FusedForward

    plain = ModelForward(model, positions)
    try:
        difference = probe(plain, model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be decoded with a plain key-value cache ({type(error).__name__}: {error}); "
            "the torch rollout engine serves attention-only causal language models, choose another rollout engine"
        ) from error
    allowed = TOLERANCE[model.dtype]
    if not difference <= allowed:
        raise ModelError(
            f"{type(model).__name__} decoded with a plain key-value cache gives logits {difference:.1e} away from its "
            f"plain forward pass (allowed {allowed:.0e}); choose another rollout engine"
        )
    if not fused or (reason := FusedForward.explain_unsupported(model)):
        if fused:
            logger.info("generating with the model's own forward pass: %s", reason)
        return plain
    fast = FusedForward(model, positions)
    difference = probe(fast, model)
    if not difference <= allowed:
        logger.warning(
            "generating with the model's own forward pass: the fused pass differs by %.1e (allowed %.0e)",
            difference, allowed,
        )  # fmt: skip
        return plain
    return fast


def probe(forward: Forward, model: PreTrainedModel) -> float:
    """Return the largest difference of `forward`'s logits from the model's plain pass, relative to the largest logit.

    It prefills two rows of unequal length together and decodes one token, so padding, positions and cache matter.
    """
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    lengths, total = (3, 5), 6
    rows = torch.randint(text.vocab_size, (2, total), generator=generator).to(model.device)
    padding = torch.tensor([lengths[1] - length for length in lengths], device=model.device)
    prompts = torch.zeros((2, lengths[1]), dtype=torch.long, device=model.device)
    for row, length in enumerate(lengths):
        prompts[row, lengths[1] - length :] = rows[row, :length]
    with torch.inference_mode():
        cache = KVCache(text.num_hidden_layers, total)
        prefilled = forward(prompts, padding, cache, all_logits=True)
        following = torch.stack([rows[row, length] for row, length in enumerate(lengths)])[:, None]
        decoded = forward(following, padding, cache)
        differences, largest = [], torch.ones((), device=model.device)
        for row, length in enumerate(lengths):
            expected = model(input_ids=rows[row : row + 1, : length + 1], use_cache=False).logits[0].float()
            computed = torch.cat((prefilled[row, lengths[1] - length :], decoded[row]))
            differences.append((expected - computed).abs().max())
            largest = torch.maximum(largest, expected.abs().max())
    worst = torch.stack(differences).max() / largest
    return float("inf") if torch.isnan(worst) else float(worst)
