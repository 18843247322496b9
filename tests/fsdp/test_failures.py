"""Memory that runs out while the `fsdp` engine works, told once and clearly, whatever it was doing."""

import re

import pytest
from fsdp_train_cases import OUTPUTS, lift_memory_limit, limit_memory, make_sharded
from rank_processes import rank_processes
from torch_train_cases import POLICY, batch_of, make_batch

from enginehouse.engines.train import LossSpec
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.memory import OutOfMemory

pytestmark = pytest.mark.slow

BIG = {"vocabulary": 400_000, "hidden": 64}
"""A model with one matrix of 100 MB, its embedding."""
LOADED = "transformers.models.qwen3.modeling_qwen3", "huggingface_hub.file_download"
"""Modules that would be imported while there is no memory left."""
LITTLE = 32 << 20
"""Bytes that are left of memory where it runs out: less than that matrix."""
LIMITING = LossSpec("fsdp_train_cases:limiting_memory", {"room_bytes": LITTLE}, OUTPUTS)


# Memory. What fails is a real allocation: the address space is limited to what is in use and a little more.


def _exhausted(rank, world_size, path, phase):
    """What an engine says that runs out of memory in a phase."""
    batch = make_batch(1, 2)
    try:
        if phase == "setup":
            limit_memory(LITTLE)
        engine = make_sharded(path, rank, world_size)
        if phase == "forward":
            limit_memory(4 * LITTLE)  # more than the row takes, less than its activations
            engine.forward(batch_of([[3] * 400_000], [[False] + [True] * 399_999]), OUTPUTS)  # the last is not run
        engine.forward_backward(batch, LIMITING if phase == "backward" else POLICY)
        limit_memory(LITTLE)
        engine.optim_step()
    except Exception as error:
        return type(error), str(error)
    finally:
        lift_memory_limit()


@pytest.mark.parametrize(
    ("phase", "big", "doing"),
    [
        ("setup", True, r"building and loading the model"),
        (
            "forward",
            False,
            r"the forward pass of a micro-batch of 399999 tokens \(1 x 399999; tokens_per_microbatch is 40",
        ),
        ("backward", True, r"the backward pass of a micro-batch of \d+ tokens"),
        ("step", True, r"taking an optimizer step"),
    ],
)
def test_out_of_memory_says_who_doing_what_and_what_needs_less(phase, big, doing):
    with rank_processes("enginehouse_fsdp.engine", *LOADED) as run:
        ((kind, said),) = run(1, _exhausted, tiny_model(**BIG) if big else tiny_model(), phase)
    assert kind is OutOfMemory, said
    assert re.search(doing, said), said
    assert said.startswith("actor rank 0/1 on localhost: out of memory while ")
    for cure in (
        "tokens_per_microbatch",
        "activation_checkpointing",
        "cpu_offload",
        "reshard_after_forward",
        "processes",
    ):
        assert cure in said
