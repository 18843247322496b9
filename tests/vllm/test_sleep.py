"""vLLM asleep on a CPU, by a worker class of ours: what it gives back, and what is said to who asks it meanwhile."""

import urllib.error
from pathlib import Path

import pytest
from openai_client import complete

from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

CACHE_MIB = 192


@pytest.fixture(scope="module")
def path():
    return tiny_model(hidden=1024, max_positions=16384)


def test_a_replica_that_sleeps_gives_back_its_weights_and_cache_and_draws_for_nobody(replica, path):
    with replica() as group:
        url = group.call("launch", path, {"openai_endpoint": "loopback", "kv_cache_mib": CACHE_MIB})[0]

        def is_refused(why: str) -> None:
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                complete(url, [5], 2)
            assert why in refused.value.read().decode()

        assert "while 1 requests are in progress" in group.call("act", "sleep_while_drawing")[0]
        assert group.call("act", "sleep", ["kv_cache"])[0] >= 0.9 * CACHE_MIB * 2**20
        is_refused("its kv_cache sleep")
        group.call("act", "wake_up")
        assert complete(url, [5, 6], 2)
        aborted, drawn = group.call("act", "sleep_while_paused")[0]
        assert (aborted.completions[0].finish_reason, list(aborted.completions[0].token_ids)) == ("abort", [])
        assert len(drawn.completions[0].token_ids) == 2

        weights = Path(path, "model.safetensors").stat().st_size
        assert weights > 80 * 2**20
        assert group.call("act", "sleep", ["*"])[0] >= 0.9 * weights
        is_refused("its weights and kv_cache sleep")
        group.call("act", "wake_up")
        is_refused("no weights since it slept")
