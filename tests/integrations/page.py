"""The scripts of docs/integrations.md, by the heading that each stands under."""

from __future__ import annotations

from distributed import pages

PAGE = pages.PAGE.with_name("integrations.md")
#: those that are for several ranks
LOOPS = ("A loop in the style of torchtune", "A loop in the style of TorchTitan")


def scripts() -> dict[str, str]:
    return pages.scripts(PAGE)
