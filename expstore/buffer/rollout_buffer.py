"""RolloutBuffer: sampled once, then empty."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

from expstore.buffer.base_buffer import DataBuffer
from expstore.buffer.registry import BUFFERS
from expstore.buffer.sampler import AllDataSampler
from expstore.errors import SchemaError


@BUFFERS.register("RolloutBuffer")
class RolloutBuffer(DataBuffer):
    """A `DataBuffer` for on-policy training: a sample takes everything, and clears it.

    Episodes that are still open go on. That the data is cleared is written down when the buffer
    is next used: a crash before gives the rollout again.
    """

    default_sampler: ClassVar[str | None] = "all"

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        *,
        return_info: bool = False,
    ) -> Any:
        """As `DataBuffer.sample`, and clear.

        Raises:
            SchemaError: the buffer is empty, or `batch_size` is larger than it.
        """
        size = self.size()
        if size and isinstance(batch_size, int) and not isinstance(self.sampler, AllDataSampler):
            if batch_size > size:
                raise SchemaError(
                    f"batch_size must be at most {size}, what the buffer holds, got {batch_size}"
                )
            if batch_size < size:
                warnings.warn(
                    f"{size - batch_size} of {size} entries are cleared without being sampled",
                    stacklevel=2,
                )
        batches = super().sample(batch_size, shuffle, drop_last, return_info=return_info)
        self._clear(write=False)
        return batches
