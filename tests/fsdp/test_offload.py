"""State that is put away is freed where it lay, comes back bit for bit, and is not used in between.

On the host of these tests a move would give the very same memory: here it is a copy, as to and from a GPU.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from fsdp_train_cases import OPTIONS, make_sharded
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, make_engine, weights_of

from enginehouse.engines.train import Outputs
from enginehouse.errors import EnginehouseError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

TAGS = ("params", "grads", "optimizer")


@contextlib.contextmanager
def moves_as_copies():
    from enginehouse_fsdp import offloading

    moved = offloading.moved
    offloading.moved = lambda tensor, device: tensor.clone()
    try:
        yield
    finally:
        offloading.moved = moved


def _away_at_times(rank, world_size, path, head, dtype, options, tags):
    """Weights after each of three steps of two batches; around the first step `tags` are put away and brought back.

    Only around the first: where FSDP then gathers from other memory than the optimizer updates, the third step differs.
    """

    def there_and_back():
        if weights:
            return
        for tag in tags:
            engine.offload((tag,))
        engine.onload(tags)

    loss = POLICY if head == "causal_lm" else SQUARED_ERROR
    batches = [make_batch(6, 3, seed).split(world_size // options.get("tensor_parallel", 1)) for seed in range(2)]
    weights = []
    with moves_as_copies():
        engine = make_sharded(path, rank, world_size, head, dtype, **options)
        for _ in range(3):
            for shards in batches:
                engine.forward_backward(shards[engine.mesh.dp_rank], loss)
                there_and_back()
            engine.optim_step()
            there_and_back()
            weights.append(weights_of(engine))
        engine.shutdown()
    return weights


def _oracle(path, head):
    engine = make_engine(path, head=head, **OPTIONS)
    loss = POLICY if head == "causal_lm" else SQUARED_ERROR
    weights = []
    for _ in range(3):
        for seed in range(2):
            engine.forward_backward(make_batch(6, 3, seed), loss)
        engine.optim_step()
        weights.append(weights_of(engine))
    engine.shutdown()
    return weights


@pytest.mark.parametrize(
    ("world_size", "tied", "head", "dtype", "options"),
    [
        # Of 32 rows three ranks hold 11, 11 and 10: the last one's shards lie in memory that is padded.
        (3, True, "causal_lm", "float32", {}),
        (3, True, "value", "float32", {}),
        (3, False, "causal_lm", "float32", {"activation_checkpointing": True, "reshard_after_forward": False}),
        (3, False, "causal_lm", "bfloat16", {"lora": {"rank": 4}}),
        (3, True, "causal_lm", "float32", {"cpu_offload": True}),
        (4, True, "causal_lm", "float32", {"replicas": 2}),
        (4, True, "causal_lm", "float32", {"tensor_parallel": 2}),
    ],
    ids=str,
)
def test_training_takes_the_same_steps_when_state_is_put_away_between(
    run_ranks, world_size, tied, head, dtype, options
):
    path = tiny_model(tied=tied)
    arguments = (world_size, _away_at_times, path, head, dtype, options)
    expected = run_ranks(*arguments, ())
    for tags in [TAGS, ("params",), ("optimizer", "grads")]:
        for rank, (found, wanted) in enumerate(zip(run_ranks(*arguments, tags), expected, strict=True)):
            for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
                off = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
                assert not off, f"{tags}, rank {rank}, step {step}"
    if dtype == "float32":
        for ours, theirs in zip(expected[0], _oracle(path, head), strict=True):
            for name, weight in theirs.items():
                torch.testing.assert_close(ours[name], weight, atol=1e-4, rtol=0)


def _memory(engine):
    """Weak references to all memory that parameters, gradients and moments lie in, by tag."""
    from torch.multiprocessing.reductions import StorageWeakRef

    def of(tensors):
        return [StorageWeakRef(t.to_local().untyped_storage()) for t in tensors if t.to_local().numel()]

    parameters = list(engine._model.parameters())
    return {
        "params": of(parameters),
        "grads": of(p.grad for p in parameters if p.grad is not None),
        "optimizer": of(engine._optimizer.state().values()),
    }


def _freed(rank, world_size, path, tags):
    """By tag, how many pieces of memory there were and how many of them are still held once `tags` are put away."""
    with moves_as_copies():
        shard = make_batch(4, 3).split(world_size)[rank]
        engine = make_sharded(path, rank, world_size)
        engine.forward_backward(shard, POLICY)
        engine.optim_step()
        engine.forward_backward(shard, POLICY)
        memory = _memory(engine)
        for tag in tags:
            engine.offload((tag,))
        held = {tag: (len(refs), sum(not ref.expired() for ref in refs)) for tag, refs in memory.items()}
        engine.shutdown()
    return held


@pytest.mark.parametrize("tags", [TAGS, ("*",), ("params",), ("grads",), ("optimizer",)], ids=str)
def test_memory_of_what_is_put_away_is_freed(run_ranks, tags):
    for held in run_ranks(3, _freed, tiny_model(), tags):
        for tag in TAGS if "*" in tags else tags:
            pieces, still = held[tag]
            assert pieces > 0
            assert still == 0, tag


def _step(engine, rank, world_size):
    engine.forward_backward(make_batch(4, 3).split(world_size)[rank], POLICY)
    engine.optim_step()
    return weights_of(engine)


def _saved_while_away(rank, world_size, path, directory):
    """Weights after a second step: as they are, and after loading what was saved while all was put away."""
    with moves_as_copies():
        engine = make_sharded(path, rank, world_size)
        _step(engine, rank, world_size)
        engine.offload()
        engine.save(directory)
        engine.onload()
        weights = _step(engine, rank, world_size)
        engine.load(directory)
        again = _step(engine, rank, world_size)
        engine.shutdown()
    return weights, again


def _loaded_while_away(rank, world_size, path, directory):
    """Weights after the step that follows on loading into an engine that has put away all, and never took a step."""
    with moves_as_copies():
        engine = make_sharded(path, rank, world_size)
        engine.offload()
        engine.load(directory)
        engine.onload()
        weights = _step(engine, rank, world_size)
        engine.shutdown()
    return weights


def test_a_checkpoint_is_written_and_loaded_while_all_is_put_away(run_ranks, tmp_path):
    path, directory = tiny_model(), str(tmp_path / "saved")
    saved = run_ranks(3, _saved_while_away, path, directory)
    loaded = run_ranks(3, _loaded_while_away, path, directory)
    for (wanted, again), elsewhere in zip(saved, loaded, strict=True):
        for name, weight in wanted.items():
            assert torch.equal(again[name], weight)
            assert torch.equal(elsewhere[name], weight)


def test_state_that_is_away_is_not_used(tmp_path):
    engine = make_sharded(tiny_model())
    batch = make_batch(1, 2)
    uses = {
        "params": [
            lambda: engine.forward(batch, Outputs()),
            engine.weight_source,
            lambda: engine.export_hf(str(tmp_path / "exported")),
        ],
        "grads": [lambda: engine.forward_backward(batch, POLICY)],
        "optimizer": [engine.optim_step],
    }
    for tag, calls in uses.items():
        engine.offload((tag,))
        engine.offload((tag,))
        for call in calls:
            with pytest.raises(EnginehouseError, match=rf"{tag} are offloaded: call onload\(\['{tag}'\]\)"):
                call()
        engine.onload((tag,))
        engine.onload((tag,))
        for call in calls:
            call()
    with pytest.raises(EnginehouseError, match="nothing called 'weights' can be offloaded; there are params, grads"):
        engine.offload(("weights",))
    engine.shutdown()


def _on_gpu(rank, world_size, path):
    """Bytes held at first, after each tag was put away, and at the end; and weights with and without that."""

    def trained(away):
        engine = make_sharded(path, rank, world_size, device="cuda")
        for _ in range(2):
            engine.forward_backward(make_batch(4, 2), POLICY)
            engine.optim_step()
        engine.forward_backward(make_batch(4, 2), POLICY)
        held = [torch.cuda.memory_allocated()]
        for tag in away:
            engine.offload((tag,))
            held.append(torch.cuda.memory_allocated())
        engine.onload()
        held.append(torch.cuda.memory_allocated())
        size = sum(parameter.numel() * 4 for parameter in engine._model.parameters())
        engine.optim_step()
        weights = {name: weight.cpu() for name, weight in weights_of(engine).items()}
        engine.shutdown()
        return size, held, weights

    return trained(()), trained(("optimizer", "grads", "params"))


@pytest.mark.gpu
def test_memory_of_the_gpu_goes_down_and_comes_back(run_ranks):
    ((_, _, wanted), (size, held, weights)) = run_ranks(1, _on_gpu, tiny_model(hidden=512))[0]
    full, *left, back = held
    for before, after, models in zip([full, *left], left, (2, 1, 1), strict=False):
        assert after <= before - 0.9 * models * size
    assert back == pytest.approx(full, rel=0.05)
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0)
