"""Whether a load filled every parameter, with a model that puts parameters together as SGLang's do; without SGLang."""

import pytest
import torch

from enginehouse_sglang.loader import find_unfilled


class Fused(torch.nn.Module):
    """Three parameters of a checkpoint are one here, and it takes what it knows of what it is given."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        self.norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.attn = torch.nn.Module()
        self.attn.k_scale = torch.nn.Parameter(torch.ones(1))
        self.steps = torch.nn.Parameter(torch.arange(3), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in "qkv":
                begin = 2 * "qkv".index(name)
                self.qkv.data[begin : begin + 2].copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


WEIGHTS = {**{name: torch.full((2, 4), float(place)) for place, name in enumerate("qkv")}, "norm": torch.zeros(4)}


def test_a_load_that_fills_every_parameter_lacks_none():
    model = Fused()
    assert find_unfilled(model, lambda: model.load_weights(WEIGHTS.items())) == []
    assert model.qkv[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert model.norm.tolist() == [0] * 4


@pytest.mark.parametrize(("missing", "said"), [("k", ["qkv"]), ("norm", ["norm"])])
def test_a_parameter_that_got_nothing_or_only_a_part_is_named_and_keeps_its_values(missing, said):
    model, before = Fused(), Fused()
    given = {name: tensor for name, tensor in WEIGHTS.items() if name != missing}
    assert find_unfilled(model, lambda: model.load_weights({**given, "another": torch.ones(1)}.items())) == said
    if missing == "k":
        assert torch.equal(model.qkv[2:4], before.qkv[2:4])
    else:
        assert torch.equal(model.norm, before.norm)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_a_load_that_raises_leaves_no_mark_behind():
    model, before = Fused(), Fused()

    def load():
        raise OSError("the memory is gone")

    with pytest.raises(OSError, match="gone"):
        find_unfilled(model, load)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))
