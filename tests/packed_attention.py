"""Stands in for the kernels of packed attention, which are a GPU's: is told the same, and computes it plainly.

In a module of its own because rank processes import it by name.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from enginehouse_torch.modeling import attention


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let transformers know the functions below by their names, in which "flash" would have it look for a package."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register("rows_apart", rows_apart)
    AttentionInterface.register("blocks", blocks)
    AttentionMaskInterface.register("rows_apart", flash_attention_mask)
    with mock.patch.object(attention, "BLOCK", 4):
        yield
    AttentionInterface._global_mapping.pop("rows_apart")
    AttentionInterface._global_mapping.pop("blocks")
    AttentionMaskInterface._global_mapping.pop("rows_apart")


def varlen(query, key, value, ends, longest, scale):
    """Causal attention within each of the rows that end at `ends`; `(tokens, heads, size)`."""
    assert ends.dtype == torch.int32
    assert ends[0] == 0
    assert ends[-1] == len(query)
    assert isinstance(longest, int)
    assert longest == int(ends.diff().max())
    rows = [
        scaled_dot_product_attention(
            *(states[begin:end].transpose(0, 1) for states in (query, key, value)),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return torch.cat(rows)


def rows_apart(module, query, key, value, attention_mask, *, scaling, cu_seq_lens_q, max_length_q, **given):
    """What transformers calls for flash-attention."""
    assert attention_mask is None
    assert given["cu_seq_lens_k"] is cu_seq_lens_q
    assert given["max_length_k"] == max_length_q
    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    return varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling)[None], None


def blocks(module, query, key, value, attention_mask, *, scaling, **given):
    """What transformers calls for `flex_attention`: pairs of blocks that are not listed are left out, whole ones are
    not looked into."""
    mask, length = attention_mask, query.shape[2]
    assert mask.seq_lengths == (length, length)

    def listed(number, indices):
        found = torch.zeros(len(number[0, 0]), indices.shape[-1], dtype=torch.bool)
        for row, (count, order) in enumerate(zip(number[0, 0].tolist(), indices[0, 0], strict=True)):
            found[row, order[:count].long()] = True
        return found.repeat_interleave(mask.BLOCK_SIZE[0], 0).repeat_interleave(mask.BLOCK_SIZE[1], 1)

    some = listed(mask.kv_num_blocks, mask.kv_indices)[:length, :length]
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)[:length, :length]
    assert not (some & whole).any(), "a kernel would count these twice"
    at = torch.arange(length)
    allowed = whole | (some & mask.mask_mod(torch.zeros(()), torch.zeros(()), at[:, None], at[None, :]))
    found = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None
