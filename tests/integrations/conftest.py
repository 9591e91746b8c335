"""torchvision, which most of these libraries import, must not need the build of torch it is for."""

from __future__ import annotations

from contextlib import suppress

import pytest

from rootfree_lab.torchvision_shim import make_importable


@pytest.fixture(scope="session", autouse=True)
def importable() -> None:
    with suppress(ModuleNotFoundError):  # it is not there: nobody will import it
        make_importable()
