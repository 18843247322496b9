"""State that is put away is freed where it lay, comes back bit for bit, and is not used in between."""

import psutil
import pytest
import torch
from megatron_train_cases import weights_after_a_step
from rank_processes import rank_processes

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.storages import give_back_freed_memory
from enginehouse.engines.train import Outputs
from enginehouse.errors import EnginehouseError
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.models import tiny_model
from enginehouse_testing.problem import POLICY, batch

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture(scope="module")
def run_ranks():
    with rank_processes("enginehouse_megatron.engine") as run:
        yield run


def _engine(path, rank=0, world_size=1, dtype="float32", device="cpu", **options):
    from enginehouse_megatron.engine import MegatronEngine
    from enginehouse_megatron.options import MegatronOptions

    engine = MegatronEngine()
    context = ProcessContext("actor", rank, world_size, rank, device=device)
    engine.setup(ModelSpec(path=path, dtype=dtype), MegatronOptions(**TRAINING, **options), context)
    return engine


def _there_and_back(rank, world_size, path, dtype, away, device="cpu"):
    """What this rank holds in bytes, by how much less memory it has for each tag that is put away, and its weights two
    steps later."""

    def held():
        return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss

    engine = _engine(path, rank, world_size, dtype, device)
    weights_after_a_step(engine)
    size = sum(parameter.numel() for parameter in engine._models[0].parameters())
    engine.forward_backward(batch().split(world_size)[rank], POLICY)
    freed = {}
    give_back_freed_memory()  # what the steps left
    for tag in away:
        before = held()
        engine.offload((tag,))
        freed[tag] = before - held()
    engine.onload()
    engine.optim_step()
    weights = weights_after_a_step(engine)
    engine.shutdown()
    return size, freed, weights


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_what_is_put_away_is_given_back_to_the_system_and_training_goes_on_alike(run_ranks, world_size, dtype):
    arguments = (world_size, _there_and_back, tiny_model(hidden=1024), dtype)
    bytes_each = {  # of a weight; ranks share the optimizer's out
        "params": 4 if dtype == "float32" else 2,
        "grads": 4,
        "optimizer": (8 if dtype == "float32" else 12) / world_size,
    }
    expected = run_ranks(*arguments, ())
    for (size, freed, weights), (_, _, wanted) in zip(
        run_ranks(*arguments, ("optimizer", "grads", "params")), expected, strict=True
    ):
        assert size > 20 * MIB
        for tag, each in bytes_each.items():
            assert freed[tag] >= 0.9 * each * size, tag
        assert not [name for name, weight in wanted.items() if not torch.equal(weights[name], weight)]


def test_state_that_is_away_is_not_used(tmp_path):
    engine = _engine(tiny_model())
    uses = {
        "params": [
            lambda: engine.forward(batch(), Outputs()),
            engine.weight_source,
            lambda: engine.export_hf(str(tmp_path / "exported")),
        ],
        "grads": [lambda: engine.forward_backward(batch(), POLICY)],
        "optimizer": [engine.optim_step, lambda: engine.save(str(tmp_path / "saved"))],
    }
    for tag, calls in uses.items():
        engine.offload((tag,))
        for call in calls:
            with pytest.raises(EnginehouseError, match=rf"{tag} are offloaded: call onload\(\['{tag}'\]\)"):
                call()
        engine.onload((tag,))
        for call in calls:
            call()
    engine.shutdown()


@pytest.mark.gpu
def test_memory_of_the_gpu_goes_down_and_training_goes_on_alike(run_ranks):
    arguments = (1, _there_and_back, tiny_model(hidden=512), "float32")
    ((_, _, wanted),) = run_ranks(*arguments, (), "cuda")
    ((size, freed, weights),) = run_ranks(*arguments, ("optimizer", "grads", "params"), "cuda")
    for tag, each in {"params": 4, "grads": 4, "optimizer": 8}.items():
        assert freed[tag] >= 0.9 * each * size, tag
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0)
