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
# # Chapter 3: Dispatch, execute, collect
#
# A call on a worker group has three questions in it. **Dispatch**: which rank gets which arguments? **Execute**:
# which ranks run it? **Collect**: what becomes of their results? The worker's author answers them once, with
# `@register`. Whoever calls writes `group.method(...)`, as on a plain object.

# %%
import sys
import tempfile
from pathlib import Path

import torch

from enginehouse.controller import (
    Balanced,
    Dispatch,
    DispatchError,
    Execute,
    ResourcePool,
    Same,
    Worker,
    WorkerGroup,
    WorkerSpec,
    register,
    start_ray,
)
from enginehouse.data import Batch, Ragged
from enginehouse.plugin import DispatchMode, configure_plugins, plugins

cluster = start_ray(num_cpus=16)
pool = ResourcePool([4], max_colocate=2)

# %% [markdown]
# ## One to all, and rank zero
#
# `Dispatch.ONE_TO_ALL` sends the same arguments to every rank and gives back a list, one result a rank. It is the
# default, so plain `@register` means it too. `Dispatch.RANK_ZERO` calls rank 0 alone and gives back its one result.
# The constants are strings: `"one_to_all"` does as well.


# %%
class Accumulator(Worker):
    def __init__(self):
        self.value = self.context.rank

    @register(Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.value += x
        return self.value

    @register(Dispatch.RANK_ZERO)
    def first_value(self):
        return self.value


spec = WorkerSpec(Accumulator).options(distributed=False)  # as in chapter 2: no torch.distributed, starts faster
group = WorkerGroup(pool, spec, name="accumulator")
print(group.add(10))
print(group.first_value())
group.shutdown()


# %% [markdown]
# ## All to all, and your own mode
#
# `Dispatch.ALL_TO_ALL` scatters: each argument is a list with one entry for each rank. A value for everybody goes
# into `Same(...)`. The rule never depends on how long a list happens to be; a list of the wrong length is an error,
# not a broadcast.
#
# `execute=Execute.RANK_ZERO` runs a call on rank 0 only, with what the dispatch made for it; `collect="first"` gives
# its result instead of a list of one.
#
# Where no mode fits, write two functions. `dispatch_fn(group, *args, **kwargs)` returns one `(args, kwargs)` for each
# rank, None for one that is not called; `collect_fn(group, outputs)` gets one output for each rank, None for one that
# was not called, and makes one result of them. Here: every argument has two entries, distributed to the ranks in turn.


# %%
def two_to_all(group, *args, **kwargs):
    return [
        (tuple(value[rank % 2] for value in args), {name: value[rank % 2] for name, value in kwargs.items()})
        for rank in range(group.world_size)
    ]


def as_they_are(group, outputs):
    return outputs


class Adder(Worker):
    def __init__(self, start):
        self.start = start

    @register({"dispatch_fn": two_to_all, "collect_fn": as_they_are})
    def add_pairs(self, x, y):
        return self.start + x + y

    @register(Dispatch.ALL_TO_ALL)
    def add_own(self, x, y):
        return self.start + x + y

    @register(Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO, collect="first")
    def add_on_rank_zero(self, x, y):
        return self.start + x + y


adder = WorkerGroup(pool, WorkerSpec(Adder, 2).options(distributed=False), name="adder")
print("two to all:   ", adder.add_pairs(x=[1, 2], y=[5, 6]))
print("all to all:   ", adder.add_own([10, 20, 30, 40], y=Same(1)))
print("on rank zero: ", adder.add_on_rank_zero(1, 2))
try:
    adder.add_own([10, 20], y=Same(1))
except DispatchError as error:
    print("refused:      ", error)

# %% [markdown]
# ## A mode as a plugin
#
# A mode that others should have by name is a plugin: a module with one hook, and an *entry point* that says where the
# module is. The hook declares a record; the record names functions as `"module:function"`, so nothing is imported
# before it is used.
#
# Your package's `pyproject.toml` publishes it:
#
#     [project.entry-points.enginehouse]
#     pairs = "pairs_plugin"
#
# `pip install` turns those lines into a small file beside the installed package. To keep this chapter in one piece we
# write the module and that file into a folder by hand; it is what pip would have put there.

# %%
PLUGIN = '''
"""A dispatch mode: every argument holds two entries, distributed to the ranks in turn."""

from enginehouse.plugin import DispatchMode, hookimpl

enginehouse_protocol = "1.0"  # the version of the plugin contract this was written for


@hookimpl
def enginehouse_register_dispatch_modes(register):
    register(
        DispatchMode(
            name="pairs",
            summary="Each argument holds two entries, distributed to the ranks in turn",
            dispatch="pairs_plugin:two_to_all",
            collect="list",
        )
    )


def two_to_all(group, *args, **kwargs):
    return [
        (tuple(value[rank % 2] for value in args), {name: value[rank % 2] for name, value in kwargs.items()})
        for rank in range(group.world_size)
    ]
'''

folder = tempfile.TemporaryDirectory(prefix="pairs-")  # removed when this program ends
site = Path(folder.name)
(site / "pairs_plugin.py").write_text(PLUGIN)
info = site / "pairs_plugin-0.1.0.dist-info"
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs-plugin\nVersion: 0.1.0\n")
(info / "entry_points.txt").write_text("[enginehouse]\npairs = pairs_plugin\n")
sys.path.append(str(site))

# %% [markdown]
# A process looks for plugins once, when it first needs one, and this process has done so already. `configure_plugins`
# says which plugins to use, and looks again. (In a run you do not need it: what is installed is found. `enginehouse
# plugins list` shows it.)

# %%
configure_plugins(enabled=["pairs"])
for mode in plugins().all(DispatchMode):
    print(f"{mode.name:11} {mode.summary}")


# %% [markdown]
# From here on the name is as good as a built-in one:


# %%
class PairAdder(Worker):
    def __init__(self, start):
        self.start = start

    @register("pairs")
    def add(self, x, y):
        return self.start + x + y


spec = WorkerSpec(PairAdder, 2).options(distributed=False)
with WorkerGroup(pool, spec, name="pair_adder") as pair_adder:
    print("by the plugin's mode:", pair_adder.add(x=[1, 2], y=[5, 6]))
adder.shutdown()


# %% [markdown]
# ## Data parallel: batches
#
# `Dispatch.DP` is the mode that training uses. A `Batch` is a table of named columns; a *ragged* column holds one
# token sequence a row, each as long as it is, without padding. A `dp` call cuts each batch among its arguments over
# the ranks, and hands everything else to all of them. Without a batch among its arguments it cuts nothing: every rank
# gets the arguments as they are.
#
# Seven rows over four ranks are fine. So are three: one rank gets no rows then, and runs on an empty batch. An empty
# list does not show what it would hold, so give `Ragged.from_list` a `dtype`.
#
# Two roles of a small pipeline: a writer turns prompts into responses, a scorer gives each response a reward.


# %%
class Writer(Worker):
    @register(Dispatch.DP)
    def write(self, batch: Batch) -> Batch:
        """Answer a prompt with its tokens in reverse, twice."""
        twice = [torch.cat([prompt.flip(0)] * 2) for prompt in batch.ragged("prompt")]
        responses = Ragged.from_list(twice, dtype=torch.int64)
        return batch.with_columns(response=responses, length=responses.lengths)

    @register(Dispatch.DP, blocking=False)
    def write_later(self, batch: Batch) -> Batch:
        return self.write(batch)


class Scorer(Worker):
    @register(Dispatch.DP)
    def score(self, batch: Batch) -> Batch:
        rewards = torch.tensor([float(row.sum()) for row in batch.ragged("response")])
        return batch.select(["response"]).with_columns(reward=rewards)

    @register(Dispatch.DP, collect="list")
    def tokens(self, batch: Batch) -> int:
        return int(batch.lengths("response").sum())

    def rank_and_process(self):
        return self.context.rank, self.context.world_size


prompts = Batch({"prompt": Ragged.from_list([torch.arange(1, n + 1) for n in (1, 2, 3, 4, 5, 6, 7)])})
print(prompts)

writer = WorkerGroup(pool, WorkerSpec(Writer).options(distributed=False), name="writer")
scorer = WorkerGroup(ResourcePool([2]), WorkerSpec(Scorer).options(distributed=False), name="scorer")
print("rank 1 of the scorer says:", scorer.execute_rank(1, "rank_and_process"))

# %% [markdown]
# ## A distributed batch
#
# What comes back from `write` is a `DistributedBatch`. The four ranks' rows stay in shared memory on the nodes where
# they were made; this program holds row counts, lengths, and columns of one number a row. That is enough to plan
# with, and small. Ask for one column by `column(name)`, not `[name]`; `fetch()` brings the rest.
#
# Chapter 1 showed an array of the store that was read-only. Torch cannot make tensors so. Never write into a batch's
# column in place: everybody who has the batch would see it. `batch.clone()` first.

# %%
written = writer.write(prompts)
print(written)
print("lengths, known here:    ", written.lengths("response").tolist())
print("one column, known here: ", written.column("length").tolist())

# %% [markdown]
# Given to another group, the rows travel from worker to worker. The writer has four ranks and the scorer two, so the
# rows are cut anew on the way; the controller only says which rows go where.

# %%
scored = scorer.score(written)
print("rewards:", scored.column("reward").tolist())
best = scored.take(scored.column("reward").topk(2).indices)  # plans, moves nothing
print("the two best, fetched:", [row.tolist() for row in best.fetch(["response"]).ragged("response")])

# %% [markdown]
# Equal numbers of rows can be very unequal work. `Balanced` deals rows by tokens instead. A result with one row for
# each row given is put back into your order. `collect="list"`, as for `tokens`, and collects of your own get what the
# ranks gave, as they gave it.

# %%
print("tokens a rank, cut by rows:   ", scorer.tokens(written))
print("tokens a rank, cut by tokens: ", scorer.tokens(Balanced(written, by="response")))
same = scorer.score(Balanced(written, by="response"))
print("same rewards in the same order:", same.column("reward").tolist() == scored.column("reward").tolist())

# %% [markdown]
# ## Futures
#
# A method registered with `blocking=False` returns a future at once; so does any method called as
# `group.call("method", ..., blocking=False)`. Two groups then work at the same time, and a future may be an argument
# of the next call.

# %%
future = writer.write_later(prompts)
print(type(future).__name__, "while the writer works")
print("rewards through a future:", scorer.score(future).column("reward").tolist())

# %% [markdown]
# ## The end
#
# You can now read enginehouse's training loop: `rollout.generate(...)`, `reference.forward(...)`, `actor.update(...)`
# are calls like these. Chapter 4 puts a model that is cut over four ranks behind one.

# %%
writer.shutdown()
scorer.shutdown()
cluster.shutdown()
print("all gone")
