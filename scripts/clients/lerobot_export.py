"""An export opened by LeRobot itself, which has an environment of its own.

python scripts/clients/lerobot_export.py --make FOLDER     where expstore is installed
python scripts/clients/lerobot_export.py --check FOLDER    where lerobot is: every frame is compared
"""

import sys
from pathlib import Path

import numpy as np

LENGTHS = (5, 3, 7)


def make(folder: Path) -> None:
    import expstore

    rng = np.random.default_rng(0)
    expected = {"state": [], "image": [], "action": [], "reward": [], "done": []}
    with expstore.Writer(folder.with_suffix(".exp")) as writer:
        for length in LENGTHS:
            state = rng.normal(size=(length, 4)).astype(np.float32)
            image = rng.integers(0, 255, (length, 16, 24, 3), np.uint8)
            action = rng.normal(size=(length, 2)).astype(np.float32)
            reward = rng.normal(size=length).astype(np.float32)
            flags = {name: np.zeros(length, bool) for name in ("terminated", "truncated")}
            flags["terminated"][-1] = True
            writer.append(
                {
                    "observation": {"state": state, "images": {"top": image}},
                    "action": action,
                    "reward": reward,
                    **flags,
                },
                task=f"task {length}",
            )
            done = flags["terminated"]
            for name, values in zip(expected, (state, image, action, reward, done), strict=True):
                expected[name].append(values)
    expstore.export_to(folder.with_suffix(".exp"), folder, format="lerobot")
    np.savez(folder.with_suffix(".npz"), **{n: np.concatenate(v) for n, v in expected.items()})


def check(folder: Path) -> None:
    import lerobot
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    expected = np.load(folder.with_suffix(".npz"))
    windows = {"action": [0.0, 1 / 30, 2 / 30]}
    dataset = LeRobotDataset("expstore/export", root=folder, delta_timestamps=windows)
    assert (dataset.num_episodes, dataset.num_frames) == (len(LENGTHS), sum(LENGTHS))
    for i in range(len(dataset)):
        frame = dataset[i]
        np.testing.assert_array_equal(frame["observation.state"], expected["state"][i])
        pixels = (frame["observation.images.top"].permute(1, 2, 0) * 255).round().byte()
        np.testing.assert_array_equal(pixels, expected["image"][i])
        np.testing.assert_array_equal(frame["action"][0], expected["action"][i])
        assert float(frame["next.reward"]) == expected["reward"][i]
        assert bool(frame["next.done"]) == expected["done"][i]
        assert frame["task"] == f"task {LENGTHS[int(frame['episode_index'])]}"
    last = sum(LENGTHS) - 1
    assert dataset[last]["action_is_pad"].tolist() == [False, True, True]
    print(
        f"lerobot {lerobot.__version__}: {len(dataset)} frames of {dataset.num_episodes} episodes"
    )


if __name__ == "__main__":
    {"--make": make, "--check": check}[sys.argv[1]](Path(sys.argv[2]))
