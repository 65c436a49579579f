"""Collections in a run look at what the run made: what was there before is passed over, and only as long."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from tfive.training.garbage import lasting


class _Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """As in a process of its own, where nothing is frozen; the tests' process has frozen what it collected."""
    gc.unfreeze()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_was_there_is_passed_over_and_what_is_made_is_not() -> None:
    before = len(gc.get_objects())
    with lasting():
        assert gc.get_freeze_count() > before // 2
        made = weakref.ref(_Knot())
        gc.collect()
        assert made() is None
        assert len(gc.get_objects()) < before // 2
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_a_run_that_fails_leaves_nothing_frozen() -> None:
    with pytest.raises(RuntimeError, match="broken"), lasting():
        raise RuntimeError("broken")
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_garbage_from_before_is_gone_first() -> None:
    old = weakref.ref(_Knot())
    with lasting():
        assert old() is None


@pytest.mark.usefixtures("thawed")
def test_what_others_have_frozen_stays_so() -> None:
    gc.freeze()
    made = _Knot()
    # Frozen objects that nobody needs any more may go meanwhile, so their number is no measure.
    with lasting():
        assert gc.get_freeze_count() > 0
        assert any(one is made for one in gc.get_objects()), "what was made since is not frozen"
    assert gc.get_freeze_count() > 0
