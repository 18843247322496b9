"""SGLang asleep on a CPU: what it gives back, and what becomes of what is asked meanwhile."""

from pathlib import Path

import pytest

from enginehouse.controller import RemoteError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

CACHE_MIB = 64


def test_a_replica_that_sleeps_gives_back_its_weights_and_cache_and_draws_nothing(replica):
    path = tiny_model(hidden=1024, max_positions=2048)
    with replica() as group:
        group.call("launch", path, {"kv_cache_mib": CACHE_MIB})
        assert "while 1 requests are in progress" in group.call("act", "sleep_while_drawing")[0]
        assert group.call("act", "sleep", ["kv_cache"])[0] >= 0.9 * CACHE_MIB * 2**20
        group.call("act", "wake_up")
        waited, drawn = group.call("act", "sleep_while_paused")[0]
        assert waited
        assert len(drawn.token_ids) == 2

        weights = Path(path, "model.safetensors").stat().st_size
        assert weights > 80 * 2**20
        assert group.call("act", "sleep", ["*"])[0] >= 0.9 * weights
        with pytest.raises(RemoteError, match="its weights and kv_cache sleep"):
            group.call("act", "draw")
        group.call("act", "wake_up")
        with pytest.raises(RemoteError, match="no weights since it slept"):
            group.call("act", "draw")
