from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse_rl.runs.timeline import Timeline


class StepClock:
    """Measures steps and their phases in wall-clock seconds, and draws both on a timeline.

    ```python
    with clock.step(7):
        with clock.phase("generate"):
            ...
    clock.metrics()     # {"time/step": 0.31, "time/generate": 0.30}
    ```

    If a phase occurs twice in a step, its seconds are added. The seconds of a nested phase count for both phases. A
    phase outside any step is only drawn. A phase that raises an error is drawn and counted too.

    Attributes:
        timeline: The timeline to draw on; None: nothing is drawn.
    """

    def __init__(self, timeline: Timeline | None = None):
        self.timeline = timeline
        self._seconds: dict[str, float] = {}
        self._step: int | None = None

    @contextmanager
    def step(self, step: int, phases: Iterable[str] = ()) -> Iterator[None]:
        """Measure one step, and forget earlier phases. Each phase in `phases` has 0 seconds until it is entered."""
        self._seconds = dict.fromkeys(phases, 0.0)
        self._step = step
        started = time.monotonic()
        try:
            yield
        finally:
            self._step = None
            self._record("step", started, f"step {step}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._record(name, started, name)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the last step: `time/step`, and `time/<phase>` for each of its phases."""
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()}

    def _record(self, name: str, started: float, label: str) -> None:
        ended = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + ended - started
        if self.timeline is not None:
            self.timeline.span(label, started, ended)
