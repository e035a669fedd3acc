"""Several runs in turn, and one signal for all of them."""

import os
import signal

from vitrail.train.observer import listen_for_signals


def test_a_signal_that_an_inner_listener_hears_is_heard_outside() -> None:
    before = signal.getsignal(signal.SIGINT)
    with listen_for_signals() as outer:
        with listen_for_signals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner
        assert outer
        assert outer.signal == "SIGTERM"
    assert signal.getsignal(signal.SIGINT) is before


def test_what_came_before_stops_the_next_run_as_well() -> None:
    with listen_for_signals() as outer:
        os.kill(os.getpid(), signal.SIGINT)
        with listen_for_signals() as inner:
            assert inner
        assert outer
