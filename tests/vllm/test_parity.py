"""fsdp and vllm, each in its own runtime, think the same of every token that vllm draws."""

import pytest
from replica_processes import parity_of


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_logprobs_vllm_reports_after_an_update_are_those_that_fsdp_computes(tmp_path):
    parity_of(tmp_path, "vllm", "fsdp", processes=2)
