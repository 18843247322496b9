"""What makes a request's seed count on a CPU, through SGLang's interface for plugins.

SGLang heeds `sampling_seed` only under `--enable-deterministic-inference`, and allows that for attention kernels of
GPUs, whose results would else depend on what shares a batch. On a CPU each sequence's attention is computed by itself.
"""

from __future__ import annotations


def make_count() -> None:
    """Allow deterministic inference with torch's own attention, and leave out its kernels for GPUs."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Stands in for an entry of the list at choices.py:113, which `--enable-deterministic-inference` is checked against.
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        # Stands in for `enable_batch_invariant_mode`, batch_invariant_ops.py:1010, which puts triton kernels in place
        # of torch's matrix products.
        HookRegistry.register(
            "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
            lambda *_arguments, **_named: None,
            HookType.REPLACE,
        )
