"""One frozen window for all tests of calibration."""

from calibration_world import *  # noqa: F403
