"""A key-value cache in preallocated tensors, usable by the forward pass of any Hugging Face model.

Rows are right-aligned: the last used column holds every row's newest token. A shorter row has padding columns on its
left, which are zero and must be masked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, each `(rows, heads, capacity, head_dim)`, of which `used` columns hold tokens.

    A sliding-window layer keeps all columns too, because the model's mask hides the columns outside the window.
    """

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.used = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate `capacity` columns like the given states."""
        self.keys = _columns(key_states, key_states.shape[0], self.capacity)
        self.values = _columns(value_states, value_states.shape[0], self.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `(rows, heads, new, head_dim)` states after the used columns; return views of all used columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        if end > self.capacity:
            raise IndexError(f"the cache holds {self.capacity} columns, but {end} are needed")
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Return length and offset of the keys that a mask for `query_length` new tokens spans."""
        if isinstance(query_length, torch.Tensor):  # transformers before 5 passes the positions, not their number
            query_length = query_length.shape[0]
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of used columns."""
        return self.used

    def get_max_length(self) -> int:
        """Return the number of columns."""
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5


class KVCache(Cache):
    """Keys and values of a batch. Create it empty, with the capacity that the rows need; the forward passes fill it."""

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self, layers: int, capacity: int):
        super().__init__(layers=[KVLayer(capacity) for _ in range(layers)])

    @property
    def used(self) -> int:
        """Number of used columns."""
        return max(layer.used for layer in self.layers)

    @property
    def capacity(self) -> int:
        """Number of columns."""
        return self.layers[0].capacity

    @classmethod
    def gather(cls, pieces: Sequence[tuple[KVCache, torch.Tensor, int]], spare: int) -> KVCache:
        """Copy rows of one or several caches into a new one, right-aligned, with `spare` free columns.

        Used to repeat a prompt's rows for its samples, to drop finished rows, and to merge batches.

        Args:
            pieces: `(cache, rows, start)`: rows to copy, `(count,)` int64 and possibly repeated, and the first column
                that any of them needs.
            spare: number of free columns for later tokens.
        """
        used = max(cache.used - start for cache, _, start in pieces)
        gathered = cls(len(pieces[0][0].layers), used + spare)
        total = sum(rows.shape[0] for _, rows, _ in pieces)
        for index, layer in enumerate(gathered.layers):
            model = pieces[0][0].layers[index]
            if not model.is_initialized:  # a layer that reads another layer's cache
                continue
            layer.keys = _columns(model.keys, total, used + spare)
            layer.values = _columns(model.values, total, used + spare)
            layer.is_initialized, layer.used = True, used
            first = 0
            for cache, rows, start in pieces:
                source, last = cache.layers[index], first + rows.shape[0]
                gap = used - (cache.used - start)
                for target, states in ((layer.keys, source.keys), (layer.values, source.values)):
                    # Attention multiplies masked columns by zero, so they must not be NaN.
                    target[first:last, :, :gap] = 0
                    target[first:last, :, gap:used] = states[:, :, start : cache.used].index_select(0, rows)
                first = last
        return gathered


def _columns(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """Allocate `(rows, heads, capacity, head_dim)` with the heads, dtype and device of `like`."""
    return like.new_empty((rows, like.shape[1], capacity, like.shape[3]))
