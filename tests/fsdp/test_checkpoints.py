"""Checkpoints of the `fsdp` engine: written while training goes on, and read by any torch engine."""

import contextlib
import os
import resource
import signal
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_processes import rank_processes
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, weights_of

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.files import CheckpointError

pytestmark = pytest.mark.slow

PRELOADED = ("enginehouse_fsdp.engine", "transformers.models.qwen3.modeling_qwen3")
OPTIONS = {"lr": 1e-3, "eps": 1e-6, "schedule": "cosine", "total_steps": 8, "warmup_steps": 1}


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes(*PRELOADED) as run:
        yield run


def make(backend, path, rank=0, world_size=1, head="causal_lm", dtype="float32"):
    if backend == "fsdp":
        from enginehouse_fsdp.engine import FSDPEngine as Engine
        from enginehouse_fsdp.options import FSDPOptions as Options
    else:
        from enginehouse_torch.options import TorchTrainOptions as Options
        from enginehouse_torch.train import TorchTrainEngine as Engine
    engine = Engine()
    context = ProcessContext(role="actor", rank=rank, world_size=world_size, local_rank=rank)
    engine.setup(ModelSpec(path=path, head=head, dtype=dtype), Options(**OPTIONS), context)
    return engine


def train(engine, steps, rank, world_size, head="causal_lm"):
    shard = make_batch(4, 4).split(world_size)[rank]
    stepped = []
    for _ in range(steps):
        engine.forward_backward(shard, POLICY if head == "causal_lm" else SQUARED_ERROR)
        stepped.append(engine.optim_step())
    return stepped


def state_of(engine):
    """All that the next steps depend on, copied, whole."""
    state = engine._train_state(("*",))
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.tensors().items()}
    return {name: tensor.clone() for name, tensor in whole.items()}, state.optimizer.step_number


def _save(rank, world_size, backend, path, head, dtype, into):
    engine = make(backend, path, rank, world_size, head, dtype)
    train(engine, 2, rank, world_size, head)
    engine.save(into)
    draw = torch.rand(3)
    saved = state_of(engine)
    stepped = train(engine, 2, rank, world_size, head)
    found = weights_of(engine)
    engine.shutdown()
    return saved, draw, stepped, found


def _load(rank, world_size, backend, path, head, dtype, source):
    engine = make(backend, path, rank, world_size, head, dtype)
    engine.load(source)
    draw = torch.rand(3)
    loaded = state_of(engine)
    stepped = train(engine, 2, rank, world_size, head)
    found = weights_of(engine)
    engine.shutdown()
    return loaded, draw, stepped, found


@pytest.mark.parametrize(
    ("writer", "reader", "head", "dtype", "tied"),
    [
        (("fsdp", 2), ("torch", 1), "causal_lm", "float32", True),
        (("torch", 1), ("fsdp", 2), "causal_lm", "float32", False),
        (("fsdp", 2), ("torch", 2), "value", "float32", False),
        (("fsdp", 2), ("torch", 1), "causal_lm", "bfloat16", True),
        (("torch", 2), ("fsdp", 1), "causal_lm", "bfloat16", True),
    ],
    ids=str,
)
def test_one_engine_goes_on_from_what_the_other_saved(run_ranks, tmp_path, writer, reader, head, dtype, tied):
    path, into = tiny_model(tied=tied), str(tmp_path / "saved")
    (saved, step), draw, stepped, weights = run_ranks(writer[1], _save, writer[0], path, head, dtype, into)[0]
    (loaded, at), redraw, restepped, found = run_ranks(reader[1], _load, reader[0], path, head, dtype, into)[0]
    assert (at, step) == (2, 2)
    assert loaded.keys() == saved.keys()
    assert all(tensor.dtype == torch.float32 for name, tensor in saved.items() if name.startswith("model."))
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in saved.items()), "not bit for bit"
    assert torch.equal(draw, redraw)
    rough = dtype != "float32"
    for ours, theirs in zip(restepped, stepped, strict=True):
        assert (ours["lr"], ours["skipped"]) == (theirs["lr"], 0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.2 if rough else 1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=5e-3 if rough else 1e-5, rtol=0.02 if rough else 0)


def _save_both_ways(rank, world_size, path, directory):
    engine = make("fsdp", path, rank, world_size)
    train(engine, 1, rank, world_size)
    engine.save_in_background(f"{directory}/replaced")
    engine.finish_save()
    engine.save(f"{directory}/blocking")
    engine.save_in_background(f"{directory}/background")
    train(engine, 2, rank, world_size)  # while it is written
    engine.save_in_background(f"{directory}/replaced")  # waits for the one before
    train(engine, 1, rank, world_size)
    engine.finish_save()
    engine.finish_save()  # nothing to do
    found = []
    for name in ("blocking", "background", "replaced"):
        engine.load(f"{directory}/{name}")
        found.append((*state_of(engine), torch.rand(3)))
    engine.shutdown()
    return found


