"""Memory that processes share without a name: who can map it, how long it lives, what is said when there is none."""

import errno
import os

import psutil
import pytest

from enginehouse.engines.weights import WeightSyncError
from enginehouse.weights import host_memory
from enginehouse.weights.host_memory import AnonymousMemory, free_bytes, map_privately


def test_it_is_zero_and_what_one_writes_the_other_reads():
    memory = AnonymousMemory.create("mine", 100, "here")
    assert (memory.size, bytes(memory.memory)) == (100, bytes(100))
    other = AnonymousMemory.attach(memory.path, "mine")
    other.memory[:5] = b"hello"
    assert memory.memory[:5] == b"hello"
    memory.close()
    del memory
    assert AnonymousMemory.attach(other.path, "mine").memory[:5] == b"hello", "it lives as long as one of them"


def test_what_is_written_to_a_private_copy_stays_there():
    memory = AnonymousMemory.create("mine", 100, "here")
    memory.memory[:5] = b"hello"
    copy = map_privately(memory.path)
    copy[:5] = b"other"
    assert (memory.memory[:5], copy[:5]) == (b"hello", b"other")


def test_another_file_under_the_same_path_is_not_taken_for_it(tmp_path):
    memory = AnonymousMemory.create("mine", 100, "here")
    (tmp_path / "empty").touch()
    for path, label in ((memory.path, "yours"), (tmp_path / "empty", "mine"), (tmp_path / "none", "mine")):
        with pytest.raises(FileNotFoundError):
            AnonymousMemory.attach(str(path), label)


def test_too_little_memory_is_said_with_both_figures(monkeypatch):
    free = psutil.virtual_memory()._replace(available=3 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(WeightSyncError, match=r"^5 MiB of memory are needed for this, and 3 MiB are free"):
        AnonymousMemory.create("mine", 5 << 20, "for this")
    assert AnonymousMemory.create("mine", 2 << 20, "for this").size == 2 << 20


def test_a_containers_limit_counts_where_it_leaves_less_than_the_host(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    host = free_bytes()
    for limit, free in (("max", None), (str(8 << 20), (8 - 5 + 2) << 20), (str(1 << 60), None), ("0", 0)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(f"{5 << 20}\n")
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {2 << 20}\n")
        if free is None:
            assert free_bytes() > 8 << 20
        else:
            assert free_bytes() == free
    assert host > 8 << 20


def test_memory_the_system_refuses_is_the_same_error_and_leaves_no_descriptor(monkeypatch):
    def refused(*args):
        raise OSError(errno.ENOMEM, "no")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(WeightSyncError, match="1 MiB of memory are needed for this"):
        AnonymousMemory.create("mine", 1 << 20, "for this")
    assert len(os.listdir("/proc/self/fd")) == before
