"""A worker that writes or reads a large file gets on, whichever library does it; one that waits does not."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from enginehouse.engines import progress
from enginehouse.engines.weights import Loan
from enginehouse.roles.workers import TrainWorker

PATIENCE_SECONDS = 30.0


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    event = threading.Event()
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "note_progress", event.set)
    return event


class Engine:
    """Writes a file of 2 MiB, or reads it, and waits until that was noted."""

    def __init__(self, noted: threading.Event):
        self.noted = noted

    def _move(self, path: str, *given: object) -> None:
        Path(path).write_bytes(bytes(2 << 20))
        assert self.noted.wait(PATIENCE_SECONDS)

    save = export_hf = export_adapter = _move

    def load(self, path: str, *given: object) -> None:
        assert len(Path(path).read_bytes()) > progress.LEAST_BYTES
        assert self.noted.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("method", ["save", "load", "export_hf"])
def test_files_that_are_written_and_read_are_progress(noted: threading.Event, tmp_path: Path, method: str):
    worker = object.__new__(TrainWorker)
    worker.engine, worker._loan = Engine(noted), Loan()
    file = tmp_path / "file"
    if method == "load":
        file.write_bytes(bytes(2 << 20))
    act: Callable[[str], None] = getattr(worker, method)
    act(str(file))


def test_what_only_waits_gets_on_with_nothing(noted: threading.Event):
    with progress.note_file_progress():
        time.sleep(0.1)  # ten looks
    assert not noted.is_set()
