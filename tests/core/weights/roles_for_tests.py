"""Real torch engines in worker groups, small, for the tests of roles and of weight sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, colocate
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec, Outputs
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.weights.sync import WeightSync
from enginehouse_rl.steps.minibatches import assign_minibatches
from enginehouse_testing.models import tiny_model

PROBE = [[3, 4, 5, 6, 7], [8, 9, 10]]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SMALL_BUCKETS = 4096  # bytes: several buckets even for a tiny model
SECONDS = 30.0

PROMPTS = Batch(
    {
        "prompt_ids": Ragged.from_list([[3, 4, 5], [6, 7], [8], [9, 10, 11, 12], [13]]),
        "prompt_index": torch.arange(5),
    }
)
DEMONSTRATIONS = Batch(
    {
        "input_ids": Ragged.from_list([[3, 4, 5, 6, 7], [8, 9], [10, 11, 12], [5, 5, 5, 5]]),
        "loss_mask": Ragged.from_list(
            [[False, False, True, True, True], [False, True], [False, True, True], [False] + 3 * [True]]
        ),
    }
)


def dealt(minibatches: int, epochs: int = 1, seed: int = 0, batch: Batch = DEMONSTRATIONS) -> Batch:
    """`batch` with its rows dealt to mini-batches."""
    return batch.with_columns(minibatch=assign_minibatches(len(batch), minibatches, epochs, seed))


def logprobs(actor):
    return actor.forward(DEMONSTRATIONS.select(["input_ids"]), Outputs())["logprobs"].values


@dataclass
class House:
    """The groups of a test."""

    actor: WorkerGroup
    rollout: WorkerGroup
    transport: str
    syncs: list[WeightSync] = field(default_factory=list)

    def connect(self, **options) -> WeightSync:
        """A connected weight sync."""
        given = {"bucket_bytes": SMALL_BUCKETS, "timeout": SECONDS, "probe": PROBE} | options
        sync = WeightSync(self.actor, RolloutFleet.from_group(self.rollout), self.transport, **given)
        self.syncs.append(sync)
        sync.connect()
        return sync

    def train(self) -> None:
        """Change the actor's weights."""
        self.actor.update(DEMONSTRATIONS, LossSpec("supervised"))

    def versions(self) -> list[int]:
        """What each replica says it serves."""
        return [state.version for state in self.rollout.weight_state()]

    def answers(self) -> list[list[int]]:
        """Greedy samples: what the replicas compute with."""
        samples = self.rollout.generate(PROMPTS, GREEDY)
        return [samples["input_ids"][row].tolist() for row in range(len(samples))]


@contextmanager
def open_house(
    transport: str,
    *,
    train=TrainWorker,
    rollout=RolloutWorker,
    launcher: str = "inline",
    processes: int = 1,
    replicas: int | None = None,
    env: dict[str, str] | None = None,
    lr: float = 0.05,
    dtype: str = "float32",
) -> Iterator[House]:
    """Start an actor and a rollout group; colocated, or with `replicas` in processes of their own."""
    model = ModelSpec(tiny_model(), dtype=dtype)
    specs = {
        "actor": WorkerSpec(train, "torch", model, {"lr": lr}).options(env=env),
        "rollout": WorkerSpec(rollout, "torch", model, {}).options(env=env),
    }
    options = {"launcher": launcher, "timeout": 120.0, "start_timeout": 120.0}
    if replicas is None:
        pools = [ResourcePool([processes])]
        groups = colocate(pools[0], specs, **options)
    else:
        pools = [ResourcePool([processes]), ResourcePool([replicas])]
        groups = {
            name: WorkerGroup(pool, spec, name=name, **options) for (name, spec), pool in zip(specs.items(), pools)
        }
    house = House(groups["actor"], groups["rollout"], transport)
    try:
        house.rollout.launch()
        yield house
    finally:
        for sync in house.syncs:
            sync.close()
        for group in groups.values():
            group.shutdown()
        for pool in pools:
            pool.shutdown()
