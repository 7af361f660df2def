"""The examples of the guide to imports run, in their order."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "import.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ("h5py", "minari", "pyarrow", "stable_baselines3", "tensordict"):
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))  # restored after the example
    namespace: dict[str, Any] = {}

    for language, example in re.findall(r"```(\w+)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        if language == "python":
            exec(compile(example, str(GUIDE), "exec"), namespace)
        elif "pip install" not in example:
            assert language == "sh"
            command = f"import sys; from expstore_cli.main import main; main({example.split()[1:]})"
            subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
