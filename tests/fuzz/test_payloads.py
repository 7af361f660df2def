"""Nothing is unpickled unless it is trusted, whatever a file says of itself."""

from __future__ import annotations

import ast
import contextlib
import functools
import pickle
from pathlib import Path

import pytest

import expstore
from expstore.errors import ExpstoreError
from expstore.formats.source import FORMATS
from tests.fuzz.payloads import PLANTED, Payload, objects, places

PACKAGES = (Path(expstore.__file__).parent, Path(__file__).parents[2] / "cli/expstore_cli")
# What runs code that data names. Only this module may, and only where it was told to.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNPICKLING = {"formats/pickles.py"}
NEVER = ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load")


def test_a_payload_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.is_dir()


@pytest.mark.parametrize("form", PLANTED)
def test_no_format_unpickles_what_was_planted(tmp_path: Path, form: str) -> None:
    plant, package = PLANTED[form]
    if package is not None:
        pytest.importorskip(package)
    mark, source = tmp_path / "mark", tmp_path / "source"
    source.mkdir()
    plant(source, mark)
    for number, place in enumerate(places(source)):
        for name in (None, *FORMATS):
            with contextlib.suppress(ExpstoreError):
                expstore.ingest_from(place, tmp_path / f"{number}-{name}.exp", format=name)
            assert not mark.exists(), (name, place.name)


def test_a_pickle_runs_where_it_is_trusted_and_nowhere_else(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    mark = tmp_path / "mark"
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(Payload(mark)))
    for trust in (False, True):
        with pytest.raises(ExpstoreError):
            expstore.ingest_from(
                tmp_path / "buffer.pkl", tmp_path / "a.exp", format="sb3", trust=trust
            )
        assert mark.exists() == trust


def test_priorities_with_objects_cannot_be_saved(tmp_path: Path) -> None:
    from expstore.storage.priorities import save_state

    with pytest.raises(ExpstoreError, match="cannot be saved"):
        save_state(tmp_path / "per", {"raw": objects(tmp_path / "mark")}, ["0" * 32])


@functools.cache
def modules() -> list[tuple[str, ast.AST]]:
    return [
        (file.relative_to(package).as_posix(), ast.parse(file.read_text()))
        for package in PACKAGES
        for file in sorted(package.rglob("*.py"))
    ]


def test_one_module_knows_how_to_unpickle() -> None:
    """A new format that needs a pickle goes through it, so that `--trust` decides."""
    found = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if UNPICKLERS & {module.split(".")[0] for module in imported}:
                found.add(name)
    assert found <= UNPICKLING


def test_every_loader_that_could_unpickle_is_told_not_to() -> None:
    told = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}
    wrong = []
    for name, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            settings = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            is_told = called in told and settings.get(told[called][0]) is told[called][1]
            if called in (*told, *NEVER) and not is_told:
                wrong.append((name, node.lineno, called))
    assert wrong == []
