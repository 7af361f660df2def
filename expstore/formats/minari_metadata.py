"""The metadata of a Minari data set: its form, its spaces, what it announces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expstore.formats.minari_fields import GROUPS, UNKNOWN, Space
from expstore.formats.source import Account

METADATA_NAME = "metadata.json"
OF_THE_DATASET = ("dataset_id", "algorithm_name", "minari_version")  # kept with each episode


class MinariMetadata:
    """`metadata.json` of a data set, whose folder or folder `data` is given.

    Attributes:
        values: as they stand there, empty where there is none.
        spaces: of observations and actions, by the name of the field.
        dataset: what each episode is to keep of it.
    """

    def __init__(self, folder: Path, account: Account) -> None:
        self._account = account
        self.values = self._read(folder)
        self.spaces = {name: self._space(f"{name}_space") for name in GROUPS}
        self.dataset = self._dataset()

    @property
    def form(self) -> str:
        """How the episodes are stored: hdf5, arrow or parquet."""
        return str(self.values.get("data_format", "hdf5"))

    @property
    def is_of_minari(self) -> bool:
        return "data_format" in self.values and "observation_space" in self.values

    @property
    def num_steps(self) -> int | None:
        """As announced."""
        steps = self.values.get("total_steps")
        return steps if isinstance(steps, int) else None

    def compare(self, numbers: Sequence[int], num_steps: int) -> None:
        """Say where the episodes of these numbers are not what is announced."""
        highest = numbers[-1] + 1 if numbers else 0
        if missing := highest - len(numbers):
            self._account.remark(
                f"{missing:,} of the numbers up to {highest - 1:,} are missing",
            )
        counts = {"total_episodes": len(numbers), "total_steps": num_steps}
        for key, found in counts.items():
            if (announced := self.values.get(key, found)) != found:
                of = key.removeprefix("total_")
                self._account.remark(f"{METADATA_NAME} says {announced} {of}, there are {found}")

    def _read(self, folder: Path) -> dict[str, Any]:
        for file in (folder / METADATA_NAME, folder / "data" / METADATA_NAME):
            if file.is_file():
                try:
                    found = json.loads(file.read_bytes())
                except ValueError:
                    reason = "it is no JSON, so it was not written whole"
                    self._account.fail(METADATA_NAME, reason)
                    return {}
                return found if isinstance(found, dict) else {}
        self._account.remark(
            f"there is no {METADATA_NAME}, so there is nothing to compare counts with"
        )
        return {}

    def _dataset(self) -> dict[str, Any]:
        values = {key: self.values[key] for key in OF_THE_DATASET if key in self.values}
        spec = self._parsed("env_spec")
        if isinstance(spec, dict) and isinstance(spec.get("id"), str):
            values["env_id"] = spec["id"]
        return values

    def _space(self, key: str) -> Space:
        space = self._parsed(key)
        return space if isinstance(space, dict) else UNKNOWN

    def _parsed(self, key: str) -> Any:
        """What stands in the metadata as JSON in JSON."""
        text = self.values.get(key)
        if not isinstance(text, str):
            return text
        try:
            return json.loads(text)
        except ValueError:
            self._account.fail(METADATA_NAME, f"its {key} is no JSON")
            return None
