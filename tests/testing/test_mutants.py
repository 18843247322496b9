"""Each property of the suite fails on an engine that breaks it, and on nothing an engine does right."""

import pytest

from enginehouse.plugin import TrainBackend, capabilities, plugins
from enginehouse_testing.running import Certifier, cases

pytestmark = pytest.mark.slow

TRAINS = {"training", "skips_nonfinite", "value_head", "offload"}
GRADIENT = {"gradients", "cut_independence", "metrics", *TRAINS}

MUTANTS = [
    ("MeanOfMeans", "single", {*GRADIENT}),
    ("Unreduced", "dp2", {*GRADIENT, "checkpoint", "export", "half_precision", "lent_weights", "value_head_files"}),
    # Clipping and AdamW itself forgive most of a factor: few trained weights show it.
    ("PaddingCounted", "single", GRADIENT - TRAINS | {"training"}),
    ("StaleExport", "single", {"export", "value_head_files"}),
    ("SwappedNames", "single", {"weights", "export", "value_head_files", *GRADIENT} - {"metrics"}),
    ("WrongMetadata", "single", {"weights"}),
    ("PartsElsewhere", "single", {"weights"}),
    ("UnsavedRandomState", "single", {"checkpoint"}),
    ("ScheduleBegunAnew", "single", {"checkpoint"}),
    ("OptimizerLost", "single", {"checkpoint", "value_head_files"}),
    ("TemperatureIgnored", "single", {"logprobs", "half_precision", *GRADIENT} - {"value_head"}),
    ("OffByOne", "single", {"logprobs", "export", "half_precision"}),
    ("NotFiniteTaken", "dp2", {"skips_nonfinite"}),
    ("LostWeightsKept", "single", {"finite_weights"}),
    ("DecayForgotten", "single", {"metrics", *TRAINS}),
    ("LossMisreported", "single", {"metrics"}),
    ("SmallStepsLost", "single", {"half_precision"}),
    ("BeginsRounded", "single", {"half_precision"}),
    ("Raising", "single", {"checkpoint", "value_head_files"}),
    ("MomentsLostOffloaded", "single", {"offload"}),
    ("LendsCopies", "single", {"lent_weights"}),
]

WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["found", "and nothing else"]
)
"""Whether the checks that should find nothing are run as well."""


def mutant(name: str, *only: str) -> TrainBackend:
    whole = plugins().get(TrainBackend, "torch")
    return TrainBackend(
        name=name,
        engine=f"engine_mutants:{name}",
        options=whole.options,
        capabilities=frozenset(only) or whole.capabilities - {capabilities.EXPERTS},
        layouts=whole.layouts,
    )


@pytest.fixture(scope="module")
def certifier(ray_cluster):
    with Certifier(mutant("StaleExport")) as certifier:
        yield certifier


@WHOLE
@pytest.mark.parametrize(("name", "layout", "broken"), MUTANTS, ids=[name for name, *_ in MUTANTS])
def test_what_is_broken_is_found(certifier, name, layout, broken, whole):
    certifier.record = mutant(name)
    results = [certifier.run(case) for case in cases(certifier.record, [layout], None if whole else sorted(broken))]
    assert {result.name for result in results if result.outcome == "failed"} == broken, [
        (result.name, result.measured, result.detail) for result in results if result.outcome == "failed"
    ]
    assert not whole or "passed" in {result.outcome for result in results}


def test_experts_that_are_mixed_up_are_found_where_a_model_has_any(certifier):
    certifier.record = mutant("SwappedExperts", capabilities.EXPERTS)
    results = {case.check.name: certifier.run(case) for case in cases(certifier.record, ["single"])}
    failed = {name for name, result in results.items() if result.outcome == "failed"}
    assert failed == {"experts_weights", "experts_export", "experts_gradients", "experts_training"}


def test_a_check_that_raises_is_a_failed_one_with_the_error_and_the_next_one_runs(certifier):
    certifier.record = mutant("Raising")
    save, score = (cases(certifier.record, ["single"], [name])[0] for name in ("checkpoint", "logprobs"))
    failed = certifier.run(save)
    assert (failed.outcome, failed.measured) == ("failed", None)
    assert "the disk is full" in failed.detail
    assert certifier.run(score).outcome == "passed"
