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
# # Chapter 1: Ray in a quarter of an hour
#
# Training a language model by reinforcement learning takes many processes: some train, some generate, some score. Ray
# starts such processes on one machine or on hundreds, carries calls and data between them, and tells you when one
# dies. enginehouse stands on Ray, and this chapter shows all of Ray that you need to follow it: **tasks**,
# **actors**, the **object store**, **futures** and **resources**.
#
# No GPU is needed, here or in any chapter. Run the cells in order; each ends by printing something worth a look.

# %%
import os

import numpy as np
import ray
from ray.util import placement_group, remove_placement_group

from enginehouse.controller import start_ray

# %% [markdown]
# ## A cluster on your laptop
#
# `start_ray()` starts a Ray cluster of one *node*: this machine. A node is a machine, or a part of one, on which a
# Ray daemon runs; the daemon starts processes when it is asked to. This program is the *driver*: the one that asks.
#
# `num_cpus` is a count that Ray keeps, not a promise about cores. Eight processes "of one CPU" run on two cores as
# well, only not faster.

# %%
cluster = start_ray(num_cpus=8)
print("nodes:", len(ray.nodes()))
print("CPUs in Ray's count:", int(ray.cluster_resources()["CPU"]))

# %% [markdown]
# ## Tasks: a function somewhere else
#
# `@ray.remote` makes a function callable in another process. `square.remote(3)` does not return 9. It returns at
# once, with a *future* (Ray says `ObjectRef`): a claim on a result that may not exist yet. `ray.get` waits for it and
# brings it here.


# %%
@ray.remote
def square(x):
    return x * x


@ray.remote
def process_id():
    return os.getpid()


futures = [square.remote(x) for x in range(5)]  # five calls are under way, none is waited for
print("futures: ", futures[0], "and four more")
print("results: ", ray.get(futures))
print("ran here:", ray.get(process_id.remote()) == os.getpid())

# %% [markdown]
# ## Actors: an object somewhere else
#
# A task forgets everything when it returns. A model should stay in memory between calls. `@ray.remote` on a **class**
# makes an *actor*: one process that holds one object. Its methods are called like tasks, and run one after the other
# in the order in which you called them.
#
# (In reinforcement learning "actor" also means the model that acts. When enginehouse says *actor* it means that
# model; the Ray kind we call a *worker*.)


# %%
@ray.remote
class Accumulator:
    def __init__(self):
        self.value = 0

    def add(self, x):
        self.value += x

    def get_value(self):
        return self.value


accumulator = Accumulator.remote()  # a process starts, and an Accumulator is built in it
print("before:", ray.get(accumulator.get_value.remote()))
accumulator.add.remote(10)  # returns at once; nobody waits for it
print("after: ", ray.get(accumulator.get_value.remote()))  # calls keep their order, so this one sees the 10

# %% [markdown]
# ## The object store: data that stays put
#
# Each node has an *object store*: shared memory that all processes of the node can read. Results go there, and
# `ray.put` puts something there by hand. What you pass around is the future, a few bytes. A process that gets a large
# array from its node's store reads it where it lies, without a copy; that is why it is read-only.


# %%
@ray.remote
def describe(array):
    return f"{array.nbytes / 1e6:.0f} MB, writable: {array.flags.writeable}, sum {array.sum():.0f}"


big = ray.put(np.ones(4_000_000))  # 32 MB, stored once
for line in ray.get([describe.remote(big) for _ in range(3)]):  # three readers, still stored once
    print(line)

# %% [markdown]
# ## Futures as arguments: data that goes the short way
#
# A future can be an argument. Ray then brings its value to the process that needs it, once it exists. The value never
# passes through this program. Remember this one: in chapter 3, whole batches travel between models like that.


# %%
@ray.remote
def add(x, y):
    return x + y


three, four = square.remote(3), square.remote(4)
print("3*3 + 4*4 =", ray.get(add.remote(three, four)))

# %% [markdown]
# `ray.wait` splits futures into those that are done and those that are not, and an exception comes back to whoever
# asks for the result:


# %%
@ray.remote
def fails():
    raise ValueError("this happened in another process")


done, waiting = ray.wait([square.remote(x) for x in range(4)], num_returns=4)
print("done:", len(done), "still waiting:", len(waiting))
try:
    ray.get(fails.remote())
except ValueError as error:
    print("came back:", str(error).splitlines()[-1])

# %% [markdown]
# ## Resources: who sits where
#
# Each task and actor asks for resources: CPUs, GPUs, or a name you invent. Ray places it on a node that has them
# free, and lets it wait while none has. That is bookkeeping: Ray does not hold a process to the CPUs it asked for.
# (For GPUs it sets `CUDA_VISIBLE_DEVICES`, so a process sees the GPUs it was given and no others.)
#
# A **placement group** reserves several shares, *bundles*, all at once or not at all. Eight ranks of one model need
# that: seven of them are worth nothing.

# %%
group = placement_group([{"CPU": 1}] * 4, strategy="STRICT_PACK")  # four bundles, together on one node
ray.get(group.ready(), timeout=60)
print("bundles reserved:", group.bundle_count)
remove_placement_group(group)

# %% [markdown]
# ## What is missing
#
# This is nearly all of Ray's vocabulary, and you could train with it. You would then write for yourself: N actors
# that know their rank, a rendezvous so that they can talk by `torch.distributed`, splitting a batch over them,
# putting results together, deadlines, and an error that says *which* rank died and where. Those are a **resource
# pool** and a **worker group**: chapter 2.
#
# Always end what you started:

# %%
ray.kill(accumulator)
cluster.shutdown()
print("Ray still runs:", ray.is_initialized())
