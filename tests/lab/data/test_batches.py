"""Batches: augmentation against a slow loop, reproducibility, coverage of the data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.data.made_images import image_set
from rootfree_lab.data import Augmentation, Batches, DataError, Dataset, Split, load
from rootfree_lab.data.augment import Draws, ImageChanges, crop_and_flip, normalise


def text_set(count: int) -> Dataset:
    split = Split(torch.arange(count), torch.empty(0, dtype=torch.int64))
    return Dataset("some", "text", split, split, None, count, ())


def batches(dataset: Dataset, seed: int = 0, **options) -> Batches:
    settings = {"batch_size": 4, "device": "cpu", "augment": False, **options}
    return Batches(
        dataset.train, dataset, generator=torch.Generator().manual_seed(seed), **settings
    )


def test_crop_and_flip_against_a_loop():
    x = image_set(40).train.x
    generator = torch.Generator().manual_seed(2)
    top, left = torch.randint(5, (2, 40), generator=generator)
    flip = torch.randint(2, (40,), generator=generator).bool()
    assert {0, 4} <= set(top.tolist()) & set(left.tolist())  # the ends are among them
    found = crop_and_flip(x, top, left, flip, padding=2)
    for i, image in enumerate(x.numpy()):
        expected = np.zeros_like(image)
        for row in range(6):
            for column in range(5):
                y, z = row + int(top[i]) - 2, column + int(left[i]) - 2
                if 0 <= y < 6 and 0 <= z < 5:
                    target = 4 - column if flip[i] else column
                    expected[row, target] = image[y, z]
        assert np.array_equal(found[i].numpy(), expected)


def test_normalise_against_a_loop():
    dataset = image_set(3)
    found = normalise(dataset.train.x, torch.tensor(dataset.mean), torch.tensor(dataset.std))
    assert found.shape == (3, 3, 6, 5)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    for c in range(3):
        plane = dataset.train.x[..., c].double()
        expected = (plane / 255 - dataset.mean[c]) / dataset.std[c]
        # A value up to 3 from a few roundings of numbers up to 5.
        assert torch.allclose(found[:, c].double(), expected, rtol=0, atol=2e-6)


def test_every_image_once_and_unchanged_without_augmentation():
    dataset = image_set()
    expected = normalise(dataset.train.x, torch.tensor(dataset.mean), torch.tensor(dataset.std))
    drawn = list(batches(dataset, drop_last=False))
    assert [len(y) for _, y in drawn] == [4, 4, 2]
    x, y = torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn])
    assert sorted(y.tolist()) == list(range(10))
    assert y.tolist() != list(range(10))
    assert torch.equal(x, expected[y])
    ordered = batches(dataset, drop_last=False, shuffle=False)
    assert torch.cat([y for _, y in ordered]).tolist() == list(range(10))
    assert len(batches(dataset)) == len(list(batches(dataset))) == 2


def test_augmented_images_are_crops_of_their_own_image():
    """Each is one of the 25 windows or a mirrored one, and all kinds appear."""
    dataset = image_set()
    every = [torch.tensor([t, left, f]) for t in range(5) for left in range(5) for f in range(2)]
    mean, std = torch.tensor(dataset.mean), torch.tensor(dataset.std)
    windows = {
        i: [
            normalise(
                crop_and_flip(
                    dataset.train.x[i : i + 1], w[:1], w[1:2], w[2:].bool(), padding=2
                ), mean, std,
            )[0]
            for w in every
        ]
        for i in range(10)
    }  # fmt: skip
    seen = set()
    source = batches(dataset, augment=True, batch_size=10)
    for _ in range(40):
        for x, y in source:
            for image, label in zip(x, y, strict=True):
                (kind, *_) = [k for k, w in enumerate(windows[int(label)]) if torch.equal(w, image)]
                seen.add(kind)
    assert len(seen) == 50  # 400 draws: a kind is missed with probability 50 x 0.98^400 < 2 %


def test_each_batch_of_an_epoch_has_its_own_changes():
    one = image_set(1).train.x
    split = Split(one.expand(200, -1, -1, -1), torch.zeros(200, dtype=torch.int64))
    dataset = replace(image_set(), train=split)
    drawn = torch.cat([x for x, _ in batches(dataset, augment=True)])
    # 50 kinds of change: 200 draws leave out 50 x 0.98^200 = 0.9 of them in the mean.
    assert len(drawn.flatten(1).unique(dim=0)) > 40


def test_no_flip_where_it_changes_the_meaning():
    for flip in (False, True):
        dataset = image_set(flip=flip)
        draws = Draws(torch.Generator().manual_seed(0), torch.device("cpu"))
        changes = ImageChanges(dataset.augmentation, dataset.train.x.shape, draws)
        assert changes.flip.any() == flip


def same(first, second) -> bool:
    pairs = zip(list(first), list(second), strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("dataset", [image_set(), text_set(60)], ids=["images", "text"])
def test_the_generator_decides(dataset):
    options = {"augment": True, "context": 4 if dataset.kind == "text" else 0}
    one, other = batches(dataset, **options), batches(dataset, **options)
    assert same(one, other)
    second = list(one)
    assert same(second, other)
    assert not same(second, batches(dataset, **options))  # epochs differ
    assert not same(batches(dataset, seed=1, **options), batches(dataset, **options))


def test_epoch_resumes_where_it_was():
    dataset = image_set()
    source = batches(dataset, augment=True, batch_size=2)
    list(source)
    state = source._draws._generator.get_state()
    whole, after = list(source), source._draws._generator.get_state()
    source._draws._generator.set_state(state)
    assert same(whole[3:], source.starting_at(3))
    assert torch.equal(after, source._draws._generator.get_state())
    with pytest.raises(DataError, match="batch must be in 0 to 5, got 6"):
        source.starting_at(6)


def test_windows_of_text():
    """Tokens are their own positions, so a window shows where it is from."""
    dataset = text_set(42)
    ordered = batches(dataset, context=5, batch_size=3, shuffle=False, drop_last=False)
    x = torch.cat([x for x, _ in ordered])
    y = torch.cat([y for _, y in ordered])
    assert x.flatten().tolist() == list(range(40))  # 8 windows; the 42nd token is no target
    assert torch.equal(y, x + 1)
    starts = set()
    shifted = batches(dataset, context=5, batch_size=7, augment=True)
    assert len(shifted) == 1
    for _ in range(60):
        ((x, y),) = shifted
        assert torch.equal(y, x + 1)
        assert y.max() <= 41
        assert sorted(x.flatten().tolist()) == list(range(int(x.min()), int(x.min()) + 35))
        starts.add(int(x.min()))
    assert starts == {0, 1, 2, 3, 4}


def test_windows_that_start_anywhere():
    """Epoch after epoch the starts are one stream of draws, and a window ends inside the text."""
    dataset = replace(text_set(42), augmentation=Augmentation(anywhere=True))
    anywhere = batches(dataset, context=5, batch_size=3, augment=True)
    found = torch.cat([x for _ in range(100) for x, _ in anywhere])
    drawn = torch.randint(36, (len(found),), generator=torch.Generator().manual_seed(0))
    assert torch.equal(found[:, 0], drawn)
    assert torch.equal(found, found[:, :1] + torch.arange(5))
    assert set(found[:, 0].tolist()) == set(range(36))
    assert all(torch.equal(y, x + 1) for x, y in anywhere)


def test_tables():
    dataset = load("diabetes")
    x, y = next(iter(batches(dataset, batch_size=32)))
    assert (x.shape, y.shape) == ((32, 10), (32,))
    place = (dataset.train.x == x[0]).all(1).nonzero().item()
    assert y[0] == dataset.train.y[place]


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (image_set(), {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (image_set(), {"batch_size": 11}, "at most the number of examples, 10; got 11"),
        (image_set(), {"context": 4}, "context must be 0 for what is not text, got 4"),
        (text_set(20), {}, "context must be at least 1 for text, got 0"),
        (text_set(20), {"context": 5, "batch_size": 4}, "number of windows of 5 tokens, 3; got 4"),
        (text_set(3), {"context": 5, "drop_last": False}, "windows of 5 tokens, 0"),
    ],
)
def test_errors(dataset, options, said):
    with pytest.raises(DataError, match=said):
        batches(dataset, **options)
