"""Checks that the nodes of a group have, at the same paths, what its workers are started from and the models they read.

A worker in another Python environment is started from that environment's interpreter, and imports core and plugins by
links to the driver's. Where a file is missing, Ray restarts the process until a deadline, without a message. Models
lie where the driver resolved them: in the cache of the hub's client, in that of models made of GGUF, or at a path.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from enginehouse.controller.errors import ControllerError
from enginehouse.runtimes.store import runtimes_folder

log = logging.getLogger(__name__)

REACH_SECONDS = 60.0
"""Time a node gets to answer; after it, its workers' own start has to tell."""

Explain = Callable[[str, str, str], str]

_whole: set[tuple[str, tuple[str, ...]]] = set()
"""Nodes that had all of some paths, with the paths."""


def needed_paths(python: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths that workers under an interpreter are started from.

    Args:
        python: path of the interpreter.
        env: environment variables of the workers, `PYTHONPATH` among them.
    """
    imported = [Path(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    links = [str(link) for path in imported if path.is_dir() for link in sorted(path.iterdir()) if link.is_symlink()]
    return (python, *map(str, imported), *links)


def model_paths(directories: Iterable[str]) -> tuple[str, ...]:
    """Return the directories of models and their weights, as far as this process has them.

    A node whose own hub client once fetched a tokenizer has the directory, and not the weights.
    """
    held = [Path(directory) for directory in dict.fromkeys(directories) if os.path.isdir(directory)]
    return tuple(str(path) for model in held for path in (model, *sorted(model.glob("*.safetensors"))))


def check_nodes(group: str, nodes: Iterable[str], paths: tuple[str, ...], explain: Explain) -> None:
    """Check that each node, by Ray's id, has some paths.

    Args:
        group: the group's name, for messages.
        nodes: the nodes.
        paths: the paths.
        explain: returns the message on a node without a path, by the names of the group, the node and the path.

    Raises:
        ControllerError: a node lacks one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, look = ray.get_runtime_context().get_node_id(), look_for_missing()
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {}
    for node in {*nodes}:
        if node == here:
            _refuse(group, node, look(paths), explain)
        elif (node, paths) not in _whole:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[task.options(scheduling_strategy=strategy).remote(paths)] = node
    ended, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REACH_SECONDS) if asked else ([], [])
    for ref in ended:
        try:
            missing = ray.get(ref, timeout=1.0)
        except Exception as error:
            log.info("node %s did not say what it has: %s", asked[ref], error)
            continue
        _refuse(group, asked[ref], missing, explain)
        _whole.add((asked[ref], paths))


def name_missing_start(group: str, node: str, path: str) -> str:
    """Return the message on a node without a file that a group's workers are started from, with the cure."""
    return (
        f"{group}: node {node} has no {path}, and its workers would be started from it. A node needs the runtimes, and "
        f"the packages of this process, at the same paths: share {runtimes_folder()} and {sys.prefix} with it, or make "
        "both there; or set engine.runtime to what all nodes have"
    )


def name_missing_model(group: str, node: str, path: str) -> str:
    """Return the message on a node without a model that a group's workers read, with the cure."""
    return (
        f"{group}: node {node} has no {path}, and its workers would read it. A node needs every model at the same "
        "path: put it on a file system that all nodes see (HF_HOME moves models of the hub, XDG_CACHE_HOME those made "
        "of GGUF), or copy its directory there"
    )


def _refuse(group: str, node: str, missing: Sequence[tuple[str, str]], explain: Explain) -> None:
    import ray

    if missing:
        path, target = missing[0]
        leads = f", which leads to {target}" if target else ""
        address = next((info["NodeManagerAddress"] for info in ray.nodes() if info["NodeID"] == node), node)
        raise ControllerError(explain(group, address, path + leads))


def look_for_missing() -> Callable[[Sequence[str]], list[tuple[str, str]]]:
    """Return a function that lists the paths missing where it runs, each with the target that a link leads to.

    It is a local function, which travels whole, because the node may lack this module, too.
    """

    def missing(paths: Sequence[str]) -> list[tuple[str, str]]:
        import os

        return [(path, os.path.realpath(path) * os.path.islink(path)) for path in paths if not os.path.exists(path)]

    return missing
