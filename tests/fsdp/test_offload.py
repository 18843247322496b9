"""State that is put away is freed where it lay, comes back bit for bit, and is not used in between."""

import psutil
import pytest
import torch
from fsdp_train_cases import OPTIONS, make_sharded
from torch_train_cases import POLICY, SQUARED_ERROR, make_batch, make_engine, weights_of

from enginehouse.engines.train import Outputs
from enginehouse.errors import EnginehouseError
from enginehouse_testing.models import tiny_model

pytestmark = pytest.mark.slow

TAGS = ("params", "grads", "optimizer")


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


def _freed(rank, world_size, path, tags):
    """Bytes of the model's shards here, and by how much less memory is resident once `tags` are put away."""
    shard = make_batch(4, 3).split(world_size)[rank]
    engine = make_sharded(path, rank, world_size)
    engine.forward_backward(shard, POLICY)
    engine.optim_step()
    engine.forward_backward(shard, POLICY)
    size = sum(parameter.to_local().numel() * 4 for parameter in engine._model.parameters())
    before = psutil.Process().memory_info().rss
    for tag in tags:
        engine.offload((tag,))
    freed = before - psutil.Process().memory_info().rss
    engine.shutdown()
    return size, freed


@pytest.mark.parametrize(
    ("tags", "copies"), [(("*",), 4), (("params",), 1), (("grads",), 1), (("optimizer",), 2)], ids=str
)
def test_memory_of_what_is_put_away_is_given_back_to_the_system(run_ranks, tags, copies):
    for size, freed in run_ranks(2, _freed, tiny_model(hidden=1024), tags):
        assert size > 40 * 2**20
        assert freed >= 0.9 * copies * size


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
        "optimizer": [engine.optim_step, lambda: engine.save(str(tmp_path / "saved"))],
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
    with pytest.raises(EnginehouseError, match="unknown tag 'weights': state is offloaded by the tags params, grads"):
        engine.offload(("weights",))
    engine.shutdown()


def _on_gpu(rank, world_size, path):
    """Bytes held at first, after each tag was put away, and at the end; and weights with and without that."""

    def trained(away):
        engine = make_sharded(path, rank, world_size, device="cuda", attention="sdpa")  # others compile kernels
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
