"""Checks that every node of a group has, at the same paths, the files that its workers are started from or read.

A worker in another Python environment runs that environment's interpreter, and imports core and plugins through links
to the driver's files. If a file is missing, Ray restarts the process without a message until a deadline. A worker reads
a model from the directory that the driver found: in the hub client's cache, in the cache of models converted from GGUF,
or at a path of the config.
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
"""Time limit in seconds for a node to answer. If a node does not answer, a missing file is noticed only when its
workers start."""

Explain = Callable[[str, str, str], str]

_whole: set[tuple[str, tuple[str, ...]]] = set()
"""Pairs of a node and the paths that the node was found to have."""


def needed_paths(python: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths from which workers are started: the interpreter, the import paths, and the links in them.

    Args:
        env: environment variables of the workers, with `PYTHONPATH`.
    """
    imported = [Path(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    links = [str(link) for path in imported if path.is_dir() for link in sorted(path.iterdir()) if link.is_symlink()]
    return (python, *map(str, imported), *links)


def model_paths(directories: Iterable[str]) -> tuple[str, ...]:
    """Return the directories of models and their weight files, as far as they exist in this process.

    The files are listed because a node whose hub client once fetched a tokenizer has the directory, but not the
    weights.
    """
    held = [Path(directory) for directory in dict.fromkeys(directories) if os.path.isdir(directory)]
    return tuple(str(path) for model in held for path in (model, *sorted(model.glob("*.safetensors"))))


def check_nodes(group: str, nodes: Iterable[str], paths: tuple[str, ...], explain: Explain) -> None:
    """Check that each node has all paths.

    Args:
        explain: function that gets the group's name, the node and the missing path, and returns the message.

    Raises:
        ControllerError: a node lacks a path.
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
            log.info("node %s did not report which paths exist: %s", asked[ref], error)
            continue
        _refuse(group, asked[ref], missing, explain)
        _whole.add((asked[ref], paths))


def name_missing_start(group: str, node: str, path: str) -> str:
    """Return the message, with the remedy, for a node that lacks `path`, from which the group's workers are started."""
    return (
        f"{group}: node {node} has no {path}, but its workers are started from this path. Every node needs the "
        f"runtimes and the packages of this process at the same paths: share {runtimes_folder()} and {sys.prefix} with "
        "the node, create both there, or set engine.runtime to an environment that all nodes have"
    )


def name_missing_model(group: str, node: str, path: str) -> str:
    """Return the message, with the remedy, for a node that lacks `path`, which holds a model of the group's workers."""
    return (
        f"{group}: node {node} has no {path}, but its workers read this path. Every node needs every model at the same "
        "path: put the model on a file system that all nodes see (HF_HOME moves models of the hub, XDG_CACHE_HOME "
        "moves models converted from GGUF), or copy its directory to the node"
    )


def _refuse(group: str, node: str, missing: Sequence[tuple[str, str]], explain: Explain) -> None:
    import ray

    if missing:
        path, target = missing[0]
        leads = f" (a link to {target})" if target else ""
        address = next((info["NodeManagerAddress"] for info in ray.nodes() if info["NodeID"] == node), node)
        raise ControllerError(explain(group, address, path + leads))


def look_for_missing() -> Callable[[Sequence[str]], list[tuple[str, str]]]:
    """Return a function that lists the paths that are missing on the node where it runs, each with its target if it is
    a link. The function is local, so that Ray pickles it by value: the node may lack this module."""

    def missing(paths: Sequence[str]) -> list[tuple[str, str]]:
        import os

        return [(path, os.path.realpath(path) * os.path.islink(path)) for path in paths if not os.path.exists(path)]

    return missing
