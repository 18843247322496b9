"""examples/cluster: each file is what the program that reads it takes, and they agree with each other and with us.

That what the dashboard and the alerts ask for is served: `integration/test_prometheus.py`; the Slurm script at work:
`integration/test_slurm.py`.
"""

import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml

from enginehouse_rl.config.load import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster"
KUBERNETES = list(yaml.safe_load_all((EXAMPLE / "kuberay.yaml").read_text(encoding="utf-8")))
DASHBOARD = json.loads((EXAMPLE / "grafana.json").read_text(encoding="utf-8"))
SCHEMA = yaml.safe_load((Path(__file__).parent / "rayjob.schema.yaml").read_text(encoding="utf-8"))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for one in KUBERNETES if one["kind"] == kind]
    return found


def pods() -> list[dict[str, Any]]:
    cluster = of_kind("RayJob")["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_shell_scripts_are_sound(tmp_path: Path):
    scripts = [EXAMPLE / "slurm.sh", *(ROOT / "tests" / "integration" / "slurm").iterdir()]
    for name in ("train.sh", "wait.sh"):
        scripts.append(tmp_path / name)
        scripts[-1].write_text("#!/bin/bash\n" + of_kind("ConfigMap")["data"][name])
    program = Path(sysconfig.get_path("scripts")) / "shellcheck"
    checked = subprocess.run([program, *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_time_that_slurm_leaves_is_enough_to_save_and_to_end_ray():
    script = (EXAMPLE / "slurm.sh").read_text(encoding="utf-8")
    (left,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    (grace,) = re.findall(r"^grace=\$\{GRACE_SECONDS:-(\d+)\}", script, re.MULTILINE)
    assert int(left) >= int(grace) + 30 + 30 + 60  # logs; Ray's own end; that Slurm may be a minute early or late


def test_the_manifest_is_a_rayjob():
    jsonschema.Draft202012Validator(SCHEMA).validate(of_kind("RayJob"))


@pytest.mark.parametrize(
    ("right", "wrong"), [("containerPort", "containerport"), ("mode: token", "mode: tokens"), ('"0"', "0")]
)
def test_a_manifest_with_a_mistake_is_none(right: str, wrong: str):
    text = (EXAMPLE / "kuberay.yaml").read_text(encoding="utf-8")
    assert right in text
    (broken,) = [one for one in yaml.safe_load_all(text.replace(right, wrong)) if one["kind"] == "RayJob"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_a_pod_waits_until_the_run_has_saved():
    (grace,) = re.findall(r"run\.grace_seconds=(\d+)", of_kind("ConfigMap")["data"]["train.sh"])
    variables = yaml.safe_load(of_kind("RayJob")["spec"]["runtimeEnvYAML"])["env_vars"]
    for pod in pods():
        assert int(grace) < int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) < pod["terminationGracePeriodSeconds"]
        (container,) = pod["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["bash", "/etc/enginehouse/wait.sh"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
    volumes = {one["name"]: one for pod in pods() for one in pod["volumes"]}
    claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
    assert claim == of_kind("PersistentVolumeClaim")["metadata"]["name"]


def test_what_waits_for_the_run_reads_what_a_run_writes(tmp_path: Path):
    from enginehouse_rl.runs import RunDirectory

    script = of_kind("ConfigMap")["data"]["wait.sh"]
    (path,) = re.findall(r"grep -q '.*' (\S+);", script)
    (words,) = re.findall(r"grep -q '(.*)' ", script)
    run = RunDirectory.create(tmp_path / "first", "model: {path: x}\n")
    assert path.endswith("/runs/first/run.json")
    assert words in (run.path / "run.json").read_text(encoding="utf-8")
    run.finish("interrupted")
    assert words not in (run.path / "run.json").read_text(encoding="utf-8")


def test_the_config_in_the_manifest_is_one(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text(of_kind("ConfigMap")["data"]["run.yaml"])
    (command,) = re.findall(r"exec enginehouse train \S+ (.*) \"\$@\"", of_kind("ConfigMap")["data"]["train.sh"])
    config = load_config(path, Template(command).substitute(run=tmp_path / "run").split())  # as the shell does
    assert config.cluster.address == "auto"
    workers = of_kind("RayJob")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = [int(one["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for one in workers]
    assert config.actor.processes + config.rollout.replicas == sum(
        each * one["replicas"] for each, one in zip(gpus, workers)
    )


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((EXAMPLE / "alerts.yml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_a_query_is_promql(title: str, query: str):
    promql_parser.parse(query.replace("$run", "first"))


def test_the_dashboard_holds_together():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(panels))) == variables
    taken: set[tuple[int, int]] = set()
    for at in (panel["gridPos"] for panel in panels):
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_each_alert_is_tried():
    rules = yaml.safe_load((EXAMPLE / "alerts.yml").read_text(encoding="utf-8"))
    tests = yaml.safe_load((EXAMPLE / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    told = [one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]]
    assert set(told) == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def test_prometheus_takes_the_alerts_and_the_folder_of_the_manifest():
    config = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    files = {job["job_name"]: job["file_sd_configs"][0]["files"] for job in config["scrape_configs"]}
    (tracker,) = yaml.safe_load(of_kind("ConfigMap")["data"]["run.yaml"])["run"]["trackers"]
    assert files["enginehouse"] == [f"{tracker['arguments']['targets']}/*.json"]
