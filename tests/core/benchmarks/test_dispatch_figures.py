"""How the dispatch benchmark takes turns and gets its figures. The figures here are made up; the arithmetic is not."""

import signal

import psutil
import pytest
from benchmarks import dispatch
from benchmarks.dispatch import BARE, OURS, VERL_NAME, Extent, Measurement, Table, fits, in_turns, noop_row, summary
from benchmarks.dispatch_side import Memory


class Recorder:
    """Stands in for a side: writes down what is asked of it, and when it was paused."""

    def __init__(self, name: str, diary: list[str]):
        self.name = name
        self.diary = diary
        self.memory: Memory | None = None

    def ask(self, do, *, watch=None, **arguments):
        self.memory = Memory(own=len(self.diary), resident=0)
        self.diary.append(f"{self.name} {do}")
        return self.name

    def pause(self):
        self.diary.append(f"{self.name} pauses")

    def resume(self):
        self.diary.append(f"{self.name} resumes")


def filled(verl: bool = True) -> Table:
    """Figures of a run with two sizes each."""
    table = Table()
    theirs = {VERL_NAME: 3000.0} if verl else {}
    table.add(noop_row(2), "us", {OURS: 1100.0, BARE: 1000.0, **theirs})
    table.add(noop_row(4), "us", {OURS: 1300.0, BARE: 1300.0, **dict.fromkeys(theirs, 3500.0)})
    table.add(dispatch.roundtrip_row(128), "ms", {OURS: 120.0, BARE: 100.0})
    table.add(dispatch.roundtrip_row(512), "ms", {OURS: 500.0, BARE: 400.0})
    for size, ours in ((128, 120.0), (512, 500.0)) if verl else ():
        table.add(dispatch.beside_verl_row(size), "ms", {OURS: ours, **theirs})
    table.add(dispatch.forward_row(128), "MB", {OURS: 0.9})
    table.add(dispatch.forward_row(512), "MB", {OURS: 0.2})
    table.add(dispatch.LARGE_ROW, "s", {OURS: 2.0})
    table.add(f"{dispatch.LARGE_ROW}, driver grows by", "MB", {OURS: 3.0})
    table.add(dispatch.startup_row(4), "s", {OURS: 5.0, BARE: 4.0})
    return table


def summarized(table: Table) -> dict[str, float]:
    return summary(table, Extent(workers=[2, 4], megabytes=[128, 512]), fits(table, [2, 4]))


def test_metrics_have_the_agreed_names_and_ratios_say_ours_by_bare_ray_and_verl_by_ours():
    assert summarized(filled()) == pytest.approx(
        {
            "noop_vs_bare": 1.05,
            "noop_slope_vs_bare": 100 / 150,
            "roundtrip_128mb_vs_bare": 1.2,
            "roundtrip_512mb_vs_bare": 1.25,
            "roundtrip_128mb_vs_verl": 25.0,
            "roundtrip_512mb_vs_verl": 6.0,
            "forward_controller_growth_mb": 0.2,
            "large_batch_seconds": 2.0,
            "large_batch_driver_mb": 3.0,
            "startup_4_vs_bare_torch": 1.25,
        }
    )


def test_without_verl_there_are_no_figures_against_it():
    assert not [name for name in summarized(filled(verl=False)) if "verl" in name]


def test_a_line_through_the_no_op_times_gives_microseconds_a_worker():
    table = Table()
    for workers in (2, 4, 8, 16):
        table.add(noop_row(workers), "us", {OURS: 500.0 + 90.0 * workers, BARE: 400.0 + 80.0 * workers})
    assert fits(table, [2, 4, 8, 16])[OURS] == pytest.approx({"us_a_worker": 90.0, "us_at_none": 500.0, "r2": 1.0})


def test_every_round_begins_with_another_side_and_the_others_are_paused_meanwhile():
    diary: list[str] = []
    sides = [Recorder(name, diary) for name in "ab"]
    measurements = {side.name: Measurement(side, "noop") for side in sides}
    assert in_turns(sides, measurements, rounds=2) == {"a": ["a", "a"], "b": ["b", "b"]}
    assert diary == [
        *("b pauses", "a noop", "a pauses", "b noop"),
        *("a pauses", "b noop", "b pauses", "a noop"),
        *("a resumes", "b resumes"),
    ]


def test_two_measurements_of_one_side_do_not_pause_it():
    diary: list[str] = []
    side = Recorder("a", diary)
    in_turns([side], {"one way": Measurement(side, "x"), "another": Measurement(side, "y")}, rounds=1)
    assert diary == ["a x", "a y", "a resumes"]


def test_a_watched_measurement_keeps_how_the_memory_grew_each_time():
    side = Recorder("a", [])
    watched, plain = Measurement(side, "x", watch=0.1), Measurement(side, "y")
    in_turns([side], {"x": watched, "y": plain}, rounds=2)
    assert len(watched.grown) == 2
    assert not plain.grown


def test_a_request_to_terminate_ends_what_was_entered():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), dispatch.ending_in_order():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_size_of_group_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="two different ones"):
        dispatch.measure(workers=[4])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_quick_run_measures_everything_but_verl_and_leaves_no_process():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    result = dispatch.measure(quick=True)
    expected = {"noop_vs_bare", "roundtrip_4mb_vs_bare", "large_batch_seconds", "startup_1_vs_bare_torch"}
    assert expected <= result["metrics"].keys()
    assert all(value >= 0 for name, value in result["metrics"].items() if "slope" not in name)
    assert result["sides"][noop_row(2)].keys() == {"unit", OURS, BARE, "vs bare"}
    assert not {process.pid for process in psutil.Process().children(recursive=True)} - before
