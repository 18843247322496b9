"""What the checks of an engine run on, and which cannot for want of GPUs. No engine is started, and there is no GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from enginehouse.errors import UserError
from enginehouse.plugin import RolloutBackend, TrainBackend, Transport, plugins
from enginehouse_testing import running, sites
from enginehouse_testing.certificate import Certificate
from enginehouse_testing.matrix.standing import still_stands
from enginehouse_testing.origin import Origin
from enginehouse_testing.running import Certifier, cases, device_of


def backend(kind, name):
    return plugins().get(kind, name, elsewhere=True)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_layout_that_needs_more_gpus_than_there_are_is_not_run(name, monkeypatch):
    def act(record, check, number, layout, directory):
        raise RuntimeError("it was run")

    site = SimpleNamespace(act=act, discard=lambda layout: None)
    monkeypatch.setattr(running, "_site", lambda *arguments: site)
    monkeypatch.setattr(running, "visible_gpus", lambda: 1)
    record = backend(RolloutBackend, name)
    single, split = cases(record, ("single", "tp2"), ("greedy",))
    certifier = Certifier(record, device="cuda")
    assert "it was run" in certifier.run(single).detail
    result = certifier.run(split)
    assert (result.outcome, result.detail) == ("not run", "needs 2 GPU(s), but this machine has 1")
    assert "it was run" in Certifier(record, device="cpu").run(split).detail


def test_training_engines_run_on_the_device_that_is_asked_for(monkeypatch):
    started, ended = [], []

    def group(pool, spec, *, name, device, timeout):
        started.append((pool.gpus, device))
        return SimpleNamespace(call=lambda *arguments: [], shutdown=lambda **how: ended.append(pool.gpus))

    def pool(nodes, *, gpus_per_process, name):
        return SimpleNamespace(gpus=nodes[0] * gpus_per_process, shutdown=lambda: None)

    monkeypatch.setattr(sites, "WorkerGroup", group)
    monkeypatch.setattr(sites, "ResourcePool", pool)
    monkeypatch.setattr(sites, "visible_gpus", lambda: 2)
    record = backend(TrainBackend, "fsdp")
    for device, expected in (("cuda", [(1, "cuda"), (2, "cuda")]), ("cpu", [(0, "cpu"), (0, "cpu")])):
        site = sites.TrainSite(1.0, device)
        for processes in (1, 2, 2):
            site.act(record, SimpleNamespace(device="cpu"), 0, SimpleNamespace(processes=processes), "")
        assert started == expected
        assert ended == ([1] if device == "cuda" else [])  # two GPUs are not enough for both groups
        started.clear()
        ended.clear()


def test_the_device_is_a_gpu_where_there_is_one_that_the_engine_can_use(monkeypatch):
    monkeypatch.setattr(running, "pick_device", lambda wanted: ("cuda", "pretended"))
    fsdp = backend(TrainBackend, "fsdp")
    assert (device_of(fsdp), device_of(fsdp, "cpu")) == ("cuda", "cpu")
    assert device_of(plugins().get(Transport, "inproc")) == "cpu"
    record = replace(fsdp, devices=("cpu",))
    assert device_of(record) == "cpu"
    with pytest.raises(UserError, match="'fsdp' runs on cpu, not on cuda"):
        device_of(record, "cuda")


def test_a_certificate_says_its_device_and_is_none_of_another():
    origin = Origin("a", "1", "x")
    made = Certificate("fsdp", finished=True, device="cuda", origin=origin)
    assert "Device: cuda" in made.as_markdown()
    assert still_stands(made.as_json(), {}, origin, "cuda")
    assert not still_stands(made.as_json(), {}, origin, "cpu")
    assert still_stands(Certificate("inproc", finished=True, origin=origin).as_json(), {}, origin, "cpu")
