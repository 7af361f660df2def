"""README and guides run: every Python block, and every command of `expstore`, in their order.

What a block prints is compared with the comment after each `print`, or with the `text` block that
follows.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [path for path in DOCUMENTS if path.parent.name == "guides"]
# `import.md` has a test of its own, which knows what it needs.
RUN = [ROOT / "README.md", *(path for path in GUIDES if path.name != "import.md")]
SHELL = ("bash", "console", "sh")
# Commands that examples may show and that are not run here.
NOT_RUN = ("scripts/", "git clone ", "cd ", "pip install ", "python -m venv ", ". .venv/")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(document: str) -> Iterator[tuple[str, str, int]]:
    """Language, text and first line of each fenced block."""
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", document, re.DOTALL | re.MULTILINE):
        yield found[1], found[2], document[: found.start(2)].count("\n")


def run_python(text: str, namespace: dict[str, Any], what: str, line: int) -> str:
    """Run a block and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + text, what, "exec"), namespace)
    assert not re.search(r"^\s*\)  # ", text, re.MULTILINE), f"{what}, line {line}: broken print"
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.MULTILINE)
    if promised:
        assert printed.getvalue().splitlines() == promised, f"printed by {what}, line {line}"
    return printed.getvalue()


def run_shell(text: str, what: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        command = line.removeprefix("$ ").split("  #")[0]
        if not command.startswith("expstore "):
            assert not command or command.startswith(NOT_RUN), f"{what} shows {command!r}"
            continue
        program = Path(sys.executable).with_name("expstore")
        done = subprocess.run(
            [str(program), *shlex.split(command)[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{what}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_every_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    if path.name == "torchrl.md":
        pytest.importorskip("torchrl", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    namespace, printed = {"__name__": "__main__"}, ""

    for language, text, line in blocks(path.read_text()):
        if language == "python":
            printed = run_python(text, namespace, name_of(path), line)
        elif language == "text":
            assert text == printed, f"printed by {name_of(path)}, line {line}"
        elif language in SHELL:
            run_shell(text, name_of(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{name_of(path)} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{name_of(path)} links to {target}"


def anchors(document: str) -> set[str]:
    """What headings can be linked by, as on GitHub."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    }


def test_every_promise_of_the_readme_names_tests_that_are_there() -> None:
    promises = (ROOT / "README.md").read_text().split("## What is promised")[1].split("\n## ")[0]
    rows = [line for line in promises.splitlines() if re.match(r"\| \d", line)]

    assert len(rows) == 6
    for row in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)(?:::(\w+))?`", row)
        assert named, row
        for file, test in named:
            assert (ROOT / file).exists(), row
            assert not test or f"def {test}(" in (ROOT / file).read_text(), row


def test_the_index_names_every_document() -> None:
    linked = {
        (ROOT / "docs" / target).resolve()
        for target in re.findall(r"\]\(([^)#\s]+)\)", (ROOT / "docs/index.md").read_text())
    }

    assert {path for path in DOCUMENTS[1:] if path.name != "index.md"} <= linked


def test_nothing_names_a_path_of_the_machine_it_was_written_on() -> None:
    for path in DOCUMENTS:
        assert not re.search(r"/(home|root|work|tmp|Users)/", path.read_text()), name_of(path)
