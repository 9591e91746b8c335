"""What is published: its contents, and that it works where torch alone is installed."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rootfree
from published.distribution import ROOT, build, environment_with_torch_alone

pytest.importorskip("hatchling", reason="hatchling builds what is tested here")
pytestmark = pytest.mark.slow

PACKAGES = ("rootfree", "rootfree_lab")
# What a source distribution has beside the sources: what is needed to build, test and read.
BESIDE = {
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "PKG-INFO",
    "README.md", ".gitignore", "configs", "constraints.lock", "constraints.txt", "docs", "examples",
    "mkdocs.yml", "pyproject.toml", "src", "tests", "tools",
}  # fmt: skip


@pytest.fixture(scope="module")
def tracked():
    """The files of the repository, by their path in it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs the repository")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel."""
    sdist, wheel = sorted(
        build(ROOT, tmp_path_factory.mktemp("built"), "sdist", "wheel"), key=lambda p: p.suffix
    )
    return sdist, wheel


def test_the_wheel_has_the_two_packages_and_nothing_else(built, tracked):
    names = set(zipfile.ZipFile(built[1]).namelist())
    sources = {
        name.removeprefix("src/")
        for name in tracked
        if name.startswith(tuple(f"src/{package}/" for package in PACKAGES))
    }
    info = f"rootfree-{rootfree.__version__}.dist-info"
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert names - {f"{info}/{name}" for name in about} == sources
    assert {"rootfree/py.typed", "rootfree_lab/config/new.toml"} <= names


def test_the_metadata_asks_for_torch_alone(built):
    with zipfile.ZipFile(built[1]) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
        metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Version"] == rootfree.__version__
    needs = [n for n in metadata.get_all("Requires-Dist") if "extra ==" not in n]
    assert needs == ["torch>=2.6"]
    assert metadata["Requires-Python"] == ">=3.10"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {rootfree.__version__.partition('.dev')[0]} (20" in changes


def test_the_source_distribution_has_what_belongs_and_builds_the_same_wheel(
    built, tracked, tmp_path
):
    with tarfile.open(built[0]) as archive:
        names = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
        assert {name.partition("/")[0] for name in names} == BESIDE
        assert names - {"PKG-INFO"} <= tracked
        kept = ("src/", "tests/", "docs/", "configs/", "examples/", "tools/")
        assert {name for name in tracked if name.startswith(kept)} <= names
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    (again,) = build(unpacked, tmp_path / "again", "wheel")
    one, other = zipfile.ZipFile(built[1]), zipfile.ZipFile(again)
    assert sorted(one.namelist()) == sorted(other.namelist())
    assert all(one.read(name) == other.read(name) for name in one.namelist())


def test_the_wheel_works_with_torch_alone(built, tmp_path):
    python = environment_with_torch_alone(tmp_path / "alone")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    subprocess.run([*install, "--no-deps", "--quiet", str(built[1])], check=True)
    shutil.copy(Path(__file__).with_name("smoke.py"), tmp_path)

    def run(*arguments):
        # -I: neither this folder nor PYTHONPATH.
        command = [str(python), "-I", "-W", "error::DeprecationWarning:rootfree", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    result = run("smoke.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"rootfree {rootfree.__version__} with torch alone\n"
    # The command says what it lacks.
    command = run("-m", "rootfree_lab")
    assert command.returncode == 1
    assert "pip install 'rootfree[lab]'" in command.stderr
    assert "Traceback" not in command.stderr


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_the_wheel_is_understood_by_every_python(built, tmp_path, minor):
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} here")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "new"], check=True)
    new = str(tmp_path / "new" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", new, "install", "--no-index", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-compile", str(built[1])], check=True)
    (packages,) = (tmp_path / "new" / "lib").glob("python*/site-packages")
    compiled = subprocess.run(
        [new, "-m", "compileall", "-q", packages / "rootfree", packages / "rootfree_lab"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert compiled.returncode == 0, compiled.stdout


def interpreter(minor):
    """A Python of this version that can be started, if there is one."""
    name = f"python3.{minor}"
    candidates = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")]
    for each in filter(None, candidates):
        try:
            if subprocess.run([each, "-c", "import venv"], capture_output=True).returncode == 0:
                return str(each)
        except OSError:
            continue
    return None
