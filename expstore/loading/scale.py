"""Scale: a field brought to mean 0 and standard deviation 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.loading.statistics import Statistics


@dataclass(frozen=True)
class Scale:
    """(value - mean) / std, as float32."""

    mean: NDArray[np.float32]  # (*shape)
    std: NDArray[np.float32]  # (*shape)

    @staticmethod
    def of(statistics: Statistics, eps: float) -> Scale:
        """By the statistics of a field; `eps` is added to each standard deviation."""
        std = np.asarray(statistics.std + eps, np.float32)
        return Scale(np.asarray(statistics.mean, np.float32), std)

    def of_array(self, values: NDArray[Any]) -> NDArray[np.float32]:
        return np.asarray((values.astype(np.float32) - self.mean) / self.std)

    def of_tensor(self, values: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.from_numpy(v).to(values.device) for v in (self.mean, self.std))
        return (values.float() - mean) / std
