"""The verified weight update, with real torch engines in this process; faults are put in by `faults`."""

import re

import pytest

from enginehouse.controller import StillRunning
from enginehouse.engines.train import Outputs
from enginehouse.engines.weights import WeightSyncError
from enginehouse.weights.effect import QUANTIZED_TOLERANCE, TOLERANCES

from . import faults
from .roles_for_tests import DEMONSTRATIONS, GREEDY, PROMPTS, open_house

TRANSPORTS = ["inproc", "shared_memory", "point_to_point", "differences"]


@pytest.fixture(params=TRANSPORTS)
def house(request):
    with open_house(request.param) as opened:
        yield opened


def test_after_an_update_the_rollout_computes_what_the_trainer_computes(house):
    sync = house.connect(effect_check_every=2)
    for version in range(1, 5):
        house.train()
        report = sync.publish(version)
        assert (report.version, house.versions()) == (version, [version])
        assert report.seconds > 0
        assert report.nbytes == sum(parameter.nbytes for parameter in house.actor.weight_metadata())
        if version == 4:  # the first is checked, the first that changes weights, and every second
            assert report.effect is None
        else:
            assert report.effect < 1e-4
        sequences = [DEMONSTRATIONS["input_ids"][row].tolist() for row in range(len(DEMONSTRATIONS))]
        trained = house.actor.forward(DEMONSTRATIONS.select(["input_ids"]), Outputs())["logprobs"]
        for row, served in enumerate(house.rollout.score(sequences)[0]):
            assert served == pytest.approx(trained[row].tolist(), abs=2e-4)


def test_a_report_says_what_was_sent_where_updates_differ():
    with open_house("differences") as house:
        sync = house.connect()
        first, again = sync.publish(1), sync.publish(2)
        assert first.bytes_moved > first.nbytes
        assert again.bytes_moved < 0.1 * again.nbytes, "nothing has changed"
        assert (first.bytes_minimum, again.bytes_minimum) == (None, None)


def test_samples_say_which_version_drew_them(house):
    sync = house.connect()
    before = house.rollout.generate(PROMPTS, GREEDY)
    sync.publish(7)
    after = house.rollout.generate(PROMPTS, GREEDY)
    assert set(before["weight_version"].tolist()) == {0}
    assert set(after["weight_version"].tolist()) == {7}


def test_versions_only_grow_and_a_transport_comes_first(house):
    sync = house.connect()
    sync.publish(3)
    with pytest.raises(WeightSyncError, match="not newer than 3"):
        sync.publish(3)
    sync.close()
    with pytest.raises(WeightSyncError, match="before the transport is connected"):
        sync.publish(4)


def test_an_update_can_be_begun_before_it_is_synced(house):
    sync = house.connect()
    sync.begin(1)  # nothing is under way that it could stand behind: it is sent now
    assert sync.publish(1).version == 1
    sync.begin(1)  # it is served already
    house.train()
    sync.begin(2)
    sync.give_up()
    assert house.versions() == [1]
    assert sync.publish(2).version == 2
    assert house.versions() == [2]
    sync.close()
    sync.begin(3)
    with pytest.raises(WeightSyncError, match="before the transport is connected"):
        sync.publish(3)


def check_that_the_old_version_serves_and_the_next_update_works(house, *, parameters, said):
    """Update 1 works, 2 fails as said and changes nothing that is served, 3 works."""
    sync = house.connect()
    house.train()
    sync.publish(1)
    state, answers = house.rollout.weight_state(), house.answers()
    house.train()
    with pytest.raises(WeightSyncError, match=said) as caught:
        sync.publish(faults.VERSION)
    assert set(caught.value.parameters) >= parameters
    assert house.rollout.weight_state() == state
    assert house.answers() == answers
    assert sync.publish(3).version == 3
    assert house.versions() == [3]
    assert house.rollout.weight_state() != state


