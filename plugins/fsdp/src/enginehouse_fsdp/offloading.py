"""Which of an engine's state lies in host memory, and moving it there and back.

Where the engine computes on the host anyway, and for what `cpu_offload` keeps there, nothing moves; what is put away
may not be used there either, so that a program that forgets `onload` fails on a laptop as it would on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse_fsdp.optimizer import ShardedAdamW

HOST = torch.device("cpu")
TAGS = ("params", "grads", "optimizer")


class Offloading:
    """Where the parameters, gradients and optimizer state of a sharded model lie. Buffers, which are small, stay.

    Parameter objects stay the same, so that tied ones stay tied and the optimizer's state stays theirs.

    Args:
        model: the sharded model.
        device: where its shards lie when they are not offloaded.
        where: the rank, for messages.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, where: str):
        self._model, self._device, self._where = model, device, where
        self._away: frozenset[str] = frozenset()
        self._gradients: dict[torch.nn.Parameter, torch.Tensor] = {}

    def offload(self, tags: tuple[str, ...], optimizer: ShardedAdamW | None) -> None:
        """Put away what `tags` name; memory of the device is free when this returns.

        Raises:
            EnginehouseError: a tag is unknown.
        """
        self._place(self._away | self._known(tags), optimizer)

    def onload(self, tags: tuple[str, ...], optimizer: ShardedAdamW | None) -> None:
        """Bring back what `tags` name.

        Raises:
            EnginehouseError: a tag is unknown.
        """
        self._place(self._away - self._known(tags), optimizer)

    def need(self, *tags: str, to: str) -> None:
        """Raise unless all of `tags` are here.

        Raises:
            EnginehouseError: one is offloaded.
        """
        if away := [tag for tag in tags if tag in self._away]:
            named = " and ".join(away)
            raise EnginehouseError(f"{self._where}: cannot {to} while {named} are offloaded: call onload({away}) first")

    def _known(self, tags: tuple[str, ...]) -> frozenset[str]:
        if unknown := sorted(set(tags) - {*TAGS, "*"}):
            raise EnginehouseError(
                f"{self._where}: nothing called {unknown[0]!r} can be offloaded; there are {', '.join(TAGS)}, or '*'"
            )
        return frozenset(TAGS) if "*" in tags else frozenset(tags)

    def _place(self, away: frozenset[str], optimizer: ShardedAdamW | None) -> None:
        """Move each kind to where it is to be. Gradients wait apart while they or their parameters are away."""
        homes = {tag: HOST if tag in away else self._device for tag in TAGS}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._gradients[parameter] = parameter.grad
                parameter.grad = None
        if ("params" in away) != ("params" in self._away):
            self._move_parameters(homes["params"])
        for parameter in self._gradients:
            self._gradients[parameter] = moved(self._gradients[parameter], homes["grads"])
        if optimizer is not None:
            optimizer.move(lambda tensor: moved(tensor, homes["optimizer"]))
        if not away & {"params", "grads"}:
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
            self._gradients = {}
        self._away = away
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_parameters(self, home: torch.device) -> None:
        """Move them as modules do: FSDP's `_apply` (torch 2.13) frees what was gathered and takes up the new shards.

        One parameter that several modules share is moved once: a second time could come after FSDP took up the first,
        and it would go on to gather from there while the optimizer updates the second.
        """
        waiting = set(self._model.parameters())

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor not in waiting:
                return tensor
            waiting.discard(tensor)  # type: ignore[arg-type]
            return moved(tensor, home)

        self._model._apply(move)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; itself if it is there."""
    return tensor.to(device)
