# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 4: Model parallelism behind a method call
#
# A layer may be too large for one device. *Tensor parallelism* cuts its matrices over several ranks, each of which
# computes a part for the **same** rows. Whoever calls the layer should not have to know. This chapter puts a
# tensor-parallel Llama MLP behind `mlp.forward(batch)`, on four ranks, in plain `torch.distributed`, and compares it
# with the layer in one piece.
#
# A Llama MLP has three matrices: `down( silu(gate(x)) * up(x) )`.
#
# - `gate` and `up` are cut by **columns** of their output: each rank computes its part of the wide middle, and needs
#   nothing from the others.
# - `down` is cut by **rows** of its input: each rank turns its part of the middle into a *partial sum* of the whole
#   output.
# - One `all_reduce` adds the partial sums up. That is all the talking there is.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from enginehouse.controller import Dispatch, ResourcePool, Worker, WorkerGroup, WorkerSpec, register, start_ray
from enginehouse.data import Batch
from enginehouse.engines.mesh import Mesh

HIDDEN, INTERMEDIATE, RANKS = 64, 192, 4

# %% [markdown]
# ## The layer in one piece
#
# Weights come from a seed, so that every process can make the same ones. `nn.Linear` stores them as `(out, in)`; so
# do we.


# %%
def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}


def llama_mlp(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])


# %% [markdown]
# ## The layer in parts
#
# The worker is SPMD: every rank runs this same code and knows its place. Two lines connect it to the rest:
#
# - The group has set `MASTER_ADDR`, `RANK` and their kin before `__init__` runs, so `init_process_group` needs no
#   address.
# - `self.mesh` says how the ranks lie: `dp` replicas of the layer, each cut over `tp` ranks. `Dispatch.DP` reads it.
#   All ranks of a replica get the same rows, and one of them, the *output rank*, answers for the replica.
#
# On CPU, processes talk by `gloo`; on CUDA by `nccl`.


# %%
class ParallelMLP(Worker):
    def __init__(self, seed: int, dp: int, tp: int):
        rank, device = self.context.rank, self.context.device
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.mesh = Mesh.of({"dp": dp, "tp": tp}, rank)

        # every rank must take part in making every process group, also those it is not in
        replicas = [dist.new_group(list(range(first, first + tp))) for first in range(0, dp * tp, tp)]
        self.tp_group = replicas[self.mesh.dp_rank]

        whole, part = make_weights(seed), self.mesh.coordinate("tp")
        self.gate = whole["gate"].chunk(tp, dim=0)[part].to(device)  # columns of the output
        self.up = whole["up"].chunk(tp, dim=0)[part].to(device)
        self.down = whole["down"].chunk(tp, dim=1)[part].to(device)  # rows of the input
        self.rows_seen: list[int] = []

    @register(Dispatch.DP)
    def forward(self, batch: Batch) -> Batch:
        self.rows_seen = batch.tensor("row").tolist()
        x = batch.tensor("x").to(self.gate.device)
        partial = F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)
        dist.all_reduce(partial, group=self.tp_group)
        return Batch({"y": partial.cpu()})

    @register
    def describe(self) -> str:
        shapes = f"gate {tuple(self.gate.shape)}, up {tuple(self.up.shape)}, down {tuple(self.down.shape)}"
        return f"dp {self.mesh.coordinate('dp')}, tp {self.mesh.coordinate('tp')}: {shapes}, rows {self.rows_seen}"

    def shutdown(self) -> None:
        dist.destroy_process_group()


# %% [markdown]
# ## Four ranks, one layer
#
# With four GPUs in this machine each rank takes one. Without, the same code runs on CPU.

# %%
cluster = start_ray()
device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
pool = ResourcePool([RANKS], gpus_per_process=1 if device == "cuda" else 0)

x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
batch = Batch({"x": x, "row": torch.arange(6)})
expected = llama_mlp(x, make_weights(seed=0))

mlp = WorkerGroup(pool, WorkerSpec(ParallelMLP, seed=0, dp=1, tp=4), name="mlp", device=device)
y = mlp.forward(batch).fetch().tensor("y")

print("on", device)
print("largest difference from the whole layer:", f"{(y - expected).abs().max():.1e}")
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
print("\n".join(mlp.describe()))

# %% [markdown]
# Each rank holds a quarter of every matrix, and every rank saw all six rows. The batch was put into shared memory
# once, and all four read it there. One result came back, from one rank.
#
# The difference is not zero: four partial sums are added in another order than one long sum, and floats mind.
#
# ## The same call on another layout
#
# Now two replicas, each cut in two. The worker class and the call do not change; the mesh does. Each replica gets
# three of the six rows, both of its ranks the same three.

# %%
mlp.shutdown()
mlp = WorkerGroup(pool, WorkerSpec(ParallelMLP, seed=0, dp=2, tp=2), name="mlp", device=device)
y = mlp.forward(batch).fetch().tensor("y")

print("largest difference from the whole layer:", f"{(y - expected).abs().max():.1e}")
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
print("\n".join(mlp.describe()))

# %% [markdown]
# ## What to take home
#
# - **Between** roles there is one controller: this program. It reads like a single process.
# - **Inside** a role there is SPMD: every rank runs the same code, and `torch.distributed` carries what ranks say to
#   each other.
# - The mesh is the seam. Megatron, FSDP or thirty lines of your own: what the controller needs to know is who gets
#   which rows, and who answers.
#
# A training engine of enginehouse is such a worker, with `forward_backward` and `optim_step` for methods and a real
# model inside. `docs/architecture.md` is the map from here.

# %%
mlp.shutdown()
pool.shutdown()
cluster.shutdown()
print("all gone")
