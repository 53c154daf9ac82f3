"""Tables in Markdown that people can read as they are."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose columns are aligned in the source too."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)
