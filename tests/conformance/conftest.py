import pytest

from conformance.rows import ROWS, Row


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request) -> Row:
    return request.param
