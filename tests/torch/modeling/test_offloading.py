"""State that is put away comes back as it was, all of it or none, and host memory for it stays in bounds."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.errors import EnginehouseError
from enginehouse_torch.modeling import offloading
from enginehouse_torch.modeling.offloading import HostRoom, OffloadedStorage, Offloading

PIECE = 2**14


@given(st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=8), st.lists(st.integers(1, PIECE), max_size=8))
def test_host_memory_holds_what_it_is_given_and_keeps_no_more(sizes: list[int], later: list[int]):
    room = HostRoom(pinned=False, piece_bytes=PIECE)
    for given_sizes in (sizes, later):
        tensors = [torch.randint(1, 255, (size,), dtype=torch.uint8) for size in given_sizes]
        before = [tensor.clone() for tensor in tensors]
        room.clear()
        stored = [OffloadedStorage(tensor.untyped_storage(), room, "rank 0") for tensor in tensors]
        room.trim()
        held = sum(len(piece) for piece in room._pieces)
        assert sum(given_sizes) <= held < sum(given_sizes) + PIECE
        for one in stored:
            one.bring_back()
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(tensors, before, strict=True))


def test_what_there_is_no_room_for_stays_whole_and_is_put_away_when_there_is(monkeypatch: pytest.MonkeyPatch):
    parameters = [torch.randn(5000) for _ in range(3)]
    before = [parameter.clone() for parameter in parameters]
    offloaded = Offloading(lambda: {"params": parameters}, torch.device("cpu"), "rank 0", lambda doing: nullcontext())
    written, written_so_far = offloading._write_file, []

    def full(*given):
        written_so_far.append(given)
        if len(written_so_far) == 3:
            raise EnginehouseError("no room")
        return written(*given)

    monkeypatch.setattr(offloading, "_write_file", full)
    with pytest.raises(EnginehouseError, match="no room"):
        offloaded.offload(("*",))
    offloaded.need("params", to="compute")
    assert all(torch.equal(parameter, wanted) for parameter, wanted in zip(parameters, before, strict=True))
    offloaded.offload(("*",))
    assert len(written_so_far) == 6
    with pytest.raises(EnginehouseError, match="params are offloaded"):
        offloaded.need("params", to="compute")
    offloaded.onload(("*",))
    assert all(torch.equal(parameter, wanted) for parameter, wanted in zip(parameters, before, strict=True))
