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
# # Chapter 5: Megatron-core behind a method call
#
# Chapter 4 cut a Llama MLP by hand. Megatron-core has the cut layers ready, and the process groups they talk in:
# tensor, pipeline, context and data parallel. This chapter puts its `MLP` on four ranks, calls it as Megatron users
# call their workers, with **a list of one entry for each data-parallel rank**, and compares it with the layer in one
# piece.
#
# You need the Megatron plugin and its engine; `make install` brings both. From a checkout:
# `pip install ".[megatron]" "megatron-core>=0.16.1,<0.17"`. No GPU is needed: Megatron-core is written for GPUs, and
# the plugin's module `on_cpu` stands in for what it misses on a CPU. Where there is a GPU, it does nothing.
#
# Those who know verl's tutorial know this layer with `hidden_size=4096`. Ours has 256, so that it runs anywhere.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from enginehouse.controller import DispatchError, ResourcePool, Worker, WorkerSpec, register, start_ray
from enginehouse.engines.mesh import Mesh
from enginehouse_megatron.dispatch import MegatronWorkerGroup

HIDDEN, INTERMEDIATE, RANKS = 256, 688, 4

# %% [markdown]
# ## The layer in one piece
#
# As in chapter 4: weights come from a seed, so that every process can make the same ones.


# %%
def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    return {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}


def llama_mlp(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])


# %% [markdown]
# ## The layer of Megatron-core
#
# Three things happen in a worker of Megatron-core, here as anywhere:
#
# 1. `initialize_model_parallel` makes the process groups, from the sizes of the axes.
# 2. The module is built. `ColumnParallelLinear` and `RowParallelLinear` know their group, and hold this rank's part.
#    Of a gated layer, Megatron-core keeps `gate` and `up` in one matrix, `linear_fc1`: this rank's part of the one,
#    then its part of the other.
# 3. `self.mesh` tells the controller where the rank stands. Megatron-core counts `tp` fastest and `pp` slowest, so
#    that is the order of the axes, outermost first. On the last pipeline stage lies the output.
#
# With more than one pipeline stage, each has a layer of its own, and hands what it computed to the next.
#
# Heavy imports stand in `__init__`: the controller never needs them.


