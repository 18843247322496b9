"""A staged version, as the processes of an engine read it."""

import re
import threading
from pathlib import Path

import pytest
import torch

from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights import staged_source
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import lay_out
from enginehouse.weights.staged_source import StagedSource
from enginehouse.weights.staging import Version

NAMES = list("abcde")


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("changed", NAMES)
def test_exactly_one_rank_finds_each_changed_parameter(changed, ranks):
    tensors = {name: torch.arange(5.0) + number for number, name in enumerate(NAMES)}
    parameters = [ParamMeta.of(name, tensor) for name, tensor in tensors.items()]
    version = Version(1, parameters)
    for name, tensor in tensors.items():
        version.take(name, tensor, None, None)
    source = StagedSource(version.source()["parameters"])
    for rank in range(ranks):
        with source.checked(rank, ranks):
            pass
    assert version.copy is not None
    version.copy.memory[lay_out(parameters)[0][changed]] ^= 1
    found = []
    for rank in range(ranks):
        try:
            with source.checked(rank, ranks):
                pass
        except WeightSyncError as error:
            found += error.parameters
    assert found == [changed]
    source.close()


def test_a_loader_may_write_to_what_it_is_given(monkeypatch):
    version, source = _staged(1.0)
    written = threading.Event()
    monkeypatch.setattr(staged_source, "checksum", lambda tensor: written.wait(30) and checksum(tensor))
    with source.checked():
        dict(source)["a"].zero_()
        written.set()
    del version


def test_a_change_is_told_instead_of_the_error_that_it_led_to():
    version, source = _staged(1.0)
    version.copy.memory[0] ^= 1
    with pytest.raises(WeightSyncError, match="the staged weights have changed: a"), source.checked():
        raise ValueError("not a number")


def test_a_tensor_that_the_engine_keeps_is_found_at_the_end_and_stays_valid():
    version, source = _staged(1.0)
    kept = [tensor[1:] for _, tensor in source]
    with pytest.raises(WeightSyncError, match="kept tensors in the update's memory"):
        source.close()
    assert kept[0].tolist() == [1.0] * (COUNT - 1)
    del version


def test_memory_stays_mapped_for_the_next_version_in_it():
    version, source = _staged(1.0)
    with source.checked():
        pass
    source.close()
    assert len(_mappings(version)) == 2, "the sender's own, and the kept one"
    _fill(version, 2.0)
    again = StagedSource(version.source()["parameters"])
    with again.checked():
        assert dict(again)["a"][0] == 2.0
    assert len(_mappings(version)) == 2


def test_memory_is_mapped_anew_after_the_engine_has_written_to_it():
    version, source = _staged(1.0)
    dict(source)["a"].zero_()
    source.close()
    _fill(version, 2.0)
    again = StagedSource(version.source()["parameters"])
    with again.checked():
        assert dict(again)["a"][0] == 2.0


def test_other_memory_under_the_same_path_is_not_taken_for_it(tmp_path):
    version, source = _staged(1.0, tmp_path / "link")
    source.close()
    other, source = _staged(2.0, tmp_path / "link")
    with source.checked():
        assert dict(source)["a"][0] == 2.0
    assert len(_mappings(version)) == 1, "the sender's own: the other was dropped"
    del other


COUNT = 1 << 20
"""Elements of the parameter, so many that its memory has further pages."""


def _staged(value, link=None):
    """Return a version with one parameter in memory, and a source that reads it, by way of a link if one is named."""
    tensor = torch.full((COUNT,), value)
    version = Version(1, [ParamMeta.of("a", tensor)])
    version.take("a", tensor, None, None)
    entry = version.source()["parameters"][0]
    if link:
        link.unlink(missing_ok=True)
        link.symlink_to(entry[3])
        entry[3] = str(link)
    return version, StagedSource([entry])


def _fill(version, value):
    """Write another version into the same memory."""
    version.take("a", torch.full((COUNT,), value), None, None)


def _mappings(version):
    """Return the addresses at which this process has mapped the version's memory."""
    inode = Path(version.copy.path).stat().st_ino
    maps = Path("/proc/self/maps").read_text()
    return re.findall(rf"^(\S+) .* {inode} ", maps, re.MULTILINE)
