"""Counter-based numbers: known answers of Philox-4x32-10, independence of batching, uniformity."""

import numpy as np
import pytest

from tfive import rng


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers published with the Random123 library.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    monkeypatch: pytest.MonkeyPatch, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    monkeypatch.setattr(rng, "_key", lambda seed, role: key)
    assert tuple(int(w) for w in rng.philox(0, "any", *counter)) == words


def test_numbers_do_not_depend_on_batching() -> None:
    whole = rng.uniforms(7, "actor", 3, np.arange(20)[:, None], 0, np.arange(12))
    parts = [rng.uniforms(7, "actor", 3, item, 0, np.arange(12)) for item in range(20)]
    np.testing.assert_array_equal(whole, np.stack(parts))


def test_every_coordinate_matters() -> None:
    base = rng.uniforms(1, "actor", 1, 1, 1, 1)
    others = [
        rng.uniforms(2, "actor", 1, 1, 1, 1),
        rng.uniforms(1, "pilot", 1, 1, 1, 1),
        *(rng.uniforms(1, "actor", *(2 if i == j else 1 for j in range(4))) for i in range(4)),
    ]
    assert all(other != base for other in others)
    assert len({float(o) for o in others}) == len(others)


def test_uniform_in_the_open_interval() -> None:
    draws = rng.uniforms(0, "actor", 0, np.arange(200_000))
    assert draws.min() > 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    chi_square = ((counts - 4000) ** 2 / 4000).sum()
    assert chi_square < 95  # the 0.9999 quantile at 49 degrees of freedom is about 96


def test_permutation_is_one() -> None:
    order = rng.permutation(5, "actor", 2, 1000)
    assert sorted(order) == list(range(1000))
    assert (order != np.arange(1000)).mean() > 0.9
    assert (rng.permutation(5, "actor", 3, 1000) != order).any()


def test_counters_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="must lie in"):
        rng.uniforms(0, "actor", -1, 0)


def test_normals_follow_their_law_and_a_longer_draw_begins_like_a_shorter_one() -> None:
    many = rng.normals(5, "initial/x", (200, 501))
    assert (rng.normals(5, "initial/x", (7,)) == many.reshape(-1)[:7]).all()
    below = [(many < bound).mean() for bound in (-1.645, 0.0, 1.0)]
    assert below == pytest.approx([0.05, 0.5, 0.8413], abs=0.006)
    assert np.corrcoef(many.reshape(-1)[:-1], many.reshape(-1)[1:])[0, 1] == pytest.approx(0, abs=0.013)
    assert rng.normals(5, "initial/x", (0, 3)).shape == (0, 3)
