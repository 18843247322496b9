"""A training engine here and sglang in its own runtime think the same of every token that sglang draws."""

import pytest
from replica_processes import parity_of


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("train", "processes"), [("fsdp", 2), ("megatron", 1)])
def test_the_logprobs_sglang_reports_after_an_update_are_those_that_a_trainer_computes(tmp_path, train, processes):
    parity_of(tmp_path, "sglang", train, processes)
