"""What the examples in docstrings need; tests have their own in `tests/conftest.py`."""

import pytest


@pytest.fixture(autouse=True)
def _examples_run_in_an_empty_folder(request: pytest.FixtureRequest) -> None:
    """An example writes `cheetah.exp` without leaving it in the project."""
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch = request.getfixturevalue("monkeypatch")
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
