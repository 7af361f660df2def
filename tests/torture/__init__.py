"""What the hostile tests of the store and `scripts/torture` share.

`episodes` says what a store must hold, `faults` stands between the store and the system,
`child` is a writer that is killed, `check` reads what is left in four ways, `readers` are alive
meanwhile, `disk` and `power` cut the power of a simulated disk, `eviction` says what
a capacity had to take, and `rounds` plays them against each other. `python -m tests.torture` is
`scripts/torture`.
"""
