"""Each property of a rollout engine fails on an engine that breaks it, and on nothing an engine does right."""

import dataclasses

import pytest

from enginehouse.plugin import RolloutBackend, plugins
from enginehouse.plugin.capabilities import WEIGHT_CHECKSUMS
from enginehouse_testing.running import Certifier, cases

pytestmark = pytest.mark.slow

DRAWN = {"token_ids", "logprobs", "many", "ends", "stop_strings"}
PAUSES = {"pause_abort", "pause_wait", "pause_keep", "kept_recomputed", "pause_keep_cache"}
SERVED = {"update", "prefix_cache", "interrupted_update", "staged_while_generating", "lent_weights"}

MUTANTS = [
    ("OffByOne", {*DRAWN, "abort_one", "abort_all", "kept_whole", "sleep", *PAUSES, *SERVED}),
    ("SeedIgnored", {"seed"}),
    ("Retokenised", {"token_ids", "prompt_logprobs"}),
    ("TemperatureForgotten", {"logprobs", "distribution", "ends"}),
    ("LogprobsAfterTopP", {"logprobs"}),
    ("TopKIgnored", {"truncation"}),
    ("StopTokenDropped", {"ends", "stop_strings"}),
    ("EndIgnored", {"ends"}),
    ("CompletionMissing", {"samples", "distribution", "seed", "abort_all"}),
    ("SamplesRepeated", {"distribution", "samples"}),
    ("AbortLosesTokens", {"abort_one", "abort_all", "pause_abort"}),
    ("VersionOff", {*PAUSES, *SERVED}),
    ("PauseIgnored", PAUSES),
    ("KeptAborted", {"pause_keep", "kept_recomputed", "pause_keep_cache", "kept_whole"}),
    ("OldCacheKept", {"kept_recomputed"}),
    ("CacheDropped", {"pause_keep_cache"}),
    ("PromptsUncounted", {"kept_whole"}),
    ("HealthOfTheDead", {"health"}),
    ("StaleReportedAsNew", {*PAUSES, *SERVED, "device_checksums", "small_updates", "sleep"}),
    ("AppliedOnArrival", {"interrupted_update", "staged_while_generating", "lent_weights"}),
    ("IncompleteTaken", {"interrupted_update"}),
    ("PrefixKept", SERVED),
    ("ChecksumOfStaged", {"device_checksums", "interrupted_update", "staged_while_generating"}),
    ("AbortsToStage", {"staged_while_generating", *PAUSES}),
    ("StateOff", {"weight_version", "weight_checksums", "device_checksums", *SERVED} - {"update", "prefix_cache"}),
    ("ChecksumsOfOneKind", {"device_checksums"}),
    ("ProcessLeft", {"shutdown", "killed"}),
    ("LoadsAnything", {"unloadable"}),
    ("ThreadsTaken", {"colocates"}),
    ("SeedTaken", {"colocates"}),
    ("BatchByBatch", {"overtaking"}),
    ("Raising", {"prompt_logprobs", "small_updates"}),
    ("DrawsAsleep", {"sleep"}),
    ("OldWeightsAfterSleep", {"sleep"}),
    ("LoanForgotten", {"lent_weights"}),
    ("WritesToLent", {"lent_weights"}),
]
ALSO = {
    "SamplesRepeated": {"ends"},
    "CompletionMissing": {"logprobs", "truncation", "ends"},
    "BatchByBatch": {
        "abort_one",
        "abort_all",
        "pause_abort",
        "pause_keep",
        "kept_recomputed",
        "pause_keep_cache",
        "health",
    },
}
"""What may fail besides: by chance, as few different samples may hold no end of the text, and a completion may come to
the prompt it is of; or as it takes the same."""
TRIES = 3
"""How often a check may look for what it is to find: what an engine does in the wrong order it may, on a busy machine,
do in the right one by chance (a request that should wait for an update comes after it)."""
WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["found", "and nothing else"]
)
"""Whether the checks that should find nothing are run as well."""
LIFE = {"killed", "unloadable", "update_untied", "update_experts", "colocates"}
"""Checks that need an engine, or a process, of their own: run on the mutants made for them."""


def mutant(name: str) -> RolloutBackend:
    whole = plugins().get(RolloutBackend, "torch")
    return dataclasses.replace(whole, name=name, engine=f"rollout_mutants:{name}")


@pytest.fixture(scope="module")
def certifier(ray_cluster):
    with Certifier(mutant("OffByOne")) as certifier:
        yield certifier


@WHOLE
@pytest.mark.parametrize(("name", "broken"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_what_is_broken_is_found(certifier, name, broken, whole):
    certifier.record = mutant(name)
    others = {case.check.name for case in cases(certifier.record)} - LIFE if whole else set()
    planned = [case for case in cases(certifier.record) if case.check.name in broken | others]
    results = [certifier.run(case) for case in planned]
    for _ in range(TRIES - 1):
        missed = broken - {result.name for result in results if result.outcome == "failed"}
        results += [certifier.run(case) for case in planned if case.check.name in missed]
    found = {result.name for result in results if result.outcome == "failed"}
    assert broken <= found <= broken | ALSO.get(name, set()), [
        (result.name, result.measured, result.detail) for result in results if result.outcome == "failed"
    ]
    assert not whole or "passed" in {result.outcome for result in results}


@pytest.mark.parametrize("name", ["UpdatesDropped", "SecondUpdateDropped"])
def test_a_dropped_update_is_found_by_logprobs_where_an_engine_cannot_be_read_back(certifier, name):
    """Alone, so that the second update of the engine's life is the check's."""
    record = mutant(name)
    certifier.record = dataclasses.replace(record, capabilities=record.capabilities - {WEIGHT_CHECKSUMS})
    (case,) = (case for case in cases(certifier.record) if case.check.name == "small_updates")
    result = certifier.run(case)
    assert (result.outcome, result.measured) == ("failed", 1.0)
    assert "a step: " in result.detail
