"""Every script of docs/distributed.md runs on four ranks."""

from __future__ import annotations

import pytest

from distributed.pages import scripts
from distributed.program import LAST, ranks  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow


def test_every_script_trains(ranks):  # noqa: F811
    assert len(scripts()) == 8
    for rank in ranks[LAST]:
        assert rank["pages"] == {heading: ({3}, True) for heading in scripts()}
