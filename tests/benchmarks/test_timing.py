# SPDX-License-Identifier: Apache-2.0
"""How figures come about, with a clock of our own in place of the card."""

import random

import pytest

from vllm.ampere.testing.timing import MIN_SAMPLES, SAMPLES, race, rotation_count, spread

MIB = 1 << 20


@pytest.mark.parametrize("l2_mib", [6, 40, 50])
def test_rotation_moves_more_than_twice_the_cache_and_not_a_set_more(l2_mib):
    drawn = random.Random(l2_mib)
    for _ in range(200):
        size = int(10 ** drawn.uniform(3, 10))
        count = rotation_count(size, l2_mib * MIB)
        assert count >= 2 and count * size > 2 * l2_mib * MIB
        assert count == 2 or (count - 1) * size <= 2 * l2_mib * MIB


class Clock:
    """Contestants that drift together: each replay is slower than the one before, whoever it belongs to."""

    def __init__(self, drift):
        self.order, self.drift = [], drift

    def replay(self, name, us):
        def once():
            self.order.append(name)
            return us * (1 + self.drift * len(self.order))

        return once


def test_contestants_alternate_and_take_turns_to_begin():
    clock = Clock(0)
    taken = race({name: clock.replay(name, us) for name, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))}, samples=6)
    rounds = ["".join(clock.order[i : i + 3]) for i in range(0, 18, 3)]
    assert rounds == ["abc", "bca", "cab"] * 2
    assert taken == {"a": [1.0] * 6, "b": [2.0] * 6, "c": [3.0] * 6}


def test_a_card_that_slows_down_leaves_the_ratio():
    clock = Clock(0.01)
    taken = race({"ours": clock.replay("ours", 10.0), "rival": clock.replay("rival", 25.0)})
    assert len(taken["ours"]) == SAMPLES >= MIN_SAMPLES
    assert spread(taken["rival"]).median_us / spread(taken["ours"]).median_us == pytest.approx(2.5, rel=2e-2)
    assert taken["ours"][-1] > 1.5 * taken["ours"][0]


def test_spread_is_of_the_samples():
    samples = list(range(101))
    random.Random(1).shuffle(samples)
    seen = spread(samples)
    assert (seen.median_us, seen.p10_us, seen.p90_us) == (50, pytest.approx(10), pytest.approx(90))


def test_too_few_samples_are_no_figure():
    with pytest.raises(ValueError, match="29 samples"):
        spread([1.0] * 29)
