"""The DataLoader over stored windows: same batches with any workers, exact resume."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import expstore  # noqa: E402
from expstore.errors import SchemaError, StateError, StepRangeError  # noqa: E402
from expstore.loading.batch import Batch  # noqa: E402
from expstore.loading.dataset import remove_leftovers  # noqa: E402
from tests.loading.making import fill  # noqa: E402
from tests.loading.test_replay import equal  # noqa: E402

LENGTHS = [1, 5, 30, 2, 17, 60]
METHODS = ["fork", "forkserver", "spawn"]


def dataset(path: Path, **options: object) -> expstore.SequenceDataset:
    return expstore.SequenceDataset(fill(path, LENGTHS, **options), expstore.Sequence(length=4))


def test_every_step_is_an_anchor_once_per_epoch(tmp_path: Path):
    loader = expstore.sequence_loader(dataset(tmp_path / "a.exp"), 16, shuffle=True, seed=1)
    orders = []
    for _ in range(2):
        anchors = torch.cat([batch.info.anchor_index[:, 0] for batch in loader])
        assert sorted(anchors.tolist()) == list(range(115))
        orders.append(anchors.tolist())
    assert orders[0] != orders[1]
    assert len(loader) == 8


def test_without_shuffle_the_order_is_that_of_the_steps(tmp_path: Path):
    loader = expstore.sequence_loader(dataset(tmp_path / "a.exp"), 50, drop_last=True)
    anchors = [batch.info.anchor_index[:, 0].tolist() for batch in loader]
    assert anchors == [list(range(50)), list(range(50, 100))]


@pytest.mark.parametrize(
    ("method", "layout"), [*((method, "mapped") for method in METHODS), ("spawn", "coded")]
)
def test_workers_change_nothing(tmp_path: Path, method: str, layout: str):
    windows = dataset(tmp_path / "a.exp", layout=layout)
    alone = list(expstore.sequence_loader(windows, 16, shuffle=True, seed=3))
    loader = expstore.sequence_loader(
        windows, 16, shuffle=True, seed=3, num_workers=2, multiprocessing_context=method
    )

    batches = list(loader)

    assert len(batches) == len(alone)
    assert all(map(equal, batches, alone))
    assert torch.equal(batches[0]["action"], batches[0].info.index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loaded_state_continues_with_the_batch_that_was_next(tmp_path: Path, num_workers: int):
    windows = dataset(tmp_path / "a.exp")

    def loader() -> expstore.loading.dataset.SequenceLoader:
        return expstore.sequence_loader(windows, 16, shuffle=True, seed=3, num_workers=num_workers)

    first = loader()
    list(first)  # one whole epoch
    walk = iter(first)
    for _ in range(3):
        next(walk)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [*walk, *first]

    resumed = loader()
    resumed.load_state_dict(state)

    assert len(rest) == 5 + 8
    assert all(map(equal, [*resumed, *resumed], rest))


def test_an_epoch_left_early_does_not_come_again(tmp_path: Path):
    loader = expstore.sequence_loader(dataset(tmp_path / "a.exp"), 16, shuffle=True)
    first, second = next(iter(loader)), next(iter(loader))
    assert not equal(first, second)


def double(batch: Batch) -> dict[str, object]:
    return {"twice": batch["reward"] * 2, "process": os.getpid()}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_transform_runs_in_the_workers(tmp_path: Path, method: str):
    loader = expstore.sequence_loader(
        dataset(tmp_path / "a.exp"), 50, transform=double, num_workers=1,
        multiprocessing_context=method,
    )  # fmt: skip
    first = next(iter(loader))
    assert torch.equal(first["twice"][:3, 0], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    assert first["process"] != os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_an_epoch_without_overlap(tmp_path: Path, world_size: int, shuffle: bool):
    windows = dataset(tmp_path / "a.exp")
    loaders = [
        expstore.sequence_loader(
            windows, 8, shuffle=shuffle, seed=2, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    left_out = []
    for _ in range(3):
        shares = [
            torch.cat([b.info.anchor_index[:, 0] for b in loader]).tolist() for loader in loaders
        ]
        assert {len(share) for share in shares} == {115 // world_size}
        together = [anchor for share in shares for anchor in share]
        assert len(set(together)) == len(together)
        left_out.append(set(range(115)) - set(together))
    if shuffle and 115 % world_size:
        assert left_out[0] != left_out[1] or left_out[1] != left_out[2]


def test_items_work_with_torchs_own_loader(tmp_path: Path):
    windows = dataset(tmp_path / "a.exp")
    item = windows[40]
    assert item["observation"]["state"].shape == (4, 3)
    assert item["info"]["index"].tolist() == [40, 41, 42, 43]
    batch = next(iter(torch.utils.data.DataLoader(windows, batch_size=5)))
    assert batch["observation"]["image"].shape == (5, 4, 40, 40)
    assert torch.equal(batch["action"], batch["info"]["index"])
    assert len(windows) == 115
    with pytest.raises(StepRangeError, match="from 0 to 114, got 115"):
        windows[115]


def test_a_state_of_another_order_or_a_grown_store_is_refused(tmp_path: Path):
    windows = dataset(tmp_path / "a.exp")
    state = expstore.sequence_loader(windows, 16, shuffle=True).state_dict()
    with pytest.raises(StateError, match=r"shuffle was True .* is False now"):
        expstore.sequence_loader(windows, 16).load_state_dict(state)
    grown = expstore.SequenceDataset(fill(tmp_path / "a.exp", [3]), expstore.Sequence(length=4))
    with pytest.raises(StateError, match="num_steps was 115"):
        expstore.sequence_loader(grown, 16, shuffle=True).load_state_dict(state)


def test_bad_arguments_are_refused(tmp_path: Path):
    windows = dataset(tmp_path / "a.exp")
    with pytest.raises(SchemaError, match="batch_size"):
        expstore.sequence_loader(windows, 0)
    with pytest.raises(SchemaError, match="rank must be from 0 to 1, got 2"):
        expstore.sequence_loader(windows, 4, rank=2, world_size=2)


def own_memory(batch: Batch) -> int:
    """Bytes of this process that are no file pages."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is not listed here")
