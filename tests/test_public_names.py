"""What `import expstore` offers."""

import inspect

import pytest

import expstore


@pytest.mark.parametrize("name", sorted(expstore.__all__))
def test_every_public_name_resolves_and_has_a_docstring(name: str) -> None:
    if "loading" in expstore._LAZY.get(name, ""):
        pytest.importorskip("torch")
    value = getattr(expstore, name)

    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        written = value.__doc__ or ""
        # A dataclass without a docstring gets its signature as one.
        assert written and not written.startswith(f"{name}("), f"expstore.{name} has no docstring"


def test_public_names_are_listed_once() -> None:
    assert sorted(set(expstore.__all__)) == sorted(expstore.__all__)


def test_dir_lists_every_public_name() -> None:
    assert set(expstore.__all__) <= set(dir(expstore))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = expstore.no_such_name
