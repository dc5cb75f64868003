"""Signals set a number, and no handler stays behind."""

import os
import signal
from contextlib import suppress

import pytest

from training.stopping import SIGNALS, Stopped, StopSignals


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_only_sets_a_number_and_the_programs_handler_is_put_back(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # the same event: torchrun passes on what the whole process group got
        assert signals.received == number
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_program_at_once():
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals._received_at -= 2.0
        os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for a job in the background
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert not signals.received


def test_a_forked_worker_does_not_hear_the_signal_of_the_run():
    with StopSignals() as signals, signals.at_once():
        child = os.fork()
        if not child:
            with suppress(BaseException):
                signal.raise_signal(signal.SIGUSR1)
                os._exit(signals.received)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_the_first_step_a_signal_ends_the_run_at_once_as_the_first_sample_may_never_come(number):
    with pytest.raises(Stopped, match="before the first step") as stop, StopSignals() as signals, signals.at_once():
        signal.raise_signal(number)
        raise AssertionError("the signal was not heard")
    assert stop.value.exit_code == (130 if number == signal.SIGINT else 75) and not stop.value.was_saved
