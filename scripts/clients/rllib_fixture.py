"""Write tests/formats/data/rllib.zip with RLlib itself, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/rllib && /tmp/rllib/bin/pip install 'ray[rllib]==2.60.0' torch
    /tmp/rllib/bin/python scripts/clients/rllib_fixture.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "rllib"
NUM_SAMPLES = 2  # of one episode each


def main() -> None:
    """Write the columns, and beside them the episodes that the runner gave."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    algorithm = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, rollout_fragment_length=10, batch_mode="complete_episodes")
        .training(train_batch_size_per_learner=20, minibatch_size=10)
        .offline_data(output=str(FOLDER), output_write_episodes=False, output_compress_columns=[])
        .debugging(seed=0)
        .build_algo()
    )
    episodes = [e for _ in range(NUM_SAMPLES) for e in algorithm.env_runner.sample()]
    algorithm.stop()
    shutil.make_archive(str(FOLDER), "zip", FOLDER)  # RLlib makes a file for each row
    shutil.rmtree(FOLDER)
    given = {"lengths": np.array([len(episode) for episode in episodes])}
    for number, episode in enumerate(episodes):
        given[f"obs_{number}"] = np.asarray(episode.get_observations())
        given[f"actions_{number}"] = np.asarray(episode.get_actions())
        given[f"rewards_{number}"] = np.asarray(episode.get_rewards())
    np.savez_compressed(FOLDER.with_suffix(".npz"), **given)


if __name__ == "__main__":
    main()
