"""Data files that are broken or made to do harm: read, or refused in words. Nothing runs."""

from __future__ import annotations

import gzip
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.data import written
from rootfree_lab.data.cifar import read_cifar10
from rootfree_lab.data.errors import DataError, reading
from rootfree_lab.data.plain_pickle import Made, PickleError, array_of, read_plain
from rootfree_lab.data.planetoid import read_planetoid, read_published
from rootfree_lab.data.unpacking import check_zip, gunzip, unpack_tar, unpack_zip

PROTOCOLS = range(5)
whole = st.integers(-(2**70), 2**70)
keys = st.one_of(st.text(max_size=5), st.integers(-5, 300), st.binary(max_size=5))
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), whole, st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.builds(tuple, st.lists(inner, max_size=4)),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(plain, st.sampled_from(PROTOCOLS))
def test_plain_data_is_what_pickle_reads(value, protocol):
    assert read_plain(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8", "f2", "<f4", ">f8", "?"])
def test_arrays_are_what_pickle_reads(dtype, protocol):
    for array in (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.zeros((0, 4))):
        array = array.astype(dtype)
        found = array_of(read_plain(pickle.dumps(array, protocol=protocol)))
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


def test_python_2_strings_are_bytes():
    assert read_plain(b"U\x03a\xffb.") == b"a\xffb"
    assert read_plain(b"S'ab'\n.") == b"ab"


class _Runs:
    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_are_written_down_and_not_made(protocol, capsys):
    made = read_plain(pickle.dumps({"a": _Runs()}, protocol=protocol))["a"]
    assert isinstance(made, Made)
    assert made.name.endswith("builtin__.print") or made.name == "builtins.print"
    assert made.args == ("it ran",)
    assert capsys.readouterr().out == ""


def array_pickle(dtype: bytes, shape: bytes, raw: bytes) -> bytes:
    """An array as numpy pickles it, with any dtype over any bytes."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + shape + b"cnumpy\ndtype\nU" + bytes([len(dtype)]) + dtype
        + b"K\x00K\x01\x87R(K\x03U\x01<NNN"
        + b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U" + bytes([len(raw)]) + raw + b"tb."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "shape", "raw"),
    [
        (b"O8", b"K\x01\x85", b"\x41" * 8),  # numpy takes the bytes for the address of an object
        (b"O", b"K\x01\x85", b"\x41" * 8),
        (b"V8", b"K\x01\x85", b"\x41" * 8),
        (b"M8", b"K\x01\x85", b"\x41" * 8),
        (b"f4", b"K\x03\x85", b"\x41" * 8),  # fewer bytes than elements
        (b"f4", b"J\xff\xff\xff\xff\x85", b""),  # a negative length
        (b"f4", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", b""),
    ],
)
def test_arrays_of_anything_but_numbers_are_refused(dtype, shape, raw):
    with pytest.raises(ValueError, match="an array has"):
        array_of(read_plain(array_pickle(dtype, shape, raw)))
    good = array_of(read_plain(array_pickle(b"f4", b"K\x02\x85", b"\x00" * 8)))
    assert good.tolist() == [0, 0]


HOSTILE = {
    "deep": b")" + b"\x85" * 200_000 + b".",
    "a deep key": b"})" + b"\x85" * 200_000 + b"Ns.",
    "a cycle": b"]q\x00h\x00a.",
    "many of one": b"K\x01" + b"q\x00h\x00\x86" * 5_000 + b".",
    "a persistent object": b"Px\n.",
    "a list of nobody": b"a.",
    "a large length": b"\x8d" + b"\xff" * 8 + b"x.",
    "many digits": b"I" + b"9" * 100_000 + b"\n.",
    "an extension": b"\x82\x01.",
    "a name of a number": b"K\x01K\x02\x93.",
    "a call of a number": b"K\x01)R.",
    "no end": b"N",
    "empty": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_are_no_data(what, tmp_path):
    """Each is refused by the readers, with the name of the file."""
    written.cifar10_folder(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3").write_bytes(HOSTILE[what])
    with pytest.raises(DataError, match="data_batch_3"):
        read_cifar10(tmp_path / "c")
    written.planetoid_files(tmp_path, "cora")
    for part in ("x", "y", "graph"):
        (tmp_path / f"ind.cora.{part}").write_bytes(HOSTILE[what])
        with pytest.raises(DataError, match=f"ind.cora.{part}"):
            read_published(tmp_path, "cora")
        written.planetoid_files(tmp_path, "cora")


@pytest.mark.parametrize(
    "copy", [b"h\x01h\x00\x85R", b"h\x00h\x00\x93"], ids=["encoded", "as a name"]
)
def test_text_that_is_copied_for_ever(copy):
    """100 kB of text and 20 kB of opcodes would become 250 MB and more."""
    text = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000 + b"q\x00"
    encode = b"c_codecs\nencode\nq\x01"
    assert read_plain(b"(" + text + encode + b"h\x01)Rl.")[2].name == "_codecs.encode"
    with pytest.raises(PickleError, match="copies more text than it has"):
        read_plain(b"(" + text + encode + copy * 2_500 + b"l.")


OPCODES = b"](})eaus.Rbqh0K\x01\x85\x86t\x93c\nNl\x81d2"
programs = st.lists(st.sampled_from(OPCODES), max_size=40).map(bytes)


def read_or_refused(read) -> bool:
    """Whether it was read; any error but the one that names the file is a failure."""
    try:
        with reading(Path("file")):
            read()
    except DataError:
        return False
    return True


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=60), programs))
def test_any_bytes_are_read_or_refused(content):
    read_or_refused(lambda: read_plain(content))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    cifar, planetoid = tmp_path_factory.mktemp("cifar") / "c", tmp_path_factory.mktemp("planetoid")
    written.cifar10_folder(cifar, each=1)
    written.planetoid_files(planetoid, "cora")
    return cifar, planetoid


@settings(max_examples=150)
@given(
    st.sampled_from(["data_batch_1", "x", "ally", "graph"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(max_size=3),
)
def test_damaged_files_are_read_or_refused(folders, name, where, bytes_there):
    """Some bytes are others; an empty string cuts the file off."""
    cifar, planetoid = folders
    path = cifar / name if name.startswith("data") else planetoid / f"ind.cora.{name}"
    content = path.read_bytes()
    # Most of a picture is pixels; what matters is before and after.
    place = int(where * min(len(content), 300))
    after = content[place + len(bytes_there) :] if bytes_there else b""
    path.write_bytes(content[:place] + bytes_there + after)
    try:
        if path.parent == cifar:
            read_or_refused(lambda: read_cifar10(cifar))
        else:
            read_or_refused(lambda: read_planetoid(planetoid, "cora"))
    finally:
        path.write_bytes(content)


# -- small files that unpack to large ones ---------------------------------------------------

BOMB = bytes(200_000_000)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return gzip.compress(BOMB, 1)  # 0.9 MB


def test_a_gzipped_bomb(tmp_path, bomb):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(bomb)
    with pytest.raises(ValueError, match="it unpacks to more than"):
        gunzip(path)
    path.write_bytes(gzip.compress(b"some" * 1000))
    assert gunzip(path) == b"some" * 1000


def test_headers_of_an_archive_count(tmp_path):
    """tarfile takes a header into memory, whatever length it says."""
    member, header = tarfile.TarInfo("data.txt"), tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 8 << 20
    archive = tmp_path / "archive.tar.gz"
    with gzip.open(archive, "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        file.write((b"%d comment=" % header.size).ljust(header.size - 1, b"a") + b"\n")
        file.write(member.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(ValueError, match="unpacks to more than"):
        unpack_tar(archive, ("*",), tmp_path)
    assert list(tmp_path.iterdir()) == [archive]


def test_holes_of_a_sparse_file_count(tmp_path):
    """They take no room in the archive: 100 bytes could fill a disk."""
    member = tarfile.TarInfo("data.txt")
    member.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.numblocks": "1",
        "GNU.sparse.map": "0,0",
        "GNU.sparse.size": str(200 << 20),
    }
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(ValueError, match="it unpacks to more than"):
        unpack_tar(archive, ("*",), tmp_path)
    assert (tmp_path / "data.txt").stat().st_size < 10_000_000


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_is_a_bomb(tmp_path, kind):
    target = tmp_path / "target"
    target.mkdir()
    archive = tmp_path / "archive"
    files = {"package/a.txt": BOMB[:50_000_000], "package/b.txt": b"b"}
    if kind == "tar":
        written.tgz(archive, files)
    else:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in files.items():
                packed.writestr(name, content)
    unpack = unpack_tar if kind == "tar" else unpack_zip
    with pytest.raises(ValueError, match="it unpacks to more than"):
        unpack(archive, ("package/*.txt",), target)
    assert sum(path.stat().st_size for path in target.iterdir()) < 10_000_000
    if kind == "zip":
        with pytest.raises(ValueError, match="it unpacks to more than"):
            check_zip(archive)


@pytest.mark.parametrize(
    ("compression", "at", "value"),
    [
        (zipfile.ZIP_DEFLATED, 6, b"\x01"),  # encrypted
        (zipfile.ZIP_DEFLATED, 8, b"\x63"),  # an unknown method
        (zipfile.ZIP_LZMA, 60, b"\xff" * 8),
    ],
)
def test_a_zip_that_python_cannot_unpack(tmp_path, compression, at, value):
    path, places = tmp_path / "data.zip", [at]
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.txt", "digits " * 100)
    content = bytearray(path.read_bytes())
    if at < 30:  # the entry at the end of the file says it again
        places.append(content.rindex(b"PK\x01\x02") + at + 2)
    for place in places:
        content[place : place + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.zip is truncated or altered"), reading(path):
        unpack_zip(path, ("*.txt",), tmp_path)


def test_a_graph_that_is_a_bomb(tmp_path):
    np.savez_compressed(tmp_path / "cora.npz", feat_data=np.zeros(20_000_000, np.float32))
    with pytest.raises(DataError, match=r"cora.npz .*unpacks to more than"):
        read_planetoid(tmp_path, "cora")
    written.planetoid(tmp_path / "cora.npz", feat_shape=np.array([5, 10**7]))
    with pytest.raises(DataError, match=r"features are 5 x 10000000 with only 5 not zero"):
        read_planetoid(tmp_path, "cora")
