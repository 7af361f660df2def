"""Which fields of a source reach the store, and under which names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from expstore.errors import SourceError

NEXT = "next_"


class ChosenFields:
    """Fields left out and renamed; what lies under a field, and its next values, go with it.

    Args:
        dropped: fields to leave out, by the names that they would have in the store.
        renamed: such a name -> the one to give it instead. What is dropped cannot be renamed.

    >>> fields = ChosenFields(["infos"], {"observation/state": "observation"})
    >>> fields.apply({"observation/state": 1, "infos/a": 2, "next_observation/state": 3}, ())
    {'observation': 1, 'next_observation': 3}
    """

    def __init__(self, dropped: Collection[str] = (), renamed: Mapping[str, str] | None = None):
        self._dropped = tuple(dict.fromkeys([dropped] if isinstance(dropped, str) else dropped))
        self._renamed = dict(renamed or {})
        for old, new in self._renamed.items():
            if not old or not new or old == new or old in self._dropped:
                raise SourceError(
                    f"--map {old}={new} (map={{{old!r}: {new!r}}}) must give a field that is kept "
                    "another name"
                )

    @property
    def dropped(self) -> tuple[str, ...]:
        return self._dropped

    def apply(self, flat: Mapping[str, Any], absent: Collection[str]) -> dict[str, Any]:
        """The fields of an episode that are left, by their new names.

        Args:
            absent: what the source itself has left out, which cannot be unknown.

        Raises:
            SourceError: there is no field of a name that was given, or two get the same name.
        """
        if not self._dropped and not self._renamed:
            return dict(flat)
        for option, names in (("--drop", self._dropped), ("--map", self._renamed)):
            for name in names:
                if name not in absent and not any(_is_under(name, n) for n in flat):
                    listed = ", ".join(n for n in flat if not n.startswith(NEXT))
                    raise SourceError(
                        f"{option} {name}: the source has no field of that name; it has {listed}"
                    )
        chosen: dict[str, Any] = {}
        for name, values in flat.items():
            if any(_is_under(field, name) for field in self._dropped):
                continue
            called = self._called(name)
            if called in chosen:
                raise SourceError(f"--map gives the name {called} to two fields; choose another")
            chosen[called] = values
        return chosen

    def _called(self, name: str) -> str:
        for old, new in self._renamed.items():
            if _is_under(old, name):
                prefix = NEXT if name.startswith(NEXT) and not old.startswith(NEXT) else ""
                return f"{prefix}{new}{name[len(prefix) + len(old) :]}"
        return name


def _is_under(field: str, name: str) -> bool:
    """Whether a name is that of a field, of what lies under it, or of their next values."""
    own = name if field.startswith(NEXT) else name.removeprefix(NEXT)
    return own == field or own.startswith(f"{field}/")
