"""The scripts of docs/integrations.md, by the heading that each stands under."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
#: those that are for several ranks
LOOPS = ("A loop in the style of torchtune", "A loop in the style of TorchTitan")


def scripts() -> dict[str, str]:
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        for source in re.findall(r"^```py\n(.*?)^```$", part, re.MULTILINE | re.DOTALL):
            found[part.splitlines()[0]] = source
    return found
