"""examples/cluster/slurm.sh, started as Slurm starts it, with two nodes of Ray on this machine.

What stands in for Slurm: `slurm/srun`, which starts processes here, and `slurm/scontrol`; and this module for `sbatch`,
which sets the variables of a job and signals the script alone, as `--signal=B:` does.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import QUICKSTART, REPOSITORY, SMALL
from .run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = REPOSITORY / "examples" / "cluster" / "slurm.sh"
STAND_INS = Path(__file__).parent / "slurm"
OVER_BOTH = ("rollout.placement=separate", "actor.processes=2", "rollout.replicas=2", "train.steps=100000")
"""A role a node, where a node has two CPUs."""


class Job:
    """A job of Slurm's, which may be queued again."""

    def __init__(self, house: Path, home: Path):
        self.house, self.home, self.number = house, home, str(os.getpid())
        self.directory = house / "runs" / home.name
        self.queued_again = home / "requeued"

    def start(self, restarts: int = 0, path: str = "") -> RunProcess:
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE))
        nodes = int(options["nodes"])
        env = {
            "PATH": f"{path}:{STAND_INS}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "REQUEUED": str(self.queued_again),
            "RUN": str(self.directory),
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NODELIST": ",".join(["localhost", *(f"node{number}" for number in range(1, nodes))]),
            "SLURM_CPUS_PER_TASK": "2",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        arguments = (str(SCRIPT), str(QUICKSTART / "grpo.yaml"), *SMALL, *OVER_BOTH)
        return RunProcess(
            *arguments, cwd=self.house, directory=self.directory, logs=self.home, env=env, program="/bin/bash"
        )


@pytest.fixture
def job(house: Path) -> Iterator[Job]:
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made = Job(house, home)
    yield made
    shutil.rmtree(home, ignore_errors=True)
    shutil.rmtree(f"/tmp/ray-{made.number}", ignore_errors=True)


def test_a_job_saves_before_its_time_is_up_and_goes_on_when_it_is_queued_again(job: Job):
    with job.start() as run:
        run.until_step(3)
        pids = [run.pid(role, rank) for role in ("actor", "rollout") for rank in (0, 1)]
        assert len(set(pids)) == 4  # twice as many as a node has CPUs
        run.signal_itself(signal.SIGUSR1)
        ended = run.finish()
    assert ended.code == 143, ended.err
    assert job.queued_again.read_text().split() == [job.number]
    assert run.record["status"] == "interrupted"
    taken = len(run.metrics)
    assert (job.directory / "checkpoints" / f"step-{taken:06}").is_dir()
    kept = job.directory.with_name(f"{job.directory.name}-ray-logs") / job.number
    assert sorted(one.name for one in kept.iterdir()) == ["node0", "node1"]
    assert list(kept.glob("node0/worker-*.err"))

    with job.start(restarts=1) as run:
        run.until_step(taken + 2)
        run.signal_itself(signal.SIGTERM)  # cancelled: it is not to come back
        ended = run.finish()
    assert ended.code == 143, ended.err
    assert job.queued_again.read_text().split() == [job.number]
    assert [row["step"] for row in run.metrics] == list(range(1, len(run.metrics) + 1))
    assert f"after step {taken}, from" in ended.out


def test_a_node_that_cannot_start_ray_ends_the_job_at_once(job: Job):
    (job.home / "bin").mkdir()
    ray = job.home / "bin" / "ray"
    ray.write_text("#!/bin/sh\necho no ray here >&2\nexit 7\n")
    ray.chmod(0o755)
    with job.start(path=str(ray.parent)) as run:
        ended = run.finish()
    assert ended.code == 1
    assert "no ray here" in ended.err
    assert "a node could not start Ray" in ended.err
    assert not job.directory.exists()
    assert not job.queued_again.exists()
