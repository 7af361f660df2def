"""d3rlpy learns from a store: `python scripts/clients/d3rlpy_offline.py STORE [STEPS]`.

Runs where expstore and d3rlpy are installed. d3rlpy samples from its own buffer in memory, which
`transitions()` fills; its CQL and IQL then learn for some hundred steps.
"""

import sys

import d3rlpy
import numpy as np

import expstore


def dataset_of(data: expstore.OfflineDataset) -> d3rlpy.dataset.MDPDataset:
    found = data.transitions()
    # d3rlpy cuts episodes where either is set, and bootstraps after a timeout.
    timeouts = found["timeouts"] & ~found["terminals"]
    return d3rlpy.dataset.MDPDataset(
        observations=found["observations"].astype(np.float32),
        actions=found["actions"].astype(np.float32),
        rewards=found["rewards"].astype(np.float32),
        terminals=found["terminals"].astype(np.float32),
        timeouts=timeouts.astype(np.float32),
    )


def main(path: str, steps: int) -> None:
    data = expstore.OfflineDataset(expstore.open(path))
    dataset = dataset_of(data)
    # d3rlpy has no transition at a timeout, since it keeps no observation after it.
    num_timeouts = int(np.count_nonzero(data.transitions()["timeouts"]))
    found = dataset.transition_count
    assert found == len(data) - num_timeouts, (found, len(data), num_timeouts)
    for config in (d3rlpy.algos.IQLConfig(), d3rlpy.algos.CQLConfig()):
        algorithm = config.create(device="cpu:0")
        algorithm.fit(
            dataset, n_steps=steps, n_steps_per_epoch=steps, show_progress=False,
            logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
        )  # fmt: skip
        actions = algorithm.predict(data.transitions()["observations"][:4].astype(np.float32))
        assert np.isfinite(actions).all()
        print(f"{type(algorithm).__name__}: {steps} steps on {len(data):,} transitions")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300)
