"""The guide's training: killed half way, it goes on from the stored experience."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import expstore

GUIDE = Path(__file__).parents[2] / "docs/guides/data-buffer.md"

# Both runs are forks of one process, which imports what they need once. The first one is killed
# in the middle of its 520th step: after the first save, before the first update.
TWO_RUNS = """
import os, signal
import gymnasium, mujoco, torch, expstore.buffer, expstore.storage.writer

training = compile(open("train.py").read(), "train.py", "exec")


class Killed(gymnasium.Wrapper):
    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        if self.num_steps == 520:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


child = os.fork()
if child == 0:
    make = gymnasium.make
    gymnasium.make = lambda env_id: Killed(make(env_id))
    os.environ["NUM_STEPS"] = "1000000"
    exec(training, {"__name__": "__main__"})
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
assert os.path.exists("td3.pt")
os.environ["NUM_STEPS"] = "579"
run = {"__name__": "__main__"}
exec(training, run)
print(run["started_with"], run["agent"].num_updates)
"""


def test_the_guides_training_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    for module in ("torch", "gymnasium", "mujoco"):
        pytest.importorskip(module)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (training,) = (block for block in blocks if "class TD3" in block)
    (tmp_path / "train.py").write_text(training)

    runs = subprocess.run(
        [sys.executable, "-c", TWO_RUNS], cwd=tmp_path, capture_output=True, text=True
    )

    assert runs.returncode == 0, runs.stderr
    # The 519 steps that had an outcome are all there, the open episode's among them.
    assert runs.stdout.split() == ["519", "60"]
    store = expstore.open(tmp_path / "pendulum.exp")
    assert "incomplete" in store.episodes["end_reason"]
    assert store.num_steps > 519
