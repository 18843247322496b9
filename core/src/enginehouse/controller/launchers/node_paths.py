"""Checks that the nodes of a group have, at the same paths, the files its workers are started from.

A worker in another Python environment is started from that environment's interpreter, and imports core and plugins by
links to the driver's. Where a file is missing, Ray starts the process anew until a deadline, without a message.
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


def check_nodes(group: str, nodes: Iterable[str], paths: tuple[str, ...]) -> None:
    """Check that each node, by Ray's id, has some paths.

    Raises:
        ControllerError: a node lacks one; the message names both, and the cure.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here, look = ray.get_runtime_context().get_node_id(), look_for_missing()
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {}
    for node in {*nodes}:
        if node == here:
            _refuse(group, node, look(paths))
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
        _refuse(group, asked[ref], missing)
        _whole.add((asked[ref], paths))


def _refuse(group: str, node: str, missing: Sequence[tuple[str, str]]) -> None:
    import ray

    if missing:
        path, target = missing[0]
        leads = f", which leads to {target}" if target else ""
        address = next((info["NodeManagerAddress"] for info in ray.nodes() if info["NodeID"] == node), node)
        raise ControllerError(
            f"{group}: node {address} has no {path}{leads}, and its workers would be started from it. A node needs the "
            f"runtimes, and the packages of this process, at the same paths: share {runtimes_folder()} and "
            f"{sys.prefix} with it, or make both there; or set engine.runtime to what all nodes have"
        )


def look_for_missing() -> Callable[[Sequence[str]], list[tuple[str, str]]]:
    """Return a function that lists the paths missing where it runs, each with the target that a link leads to.

    It is a local function, which travels whole, because the node may lack this module, too.
    """

    def missing(paths: Sequence[str]) -> list[tuple[str, str]]:
        import os

        return [(path, os.path.realpath(path) * os.path.islink(path)) for path in paths if not os.path.exists(path)]

    return missing
