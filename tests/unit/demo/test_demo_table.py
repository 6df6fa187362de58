from __future__ import annotations

import io

from rich.console import Console

from tests.unit.demo.figures import OURS, STOCK
from tools.demo.table import console, table


def rendered(*, columns: int = 2) -> list[str]:
    output = Console(file=io.StringIO(), width=console().width, no_color=True)
    output.print(table([OURS, STOCK] * (columns // 2), plain=True))
    assert isinstance(output.file, io.StringIO)
    return output.file.getvalue().splitlines()


def cells(lines: list[str], label: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_number_of_the_demo_has_a_row() -> None:
    lines = rendered()
    assert cells(lines, "time to ready") == ["120.2", "40.0"]
    assert cells(lines, "first request at 512x512") == ["0.21", "11.50"]
    assert cells(lines, "first request at 768x640") == ["0.40", "11.60"]
    assert cells(lines, "median of the next 5 at 512x512") == ["0.18", "0.20"]
    assert cells(lines, "median of the next 5 at 768x640") == ["0.36", "0.40"]
    assert cells(lines, "compilations before ready") == ["8", "2"]
    assert cells(lines, "compilations after ready") == ["0", "4"]
    assert cells(lines, "regions compiled") == ["4", "4"]
    assert cells(lines, "VAE decodes compiled") == ["1", "0"]


def test_nothing_is_cut_off_where_the_output_is_no_terminal() -> None:
    for columns in (2, 4):
        text = "\n".join(rendered(columns=columns))
        assert "…" not in text
        assert text.isascii()
        for file in OURS.pictures.values():
            assert str(file) in text
