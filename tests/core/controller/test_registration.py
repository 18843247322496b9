"""What `@register` and a `WorkerSpec` accept."""

import pytest
from controller_workers import Accumulator, Plain

from enginehouse.controller import ControllerError, Dispatch, Execute, Worker, WorkerGroup, WorkerSpec, register
from enginehouse.controller.registration import is_async, registered_methods


def test_enums_and_strings_name_the_same_modes():
    @register(Dispatch.ALL_TO_ALL, execute=Execute.RANK_ZERO)
    def by_enum(self): ...

    @register("all_to_all", execute="rank_zero")
    def by_name(self): ...

    class Both(Worker):
        enum = by_enum
        name = by_name

    specs = registered_methods(Both)
    assert specs["enum"] == specs["name"]


def test_an_override_without_the_decorator_keeps_the_registration():
    class Louder(Accumulator):
        def add(self, value):
            return super().add(value * 10)

    assert registered_methods(Louder)["add"] == registered_methods(Accumulator)["add"]


def test_async_methods_are_told_apart():
    class Mixed(Worker):
        async def one(self): ...

        def two(self): ...

    assert is_async(Mixed, "one")
    assert not is_async(Mixed, "two")
    assert not is_async(Mixed, "absent")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dispatch": {"dispatch_fn": print}}, "collect_fn"),
        ({"collect": "sum"}, "concat"),
        ({"execute": "some"}, "some"),
    ],
)
def test_a_wrong_registration_fails_where_it_is_written(arguments, said):
    with pytest.raises(ValueError, match=said):
        register(**arguments)


def test_only_async_methods_are_urgent():
    with pytest.raises(TypeError, match=r"compute cannot be urgent"):

        @register(urgent=True)
        def compute(self): ...


def test_a_spec_is_made_from_a_class():
    with pytest.raises(TypeError, match="class"):
        WorkerSpec(Plain(1))


def test_options_leave_the_spec_they_are_taken_from_alone():
    spec = WorkerSpec(Plain, 1)
    other = spec.options(env={"A": 1}, distributed=False)
    assert (spec.env, spec.distributed) == ({}, True)
    assert (other.env, other.distributed) == ({"A": "1"}, False)
    assert other.options(python="/x").env == {"A": "1"}


@pytest.mark.parametrize("name", ["shutdown", "name", "world_size", "call"])
def test_a_registered_method_cannot_hide_the_groups_own(name):
    cls = type("Bad", (Worker,), {name: register(lambda self: None)})
    with pytest.raises(ControllerError, match=name):
        WorkerGroup(None, WorkerSpec(cls), launcher="inline")


def test_rows_that_would_be_lost_are_refused():
    with pytest.raises(ValueError, match="would lose all rows"):
        register(dispatch="dp", execute="rank_zero")
