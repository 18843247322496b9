"""On a device, passes are launched without waiting: the host reads a few numbers of each micro-batch, and no more.

Counted on a pretend device (`pretend`). It shows how often the host waits, not for how long.
"""

import pytest
from device_waits import MICROBATCHES, train_on
from pretend import count_waits


@pytest.fixture(scope="module")
def found():
    return count_waits(train_on)


def test_a_forward_pass_reads_nothing_before_all_are_launched(found):
    waits = found["forward"]
    assert not waits.reads
    assert not waits.to_device
    assert waits.to_host == {"token_model.py:forward": MICROBATCHES}


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        ("clipped_policy", {"policy.py:finish_loss": MICROBATCHES}),
        ("entropy bonus", {"policy.py:finish_loss": MICROBATCHES}),
        ("measured", {"policy.py:finish_loss": MICROBATCHES, "mismatch.py:_measure": MICROBATCHES}),
        ("supervised", {}),
    ],
)
def test_a_micro_batch_waits_once_for_the_metrics_of_its_loss_and_for_no_copy(found, loss, reads):
    waits = found[loss]
    assert waits.reads == {**reads, "token_model.py:forward_backward": 1}  # the totals, once for all micro-batches
    assert not waits.to_device
    assert not waits.to_host
