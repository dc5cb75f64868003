import os
import signal

import pytest

from training import stopping
from training.stopping import SIGNALS, Stopped, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_only_sets_a_flag(number):
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the same event: torchrun passes on what the whole process group got
        assert signals.received == number


def test_a_second_signal_ends_the_program_at_once(monkeypatch):
    monkeypatch.setattr(stopping, "ONE_EVENT", 0.0)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_after_a_stop_the_programs_own_handler_runs():
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        with pytest.raises(Stopped), StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not calls
            raise Stopped("saved", signals.received)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a job in the background
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert not signals.received
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_exit_code_tells_ctrl_c_from_a_preemption_and_no_sweep_goes_on():
    assert Stopped("", signal.SIGINT).exit_code == 130
    assert Stopped("", signal.SIGTERM).exit_code == Stopped("", signal.SIGUSR1).exit_code == 75
    assert not issubclass(Stopped, Exception), "Hydra goes on after an Exception"