@pytest.mark.parametrize("layout", ["mapped", "coded"])
def test_workers_hold_nothing_but_maps(tmp_path: Path, layout: str):
    rng = np.random.default_rng(0)
    with expstore.Writer(tmp_path / "a.exp", layout=layout) as writer:
        for _ in range(20):
            frames = rng.integers(0, 255, (500, 128, 128), dtype=np.uint8)  # 164 MB in all
            writer.append({"observation": frames, "action": np.zeros(499, np.int64)})
    windows = expstore.SequenceDataset(expstore.open(tmp_path / "a.exp"), expstore.Sequence(10))
    loader = expstore.sequence_loader(
        windows, 16, shuffle=True, num_workers=1, transform=own_memory
    )
    memory = [size for size, _ in zip(loader, range(300), strict=False)]
    assert max(memory[10:]) - memory[10] < 30 << 20


def shared_memory(pids: list[str]) -> set[str]:
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith("torch_") and name.split("_")[1] in pids
    }


KILLED = """
import os, signal, sys
import expstore

if __name__ == "__main__":
    dataset = expstore.SequenceDataset(expstore.open(sys.argv[1]), expstore.Sequence(length=4))
    loader = expstore.sequence_loader(
        dataset, 4, num_workers=2, multiprocessing_context=sys.argv[2]
    )
    walk = iter(loader)
    next(walk)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise at any moment
    workers = walk.gi_frame.f_locals["batches"]._workers
    print(os.getpid(), *(worker.pid for worker in workers))
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    try:
        list(walk)
    except (RuntimeError, OSError, EOFError):  # it is gone, or so is a batch that it had sent
        print("told")
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not listed here")
def test_what_a_worker_was_killed_over_is_removed():
    """Torch takes the name of shared memory away at once, but a kill can come before that."""
    process = multiprocessing.get_context("spawn").Process
    workers = [process(target=time.sleep, args=(60,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    dead, alive = (Path(f"/dev/shm/torch_{worker.pid}_1_0") for worker in workers)
    try:
        dead.touch(), alive.touch()
        workers[0].kill()
        remove_leftovers(workers)
        assert alive.exists() and not dead.exists()
    finally:
        workers[1].kill()
        workers[1].join()
        remove_leftovers(workers)
    assert not alive.exists()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not listed here")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_workers_leave_nothing_in_shared_memory(tmp_path: Path, method: str):
    # In a process of its own: torch reports dead workers by a signal, at any moment.
    fill(tmp_path / "a.exp", LENGTHS)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "a.exp"), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    *pids, is_told = done.stdout.split()
    assert is_told == "told"
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while shared_memory(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not shared_memory(pids)


ORPHANING = """
import os, signal, sys
import expstore

if __name__ == "__main__":
    dataset = expstore.SequenceDataset(expstore.open(sys.argv[1]), expstore.Sequence(length=4))
    loader = expstore.sequence_loader(dataset, 4, num_workers=2, multiprocessing_context="fork")
    walk = iter(loader)
    next(walk)
    workers = walk.gi_frame.f_locals["batches"]._workers
    print(os.getpid(), *(worker.pid for worker in workers), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not listed here")
def test_workers_whose_parent_was_killed_end_and_leave_nothing(tmp_path: Path):
    fill(tmp_path / "a.exp", LENGTHS)
    script = tmp_path / "orphaning.py"
    script.write_text(ORPHANING)
    command = [sys.executable, str(script), str(tmp_path / "a.exp")]
    # The workers have its output, too, so this returns when the last of them has ended.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = done.stdout.split()
    assert len(pids) == 3
    assert not shared_memory(pids)
