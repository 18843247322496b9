"""Data-parallel ranks, each a real process: their number changes nothing but the time."""

import os

import pytest
import torch
from rank_processes import rank_processes
from torch_train_cases import NOT_FINITE, POLICY, make_batch, make_engine, weights_of

from enginehouse.errors import EnginehouseError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

OPTIONS = {"lr": 1e-3, "eps": 1e-6, "schedule": "cosine", "total_steps": 8, "warmup_steps": 1}
STEPS = 5


@pytest.fixture(scope="module")
def run_ranks():
    """Runs a function in several processes at once and gives each one's result, by rank."""
    with rank_processes("enginehouse_torch.train", "transformers.models.qwen3.modeling_qwen3") as run:
        yield run


def _train(rank, world_size, path, sizes, steps=STEPS, first=0, load=None, save=None):
    """Train on this rank's shard; return its weights and metrics, by step."""
    engine = make_engine(path, rank, world_size, **OPTIONS)
    if load:
        engine.load(load)
    metrics = []
    for step in range(first, first + steps):
        shard = make_batch(4, 2, seed=step).split(sizes)[rank]
        part = engine.forward_backward(shard, POLICY)
        metrics.append((part.get("loss"), engine.optim_step()))
    if save:
        engine.save(save)
    weights = weights_of(engine)
    engine.shutdown()
    return weights, metrics, engine.mesh


@pytest.fixture(scope="module")
def one_rank():
    path = tiny_model()
    return path, *_train(0, 1, path, [8])[:2]


@pytest.mark.parametrize("sizes", [[4, 4], [7, 1], [8, 0], [2, 2, 2, 2], [0, 5, 1, 2]], ids=str)
def test_any_split_over_ranks_trains_like_one_rank(run_ranks, one_rank, sizes):
    path, weights, metrics = one_rank
    results = run_ranks(len(sizes), _train, path, sizes)
    for rank, (found, by_step, mesh) in enumerate(results):
        assert (mesh.dp_rank, mesh.dp_size, mesh.is_output_rank) == (rank, len(sizes), True)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=0)
            assert torch.equal(found[name], results[0][0][name]), "replicas differ"
        for (_, stepped), (_, alone) in zip(by_step, metrics, strict=True):
            assert stepped["lr"] == alone["lr"]
            assert stepped["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-3)
    for step, (alone, _) in enumerate(metrics):
        parts = [by_step[step][0] for _, by_step, _ in results if by_step[step][0] is not None]
        assert sum(part.weight for part in parts) == alone.weight
        assert sum(part.total for part in parts) / alone.weight == pytest.approx(alone.value, abs=1e-4)


def _skip(rank, world_size, path):
    """One rank's gradients are not finite."""
    engine = make_engine(path, rank, world_size, **OPTIONS)
    before = weights_of(engine)
    engine.forward_backward(make_batch(1, 2, seed=rank), NOT_FINITE if rank == 1 else POLICY)
    stepped = engine.optim_step()
    same = all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    engine.shutdown()
    return stepped["skipped"], same


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(run_ranks):
    assert run_ranks(2, _skip, tiny_model()) == [(1.0, True), (1.0, True)]


def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_four(run_ranks, one_rank, tmp_path):
    path, weights, _ = one_rank
    saved = str(tmp_path / "step2")
    run_ranks(2, _train, path, [5, 3], 2, 0, None, saved)
    goes_on = [
        _train(0, 1, path, [8], STEPS - 2, 2, saved),
        *run_ranks(4, _train, path, [2, 2, 2, 2], STEPS - 2, 2, saved),
    ]
    for found, _, _ in goes_on:
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=0)


def _differing_weights(rank, world_size, paths):
    """Each rank's directory holds other weights: rank 0's must win."""
    engine = make_engine(paths[rank], rank, world_size)
    weights = weights_of(engine)
    engine.shutdown()
    return weights


def test_replicas_start_equal(run_ranks):
    paths = [tiny_model(seed=0), tiny_model(seed=1)]
    first, second = run_ranks(2, _differing_weights, paths)
    assert all(torch.equal(first[name], second[name]) for name in first)
    own = weights_of(make_engine(paths[0]))
    assert all(torch.equal(first[name], own[name]) for name in first)


def _failing_save(rank, world_size, path, into):
    engine = make_engine(path, rank, world_size)
    try:
        engine.save(into)
    except (EnginehouseError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.shutdown()


def test_a_save_that_fails_on_the_writing_rank_fails_on_all(run_ranks, tmp_path):
    (tmp_path / "file").touch()
    writer, other = run_ranks(2, _failing_save, tiny_model(), str(tmp_path / "file" / "checkpoint"))
    assert writer.startswith("CheckpointError: ")
    assert other == writer
    assert os.listdir(tmp_path) == ["file"]


def _two_roles(rank, world_size, path):
    """Two roles share a process: the second uses the first's group, and ending it leaves the group alone."""
    actor = make_engine(path, rank, world_size)
    reference = make_engine(path, rank, world_size)
    reference.shutdown()
    actor.forward_backward(make_batch(1, 2), POLICY)
    skipped = actor.optim_step()["skipped"]
    actor.shutdown()
    return skipped, torch.distributed.is_initialized()


def test_two_roles_of_a_process_share_its_group(run_ranks):
    assert run_ranks(2, _two_roles, tiny_model()) == [(0.0, False), (0.0, False)]
