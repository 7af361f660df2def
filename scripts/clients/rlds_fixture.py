"""Write tests/formats/data/rlds with TensorFlow Datasets itself, in an environment of its own.

It runs by hand, and the files are checked in:

    python -m venv /tmp/rlds
    /tmp/rlds/bin/pip install tensorflow-cpu 'tensorflow-datasets==4.9.10'
    /tmp/rlds/bin/python scripts/clients/rlds_fixture.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

FOLDER = Path(__file__).parents[2] / "tests" / "formats" / "data" / "rlds"
LENGTHS = (3, 2, 4)  # steps; each has one row more, the final observation


def episodes() -> list[dict[str, Any]]:
    """Terminated, truncated, and one whose last row is not marked as last."""
    rng = np.random.default_rng(0)
    found = []
    for number, length in enumerate(LENGTHS):
        rows = []
        for t in range(length + 1):
            is_last = t == length and number != 2
            rows.append(
                {
                    "observation": {
                        "image": rng.integers(0, 256, (6, 5, 3)).astype(np.uint8),
                        "state": rng.normal(size=3).astype(np.float32),
                        "packed": rng.normal(size=(2, 2)).astype(np.float64),
                        "count": np.uint8(200 + t),
                        "contacts": rng.normal(size=(t, 2)).astype(np.float32),
                    },
                    "action": {"grip": t % 2 == 0, "move": rng.normal(size=2).astype(np.float32)},
                    "reward": np.float32(rng.normal()),
                    "discount": np.float32(1),
                    "is_first": t == 0,
                    "is_last": is_last,
                    "is_terminal": is_last and number == 0,
                    "language_instruction": f"pick the cube {number}",
                }
            )
        found.append({"steps": rows, "episode_metadata": {"file_path": f"raw/{number}.npy"}})
    return found


class Arm(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
    """A data set with every kind of feature that the reader knows."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        step = {
            "observation": {
                "image": tfds.features.Image(shape=(6, 5, 3), encoding_format="png"),
                "state": tfds.features.Tensor(shape=(3,), dtype=tf.float32),
                "packed": tfds.features.Tensor(shape=(2, 2), dtype=tf.float64, encoding="zlib"),
                "count": tfds.features.Scalar(dtype=tf.uint8),
                "contacts": tfds.features.Sequence(
                    tfds.features.Tensor(shape=(2,), dtype=tf.float32)
                ),
            },
            "action": {
                "grip": tfds.features.Scalar(dtype=tf.bool),
                "move": tfds.features.Tensor(shape=(2,), dtype=tf.float32),
            },
            "reward": tfds.features.Scalar(dtype=tf.float32),
            "discount": tfds.features.Scalar(dtype=tf.float32),
            "is_first": tf.bool,
            "is_last": tf.bool,
            "is_terminal": tf.bool,
            "language_instruction": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "steps": tfds.features.Dataset(step),
                    "episode_metadata": {"file_path": tfds.features.Text()},
                }
            ),
        )

    def _split_generators(self, _: Any) -> dict[str, Any]:
        return {"train": self._generate_examples(0, 2), "val": self._generate_examples(2, 3)}

    def _generate_examples(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        yield from list(enumerate(episodes()))[start:stop]


def main() -> None:
    """Write the data set, and beside it the rows of each episode as arrays."""
    with tempfile.TemporaryDirectory() as folder:
        Arm(data_dir=folder).download_and_prepare()
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(Path(folder) / "arm", FOLDER)
    given: dict[str, Any] = {}
    for number, episode in enumerate(episodes()):
        rows = episode["steps"]
        for name in ("image", "state", "packed", "count"):
            given[f"{number}/{name}"] = np.stack([row["observation"][name] for row in rows])
        for name in ("grip", "move"):
            given[f"{number}/{name}"] = np.stack([row["action"][name] for row in rows])
        contacts = [row["observation"]["contacts"] for row in rows]
        given[f"{number}/contacts"] = np.concatenate(contacts)
        given[f"{number}/reward"] = np.array([row["reward"] for row in rows])
    np.savez_compressed(FOLDER.with_suffix(".npz"), **given)


if __name__ == "__main__":
    main()
