"""`enginehouse matrix` as a user starts it: real runs, one that fails, Ctrl-C in between, and what then stands."""

import json
from pathlib import Path

import pytest

from .run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ARGUMENTS = (
    "matrix",
    "--train=torch",
    "--rollout=torch",
    "--transport=inproc",
    "--transport=shared_memory",
    "--transport=corrupting_shared_memory",
    "--no-certify",
    "--processes=1",
    "--steps=2",
    "--output=found/matrix.md",
)


def rows(house: Path) -> dict[str, dict]:
    """The rows found so far, by transport."""
    path = house / "found" / "matrix.json"
    return {row["transport"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def test_it_goes_on_after_ctrl_c_and_after_a_combination_that_fails(house: Path, faulty_transports: dict[str, str]):
    def start() -> RunProcess:
        logs = house / "logs"
        return RunProcess(*ARGUMENTS, cwd=house, directory=house / "runs" / "matrix", logs=logs, env=faulty_transports)

    with start() as interrupted:
        interrupted.until(lambda: rows(house), "the first row", 600)
        before = rows(house)["inproc"]
        interrupted.interrupt()
        assert interrupted.finish().code == 130  # also: that no process is left

    with start() as resumed:
        ended = resumed.finish(1100)
    assert ended.code == 1, ended.err
    found = rows(house)
    assert found["inproc"] == before, "what was found is not run again"
    for transport, placement in (("inproc", "colocated"), ("shared_memory", "separate")):
        row = found[transport]
        assert (row["outcome"], row["placement"]) == ("ran", placement), row["reason"]
        assert row["figures"]["steps"] == 2
        assert 0 < row["figures"]["mean_difference"] < 1e-4
        assert row["figures"]["update_seconds"] > 0
        assert row["figures"]["tokens_per_second"] > 0
    broken = found["corrupting_shared_memory"]
    assert (broken["outcome"], broken["figures"]) == ("failed", None)
    assert "weight update" in broken["reason"]
    assert str(house) not in json.dumps(found), "paths that are only true here"
    page = (house / "found" / "matrix.md").read_text()
    assert "\nenginehouse matrix --steps 2 --processes 1 --output found/matrix.md\n" in page
    for row in (found["inproc"], found["shared_memory"]):
        assert f"{row['figures']['tokens_per_second']:,.0f}" in page
    assert broken["reason"].splitlines()[0] in page
