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
# # Chapter 2: Resource pools and worker groups
#
# A model that is spread over four processes should still feel like one object. In enginehouse that takes two things:
#
# - a **resource pool**: the places for processes, reserved together;
# - a **worker group**: one process on each place, called as if they were one object.

# %%
import os
import signal

from enginehouse.controller import (
    PlacementError,
    RemoteError,
    ResourcePool,
    Worker,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    colocate,
    merge_resource_pools,
    start_ray,
)

cluster = start_ray(num_cpus=16)

# %% [markdown]
# ## A worker is a plain class
#
# Nothing in it is remote. Before `__init__` runs, the worker gets a `context`: its rank, how many ranks there are, its
# node, its device. Each of our workers starts at its own rank.


# %%
class Accumulator(Worker):
    def __init__(self):
        self.value = self.context.rank

    def add(self, x):
        self.value += x
        return self.value


# %% [markdown]
# `WorkerSpec` holds the class and the arguments of its constructor; the object is built where the worker is to be.
#
# To test or debug a worker, let that be here: `launcher="inline"` makes a group of one rank in this process, without
# Ray. `breakpoint()` works in it. (A class that does not read `context` you can also just call.)

# %%
spec = WorkerSpec(Accumulator).options(distributed=False)  # adding numbers needs no torch.distributed; starts faster
with WorkerGroup(None, spec, name="alone", launcher="inline") as alone:
    print("in this process:", alone.execute_all("add", 1), alone.pids == [os.getpid()])

# %% [markdown]
# ## Four processes
#
# `ResourcePool([4])` means: four processes on one node. `[4, 2]` would mean four on one node and two on another (or
# on the same, if it is large enough). With GPUs you would say `gpus_per_process=1`.
#
# `max_colocate=2` lets two groups sit on the pool at once; we need that further down. It reserves two CPUs a place,
# one for each group.

# %%
pool = ResourcePool([4], max_colocate=2, name="first")
first = WorkerGroup(pool, spec, name="first")

print(first)
print("process ids:", first.pids)

# %% [markdown]
# `execute_all` calls a method on every rank, with the same arguments, and waits. The values were 0, 1, 2, 3; one more
# each:

# %%
print(first.execute_all("add", 1))

# %% [markdown]
# ## A second pool, and both together
#
# A second group on a pool of its own has nothing to do with the first; its values start at its own ranks.

# %%
second_pool = ResourcePool([4], max_colocate=2, name="second")
second = WorkerGroup(second_pool, spec, name="second")
print(second.execute_all("add", 2))

# %% [markdown]
# `merge_resource_pools` makes a pool of eight out of the two. It reserves nothing new: a group on it sits on the very
# places that the first two groups sit on, beside them, in processes of its own. With GPUs, they would share GPUs.
# This is how a model that needs all eight GPUs takes turns with two models that need four each.

# %%
merged_pool = merge_resource_pools(pool, second_pool)
everyone = WorkerGroup(merged_pool, spec, name="everyone")
print(everyone.execute_all("add", 3))
print("sizes:", first.world_size, second.world_size, everyone.world_size)
print("each has its own processes:", not set(everyone.pids) & {*first.pids, *second.pids})

# %% [markdown]
# Each place holds two groups now, and two is what we allowed. A third is refused with a reason, and not with a wait:

# %%
try:
    WorkerGroup(pool, spec, name="third")
except PlacementError as error:
    print(error)

# %% [markdown]
# `split` is the other way round: parts of a pool, as pools.

# %%
everyone.shutdown()
two, six = merged_pool.split([2, 6])
pair = WorkerGroup(two, spec, name="pair")
print("the pair:", pair.execute_all("add", 10), "and", six.world_size, "places left over")
pair.shutdown()

# %% [markdown]
# ## Two roles in one process
#
# Groups on one place are processes side by side. Roles that should share memory, such as a model that trains and the
# same model generating, can live in the *same* processes: `colocate` builds one object for each role in every
# process, and gives you a group for each role. Each is called as if it were alone.

# %%
roles = colocate(pool, {"actor": spec, "reference": spec})
print("same processes:", roles["actor"].pids == roles["reference"].pids)
print("the actor:     ", roles["actor"].execute_all("add", 50))
print("the reference: ", roles["reference"].execute_all("add", 0))
for role in roles.values():
    role.shutdown()

# %% [markdown]
# ## Without waiting, and one rank alone
#
# Each way to call has a twin that does not wait and returns a future.

# %%
future = first.execute_all_async("add", 100)
print("rank 2 of the second group:", second.execute_rank(2, "add", 5))
print("rank 0 of the second group:", second.execute_rank_zero("add", 5))
print("the future's result:", future.result())

# %% [markdown]
# ## What does not fit is said at once
#
# A cluster that is too small is a common first surprise. The message says what was asked for and what there is.

# %%
try:
    WorkerGroup(ResourcePool([1000]), spec, name="too large")
except PlacementError as error:
    print(error)

# %% [markdown]
# ## When a worker raises
#
# The error comes here, and says which rank raised what. If nobody catches it, Python prints the worker's own traceback
# too. The group stays usable.

# %%
try:
    first.execute_rank(1, "add", "ten")
except RemoteError as error:
    print(error)

# %% [markdown]
# What a worker *prints* does not come here: it goes to Ray's log files, `worker-*.out` in
# `/tmp/ray/session_latest/logs` on the worker's node. Better use `logging`: its lines carry role and rank, go to
# `worker-*.err` beside them, and the last of them come with an error.
#
# ## When a process dies
#
# Processes get killed, most often because memory ran out. The next call says who died, where, and in which method.
# The group then refuses further calls: three quarters of a model are no model. `restart()` brings it back with the
# same ranks; its state is new, so the values start from the ranks again.

# %%
os.kill(first.pids[2], signal.SIGKILL)
try:
    first.execute_all("add", 1)
except WorkerDied as error:
    print(f"{error.role}: rank {error.rank} died in {error.method!r}")
print("broken:", first.broken)

first.restart()
print("again: ", first.execute_all("add", 1))

# %% [markdown]
# ## The end
#
# A group ends with its program, at the latest.
#
# Groups end their processes; pools give their places back; the cluster stops. A `with` block does the same, also when
# something goes wrong inside it:
#
#     with start_ray(), WorkerGroup(ResourcePool([4]), WorkerSpec(Accumulator), name="first") as first:
#         ...
#
# Calling by the name of a method, with the same arguments for all, is the rough way. Chapter 3 makes it
# `first.add(1)`, and says who gets what.

# %%
first.shutdown()
second.shutdown()
pool.shutdown()
second_pool.shutdown()
cluster.shutdown()
print("all gone")
