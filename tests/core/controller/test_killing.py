"""Processes of a group end whatever Ray says; Ray is a stand-in here."""

import subprocess
import sys
from typing import Any

import psutil
import ray

from enginehouse.controller.launchers.ray import RayProcesses


def test_workers_on_this_machine_end_though_ray_fails_to_kill_them(monkeypatch, caplog):
    def fails(actor: object, no_restart: bool) -> None:
        raise RuntimeError("no such actor")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", fails)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes: Any = RayProcesses.__new__(RayProcesses)
    processes._local, processes._facts = {0: psutil.Process(worker.pid)}, {}
    processes._actors, processes._stuck = [object()], set()
    processes._kill(patience=0.0)
    assert worker.poll() is not None
    assert "Ray could not kill workers: no such actor" in caplog.text