# %%
class MegatronMLP(Worker):
    def __init__(self, tp: int, pp: int):
        from enginehouse_megatron import on_cpu  # before Megatron-core, which it keeps quiet

        # isort: split
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        context = self.context
        dist.init_process_group("nccl" if context.device == "cuda" else "gloo")
        on_cpu.adapt(context.device)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        sizes = {"pp": pp, "dp": context.world_size // (tp * pp), "cp": 1, "tp": tp}
        self.mesh = Mesh.of(sizes, context.rank, output={"pp": pp - 1})
        assert self.mesh.dp_rank == parallel_state.get_data_parallel_rank(), "both count ranks alike"

        config = TransformerConfig(
            num_layers=pp,
            hidden_size=HIDDEN,
            ffn_hidden_size=INTERMEDIATE,
            num_attention_heads=8,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            tensor_model_parallel_size=tp,
            perform_initialization=False,  # `load` brings the weights
            use_cpu_initialization=context.device == "cpu",
        )
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        group = parallel_state.get_tensor_model_parallel_group()
        self.layer = MLP(config, parts, ffn_hidden_size=INTERMEDIATE, tp_group=group)

    @register
    def load(self) -> None:
        tp, part, stage = self.mesh.size("tp"), self.mesh.coordinate("tp"), self.mesh.coordinate("pp")
        whole = make_weights(seed=stage)
        gate, up = (whole[name].chunk(tp, dim=0)[part] for name in ("gate", "up"))
        with torch.no_grad():
            self.layer.linear_fc1.weight.copy_(torch.cat([gate, up]))
            self.layer.linear_fc2.weight.copy_(whole["down"].chunk(tp, dim=1)[part])

    @register
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.layer.named_parameters()}

    @register("megatron_compute")
    def run_layer(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core import parallel_state

        x = x.to(self.context.device)
        if not parallel_state.is_pipeline_first_stage():
            x = torch.empty_like(x)
            dist.recv(x, parallel_state.get_pipeline_model_parallel_prev_rank())
        with torch.no_grad():
            y, _ = self.layer(x)  # the second is a bias, which Llama has none of
        if not parallel_state.is_pipeline_last_stage():
            dist.send(y, parallel_state.get_pipeline_model_parallel_next_rank())
        return y.cpu()

    def shutdown(self) -> None:
        dist.destroy_process_group()


# %% [markdown]
# ## Four ranks: two replicas, each cut in two
#
# A `MegatronWorkerGroup` is a `WorkerGroup` that knows Megatron's axes by name.

# %%
cluster = start_ray()
device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
pool = ResourcePool([RANKS], gpus_per_process=1 if device == "cuda" else 0)

mlp = MegatronWorkerGroup(pool, WorkerSpec(MegatronMLP, tp=2, pp=1), name="mlp", device=device)
print("on", device)
print(f"{mlp.world_size} ranks: tp {mlp.tp_size}, pp {mlp.pp_size}, dp {mlp.dp_size}, cp {mlp.cp_size}")


def describe(group: MegatronWorkerGroup) -> None:
    for rank, shapes in enumerate(group.shapes()):
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        said = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        print(f"rank {rank}: {count} parameters: {said}")
    print(f"in one piece a layer has {3 * HIDDEN * INTERMEDIATE}")


mlp.load()
describe(mlp)

# %% [markdown]
# Each rank holds half of the layer. Ranks 0 and 1 are one replica, ranks 2 and 3 the other, and both hold the same.
#
# ## A list in, a list out
#
# `megatron_compute` takes one entry of each argument for each data-parallel rank. All ranks of a replica get the entry
# of their replica; one of them answers: the first that splits matrices, on the last pipeline stage. So a list of
# `dp_size` results comes back. The tensors are `(sequence, batch, hidden)`, as everywhere in Megatron-core.

# %%
generator = torch.Generator().manual_seed(100)
data = [torch.randn(5, 2, HIDDEN, generator=generator) for _ in range(mlp.dp_size)]
outputs = mlp.run_layer(data)

print(len(outputs), "results, each", tuple(outputs[0].shape))
for entry, output in zip(data, outputs, strict=True):
    expected = llama_mlp(entry, make_weights(seed=0))
    print("largest difference from the whole layer:", f"{(output - expected).abs().max():.1e}")
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

# %% [markdown]
# A list of another length is refused before anything is sent. A value that everybody gets is `Same(value)`.

# %%
try:
    mlp.run_layer([data[0]])
except DispatchError as error:
    print(error)

# %% [markdown]
# ## The same call on a pipeline
#
# Now one replica of two stages: the ranks 0 and 1 have the first layer, 2 and 3 the second. The data-parallel size is
# 1, so the list has one entry, and the answer comes from rank 2, the first of the last stage.

# %%
mlp.shutdown()
mlp = MegatronWorkerGroup(pool, WorkerSpec(MegatronMLP, tp=2, pp=2), name="mlp", device=device)
print(f"{mlp.world_size} ranks: tp {mlp.tp_size}, pp {mlp.pp_size}, dp {mlp.dp_size}, cp {mlp.cp_size}")
mlp.load()

(output,) = mlp.run_layer([data[0]])
expected = llama_mlp(llama_mlp(data[0], make_weights(seed=0)), make_weights(seed=1))
print("largest difference from both whole layers:", f"{(output - expected).abs().max():.1e}")
torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## What to take home
#
# - `megatron_compute` is a mode like those of chapter 3; it comes from a plugin, as yours may.
# - A worker that sets `self.mesh` may use `Dispatch.DP` on the same mesh as well: then the controller cuts a batch, and
#   the caller need not know `dp_size`. Roles of enginehouse are called so.
# - `MegatronEngine` is what such a worker holds in a run: a whole model, packed sequences, schedules that keep every
#   stage busy, the distributed optimizer. `enginehouse train ... actor.engine.backend=megatron` runs it.

# %%
mlp.shutdown()
pool.shutdown()
cluster.shutdown()
print("all gone")
