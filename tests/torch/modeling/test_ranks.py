"""What ranks say to each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_processes import rank_processes

ROOT = Path(__file__).parents[3]


def test_ranks_unpickle_nothing_that_another_sends():
    """torch's collectives of objects do, and what is unpickled may run anything."""
    sources = [path for folder in ("core/src", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in sources if re.search(r"(dist|distributed)\.\w+_object", path.read_text())]


@pytest.mark.slow
def test_what_ranks_gather_is_whole_and_in_order():
    with rank_processes("enginehouse_torch.modeling.ranks") as run:
        found = run(2, _gathered)
    assert found == [[["naïve", 1.5], {"rank": [1, "y" * 1000]}]] * 2


def _gathered(rank, world_size):
    import torch.distributed as dist

    from enginehouse_torch.modeling.ranks import gather

    dist.init_process_group("gloo")
    value = ["naïve", 1.5] if rank == 0 else {"rank": [1, "y" * 1000]}
    return gather(value)
