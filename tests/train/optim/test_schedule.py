import pytest

from matmix.train.optim.config import ScheduleConfig, rate_share
from matmix.train.recipe import load_config


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


def test_wsd_falls_by_the_shape_of_its_decay():
    shares = {
        shape: [
            rate_share(step, 100, ScheduleConfig(name="wsd", decay=20, decay_shape=shape)) for step in range(1, 101)
        ]
        for shape in ("linear", "1-sqrt", "cosine")
    }
    assert {tuple(of_shape[2:80]) for of_shape in shares.values()} == {(1.0,) * 78}
    assert [of_shape[84] for of_shape in shares.values()] == pytest.approx([0.775, 0.55, 0.1 + 0.45 * (1 + 0.5**0.5)])
    assert [of_shape[99] for of_shape in shares.values()] == pytest.approx([0.1] * 3)
    trapezoid = ScheduleConfig(name="trapezoid", decay=20)
    assert [rate_share(step, 100, trapezoid) for step in range(1, 101)] == shares["linear"]
    with pytest.raises(ValueError, match=r'schedule\.decay_shape = "1-sqrt" is for wsd: set schedule\.name = "wsd"$'):
        load_config("debug_hydra", {"schedule.name": "trapezoid", "schedule.decay_shape": "1-sqrt"})
    words = ["--init.from", "runs/a/checkpoints/step-00000010", "--init.decay", "5", "--schedule.decay-shape", "1-sqrt"]
    branch = load_config("debug_hydra", [*words, "--schedule.name", "constant"])
    assert (branch.steps, branch.schedule.name, branch.schedule.decay_shape) == (15, "wsd", "1-sqrt")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ScheduleConfig(name="constant", warmup=0), "0.001, stable to step 200"),
        (ScheduleConfig(name="cosine"), "from 0 to 0.001 at step 4, cosine to 0.0001 at step 200"),
        (
            ScheduleConfig(name="wsd", start=0.1, decay_shape="1-sqrt", final=0),
            "from 0.0001 to 0.001 at step 4, stable to step 180, 1-sqrt to 0 at step 200",
        ),
    ],
)
def test_a_schedule_says_where_it_goes(config, words):
    assert config.words(200, 1e-3) == words
