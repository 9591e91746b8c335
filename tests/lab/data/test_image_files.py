"""Loaders of images, on small files that `written` makes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from PIL import Image

from lab.data import written
from rootfree_lab.data import DataError, cifar, fashion_mnist, load


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar10_python_version(tmp_path, inside):
    x, y = written.cifar10_folder(tmp_path / "c" / inside)
    found = load("cifar10", folder=tmp_path / "c")
    assert found.kind == "images"
    assert found.shape == (3, 32, 32)
    assert found.classes == 10
    assert np.array_equal(found.train.x.numpy(), x)
    assert found.train.y.tolist() == y
    assert len(found.test) == 4
    scaled = x.reshape(-1, 3) / 255
    assert np.allclose(found.mean, scaled.mean(0), rtol=1e-12)
    assert np.allclose(found.std, scaled.std(0), rtol=1e-12)


def test_cifar10_pickled_by_python_3(tmp_path):
    x, y = written.cifar10_folder(tmp_path / "c")
    rows = x[:4].transpose(0, 3, 1, 2).reshape(4, -1)
    content = pickle.dumps({b"data": rows, b"labels": y[:4]}, protocol=2)
    (tmp_path / "c" / "data_batch_1").write_bytes(content)
    assert np.array_equal(load("cifar10", folder=tmp_path / "c").train.x.numpy(), x)


@pytest.mark.parametrize("inside", ["", "package"])
def test_cifar10_as_rows_of_pngs(tmp_path, inside):
    x, y = written.cifar10_pngs(tmp_path / "c" / inside)
    found = load("cifar10", folder=tmp_path / "c")
    assert np.array_equal(found.train.x.numpy(), x)
    assert found.train.y.tolist() == y


def test_cifar100(tmp_path):
    x, y = written.pixels(6, 32, 32, 3), written.labels(6, 100)
    written.cifar_pickle(tmp_path / "train", x, "fine_labels", y)
    written.cifar_pickle(tmp_path / "test", x[:2], "fine_labels", y[:2])
    found = load("cifar100", folder=tmp_path)
    assert found.classes == 100
    assert np.array_equal(found.train.x.numpy(), x)
    assert found.test.y.tolist() == y[:2]


class _RunsCode:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    written.cifar10_folder(tmp_path / "c")
    (tmp_path / "c" / "data_batch_2").write_bytes(pickle.dumps({b"data": _RunsCode()}))
    with pytest.raises(DataError, match=r"data_batch_2 .*it has \w*builtin\w*\.print"):
        load("cifar10", folder=tmp_path / "c")
    assert capsys.readouterr().out == ""


def test_a_file_of_the_published_length_must_be_the_published_one(tmp_path, monkeypatch):
    written.cifar10_folder(tmp_path / "c")
    monkeypatch.setitem(cifar.PUBLISHED, "data_batch_3", ("0" * 32, 4))
    with pytest.raises(DataError, match="data_batch_3 is altered: its checksum"):
        load("cifar10", folder=tmp_path / "c")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist(tmp_path, suffix):
    written.fashion_folder(tmp_path / "f", suffix)
    found = load("fashion_mnist", folder=tmp_path / "f")
    assert found.shape == (1, 28, 28)
    assert np.array_equal(found.train.x.numpy()[..., 0], written.pixels(12, 28, 28))
    assert found.test.y.tolist() == [0, 1, 2, 3, 4]


def test_fashion_mnist_of_the_distribution(tmp_path, monkeypatch):
    written.fashion_folder(tmp_path / "f")
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "f")
    assert len(load("fashion_mnist", cache=tmp_path / "empty").train) == 12


def test_fashion_mnist_checks_the_published_content(tmp_path, monkeypatch):
    written.fashion_folder(tmp_path / "f")
    monkeypatch.setitem(fashion_mnist.PUBLISHED, "train-images-idx3-ubyte", ("0" * 64, 12))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is altered"):
        load("fashion_mnist", folder=tmp_path / "f")


DAMAGED = [
    ("cifar10", written.cifar10_folder, "data_batch_4"),
    ("cifar10", written.cifar10_pngs, "data_batch_4.png"),
    ("cifar10", written.cifar10_pngs, "train_lables.json"),
    ("fashion_mnist", written.fashion_folder, "t10k-images-idx3-ubyte.gz"),
]


@pytest.mark.parametrize(("name", "write", "file"), DAMAGED)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99, None])
def test_truncated_and_missing_files(tmp_path, name, write, file, kept):
    """Cut anywhere, empty, or not there: the error names the file and the way to get it."""
    write(tmp_path / "d")
    path = tmp_path / "d" / file
    content = path.read_bytes()
    path.unlink()
    if kept is not None:
        path.write_bytes(content[: int(kept * len(content))])
    said = "is missing" if kept is None else "is truncated or altered"
    with pytest.raises(DataError, match=f"{file} {said}.*To get it: .*{name}"):
        load(name, folder=tmp_path / "d")


def test_labels_and_images_must_fit(tmp_path):
    written.cifar10_pngs(tmp_path / "c")
    (tmp_path / "c" / "train_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(DataError, match="20 images and 3 labels"):
        load("cifar10", folder=tmp_path / "c")
    (tmp_path / "c" / "train_lables.json").write_text(str([10] * 20))
    with pytest.raises(DataError, match="labels outside 0 to 9"):
        load("cifar10", folder=tmp_path / "c")


def image_tree(folder, *, split: bool) -> None:
    colours = {"cat": (200, 10, 10), "dog": (10, 200, 10)}
    for part in ("train", "val") if split else ("",):
        for name, colour in colours.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(5):
                image = Image.new("RGB", (40 + i, 30), colour)
                image.save(folder / part / name / f"{i}.{('png', 'JPEG')[i % 2]}")
            (folder / part / name / "notes.txt").write_text("no image")


@pytest.mark.parametrize("split", [True, False])
def test_image_folder(tmp_path, split):
    image_tree(tmp_path / "t", split=split)
    found = load("image_folder", folder=tmp_path / "t", size=16)
    assert found.shape == (3, 16, 16)
    assert found.classes == 2
    assert (len(found.train), len(found.test)) == ((10, 10) if split else (8, 2))
    for image, label in zip(found.train.x, found.train.y, strict=True):
        # The colour says the class; JPEG may be off by a little.
        assert image[..., int(label)].float().mean() > 190
    assert found.augmentation.padding == 2


def test_image_folder_keeps_the_middle_and_decodes_no_more_than_the_limit(tmp_path):
    image_tree(tmp_path / "t", split=True)
    stripes = np.zeros((16, 32, 3), dtype=np.uint8)
    stripes[:, 8:24] = 255
    for path in (tmp_path / "t" / "train").rglob("*.png"):
        Image.fromarray(stripes).save(path)
    for path in (tmp_path / "t" / "train").rglob("*.JPEG"):
        path.unlink()
    found = load("image_folder", folder=tmp_path / "t", size=16, limit=3)
    assert len(found.train) == 3
    assert (found.train.x == 255).all()


def test_image_folder_errors(tmp_path):
    image_tree(tmp_path / "t", split=True)
    (tmp_path / "t" / "train" / "cat" / "0.png").write_bytes(b"no image at all")
    with pytest.raises(DataError, match=r"0\.png is truncated or altered"):
        load("image_folder", folder=tmp_path / "t")
    with pytest.raises(DataError, match="a folder for each class"):
        load("image_folder", folder=tmp_path / "t" / "train" / "dog")
    with pytest.raises(DataError, match=r"there is no folder .*To get it: Name a folder"):
        load("image_folder", folder=tmp_path / "nowhere")
    with pytest.raises(DataError, match="size is for image_folder alone"):
        load("digits", size=8)