def test_training_goes_on_and_changes_nothing_in_what_is_written(run_ranks, tmp_path):
    path = tiny_model()
    for found in run_ranks(2, _save_both_ways, path, str(tmp_path)):
        (blocking, step, draw), (background, same_step, redraw), (_, later, _) = found
        assert (step, same_step, later) == (1, 1, 3)
        assert all(torch.equal(background[name], tensor) for name, tensor in blocking.items())
        assert torch.equal(draw, redraw)
    assert sorted(os.listdir(tmp_path)) == ["background", "blocking", "replaced"]


@contextlib.contextmanager
def _disk_full():
    """No file of this process grows beyond 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _memory_full():
    """There is no host memory for the copy that is written in the background."""
    return mock.patch("torch.distributed.checkpoint.staging._create_cpu_state_dict", side_effect=MemoryError("none"))


def _said(act, *arguments):
    try:
        act(*arguments)
    except CheckpointError as error:
        return str(error)
    return ""


def _fail_to_save(rank, world_size, path, directory, failing, background):
    """A save that fails on rank 1 alone; then what it left, and one that works."""
    engine = make("fsdp", path, rank, world_size)
    latest = f"{directory}/latest"
    engine.save(latest)
    saved = state_of(engine)
    train(engine, 1, rank, world_size)

    def save():
        if background:
            engine.save_in_background(latest)
            engine.finish_save()
        else:
            engine.save(latest)

    with failing() if rank == 1 else contextlib.nullcontext():
        said = _said(save)
    engine.finish_save()  # it was said
    engine.load(latest)
    found = os.listdir(directory)
    loaded = state_of(engine)
    save()
    engine.shutdown()
    return said, found, saved, loaded


@pytest.mark.parametrize(
    ("failing", "background", "wanted"),
    [
        (_disk_full, False, "rank 1: "),
        (_disk_full, True, "rank 1: "),
        (_memory_full, True, "rank 1: MemoryError: none"),
    ],
)
def test_a_save_that_fails_on_one_rank_is_said_on_all_and_leaves_the_one_before(
    run_ranks, tmp_path, failing, background, wanted
):
    for said, found, saved, loaded in run_ranks(2, _fail_to_save, tiny_model(), str(tmp_path), failing, background):
        assert f"latest' was not written: {wanted}" in said
        assert "rank 0" not in said
        assert found == ["latest"]
        assert loaded[1] == saved[1]
        assert all(torch.equal(loaded[0][name], tensor) for name, tensor in saved[0].items())


def _fail_to_load(rank, world_size, path, directory):
    """Loads that fail on rank 1 alone; then one that works."""
    engine = make("fsdp", path, rank, world_size)
    engine.save(f"{directory}/latest")
    absent = _said(engine.load, f"{directory}/{'absent' if rank == 1 else 'latest'}")
    broken = mock.patch("torch.load", side_effect=OSError("input/output error"))
    with broken if rank == 1 else contextlib.nullcontext():
        unreadable = _said(engine.load, f"{directory}/latest")
    engine.load(f"{directory}/latest")
    engine.shutdown()
    return absent, unreadable


def test_a_load_that_fails_on_one_rank_is_said_on_all(run_ranks, tmp_path):
    for absent, unreadable in run_ranks(2, _fail_to_load, tiny_model(), str(tmp_path)):
        assert "absent' holds no checkpoint" in absent
        assert "latest' is damaged: rank 1: OSError: input/output error" in unreadable


def _die_in_a_save(rank, world_size, path, directory, background):
    """Rank 1 is killed between two tensors of its part; what rank 0 is told lies in a file afterwards."""
    engine = make("fsdp", path, rank, world_size)
    engine.save(f"{directory}/latest")
    train(engine, 1, rank, world_size)
    left = iter(range(3))
    written = torch.save

    def write(*args, **kwargs):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return written(*args, **kwargs)

    with mock.patch("torch.save", write) if rank == 1 else contextlib.nullcontext():
        if background:
            engine.save_in_background(f"{directory}/latest")
        said = _said(engine.finish_save) if background else _said(engine.save, f"{directory}/latest")
    Path(f"{directory}/said").write_text(said)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_it(tmp_path, background):
    with rank_processes(*PRELOADED) as run, pytest.raises(BrokenProcessPool):
        run(2, _die_in_a_save, tiny_model(), str(tmp_path), background)
    assert "latest' was not written: " in (tmp_path / "said").read_text()
    engine = make("torch", tiny_model())
    before = state_of(engine)[0]
    train(engine, 1, 0, 1)
    engine.load(str(tmp_path / "latest"))
    loaded, step = state_of(engine)
    assert step == 0
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items() if name.startswith("model."))
