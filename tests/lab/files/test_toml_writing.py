"""TOML that is written is read back as it was."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from rootfree_lab.config.reading import read_toml
from rootfree_lab.files.toml_writing import toml, write_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
plain = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | text
leaves = plain | st.lists(plain, max_size=3)
tables = st.recursive(
    st.dictionaries(text, leaves, max_size=3),
    lambda inner: st.dictionaries(text, leaves | inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=8,
)


@given(tables)
def test_any_tables_come_back(given_tables):
    assert tomllib.loads(toml(given_tables)) == given_tables


def test_a_range_stays_on_a_line_and_remarks_stand_above(tmp_path):
    path = tmp_path / "a.toml"
    write_toml(path, {"a": {"b": {"low": 1, "high": 2}}}, remarks=["what it is", ""])
    assert path.read_text() == "# what it is\n#\n\n[a]\nb = { low = 1, high = 2 }\n"
    assert read_toml(path) == {"a": {"b": {"low": 1, "high": 2}}}
    assert [p.name for p in tmp_path.iterdir()] == ["a.toml"]
