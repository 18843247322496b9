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
    """Staged tensors without shared memory."""

    def __init__(self, staged: Staged):
        self.staged = staged
        self.sums = [checksum(tensor) for tensor in staged.values()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.staged.items())


def load(read_back: ReadBack, model: Model, staged: Staged) -> None:
    with read_back.watch():
        model.load(read_back.follow(staged.items()))


def compare(read_back: ReadBack, model: Model, staged: Staged) -> dict[str, int]:
    read = read_back.compare(model, Source(staged))  # type: ignore[arg-type]
    assert [total for _, total in read] == [checksum(tensor) for tensor in staged.values()]
    return dict(zip(staged, [count for count, _ in read], strict=True))


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


def test_ranks_together_hold_what_each_holds_a_part_of():
    parameters = [[name, "float32", list(tensor.shape)] for name, tensor in STAGED.items()]
    counts = (24, 12, 24, 24, 90, 6, 0, 15)
    rank = list(zip(counts, "abcdefgh", strict=True))
    assert merge_read(parameters, [rank]) == {"q": "a", "k": "b", "experts": "e", "norm": "f", "turned": "h"}
    both = {"q": "a", "k": "b", "up": "c", "down": "d", "experts": "e", "norm": "f", "turned": "h"}
    assert merge_read(parameters, [rank, rank]) == both
    older = [(24, "z"), *rank[1:]]
    assert merge_read(parameters, [rank, older]) == {name: read for name, read in both.items() if name != "q"}


@pytest.mark.parametrize("again", [False, True], ids=["the recorded load", "a later load"])
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
    if again:
        compare(read_back, model, STAGED)
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


def test_swapped_experts_and_rows_are_found(model: Model, read_back: ReadBack):
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
