"""Hostile requests against a server that may not write a byte; at length, bench/fuzz_server.py."""

import pytest

from tests.serve import fuzzing


@pytest.mark.slow
def test_some_hostile_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzzing.main(["--uploads", "40", "--slow", "0", "--large", str(20 * 2**20)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_thousand_uploads_and_slow_senders(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzzing.main(["--uploads", "1000", "--seed", "1"]) == 0, capsys.readouterr().out
