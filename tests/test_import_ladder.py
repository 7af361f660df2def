"""Imports go down the ladder of rooms, and heavy packages stay where they belong.

The tables are the rule: a new top-level module, or a new module of `storage`, gets its place there.
Imports inside functions and under `TYPE_CHECKING` count like any other, unless said otherwise.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import expstore

ROOT = Path(__file__).parents[1]

# room -> the rooms it may import from, besides itself; lowest first
CORE = ("errors", "spans", "ragged", "schema", "episode")
ROOMS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "spans": ("errors",),
    "ragged": ("errors",),
    "schema": ("errors", "spans"),
    "episode": ("errors", "spans", "ragged", "schema"),
    "storage": CORE,
    "sampling": ("errors", "spans"),
    "loading": (*CORE, "storage", "sampling"),
    "formats": CORE,
    "ingest": (*CORE, "storage", "formats"),
    "ingesting": (*CORE, "storage", "formats", "ingest"),
    "exports": (*CORE, "storage", "formats"),
    "exporting": (*CORE, "storage", "exports"),
    "summary": (*CORE, "storage"),
    "buffer": (*CORE, "storage", "sampling", "loading", "ingest"),
    "types": ("buffer",),
    "utils": ("buffer",),
    "interop": (*CORE, "storage", "sampling", "loading", "ingest", "buffer", "formats"),
}

# modules of `storage`, lowest first; each may import those of earlier lines only
STORAGE = (
    ("layout",),
    ("files", "fingerprint", "forking", "parallel", "row_kernels", "zstd"),
    ("advice", "protocols", "moved_column"),
    ("mapping",),
    ("planning",),
    ("mapped", "coded", "ragged", "boundaries", "contiguity", "holding", "tombstones"),
    ("undecided",),
    ("following",),
    ("episodes",),
    ("appenders",),
    ("open_episode",),
    ("streaming",),
    ("commits",),
    ("states",),
    ("pointer",),
    ("priorities",),
    ("reading",),
    ("table", "capacity", "salvage", "quarantine", "bounds"),
    ("conditions",),
    ("selection",),
    ("store",),
    ("history", "stored_episode", "carrying", "postprocessing"),
    ("writer",),
    ("new_column",),
    ("deletion", "verification", "adding"),
    ("repair", "copying"),
)

# what a command may import from the library, besides the names in `expstore.__all__`
PUBLIC_MODULES = ("errors", "formats")

# rooms that may import torch, anywhere in a module
TORCH_ROOMS = ("loading", "buffer", "interop")

# packages imported inside the function that needs them (a type checker may see them at the top)
LAZY = (
    "h5py",
    "pyarrow",
    "av",
    "PIL",
    "gymnasium",
    "minari",
    "torchrl",
    "tensordict",
    "numba",
    "tensorstore",
    "yaml",
)

# module name -> the lazy packages that it may import at its top
TOP_LEVEL = {
    "kernels": ("numba",),
    "tree_kernels": ("numba",),
    "row_kernels": ("numba",),
    "recording": ("gymnasium",),  # its classes are the base of ours
    "torchrl": ("torchrl",),  # its classes are the base of ours
}


@dataclass(frozen=True)
class Import:
    """One imported module or name, as a full dotted name."""

    target: str
    line: int
    lazy: bool  # inside a function, or only for a type checker


def dotted_name(path: Path, source_root: Path) -> str:
    return ".".join(path.relative_to(source_root).with_suffix("").parts).removesuffix(".__init__")


MODULES: dict[str, Path] = {
    dotted_name(path, source_root): path
    for source_root, package in ((ROOT, "expstore"), (ROOT / "cli", "expstore_cli"))
    for path in (source_root / package).rglob("*.py")
}


def imports_of(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_of(ast.Module(node.body, []), lazy=True)
            yield from imports_of(ast.Module(node.orelse, []), lazy)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(node, lazy or is_function)


def room_problem(module: str, target: str) -> str | None:
    """Why `module`, of a room of expstore, may not import `target`, of expstore too."""
    room, *inner = module.split(".")[1:]
    target_room, *target_inner = [*target.split("."), ""][1:]
    if target_room not in ROOMS:
        return "is expstore itself, or not in the table ROOMS; import from where it is defined"
    if target_room != room and target_room not in ROOMS[room]:
        return f"is above {room}, or beside it, which may import {ROOMS[room]}"
    if target_room == room == "storage":
        return storage_problem(inner, target_inner)
    return None


def storage_problem(inner: list[str], target_inner: list[str]) -> str | None:
    rung = {name: number for number, names in enumerate(STORAGE) for name in names}
    if not inner:  # the package itself only collects names
        return None
    if inner[0] not in rung:
        return f"comes into storage.{inner[0]}, which is not in the table STORAGE; place it there"
    if target_inner[0] not in rung:
        return "is not in the table STORAGE"
    if target_inner[0] != inner[0] and rung[target_inner[0]] >= rung[inner[0]]:
        return f"is not below storage.{inner[0]} in the table STORAGE"
    return None


def command_problem(target: str) -> str | None:
    """Why a command may not import `target` of expstore."""
    first, *rest = [*target.split("."), ""][1:]
    if first in PUBLIC_MODULES:
        hidden = rest[0].startswith("_") or f"expstore.{first}.{rest[0]}" in MODULES
        return f"is not a public name of expstore.{first}" if hidden else None
    if first == "" or (first in expstore.__all__ and rest == [""]):
        return None
    return "is not a public name of expstore"


def package_problem(module: str, found: Import) -> str | None:
    """Why `module` may not import what it does of a package that is heavy or optional."""
    package = found.target.split(".")[0]
    room = [*module.split("."), ""][1] if module.startswith("expstore.") else module
    if package == "torch" and room not in TORCH_ROOMS:
        return f"is for {TORCH_ROOMS} only"
    at_top = TOP_LEVEL.get(module.split(".")[-1], ())
    if package in LAZY and not found.lazy and package not in at_top:
        return "must be imported inside the function that needs it"
    return None


def broken_rules(module: str, source: str) -> list[str]:
    """One line for each import of `module` that breaks a rule."""
    if module.startswith("expstore.") and module.split(".")[1] not in ROOMS:
        return [f"{module} is not in the table ROOMS of this test; give it its place on the ladder"]
    tree = ast.parse(source)
    broken = []
    for found in imports_of(tree):
        problem = package_problem(module, found)
        if found.target.startswith("."):
            problem = "is relative; write the full name"
        elif found.target.split(".")[0] == "expstore_cli" and not module.startswith("expstore_cli"):
            problem = "is the command, which stands above the library"
        elif found.target.split(".")[0] == "expstore" and module.startswith("expstore_cli"):
            problem = command_problem(found.target)
        elif found.target.split(".")[0] == "expstore" and module != "expstore":
            problem = room_problem(module, found.target)
        if problem:
            broken.append(f"{module}:{found.line}: {found.target} {problem}")
    if module.startswith("expstore_cli"):
        broken += hidden_attributes(module, tree)
    return broken


def hidden_attributes(module: str, tree: ast.AST) -> Iterator[str]:
    """Where a command reaches for `expstore.storage` without importing it."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="expstore"), attr=name):
                if problem := command_problem(f"expstore.{name}"):
                    yield f"{module}:{node.lineno}: expstore.{name} {problem}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_the_ladder(module: str) -> None:
    broken = broken_rules(module, MODULES[module].read_text(encoding="utf-8"))

    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("module", ["expstore", "expstore_cli.main"])
