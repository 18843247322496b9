"""Reading back: what a load copied where is found, and each later change of it is named."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from enginehouse.engines.weights import WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.read_back import ReadBack, merge_read

STAGED = {
    "q": torch.randn(4, 6),
    "k": torch.randn(2, 6),
    "up": torch.randn(8, 6),
    "down": torch.randn(6, 8),
    "experts": torch.randn(3, 5, 6),
    "norm": torch.randn(6),
    "scale": torch.randn(1),
    "turned": torch.randn(3, 5),
}


class Model(nn.Module):
    """A model as engines have them: joined, split for the second of two ranks, converted, packed, in turn."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 6))
        self.up = nn.Parameter(torch.zeros(4, 6))
        self.down = nn.Parameter(torch.zeros(6, 4))
        self.experts = nn.Parameter(torch.zeros(3, 5, 6))
        self.lower = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros(1))
        self.turned = nn.Parameter(torch.zeros(5, 3))
        self.packed = nn.Parameter(torch.zeros(4, 6))

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        joined = torch.empty(6, 6)
        for name, tensor in weights:
            match name:
                case "q":
                    joined[:4].copy_(tensor)
                    self.packed.copy_(tensor)
                    self.packed.mul_(2)
                case "k":
                    joined[4:] = tensor
                    self.qk.data.copy_(joined)
                case "up":
                    self.up.data.copy_(tensor.narrow(0, 4, 4))
                case "down":
                    self.down.data.copy_(tensor.chunk(2, 1)[1].clone())
                case "experts":
                    for expert in range(3):
                        self.experts.data[expert].copy_(tensor[expert])
                case "norm":
                    self.lower.data = tensor.to(torch.bfloat16)
                case "scale":
                    self.scale.data.fill_(tensor.item())
                case "turned":
                    self.turned.data.copy_(tensor.t())


Staged = dict[str, torch.Tensor]


class Source:
    """Staged tensors without shared memory, of which one may be damaged."""

    def __init__(self, staged: Staged, damaged: str = ""):
        self.staged = staged
        self.damaged = damaged
        self.sums = [checksum(tensor) for tensor in staged.values()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.staged.items())

    def check_again(self, names: list[str]) -> None:
        if self.damaged in names:
            raise WeightSyncError(f"the staged weights have changed: {self.damaged}")


def load(read_back: ReadBack, model: Model, staged: Staged) -> None:
    with read_back.watch():
        model.load(read_back.follow(staged.items()))


def compare(read_back: ReadBack, model: Model, staged: Staged) -> dict[str, int]:
    read = read_back.compare(model, Source(staged))  # type: ignore[arg-type]
    assert [total for total, _ in read] == [checksum(tensor) for tensor in staged.values()]
    return {
        name: tensor.numel() if held == "whole" else sum(torch.Size(size).numel() for size, _, _ in held)
        for (name, tensor), (_, held) in zip(staged.items(), read, strict=True)
    }


@pytest.fixture
def read_back() -> ReadBack:
    return ReadBack()


@pytest.fixture
def model(read_back: ReadBack) -> Model:
    model = Model()
    load(read_back, model, STAGED)
    return model


def test_counts_what_was_copied_of_each_tensor(model: Model, read_back: ReadBack):
    counts = compare(read_back, model, STAGED)
    assert counts == {
        "q": 24, "k": 12, "up": 24, "down": 24, "experts": 90, "norm": 6, "scale": 0, "turned": 15,
    }  # fmt: skip


def rows(begin: int, end: int) -> list[list[object]]:
    """The region of some rows of a parameter of 4 rows and 6 columns, as a rank reports it."""
    return [[[end - begin, 6], [6, 1], 6 * begin]]


@pytest.mark.parametrize(
    ("held", "is_read"),
    [
        (["whole"], True),
        ([[]], False),
        ([rows(0, 2)], False),
        ([rows(0, 2), rows(2, 4)], True),
        ([rows(0, 2), rows(0, 2)], False),
        ([rows(0, 2), rows(0, 2), rows(2, 4), rows(2, 4)], True),
        ([rows(0, 3), rows(1, 3)], False),
        (["whole", []], True),
        (["whole", rows(0, 2)], True),
    ],
)
def test_ranks_together_have_read_a_parameter_of_which_they_hold_every_element(held: list[object], is_read: bool):
    reports = [[("sum", part)] for part in held]
    assert merge_read([["q", "float32", [4, 6]]], reports) == ({"q": "sum"} if is_read else {})  # type: ignore[arg-type]


def test_ranks_that_compared_different_versions_have_read_none():
    assert merge_read([["q", "float32", [4, 6]]], [[("new", "whole")], [("old", "whole")]]) == {}


@pytest.mark.parametrize("again", [False, True], ids=["changed later", "changed after a later load"])
@pytest.mark.parametrize(
    ("parameter", "place", "named"),
    [
        ("qk", (0, 0), "q"),
        ("qk", (5, 5), "k"),
        ("up", (3, 2), "up"),
        ("down", (2, 3), "down"),
        ("experts", (1, 4, 5), "experts"),
        ("lower", (3,), "norm"),
        ("turned", (4, 0), "turned"),
    ],
)
def test_names_what_one_changed_bit_belongs_to(
    model: Model, read_back: ReadBack, parameter: str, place: tuple[int, ...], named: str, again: bool
):
    staged = STAGED
    compare(read_back, model, STAGED)
    if again:
        staged = {name: torch.randn_like(tensor) for name, tensor in STAGED.items()}
        load(read_back, model, staged)
    bits = getattr(model, parameter).data
    bits = bits.view(torch.int16 if bits.dtype == torch.bfloat16 else torch.int32)
    bits[place] ^= 1
    with pytest.raises(WeightSyncError) as caught:
        compare(read_back, model, staged)
    assert caught.value.parameters == (named,)


