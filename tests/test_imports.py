"""What `import rootfree` brings in, and what the public names promise."""

from __future__ import annotations

import doctest
import inspect
import json
import subprocess
import sys

import pytest

import rootfree


def modules_after(statement: str) -> set[str]:
    """Names of all modules loaded after the statement, in a fresh interpreter."""
    program = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def added() -> set[str]:
    return modules_after("import rootfree") - modules_after("import torch")


def test_the_library_imports_torch_and_nothing_else(added):
    packages = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    # torch: modules of it that `import torch` alone leaves out
    assert packages <= {"rootfree", "torch"}
    assert "rootfree" in packages


def test_the_library_does_not_load_its_laboratory(added):
    assert not any(name.split(".")[0] == "rootfree_lab" for name in added)


def test_the_compiler_is_not_loaded():
    """torch._dynamo takes longer to import than all the rest; only torch.compile needs it."""
    loaded = modules_after("import rootfree")
    assert "torch._dynamo" not in loaded
    assert "torch._inductor" not in loaded


def test_public_names_are_sorted_and_complete():
    assert list(rootfree.__all__) == sorted(rootfree.__all__)
    assert len(set(rootfree.__all__)) == len(rootfree.__all__)
    visible = {
        name
        for name, value in vars(rootfree).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert visible == set(rootfree.__all__)


def test_unknown_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'rootfree' has no attribute 'IFWhitning'"):
        _ = rootfree.IFWhitning


def test_every_optimizer_is_public():
    def below(kind: type) -> set[type]:  # those that nothing is derived from
        children = kind.__subclasses__()
        return set().union(*map(below, children)) if children else {kind}

    ours = {
        kind.__name__
        for kind in below(rootfree.RootFreeOptimizer)
        if kind.__module__.split(".")[0] == "rootfree"
    }
    assert ours <= set(rootfree.__all__)


@pytest.mark.parametrize("name", [n for n in rootfree.__all__ if n != "RootFreeOptimizer"])
def test_public_names_have_a_docstring_with_an_example(name):
    """The examples themselves are run as doctests."""
    value = getattr(rootfree, name)
    assert inspect.getdoc(value)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__, f"{name} inherits its docstring"
        assert doctest.DocTestParser().get_examples(value.__doc__), f"{name} has no example"


def documentation_of(name: str) -> str:
    """The docstring, and those of the public names that it points to."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        text = found[current] = inspect.getdoc(getattr(rootfree, current)) or ""
        waiting += [n for n in rootfree.__all__ if n not in found and f"rootfree.{n}`" in text]
    return "\n".join(found.values())


@pytest.mark.parametrize(
    "name", [n for n in rootfree.__all__ if n not in ("RootFreeOptimizer", "Curvature")]
)  # a base class and a protocol are not called by users
def test_arguments_are_documented(name):
    """Every argument is named in the docstring, or in one that the docstring points to."""
    value = getattr(rootfree, name)
    text = documentation_of(name)
    missing = [
        argument
        for argument in inspect.signature(value).parameters
        if argument != "self" and f"{argument}:" not in text
    ]
    assert missing == []


def test_version_is_a_version():
    assert rootfree.__version__[0].isdigit()
