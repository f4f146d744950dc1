"""Augmentation by libraries: every notation runs at every strength, and gives pictures of the right size."""

import numpy as np
import pytest
import torch
from failures import each
from pictures import pixels
from PIL import Image

from matmix.data.config import ImagesConfig
from matmix.data.images import transforms
from matmix.data.images.transforms import borrowed_generators, make_transform, seed_generators

PICTURE = Image.fromarray(pixels(7, 40, 30))


def drawn(config, count, *, training=True, picture=PICTURE):
    """So many augmentations of a picture."""
    transform = make_transform(config, (0.5,) * config.channels, (0.5,) * config.channels, training=training)
    with borrowed_generators():
        seed_generators(np.random.default_rng(0))
        return torch.stack([transform(picture) for _ in range(count)])


@pytest.mark.slow
@each("notation", ["rand-m9-mstd0.5-inc1", "rand-m10-inc1", "original", "v0r", "3a", "augmix-m5-w4-d2"])
@each("channels", [3, 1])
def test_every_notation_at_every_strength(notation, channels):
    # The strongest posterisation, which few pictures meet, keeps no bit.
    found = drawn(ImagesConfig(size=12, augment=notation, channels=channels, erasing=0.5), 150)
    assert found.shape == (150, channels, 12, 12)
    assert found.isfinite().all()
    assert len(found.flatten(1).unique(dim=0)) > 100


@pytest.mark.parametrize("training", [True, False])
def test_one_channel_is_what_three_equal_ones_are(training):
    """A picture without colours is not turned into one with colours where nothing needs them."""
    grey = PICTURE.convert("L")
    one, three = (drawn(ImagesConfig(size=16, channels=n), 20, training=training, picture=grey) for n in (1, 3))
    assert torch.equal(one, three[:, :1])
    assert training == (len(one.unique(dim=0)) > 1)


@pytest.mark.parametrize("size", [(401, 3), (3, 400)])
def test_a_thin_picture_is_resized_in_its_middle_alone(size, monkeypatch):
    place = np.arange(max(size)).reshape([-1 if one == max(size) else 1 for one in size])
    picture = Image.fromarray(np.broadcast_to(120 + 120 * np.sin(place / 4), size).astype(np.uint8)).convert("RGB")
    config = ImagesConfig(path="x", size=16, crop=0.8)
    transform = make_transform(config, (0.5,) * 3, (0.2,) * 3, training=False)
    found = transform(picture)
    assert max(transforms._without_far_ends(picture).size) <= 97
    monkeypatch.setattr(transforms, "_THINNEST", 10**6)
    expected = transform(picture)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)  # half of a resized pixel may be between them
    assert expected.std() > 0.3


def test_nothing_is_changed_where_nothing_is_asked_for():
    config = ImagesConfig(size=30, train_crop="none", crop=1.0, hflip=0.0)
    first, second = drawn(config, 2)
    assert torch.equal(first, second)
    middle = np.asarray(PICTURE.crop((5, 0, 35, 30)), np.float32) / 127.5 - 1
    assert torch.allclose(first, torch.from_numpy(middle).permute(2, 0, 1), atol=1e-6)


def test_a_shift_moves_the_whole_picture():
    config = ImagesConfig(size=16, train_crop="shift", shift=3, hflip=0.0)
    whole = drawn(ImagesConfig(size=16, train_crop="shift", shift=0, hflip=0.0), 1)[0]
    padded = torch.nn.functional.pad(whole, (3, 3, 3, 3), value=-1.0)
    moved = {(y, x) for y in range(7) for x in range(7)}
    seen = set()
    for found in drawn(config, 60):
        places = {(y, x) for y, x in moved if torch.equal(found, padded[:, y : y + 16, x : x + 16])}
        assert len(places) == 1
        seen |= places
    assert len(seen) > 25


def test_mirrored_half_of_the_time():
    found = drawn(ImagesConfig(size=16, train_crop="none", crop=1.0, hflip=0.5), 60)
    whole = drawn(ImagesConfig(size=16, train_crop="none", crop=1.0, hflip=0.0), 1)[0]
    mirrored = sum(torch.equal(one, whole.flip(2)) for one in found)
    assert mirrored + sum(torch.equal(one, whole) for one in found) == 60
    assert 15 <= mirrored <= 45


def test_erasing_fills_a_rectangle():
    plain = {"size": 16, "train_crop": "none", "crop": 1.0, "hflip": 0.0}
    whole = drawn(ImagesConfig(**plain), 1)[0]
    for found in drawn(ImagesConfig(**plain, erasing=1.0, erasing_mode="const"), 10):
        changed = (found != whole).any(dim=0)
        rows, columns = changed.any(dim=1).nonzero().flatten(), changed.any(dim=0).nonzero().flatten()
        inside = found[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (inside == 0).float().mean() > 0.99  # the mean, after normalising
        assert 0 < changed.float().mean() < 0.5
