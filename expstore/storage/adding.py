"""add_field: one more column for a store that has steps, published by one commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from expstore.errors import SchemaError
from expstore.ragged import Rows
from expstore.schema import FLAGS, LAYOUTS, Field, Schema, check_name, is_observation
from expstore.storage import files
from expstore.storage.commits import (
    Root,
    WriterLock,
    read_root,
    recover,
)
from expstore.storage.layout import (
    PRIVATE,
    STEP,
)
from expstore.storage.new_column import NewColumn
from expstore.storage.store import Store, absolute, open_store

Values = Callable[[dict[str, Any]], Any] | Any


@dataclass(frozen=True)
class Addition:
    """What `add_field` added."""

    path: str
    name: str
    field: Field
    commit: int  # number of the commit that published it
    num_steps: int  # that have a value
    resumed_at: int  # episodes that an earlier attempt had finished


def add_field(
    path: str | os.PathLike[str],
    name: str,
    values: Values,
    *,
    layout: str = "auto",
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    durable: bool = True,
) -> Addition:
    """Add a column to a store: new rewards, latents, returns to go.

    Readers see it whole with one commit, or not at all; nothing else of the store is written
    again. From then on every appended episode must bring the field. Values are computed and
    written episode by episode, so memory holds one episode at a time.

    Args:
        path: the store's directory; no writer may be open on it.
        name: of the field. Those under `observation`, `reward`, `terminated` and `truncated`
            cannot come later: next values, returns and end reasons hang on them.
        values: a function of an episode, as `Store.episode` gives it, that returns its values
            (T, *shape); or anything with one row for each step of the store, in their order:
            an array (num_steps, *shape), a memory map, a list.
        layout: as for `Writer`.
        resume: continue what an earlier call with the same function did not finish, because it
            was killed or the function raised. Without it, everything is computed anew.
        progress: called with (episodes done, episodes in all).
        durable: as for `Writer`.

    Raises:
        SchemaError: the name is taken or cannot be added, or the values do not fit.
        StateError: what was not finished is another field, or of another store.
        StoreLockedError: a writer is open.

    Example:
        >>> import numpy as np, tempfile, expstore
        >>> path = tempfile.mkdtemp() + "/demo.exp"
        >>> with expstore.Writer(path) as writer:
        ...     numbers = [writer.append({"reward": np.ones(n)}) for n in (3, 2)]
        >>> def to_go(episode):
        ...     return np.cumsum(episode["reward"][::-1])[::-1]
        >>> added = expstore.add_field(path, "return_to_go", to_go)
        >>> expstore.open(path).read(range(5), "return_to_go")["return_to_go"].tolist()
        [3.0, 2.0, 1.0, 2.0, 1.0]
    """
    target = absolute(path)
    if layout not in LAYOUTS:
        raise SchemaError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    read_root(target)  # before anything is touched
    files.make_directory(target / PRIVATE)
    with WriterLock(target):
        root = read_root(target)
        _check_new(root, name)
        work = NewColumn(target, root, name, layout, durable=durable)
        work.begin(resume)
        recover(target, root, durable=durable)
        with ExitStack() as stack:
            stack.callback(work.close)
            resumed_at = work.take_up()
            store = open_store(target)
            for done, rows in enumerate(_given(store, values, work, name), resumed_at + 1):
                work.append(rows)
                if progress is not None:
                    progress(done, len(work))
            work.note()
        added = work.publish()
    return Addition(str(target), name, added.schema[name], added.commit.number, store.num_steps,
                    resumed_at)  # fmt: skip


def _check_new(root: Root, name: str) -> None:
    check_name(name)
    if name in root.schema.fields:
        raise SchemaError(
            f"there is a field {name!r} already; give another name, or write a new store without "
            "the old one"
        )
    if is_observation(name) or name in ("reward", *FLAGS):
        raise SchemaError(
            f"field {name!r} cannot be added later, since next values, returns and end reasons "
            f"hang on it; give it another name, such as 'new_{name.replace('/', '_')}'"
        )
    start, stop = root.commit.dims[STEP]
    if start == stop:
        raise SchemaError(f"the store has no steps yet; give field {name!r} with the first episode")
    Schema({**root.schema.fields, name: Field((), "bool")})  # it may lie under another one


def _given(store: Store, values: Values, work: NewColumn, name: str) -> Iterator[Rows | None]:
    """The rows of each episode that is not done yet; None for a deleted one."""
    array = None if callable(values) else values
    if array is not None and (not hasattr(array, "__len__") or len(array) != store.num_steps):
        got = f"{len(array)} rows" if hasattr(array, "__len__") else f"a {type(array).__name__}"
        raise SchemaError(
            f"values of field {name!r} must be a function or have one row for each of "
            f"{store.num_steps} steps, got {got}"
        )
    held = dict(zip(store.episode_numbers.tolist(), store.spans.first.tolist(), strict=True))
    for number in range(work.next_episode, work.stop_episode):
        if number not in held:
            yield None
            continue
        length, where = work.length(number), f"in episode {number}"
        first = held[number]
        given = values(store.episode(number)) if array is None else array[first : first + length]
        yield work.fitted(given, length, where)
