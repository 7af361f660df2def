"""ReplayBuffer: sampled again and again."""

from __future__ import annotations

from typing import Any, ClassVar

from expstore.buffer.base_buffer import DataBuffer
from expstore.buffer.registry import BUFFERS
from expstore.errors import SchemaError


@BUFFERS.register("ReplayBuffer")
class ReplayBuffer(DataBuffer):
    """A `DataBuffer` for off-policy training: batches are drawn uniformly, data stays."""

    default_sampler: ClassVar[str | None] = "uniform"

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        *,
        return_info: bool = False,
    ) -> Any:
        """As `DataBuffer.sample`; a batch larger than the buffer is refused."""
        size = self.size()
        if size and isinstance(batch_size, int) and batch_size > size:
            raise SchemaError(
                f"batch_size must be at most {size}, what the buffer holds, got {batch_size}"
            )
        return super().sample(batch_size, shuffle, drop_last, return_info=return_info)