def test_import_loads_neither_torch_nor_numba(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numba'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        ("expstore.spans", "from expstore.schema import Schema", "is above spans"),
        ("expstore.sampling.draw", "import expstore.storage.files", "is above sampling"),
        ("expstore.sampling.draw", "from expstore.episode import Episode", "is above sampling"),
        ("expstore.formats.hdf5", "from expstore.storage import Store", "is above formats"),
        ("expstore.ingest.recorder", "def f():\n from expstore.loading import x", "above ingest"),
        ("expstore.loading.gather", "from expstore import Store", "is expstore itself"),
        ("expstore.loading.gather", "import expstore", "is expstore itself"),
        ("expstore.loading.gather", "import expstore_cli.main", "is the command"),
        ("expstore.loading.gather", "from .batch import Batch", "is relative"),
        ("expstore.news", "", "is not in the table ROOMS of this test"),
        ("expstore.storage.news", "import expstore.storage.files", "storage.news, which is not"),
        ("expstore.storage.mapped", "import expstore.storage.coded", "not below storage.mapped"),
        ("expstore.storage.store", "import expstore.storage.writer", "not below storage.store"),
        ("expstore.storage.store", "from expstore.storage import Writer", "not in the table"),
        ("expstore.storage.store", "def f():\n import torch", "is for"),
        ("expstore.sampling.draw", "import torch.nn", "is for"),
        ("expstore", "import torch", "is for"),
        ("expstore_cli.main", "def f():\n import torch", "is for"),
        ("expstore.formats.hdf5", "import h5py", "must be imported inside the function"),
        ("expstore.sampling.sumtree", "from numba import njit", "must be imported inside"),
        ("expstore.sampling.kernels", "import h5py", "must be imported inside the function"),
        ("expstore_cli.inspect", "import expstore.storage.files", "is not a public name"),
        ("expstore_cli.inspect", "from expstore.formats import _x", "not a public name"),
        ("expstore_cli.inspect", "import expstore\nexpstore.storage.Store", "not a public name"),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, text: str) -> None:
    broken = broken_rules(module, source)

    assert len(broken) == 1
    assert text in broken[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("expstore", "def __getattr__(name):\n from expstore.loading import replay"),
        ("expstore.storage", "from expstore.storage.store import Store"),
        ("expstore.storage.writer", "from expstore.storage.store import Store"),
        ("expstore.storage.copying", "from expstore.storage import layout, writer"),
        ("expstore.loading.replay", "import torch\nfrom expstore.sampling.draw import Draw"),
        ("expstore.formats.hdf5", "def f():\n import h5py"),
        ("expstore.ingest.recorder", "if TYPE_CHECKING:\n import gymnasium"),
        ("expstore.sampling.kernels", "import numba"),
        ("expstore_cli.main", "import expstore\nfrom expstore.errors import ExpstoreError"),
        ("expstore_cli.main", "from expstore_cli import inspect"),
    ],
)
def test_an_import_by_the_rules_passes(module: str, source: str) -> None:
    assert broken_rules(module, source) == []
