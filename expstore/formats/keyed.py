"""Sources whose episodes are known in advance, and read one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from expstore.errors import SourceError
from expstore.formats.source import NOTHING, Account, Imported, SourceEpisode


class KeyedSource(ABC):
    """A source that reads any of its episodes by its key.

    Attributes:
        keys: of all episodes, in the order of the source.
        num_steps: in all of them, where that is known without reading them.
    """

    boundary_rule: str
    keys: Sequence[int | str]
    num_steps: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.account = Account()

    @property
    def num_episodes(self) -> int:
        return len(self.keys)

    def episodes(self, imported: Imported = NOTHING) -> Iterator[SourceEpisode]:
        """Those that are not imported yet; the ones that cannot be read are accounted for."""
        for key in self.keys:
            if key in imported.keys:
                continue
            try:
                episode = self.read(key)
            except SourceError as error:
                self.account.fail(f"episode {key}", str(error))
            except OSError as error:
                self.account.fail(f"episode {key}", f"cannot be read: {error}")
            else:
                yield episode

    @abstractmethod
    def read(self, key: int | str) -> SourceEpisode:
        """One episode.

        Raises:
            SourceError: it cannot be read, or is none.
        """

    @abstractmethod
    def describe(self) -> str: ...

    def close(self) -> None:
        """Let go of what is held open: nothing, unless a source says otherwise."""
        return None


def stretches(ends: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where episodes start and stop in rows of which some end one; the last may have no end.

    >>> import numpy as np
    >>> stretches(np.array([False, True, True, False]))
    [(0, 2), (2, 3), (3, 4)]
    """
    stops = (np.flatnonzero(ends) + 1).tolist()
    if len(ends) and (not stops or stops[-1] != len(ends)):
        stops.append(len(ends))
    return list(zip([0, *stops[:-1]], stops, strict=False)) if stops else []


def scalars(name: str, values: NDArray[np.generic], account: Account) -> NDArray[np.generic]:
    """One number a row, where the source may have it as one element: (T, 1) to (T,)."""
    if values.ndim > 1 and values.size == len(values):
        shape = "(1,)" if values.shape[1:] == (1,) else str(values.shape[1:])
        account.shape_changes[name] = f"{shape} to ()"
        return values.reshape(len(values))
    return values


def flags(name: str, values: NDArray[np.generic], account: Account) -> NDArray[np.bool_]:
    """An end flag, one a row, as booleans.

    Raises:
        SourceError: it is more than one number a row, or neither 0 nor 1.
    """
    rows = scalars(name, values, account)
    if rows.ndim != 1:
        raise SourceError(f"{name} must be one flag per row, got shape {rows.shape[1:]}")
    if rows.dtype == bool:
        return rows.astype(bool, copy=False)
    if rows.dtype.kind not in "iuf" or not ((rows == 0) | (rows == 1)).all():
        raise SourceError(f"{name} must hold nothing but 0 and 1, got dtype {rows.dtype}")
    account.dtype_changes[name] = f"{rows.dtype} to bool"
    return np.asarray(rows == 1)


def last_only(is_set: bool, num_steps: int) -> NDArray[np.bool_]:
    """A flag of an episode, which can be set at its last step only."""
    column = np.zeros(num_steps, bool)
    if num_steps:
        column[-1] = is_set
    return column