@pytest.mark.parametrize("dropped", ["q", "experts", "norm", "down"])
def test_a_tensor_that_a_later_load_leaves_out_is_named(model: Model, read_back: ReadBack, dropped: str):
    compare(read_back, model, STAGED)
    new = {name: torch.randn_like(tensor) for name, tensor in STAGED.items()}
    load(read_back, model, {**new, dropped: STAGED[dropped]})
    with pytest.raises(WeightSyncError) as caught:
        compare(read_back, model, new)
    assert caught.value.parameters == (dropped,)


def test_damaged_memory_does_not_count_as_filled_in_another_way(model: Model, read_back: ReadBack):
    model.up.data.view(torch.int32)[1, 2] ^= 1
    with pytest.raises(WeightSyncError, match="changed: up"):
        read_back.compare(model, Source(STAGED, damaged="up"))  # type: ignore[arg-type]


def test_what_is_otherwise_from_the_first_load_on_counts_as_filled_in_another_way(model: Model, read_back: ReadBack):
    model.up.data.numpy()[0, 0] += 1  # a write that torch does not see
    assert compare(read_back, model, STAGED)["up"] == 0
    assert compare(read_back, model, STAGED)["down"] == 24


def test_a_parameter_that_the_engine_has_packed_as_well_counts_as_not_read(model: Model, read_back: ReadBack):
    read = read_back.compare(model, Source(STAGED), {id(model.experts)})  # type: ignore[arg-type]
    assert [name for name, (_, regions) in zip(STAGED, read, strict=True) if not regions] == ["experts", "scale"]


def test_swapped_experts_and_rows_are_found(model: Model, read_back: ReadBack):
    compare(read_back, model, STAGED)
    for parameter, named in (("experts", "experts"), ("qk", "q")):
        rows = getattr(model, parameter).data
        rows[[0, 1]] = rows[[1, 0]]
        with pytest.raises(WeightSyncError, match=named):
            compare(read_back, model, STAGED)
        rows[[0, 1]] = rows[[1, 0]]
    assert compare(read_back, model, STAGED)["q"] == 24


def test_a_parameter_that_is_gone_is_named(model: Model, read_back: ReadBack):
    compare(read_back, model, STAGED)
    del model.lower
    with pytest.raises(WeightSyncError, match="norm"):
        compare(read_back, model, STAGED)


def test_memory_that_was_freed_holds_nothing():
    """An allocator may give the memory of a freed tensor to the next one, which then holds other values."""
    read_back, model = ReadBack(), Model()
    with read_back.watch():
        for _, tensor in read_back.follow([("up", STAGED["up"])]):
            for _ in range(50):
                torch.empty(8, 6).copy_(tensor)
            model.up.data = torch.empty(8, 6).fill_(1.0)
    assert compare(read_back, model, {"up": STAGED["up"]}) == {"up": 0}


Fill = Callable[[nn.Parameter, torch.Tensor], object]
UNREAD: dict[str, Fill] = {
    "rounded twice": lambda held, staged: held.data.copy_(staged.to(torch.bfloat16)),
    "other numbers in the same bits": lambda held, staged: held.data.copy_(staged.view(torch.int32)),
    "calculated": lambda held, staged: held.data.copy_(staged + 1),
    "written over": lambda held, staged: (held.data.copy_(staged), held.data.add_(1)),
    "written over by its name": lambda held, staged: (held.data.copy_(staged), torch.add(staged, 1, out=held.data)),
    "written over as integers": lambda held, staged: (held.data.copy_(staged), held.data.view(torch.int32)[0].zero_()),
    "rounded to 8 bits": lambda held, staged: setattr(held, "data", staged.to(torch.float8_e4m3fn)),
    "kept in another form": lambda held, staged: (
        held.data.copy_(staged),
        setattr(held, "packed", staged * 2),
    ),
    "kept a second time": lambda held, staged: (held.data.copy_(staged), setattr(held, "packed", staged.clone())),
    "written over in a part": lambda held, staged: (held.data.copy_(staged), held.data[3].zero_()),
}


@pytest.mark.parametrize("fill", UNREAD.values(), ids=UNREAD)
def test_what_is_no_copy_of_what_was_sent_is_not_read_back(fill: Fill):
    read_back, model = ReadBack(), Model()
    with read_back.watch():
        for _, tensor in read_back.follow([("up", STAGED["up"])]):
            model.up.data = torch.empty(8, 6)
            fill(model.up, tensor)
    assert compare(read_back, model, {"up": STAGED["up"]}) == {"up": 0}


def test_a_load_that_failed_leaves_nothing_behind(read_back: ReadBack):
    model = Model()
    with read_back.watch():
        for _, tensor in read_back.follow([("up", STAGED["up"])]):
            model.up.data.copy_(tensor[4:] * 2)  # counts as used in another way
    load(read_back, model, STAGED)
    assert compare(read_back, model, STAGED)["up"] == 24
