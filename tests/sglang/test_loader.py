"""Loads of versions into a model that puts parameters together as SGLang's do, without SGLang."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.checksums import checksum
from enginehouse.weights.reports import Reports
from enginehouse.weights.staging import Version
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


class Process:
    """One of SGLang's processes, and the worker's side of its reports."""

    def __init__(self, loader, sglang):
        self.model, self.reports = Fused(), Reports(1, "sglang")
        self.processed = 0
        self._loader, self._sglang = loader, sglang

    def load(self, weights, wrong_sum=""):
        """Load a version as the server is ordered to; raise what it reports."""
        staged = Version(1, [ParamMeta(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()])
        for name, tensor in weights.items():
            staged.take(name, tensor, "0" * 16 if name == wrong_sum else None, None)
        self._loader.load(self.model, self._loader.build_order(staged.source(), self.reports.path))
        self.reports.check("here", "load")
        self.reports.clear()

    def end_update(self):
        """Return what SGLang reports at the end of an update."""
        self._sglang.postprocess_weights(self.model, torch.device("cpu"))
        return self.reports.check("here", "read back")


@pytest.fixture
def process(monkeypatch):
    class DefaultModelLoader:
        @staticmethod
        def postprocess_weights(model, target_device):
            process.processed += 1

    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader", "sglang.srt.model_loader.loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.model_loader.loader"].DefaultModelLoader = DefaultModelLoader
    monkeypatch.delitem(sys.modules, "enginehouse_sglang.loader")  # which has wrapped another
    process = Process(importlib.import_module("enginehouse_sglang.loader"), DefaultModelLoader)
    return process


def test_each_update_is_processed_and_compared_once_and_reports_what_the_model_holds(process):
    for number in range(1, 4):
        weights = {name: tensor + number for name, tensor in WEIGHTS.items()}
        process.load(weights)
        (read,) = process.end_update()
        assert read == [[checksum(tensor), "whole"] for tensor in weights.values()]
        assert process.processed == number
    wrapped = process._sglang.postprocess_weights
    process.load(WEIGHTS)
    assert process._sglang.postprocess_weights is wrapped, "wrapped anew at each update, it would nest ever deeper"


def test_memory_that_differs_from_its_checksum_fails_the_load_by_name(process):
    with pytest.raises(WeightSyncError, match="the staged weights have changed: k"):
        process.load({name: tensor + 1 for name, tensor in WEIGHTS.items()}, wrong_sum="k")


def test_a_version_that_does_not_fill_the_model_fails_by_name(process):
    with pytest.raises(WeightSyncError, match="do not fill qkv of sglang's model"):
        process.load({name: tensor for name, tensor in WEIGHTS.items() if name != "k"})


def test_a_weight_that_changes_between_the_load_and_the_end_of_the_update_fails_it_by_name(process):
    process.load(WEIGHTS)
    process.end_update()
    process.load(WEIGHTS)
    process.model.qkv.data.view(torch.int32)[2, 1] ^= 1
    with pytest.raises(WeightSyncError, match="does not hold k as sent"):
        process.end_update()
