"""Planning with backends of others: what their records name is there, or is named before a process starts."""

from collections.abc import Callable

import pytest
from projects import Project, project, refusal  # noqa: F401 - a fixture

from enginehouse.controller import WorkerGroup, WorkerSpec
from enginehouse.engines.model import ModelSpec
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import load_plugins, process
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse_rl.plan.plan import Plan
from enginehouse_testing.models import tiny_model

TORCH = "enginehouse_torch"
ENGINES = {
    "rollout": (f"{TORCH}.rollout:TorchRolloutEngine", f"{TORCH}.options:TorchRolloutOptions"),
    "train": (f"{TORCH}.train:TorchTrainEngine", f"{TORCH}.options:TorchTrainOptions"),
}

PARTS = """
from pydantic import BaseModel

class Options(BaseModel):
    pass

class NoModel:
    pass

class Engine:
    mesh = None

    def setup(self, model, options, context): ...

def loss(view, *, needed: float): ...
"""


@pytest.fixture
def site(distributions, monkeypatch: pytest.MonkeyPatch):
    """Distributions that this process has loaded."""
    (distributions.site / "parts_of_a_plugin.py").write_text(PARTS)
    distributions.modules.append("parts_of_a_plugin")  # to be forgotten

    def load() -> None:
        monkeypatch.setattr(process, "_current", load_plugins())

    distributions.load = load
    return distributions


@pytest.fixture
def make(project: Project, site) -> Callable[..., Plan]:  # noqa: F811
    return lambda *overrides: project.planned(*overrides, plugins=load_plugins())


def swift(site, distribution: str, kind: str, engine: str, options: str) -> None:
    record = {"train": "TrainBackend", "rollout": "RolloutBackend"}[kind]
    site.add(
        distribution,
        f"""
        @hookimpl
        def enginehouse_register_backends(register):
            register({record}(name="swift", engine={engine!r}, options={options!r}))
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_a_name_that_two_distributions_offer_works_where_it_is_qualified(make, site, kind: str):
    for distribution in ("acme-hf", "bad-twin"):
        swift(site, distribution, kind, *ENGINES[kind])
    key = {"train": "actor", "rollout": "rollout"}[kind]
    assert "write 'acme-hf:swift' or 'bad-twin:swift'" in refusal(make, f"{key}.engine.backend=swift")
    planned = make(f"{key}.engine.backend=acme-hf:swift")
    assert "acme-hf:swift" in dict(planned.facts)[key]
    assert "acme-hf" in planned.distributions
    assert "bad-twin" not in planned.distributions

    site.load()
    spec = WorkerSpec({"train": TrainWorker, "rollout": RolloutWorker}[kind], "acme-hf:swift", ModelSpec(tiny_model()))
    with WorkerGroup(None, spec, launcher="inline") as group:
        assert [said["backend"] for said in group.call("describe")] == ["swift"]


def test_a_transport_that_two_distributions_offer_keeps_its_qualified_name(make, site):
    for distribution in ("acme-hf", "bad-twin"):
        site.add(
            distribution,
            """
            @hookimpl
            def enginehouse_register_transports(register):
                register(Transport(name="pigeon", transport="parts_of_a_plugin:Engine", capabilities={"same_process"}))
            """,
        )
    assert "write 'acme-hf:pigeon'" in refusal(make, "weights.transport=pigeon")
    assert make("weights.transport=acme-hf:pigeon").roles["rollout"].transport == "acme-hf:pigeon"


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("parts_of_a_plugin:Engin", "parts_of_a_plugin:Options", "has no 'Engin'"),
        ("parts_of_nothing:Engine", "parts_of_a_plugin:Options", "there is no module 'parts_of_nothing'"),
        (
            "parts_of_a_plugin:Engine",
            "parts_of_a_plugin:Option",
            "the options of 'swift': module 'parts_of_a_plugin' has",
        ),
        (
            "parts_of_a_plugin:Engine",
            "parts_of_a_plugin:NoModel",
            "is no pydantic model; its author has to derive it from",
        ),
        ("parts_of_a_plugin:Engine", "parts_of_a_plugin:Options", "it lacks forward, forward_backward, optim_step, "),
    ],
)
def test_what_a_backend_names_is_there_before_a_process_starts(make, site, engine: str, options: str, said: str):
    swift(site, "acme", "train", engine, options)
    assert said in refusal(make, "actor.engine.backend=swift")


def test_a_worker_whose_engine_lacks_methods_names_them_all(site):
    (site.site / "parts_of_a_plugin.py").write_text(PARTS + "\nclass Heir(Engine, NoModel):\n    def save(self): ...\n")
    swift(site, "acme", "train", "parts_of_a_plugin:Heir", "parts_of_a_plugin:Options")
    site.load()
    spec = WorkerSpec(TrainWorker, "swift", ModelSpec("nowhere"))
    lacking = (
        "does not implement TrainEngine: it lacks forward, forward_backward, optim_step, weight_source, load, "
        "export_hf, shutdown"
    )
    with pytest.raises(EnginehouseError, match=lacking):
        WorkerGroup(None, spec, launcher="inline")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("parts_of_a_plugin:losses", "module 'parts_of_a_plugin' has no 'losses'"),
        ("parts_of_nothing:loss", "there is no module 'parts_of_nothing'"),
        ("parts_of_a_plugin:loss", "requires the argument 'needed'"),
    ],
)
def test_a_registered_loss_is_looked_for_though_it_gets_no_arguments(make, site, function: str, said: str):
    site.add(
        "acme",
        f"""
        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="drifting", function={function!r}))
        """,
    )
    assert said in refusal(make, "algorithm.loss.name=drifting")


def test_an_argument_that_a_loss_takes_from_a_key_that_is_none_is_refused(make, site):
    site.add(
        "acme",
        """
        @hookimpl
        def enginehouse_register_losses(register):
            register(Loss(name="drifting", function="parts_of_a_plugin:loss", taken_from={"needed": "rollout.nothing"}))
        """,
    )
    said = refusal(make, "algorithm.loss.name=drifting")
    assert "'drifting' (acme 0.1.0) takes 'needed' from rollout.nothing, but the config has no such key" in said


def test_an_option_of_another_backend_names_that_backend(make, site):
    (site.site / "parts_of_a_plugin.py").write_text(PARTS + "\nclass Rich(Options):\n    lora: dict = {}\n")
    swift(site, "acme", "rollout", ENGINES["rollout"][0], "parts_of_a_plugin:Rich")
    said = refusal(make, "rollout.engine.options.lora.rank=4")
    assert "'rollout.engine.options.lora': engine 'swift' has it; set rollout.engine.backend=swift" in said


def test_an_option_that_nobody_has_may_be_the_engines_own(make, site):
    options = "enginehouse.engines.options:RolloutOptions"
    swift(site, "acme", "rollout", ENGINES["rollout"][0], options)
    said = refusal(make, "rollout.engine.backend=swift", "rollout.engine.options.some_flag=4")
    assert "Arguments of the engine itself belong under rollout.engine.options.native" in said
    assert "native" not in refusal(make, "rollout.engine.options.some_flag=4").replace("native, prefill", "")
