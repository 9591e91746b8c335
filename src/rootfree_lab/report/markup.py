"""HTML from values: text is escaped unless it was made here, so that no label can be markup."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


VOID = {"input", "meta"}  # elements without an end
Child = str | None


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """An element. In attributes `_` means `-`, a last `_` is dropped; False and None are left out.

    Example:
        >>> tag("td", "a < b", class_="name", data_value="1")
        '<td class="name" data-value="1">a &lt; b</td>'
    """
    written = []
    for key, value in attributes.items():
        attribute = key.removesuffix("_").replace("_", "-")
        if value is True:
            written.append(f" {attribute}")
        elif isinstance(value, str):
            written.append(f' {attribute}="{escape(value)}"')
    start = f"<{name}{''.join(written)}>"
    return Markup(start if name in VOID else f"{start}{join(children)}</{name}>")


def join(children: list[Child] | tuple[Child, ...]) -> Markup:
    """Children one after another; what is not Markup is escaped."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(child)
            for child in children
            if child is not None
        )
    )
