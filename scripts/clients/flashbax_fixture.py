"""Write tests/formats/data/vault.zip with Flashbax itself, in an environment of its own.

It runs by hand, and the file is checked in:

    python -m venv /tmp/flashbax && /tmp/flashbax/bin/pip install 'flashbax==0.1.3' tensorstore
    /tmp/flashbax/bin/python scripts/clients/flashbax_fixture.py
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import flashbax
import jax.numpy as jnp
import numpy as np
from flashbax.vault import Vault

FILE = Path(__file__).parents[2] / "tests" / "formats" / "data" / "vault"
NUM_ROWS, EVERY = 20, 6  # rows of each of two environments, and how often they are written
TERMINALS, TRUNCATIONS = {0: (5,), 1: (3, 15)}, {0: (12,), 1: ()}


def row(t: int) -> dict[str, Any]:
    """Row t of both environments: every value tells environment and row."""
    values = np.array([t, 100 + t])
    return {
        "observation": jnp.asarray(np.repeat(values[:, None], 3, 1), jnp.float32),
        "action": jnp.asarray(values, jnp.int32),
        "reward": jnp.asarray(values / 4, jnp.float32),
        "terminals": jnp.asarray([t in TERMINALS[0], t in TERMINALS[1]]),
        "truncations": jnp.asarray([t in TRUNCATIONS[0], t in TRUNCATIONS[1]]),
        "infos": {"state": jnp.asarray(values[:, None] + 0.5, jnp.float32)},
    }


def main() -> None:
    """A vault of two environments, in as many writes as the buffer needs."""
    buffer = flashbax.make_flat_buffer(
        max_length=32, min_length=2, sample_batch_size=2, add_batch_size=2
    )
    state = buffer.init({k: _first(v) for k, v in row(0).items()})
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        vault = Vault("arm", state.experience, vault_uid="run", metadata={"task": "reach"})
        for t in range(NUM_ROWS):
            state = buffer.add(state, row(t))
            if t % EVERY == EVERY - 1 or t == NUM_ROWS - 1:
                vault.write(state)
        shutil.make_archive(str(FILE), "zip", Path("vaults") / "arm")
        os.chdir("/")


def _first(values: Any) -> Any:
    return {k: v[0] for k, v in values.items()} if isinstance(values, dict) else values[0]


if __name__ == "__main__":
    main()
