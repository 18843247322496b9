"""The compatibility matrix: training engines x rollout engines x weight transports, found by certificates and runs.

Everything in it was measured by what is here: `certified` makes or reads a certificate of each backend and transport,
`combination` asks `plan` which runs are possible, `running` makes each in a process of its own, as a user would,
`row` reads its figures from its run directory, and `page` writes them down. `enginehouse matrix` does all of it.
"""
