"""Checkpoints that are not there, not whole or of another model, and what a load leaves alone. One rank does."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse_megatron.options import MegatronOptions
from enginehouse_testing.models import tiny_model
from enginehouse_testing.problem import POLICY, batch
from enginehouse_torch.modeling.files import CheckpointError


@contextlib.contextmanager
def engine_of(path: str, **options):
    from enginehouse_megatron.engine import MegatronEngine

    engine = MegatronEngine()
    engine.setup(ModelSpec(path=path), MegatronOptions(**{"lr": 1e-3, **options}), ProcessContext("actor"))
    try:
        yield engine
    finally:
        engine.shutdown()


def step(engine) -> float:
    engine.forward_backward(batch(), POLICY)
    return engine.optim_step()["lr"]


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weight_source().iter_full()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the random states after two steps, without the optimizer."""
    directory = tmp_path_factory.mktemp("checkpoints") / "saved"
    with engine_of(tiny_model()) as engine:
        step(engine)
        step(engine)
        engine.save(str(directory), ("model", "rng"))
    return directory


def copied(saved: Path, to: Path) -> Path:
    shutil.copytree(saved, to / "copy")
    return to / "copy"


def nothing_there(saved: Path, to: Path) -> Path:
    return to / "nothing"


def a_save_was_killed_replacing_it(saved: Path, to: Path) -> Path:
    path = copied(saved, to)
    path.rename(path.with_name(f".{path.name}.replaced"))
    return path


def not_finished(saved: Path, to: Path) -> Path:
    path = copied(saved, to)
    (path / "metadata.json").unlink()
    (path / ".metadata").unlink()
    return path


def a_file_is_gone(saved: Path, to: Path) -> Path:
    path = copied(saved, to)
    next(path.glob("*.distcp")).unlink()
    return path


def a_file_is_cut(saved: Path, to: Path) -> Path:
    path = copied(saved, to)
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:200])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (nothing_there, r"holds no checkpoint of megatron \(no file metadata\.json\)$"),
        (a_save_was_killed_replacing_it, r"rename '.*\.copy\.replaced', which is the earlier one"),
        (not_finished, "incomplete"),
        (a_file_is_gone, "damaged: .*distcp"),
        (a_file_is_cut, "is damaged"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(saved, tmp_path, make, said):
    with engine_of(tiny_model()) as engine, pytest.raises(CheckpointError, match=said):
        engine.load(str(make(saved, tmp_path)), ("model",))


def test_a_part_that_was_not_saved_is_named(saved):
    with (
        engine_of(tiny_model()) as engine,
        pytest.raises(CheckpointError, match="has no optimizer: it was saved only with model, rng"),
    ):
        engine.load(str(saved))


def test_a_checkpoint_of_another_model_says_what_differs(saved):
    with (
        engine_of(tiny_model(layers=3)) as engine,
        pytest.raises(CheckpointError, match="another model: its num_hidden_layers is 2, but this model's is 3"),
    ):
        engine.load(str(saved), ("model",))


@pytest.mark.slow
def test_a_checkpoint_replaces_the_one_before_and_a_failed_one_leaves_it(saved, tmp_path, monkeypatch):
    path = copied(saved, tmp_path)
    with engine_of(tiny_model()) as engine:
        step(engine)
        engine.save(str(path))
        after_one = weights_of(engine)
        step(engine)
        from enginehouse_megatron import checkpoints

        monkeypatch.setattr(checkpoints.dcp, "FileSystemWriter", _full_disk)
        with pytest.raises(CheckpointError, match=r"was not written: .*no space"):
            engine.save(str(path))
        monkeypatch.undo()
        assert [file.name for file in tmp_path.iterdir()] == ["copy"], "nothing half-written stays"
        engine.load(str(path))
        assert all(torch.equal(after_one[name], weight) for name, weight in weights_of(engine).items())


def _full_disk(*arguments):
    raise OSError("no space left on device")


@pytest.mark.slow
def test_hyperparameters_after_a_load_are_this_runs_own(saved, tmp_path):
    path = str(tmp_path / "trained")
    with engine_of(tiny_model()) as engine:
        step(engine)
        engine.save(path)
    with engine_of(tiny_model(), lr=0.5, eps=1e9) as engine:
        engine.load(path)
        before = weights_of(engine)
        assert step(engine) == 0.5
        after = weights_of(engine)
    moved = max(float((after[name] - weight).abs().max()) for name, weight in before.items())
    assert moved < 1e-6, "with the eps that was saved, weights move by the learning rate"
