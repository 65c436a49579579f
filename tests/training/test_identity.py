"""What a step costs: seconds of phases without what they only report."""

from __future__ import annotations

from tfive.training.identity import without_diagnoses


def test_diagnoses_are_taken_from_every_phase_around_them() -> None:
    seconds = {"fit": 3.0, "calibrate": 10.0, "calibrate/validate": 4.0, "calibrate/validate/diagnose": 1.5}
    seconds |= {"close": 2.0, "close/diagnose": 0.5}
    found = without_diagnoses(seconds)
    assert found == {"fit": 3.0, "calibrate": 8.5, "calibrate/validate": 2.5, "close": 1.5}
