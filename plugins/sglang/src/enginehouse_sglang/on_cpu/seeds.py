"""Makes SGLang use a request's seed on a CPU, through its interface for plugins.

SGLang uses `sampling_seed` only with `--enable-deterministic-inference`, which it allows only with attention kernels
for GPUs. On a CPU each sequence's attention is computed by itself, so that no other sequence of the batch changes it.
"""

from __future__ import annotations


def allow_deterministic_inference() -> None:
    """Allow deterministic inference with torch's own attention, without its kernels for GPUs."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Stands in for an entry of the list at choices.py:113, which `--enable-deterministic-inference` is checked against.
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        # Stands in for `enable_batch_invariant_mode`, batch_invariant_ops.py:1010, which puts triton kernels in place
        # of torch's matrix products.
        HookRegistry.register(
            "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
            lambda *_args, **_kwargs: None,
            HookType.REPLACE,
        )