def test_what_was_begun_is_verified_as_any_other_update():
    with open_house(f"{faults.__name__}:CorruptingInproc") as house:
        sync = house.connect()
        sync.publish(1)
        states = house.rollout.weight_state()
        house.train()
        sync.begin(faults.VERSION)
        with pytest.raises(WeightSyncError, match=f"changed: {faults.PARAMETER}"):
            sync.publish(faults.VERSION)
        assert house.rollout.weight_state() == states
        assert sync.publish(3).version == 3


@pytest.mark.parametrize("transport", ["CorruptingInproc", "CorruptingSharedMemory"])
def test_a_bucket_corrupted_in_flight_stops_the_update_with_the_parameters_name(transport):
    with open_house(f"{faults.__name__}:{transport}") as house:
        check_that_the_old_version_serves_and_the_next_update_works(
            house, parameters={faults.PARAMETER}, said=f"replica 0 .*arrived changed: {faults.PARAMETER}"
        )


@pytest.mark.parametrize("transport", ["DroppingInproc", "DroppingSharedMemory"])
def test_a_bucket_lost_in_flight_stops_the_update_with_the_parameters_name(transport):
    with open_house(f"{faults.__name__}:{transport}") as house:
        check_that_the_old_version_serves_and_the_next_update_works(
            house, parameters={faults.PARAMETER}, said=f"replica 0 .*did not arrive: .*{faults.PARAMETER}"
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_parameter_the_engine_refuses_stops_the_update_and_the_cause_is_named(transport):
    with open_house(transport, rollout=faults.RefusingRolloutWorker) as house:
        check_that_the_old_version_serves_and_the_next_update_works(
            house, parameters={faults.PARAMETER}, said=f"no room for '{faults.PARAMETER}'"
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_fails_while_it_gives_its_weights_stops_the_update_and_the_cause_is_named(transport):
    with open_house(transport, train=faults.HalfWayTrainWorker) as house:
        check_that_the_old_version_serves_and_the_next_update_works(
            house, parameters=set(), said="update 2 failed.*gathering failed"
        )


def test_an_engine_that_never_pauses_ends_in_an_error_at_the_deadline():
    with open_house("inproc", rollout=faults.StuckRolloutWorker) as house:
        sync = house.connect(timeout=0.3)
        with pytest.raises(WeightSyncError, match=r"within 0\.3 s"):
            sync.publish(1)
        assert house.versions() == [0]


def check_that_nothing_is_answered(house):
    pending = house.rollout.call("generate", PROMPTS, GREEDY, blocking=False)
    with pytest.raises(StillRunning):
        pending.result(0.2)


def test_an_engine_that_does_not_serve_what_it_staged_is_caught_and_answers_nothing():
    with open_house("inproc", rollout=faults.MangledRolloutWorker) as house:
        with pytest.raises(WeightSyncError, match=f"does not serve {faults.PARAMETER} as sent") as caught:
            house.connect().publish(1)
        assert caught.value.parameters == (faults.PARAMETER,)
        check_that_nothing_is_answered(house)


def test_weights_that_were_never_verified_are_not_served_after_a_later_update_fails_either():
    transport = f"{faults.__name__}:CorruptingInproc"
    with open_house(transport, rollout=faults.MangledRolloutWorker) as house:
        sync = house.connect()
        for version, said in ((1, "does not serve"), (faults.VERSION, "arrived changed")):
            with pytest.raises(WeightSyncError, match=said):
                sync.publish(version)
        check_that_nothing_is_answered(house)


def test_what_waited_inside_an_engine_is_not_answered_from_weights_that_were_never_verified():
    with open_house("inproc", rollout=faults.QueueingRolloutWorker) as house:
        pending = house.rollout.call("generate", PROMPTS, GREEDY, blocking=False)
        house.rollout.holds_one()
        house.train()
        with pytest.raises(WeightSyncError, match="does not compute with them"):
            house.connect(effect_tolerance=1e-12).publish(1)
        with pytest.raises(StillRunning):
            pending.result(0.5)
        house.train()
        house.connect().publish(2)
        assert set(pending.result()["weight_version"].tolist()) == {2}


@pytest.mark.parametrize("later", ["sync", "connect", "close"])
def test_a_replica_that_does_not_resume_is_an_error_of_what_comes_next(later, caplog):
    said = "not every replica resumed after weight update 2.*did not wake up"
    with open_house("inproc", rollout=faults.UnresumedRolloutWorker) as house:
        sync = house.connect()
        sync.publish(faults.VERSION)
        if later == "close":
            sync.close()
            assert re.search(said, caplog.text)
            return
        with pytest.raises(WeightSyncError, match=said):
            sync.publish(3) if later == "sync" else sync.connect()
        assert sync.publish(4).version == 4
        assert house.answers()


@pytest.fixture
def meeting():
    """A house whose trainer computes the probe only while the replica switches."""
    trainer = faults.MeetingTrainWorker
    trainer.meeting.reset()
    trainer.aborted.clear()
    trainer.computed.clear()
    with open_house("inproc", train=trainer, rollout=faults.MeetingRolloutWorker) as house:
        yield house


def test_the_trainer_computes_for_the_effect_check_while_replicas_switch(meeting):
    sync = meeting.connect()
    for version in (1, 2):
        assert sync.publish(version).effect is not None
        meeting.train()


def test_an_update_that_fails_ends_what_the_trainer_computes_for_it(meeting, monkeypatch):
    monkeypatch.setattr(faults.MeetingRolloutWorker, "refuses", True)
    sync = meeting.connect()
    with pytest.raises(WeightSyncError, match="no switch today"):
        sync.publish(1)
    assert faults.MeetingTrainWorker.computed.is_set()
    monkeypatch.undo()
    assert sync.publish(2).effect is not None


def test_an_engine_with_the_right_bytes_that_computes_with_others_is_caught_by_the_effect_check():
    with open_house("inproc", rollout=faults.StaleRolloutWorker) as house:
        house.train()
        with pytest.raises(WeightSyncError, match=r"does not compute with them.* [0-9.]+ nats"):
            house.connect().publish(1)
        check_that_nothing_is_answered(house)


@pytest.mark.parametrize("switched_off", [{"effect_check_every": 0}, {"probe": None}, {"probe": [[3]]}])
def test_the_effect_check_can_be_switched_off(switched_off):
    with open_house("inproc", rollout=faults.StaleRolloutWorker) as house:
        house.train()
        assert house.connect(**switched_off).publish(1).effect is None


def test_a_new_connection_replaces_the_old_one_and_checks_the_effect_again(house):
    sync = house.connect()
    assert sync.publish(1).effect is not None
    assert sync.publish(2).effect is None
    sync.connect()
    assert sync.publish(3).effect is not None
    house.train()
    assert sync.publish(4).effect is not None  # the first that changes weights
    house.train()
    assert sync.publish(5).effect is None


@pytest.mark.parametrize("worker", [faults.DroppingRolloutWorker, faults.DroppingOnceRolloutWorker])
def test_a_dropped_update_of_an_engine_that_cannot_be_read_back_is_found_at_once(worker):
    with open_house("inproc", rollout=worker, lr=1e-6) as house:
        sync = house.connect()
        sync.publish(1)  # brings the weights it was launched with
        house.train()
        with pytest.raises(WeightSyncError, match="replica 0 says that it serves version 2, but computes as before"):
            sync.publish(2)
        check_that_nothing_is_answered(house)


@pytest.mark.parametrize("worker", ["PartlyReadOlder", "PartlySilent"])
def test_what_an_engine_reads_back_is_compared_though_it_cannot_read_all(worker):
    with open_house("inproc", rollout=getattr(faults, f"{worker}RolloutWorker")) as house:
        sync = house.connect()
        with pytest.raises(WeightSyncError, match=r"does not serve model\.norm\.weight as sent"):
            sync.publish(1)
        check_that_nothing_is_answered(house)


@pytest.mark.parametrize("worker", ["Unreadable", "PartlyRead"])
def test_an_engine_that_cannot_read_all_back_is_asked_at_every_update_that_changes_weights(worker):
    with open_house("inproc", rollout=getattr(faults, f"{worker}RolloutWorker"), lr=1e-6) as house:
        sync = house.connect()
        assert sync.publish(1).taken is None  # nothing has changed
        for version in (2, 3):
            house.train()
            assert sync.publish(version).taken > 0.99
        assert sync.publish(4).effect is None


def test_an_engine_that_cannot_be_read_back_any_more_is_asked_at_once():
    with open_house("inproc", rollout=faults.LaterUnreadableRolloutWorker) as house:
        sync = house.connect()
        for version in (1, 2, 3):
            house.train()
            assert sync.publish(version).effect is not None


@pytest.mark.parametrize(("worker", "warned"), [("Unreadable", False), ("PartlyDropping", True)])
def test_an_engine_that_drops_a_part_of_each_update_is_warned_of_once(worker, warned, caplog):
    with open_house("inproc", rollout=getattr(faults, f"{worker}RolloutWorker"), lr=1e-4) as house:
        sync = house.connect(effect_tolerance=1.0)
        sync.publish(1)
        for version in range(2, 6):
            house.train()
            report = sync.publish(version)
        assert (report.least_taken < 0.9) == warned, report
    told = [record.getMessage() for record in caplog.records if "it may drop a part of each update" in record.message]
    assert len(told) == warned


def test_bfloat16_hides_small_updates_and_no_update_that_was_taken_is_called_dropped():
    with open_house("inproc", rollout=faults.UnreadableRolloutWorker, lr=1e-6, dtype="bfloat16") as house:
        sync = house.connect(effect_tolerance=1.0)
        sync.publish(1)
        for version in range(2, 12):
            house.train()
            assert sync.publish(version).taken is None


def test_one_dropped_update_of_many_is_found_below_bfloat16():
    with open_house("inproc", rollout=faults.DroppingLaterRolloutWorker, lr=1e-5, dtype="bfloat16") as house:
        sync = house.connect(effect_tolerance=1.0)
        for version in (1, 2):
            sync.publish(version)
            house.train()
        with pytest.raises(WeightSyncError, match="replica 0 says that it serves version 3, but computes as before"):
            sync.publish(3)


def test_a_quantized_engine_may_be_further_apart():
    with open_house("inproc", rollout=faults.QuantizedRolloutWorker, lr=1e-3) as house:
        with pytest.raises(WeightSyncError, match="but does not compute with them"):
            house.connect(effect_tolerance=TOLERANCES["float32"]).publish(1)
        sync = house.connect(effect_tolerance=QUANTIZED_TOLERANCE)
        for version in range(2, 6):
            report = sync.publish(version)
            assert 0.02 < report.effect < QUANTIZED_TOLERANCE
            assert report.taken is None or report.taken > 0.9
            house.train()


def test_a_quantized_engine_that_drops_an_update_is_found_though_it_is_far_apart():
    with open_house("inproc", rollout=faults.QuantizedDroppingLaterRolloutWorker, lr=1e-6) as house:
        sync = house.connect(effect_tolerance=QUANTIZED_TOLERANCE)
        for version in (1, 2):
            sync.publish(version)
            house.train()
        with pytest.raises(WeightSyncError, match="replica 0 says that it serves version 3, but computes as before"):
            sync.publish(3)


def test_a_trainer_that_is_not_reproducible_and_has_not_changed_is_no_dropped_update():
    with open_house("inproc", train=faults.WanderingTrainWorker) as house:
        sync = house.connect(effect_check_every=1)
        for version in (1, 2, 3):
            assert sync.publish(version).taken is None


def test_updates_dropped_below_bfloat16_add_up_until_they_are_seen():
    with open_house("inproc", rollout=faults.DroppingRolloutWorker, lr=1e-3, dtype="bfloat16") as house:
        sync = house.connect(effect_tolerance=1.0)

        def updated():
            for version in range(1, 12):
                sync.publish(version)
                house.train()

        with pytest.raises(WeightSyncError, match="computes as before"):
            updated()
