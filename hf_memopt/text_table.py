"""Tables of plain text: words to the left, numbers to the right."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Cell = str | float | int | None


class Table(NamedTuple):
    """Column heads, and rows of as many cells. `str` aligns it as text; floats have `digits` behind the point."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    digits: int = 1

    @property
    def are_numbers(self) -> list[bool]:
        return [any(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.heads))]

    def texts(self) -> list[list[str]]:
        """Return the rows as they are shown: numbers with thousands separated, None as a dash."""
        return [[_text(cell, self.digits) for cell in row] for row in self.rows]

    def lines(self) -> list[str]:
        return align([self.heads, *self.texts()], "".join("<>"[is_number] for is_number in self.are_numbers))

    def __str__(self) -> str:
        return "\n".join(self.lines())


def align(rows: Iterable[Sequence[str]], sides: str = "<", separator: str = "  ") -> list[str]:
    """Return rows as lines of equally wide columns, on the `sides` "<" or ">", the last of which holds for the rest."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides += sides[-1] * (len(widths) - len(sides))
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return [separator.join(map(format, row, forms)).rstrip() for row in rows]


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return "-"
    return f"{cell:,.{digits}f}" if isinstance(cell, float) else str(cell)
