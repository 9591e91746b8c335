"""Docstrings have a few marks of reStructuredText; the site is Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class RstToMarkdown(griffe.Extension):
    """Turn code blocks and cross-references of docstrings into their Markdown form."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that was read, after its members."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        # In the plural it is a section of examples that are shown as code.
        text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        # An indented block is code in Markdown without a directive before it.
        text = re.sub(r"^\.\. code-block:: *\w*\n\n", "", text, flags=re.MULTILINE)
        text = re.sub(r":(?:class|func|meth):`rootfree\.([\w.]+)`", r"[`\1`][rootfree.\1]", text)
        text = re.sub(r":(?:class|func|meth):`([\w.]+)`", r"`\1`", text)
        # "block_diagonal:<k>" would be taken for a tag.
        text = re.sub(r"<([A-Za-z])>", r"&lt;\1&gt;", text)
        obj.docstring.value = text
