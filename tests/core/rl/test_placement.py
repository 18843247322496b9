"""What workers are told when a plan is placed."""

from __future__ import annotations

import pytest
from projects import Project

from enginehouse.config.load import load_config
from enginehouse.config.plan import plan
from enginehouse.plugin import load_plugins
from enginehouse.rl import placement


class Stopped(Exception):
    """Nothing is started."""


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_the_seed_of_a_run_reaches_new_weights(project: Project, monkeypatch: pytest.MonkeyPatch, seed: int):
    given = {}

    def stop(pool, specs, **options):
        given.update(specs)
        raise Stopped

    monkeypatch.setattr(placement, "colocate", stop)
    path = project.save()
    overrides = (f"train.seed={seed}", "cluster.launcher=inline", "algorithm.kl.coefficient=0.1")
    planned = plan(load_config(path, overrides), load_plugins(enabled=("torch",)), path)
    with pytest.raises(Stopped), placement.place(planned, ()):
        pass
    assert given.keys() == {"actor", "reference", "rollout"}
    for spec in given.values():
        model = next(one for one in spec.args if hasattr(one, "dtype"))
        assert model.seed == seed
