"""The `megatron` backend conforms, at every layout it declares."""

from __future__ import annotations

import pytest

from enginehouse.testing import TrainEngineSuite


@pytest.mark.slow
class TestMegatron(TrainEngineSuite):
    backend = "megatron"
