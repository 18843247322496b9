"""What this plugin declares, of what came with contract 1.1."""

from enginehouse.plugin import Environment, Filter, Reward, Tracker, hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_trackers(register):
    register(Tracker(name="middle", summary="Lines in a file", tracker="plugin_1_1.parts:Lines", requires=("torch",)))


@hookimpl
def enginehouse_register_environments(register):
    register(Environment(name="middle", summary="One answer, scored here", environment="plugin_1_1.parts:Once"))


@hookimpl
def enginehouse_register_rewards(register):
    register(Reward(name="middle", summary="1 for the answer", function="plugin_1_1.parts:right"))


@hookimpl
def enginehouse_register_filters(register):
    register(Filter(name="middle", summary="Keeps every group", function="plugin_1_1.parts:keep"))


@hookimpl
def enginehouse_run_recorded(directory, outcome):
    with open(f"{directory}/middle.txt", "a") as file:
        file.write(f"recorded {outcome}\n")
