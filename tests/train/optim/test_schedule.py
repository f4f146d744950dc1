import pytest

from matmix.train.optim.config import ScheduleConfig, rate_share


def test_warmup_rises_linearly_and_the_peak_is_reached():
    config = ScheduleConfig(name="linear", warmup=10, final=0.0)
    shares = [rate_share(step, 100, config) for step in range(1, 101)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == pytest.approx(1.0)
    assert max(shares) == shares[9]
    assert shares[-1] == pytest.approx(0.0)


def test_warmup_below_one_is_a_share_of_the_steps():
    assert rate_share(6, 100, ScheduleConfig(warmup=0.06)) == pytest.approx(1.0)
    assert rate_share(3, 100, ScheduleConfig(warmup=0.06)) == pytest.approx(0.5)


def test_warmup_may_start_from_a_share_of_the_peak():
    config = ScheduleConfig(warmup=100, start=0.1)
    assert rate_share(50, 5000, config) == pytest.approx(0.55)
    assert rate_share(100, 5000, config) == pytest.approx(1.0)
    from_zero = [rate_share(step, 5000, ScheduleConfig(warmup=100, start=0.0)) for step in range(1, 100)]
    assert from_zero == [step / 100 for step in range(1, 100)]  # exactly as without the option
    with pytest.raises(ValueError, match=r"schedule\.start must lie in \[0, 1\], got 2"):
        ScheduleConfig(start=2)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_last_step_has_the_final_share(name):
    assert rate_share(1000, 1000, ScheduleConfig(name=name, final=0.02)) == pytest.approx(0.02)


def test_cosine_is_half_way_in_the_middle():
    config = ScheduleConfig(name="cosine", warmup=0, final=0.0)
    assert rate_share(50, 100, config) == pytest.approx(0.5)


def test_wsd_is_flat_until_its_decay():
    config = ScheduleConfig(name="wsd", warmup=0.1, decay=0.2, final=0.0)
    assert {rate_share(step, 100, config) for step in range(10, 81)} == {1.0}
    assert rate_share(90, 100, config) == pytest.approx(0.5)


def test_constant_stays_at_the_peak():
    assert rate_share(100, 100, ScheduleConfig(name="constant", warmup=5)) == 1.0
