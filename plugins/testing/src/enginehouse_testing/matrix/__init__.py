"""The compatibility matrix of training engines, rollout engines and weight transports: certificates and real runs.

`certified` makes or reads a certificate of each backend and transport. `combination` asks `plan` which runs are
possible. `single_run` makes each run in its own process, as a user would. `row` reads the run's figures from its
directory, and `page` writes the page. `enginehouse matrix` does all of this.
"""
