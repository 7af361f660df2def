"""One writer at a time: who is refused, why, and what overrides it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.errors import StoreLockedError
from expstore.storage.layout import HOLDER_FILE, LOCK_FILE
from tests.storage.made import episode, writer
from tests.torture.nursery import ROOT

HOLDS = """
import expstore, os, signal, sys, time
held = expstore.Writer(sys.argv[1], durable=False)
{more}
print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextmanager
def holder(path: Path, *prefix: str, more: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process with a writer, and its number as it knows it."""
    command = [*prefix, sys.executable, "-c", HOLDS.format(more=more), str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_second_writer_of_this_process_is_refused_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    link = tmp_path / "link.exp"
    with writer(path) as out:
        link.symlink_to(path)
        for name in (path, link, tmp_path / "." / "a.exp"):
            with pytest.raises(StoreLockedError, match=f"by process {os.getpid()} on .*; close"):
                writer(name)
        out.append(episode(3))
    with writer(path) as out:
        assert out.num_episodes == 1


def test_the_lock_of_a_killed_holder_is_free_though_its_child_lives(tmp_path: Path) -> None:
    """A forked worker holds the lock no longer than its parent."""
    path = tmp_path / "a.exp"
    # The child has let go of the lock by the time that its own code runs, which it tells.
    runs = "if not os.fork(): os.write(there, b'!'); time.sleep(60); os._exit(0)"
    forks = f"here, there = os.pipe()\n{runs}\nos.read(here, 1)"
    with holder(path, more=forks) as (process, number):
        with pytest.raises(StoreLockedError, match=f"by process {number} on"):
            writer(path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        writer(path).close()


def test_whose_number_is_ours_is_not_us(tmp_path: Path) -> None:
    """In another container a process may have the same number and host; only the lock counts."""
    path = tmp_path / "a.exp"
    ours = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    writer(path).close()
    (path / HOLDER_FILE).write_text(ours)
    writer(path).close()  # nobody has the lock, whatever the file says
    with holder(path):
        (path / HOLDER_FILE).write_text(ours)
        with pytest.raises(StoreLockedError, match=f"by process {os.getpid()} on"):
            writer(path)


def test_two_containers_in_which_both_are_process_1(tmp_path: Path) -> None:
    path, container = tmp_path / "a.exp", ("unshare", "--user", "--map-root-user", "--pid")
    container += ("--fork", "--kill-child")
    if not shutil.which("unshare") or subprocess.run([*container, "true"], check=False).returncode:
        pytest.skip("no namespaces here")
    with holder(path, *container) as (_, number):
        assert number == 1
        code = f"import expstore, os; print(os.getpid()); expstore.Writer({str(path)!r})"
        second = subprocess.run(
            [*container, sys.executable, "-c", code],
            **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
        )
    assert second.stdout == "1\n"
    assert "StoreLockedError" in second.stderr
    assert "by process 1 on" in second.stderr


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_where_nothing_can_be_locked_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """No file takes the place of the lock: nobody would remove it for a killed process."""

    def refused(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    path = tmp_path / "a.exp"
    monkeypatch.setattr(fcntl, "flock", refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(StoreLockedError) as raised:
                writer(path)
            assert os.strerror(error) in str(raised.value)
            assert "or open with lock=False if nothing else writes here" in str(raised.value)
    assert not (path / "zarr.json").exists()
    with writer(path, lock=False) as out:
        out.append(episode(3))
    assert expstore.open(path).num_episodes == 1
    if (path / LOCK_FILE).exists():
        assert not (path / LOCK_FILE).read_bytes()
