"""Ctrl-C, held back while an episode is written."""

import contextlib
import os
import signal
import threading

import pytest

from expstore.ingest.interrupts import Interrupts


def press() -> None:
    """Ctrl-C, and the moment that Python needs to notice."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


@pytest.fixture(autouse=True)
def _usual_handler(monkeypatch: pytest.MonkeyPatch) -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_part_that_allows_it() -> None:
    done = []

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        press()
        done.append("written")
        with interrupts.allowed():
            done.append("read")

    assert done == ["written"]


def test_an_interrupt_of_the_allowed_part_comes_at_once() -> None:
    done = []

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.allowed():
        press()
        done.append("read")

    assert done == []


def test_an_interrupt_at_the_end_comes_after_it() -> None:
    done = []

    with pytest.raises(KeyboardInterrupt), Interrupts():
        press()
        done.append("written")

    assert done == ["written"]


def test_an_interrupt_that_was_swallowed_comes_again() -> None:
    done = []

    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.allowed():
            with contextlib.suppress(KeyboardInterrupt):
                press()
            done.append("read on")
        done.append("written")
        with interrupts.allowed():
            done.append("read more")

    assert done == ["read on", "written"]


def test_an_interrupt_that_was_caught_outside_does_not_come_again() -> None:
    with Interrupts() as interrupts:
        with contextlib.suppress(KeyboardInterrupt), interrupts.allowed():
            press()
        with interrupts.allowed():
            pass


def test_a_handler_that_raises_nothing_is_called_once() -> None:
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))

    with Interrupts() as interrupts:
        press()
        for _ in range(3):
            with interrupts.allowed():
                pass

    assert calls == [signal.SIGINT]


def test_an_error_is_not_replaced_by_an_interrupt() -> None:
    with pytest.raises(ZeroDivisionError), Interrupts():
        press()
        raise ZeroDivisionError


def test_the_handler_of_before_is_put_back() -> None:
    with Interrupts():
        pass

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_interrupts_are_ignored_they_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    with Interrupts() as interrupts:
        press()
        with interrupts.allowed():
            pass

    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_in_another_thread_it_does_nothing() -> None:
    failures = []

    def run() -> None:
        try:
            with Interrupts() as interrupts, interrupts.allowed():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert failures == []
