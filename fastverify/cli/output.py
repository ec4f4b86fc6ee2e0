"""What the user sees: colours and progress on a terminal, plain text in a pipe. Results to stdout, the rest to stderr."""

import contextlib
import importlib.util
import json
import os
import re
import sys
from typing import Callable, Iterator

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not steer the terminal


def _is_terminal(stream) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


class Output:
    """One command's output. json_only: nothing but one JSON object may reach stdout.

    NO_COLOR (any value) turns colours and styles off; the table's frame stays. Without rich a terminal gets plain text, and one line
    that says so.
    """

    _said = False

    def __init__(self, json_only: bool = False) -> None:
        self.json_only = json_only
        self.out_terminal, self.err_terminal = _is_terminal(sys.stdout), _is_terminal(sys.stderr)
        self.rich = importlib.util.find_spec("rich") is not None
        if not self.rich and self.err_terminal and not Output._said:
            Output._said = True
            self.note("rich is not installed: plain text, no progress bars (pip install rich)")
        self._at_line_start = True

    # ---- stdout ------------------------------------------------------------------------------------------------------

    def text(self, piece: str) -> None:
        """A piece of streamed text, shown at once."""
        if self.json_only or not piece:
            return
        sys.stdout.write(_CONTROL.sub("\ufffd", piece) if self.out_terminal else piece)
        sys.stdout.flush()
        self._at_line_start = piece.endswith("\n")

    def end_text(self) -> None:
        """Ends the streamed text with a newline, if it has none."""
        if not self._at_line_start:
            self.text("\n")

    def line(self, text: str = "", style: str = "") -> None:
        """One line of results."""
        if self.json_only:
            return
        if self.out_terminal and self.rich and style:
            self._console().print(text, style=style, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def json(self, data: dict) -> None:
        """The JSON object of a --json run."""
        print(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False), flush=True)

    def wide_table(self, header: list, rows: list, left: int = 1) -> None:
        """A table that a narrow terminal wraps instead of cutting its columns short."""
        for i, cells in enumerate(plain_table(header, rows, left)):
            self.line(cells, style="bold" if i == 0 else "")

    def table(self, header: list, rows: list, title: str = "", left: int = 1) -> None:
        """header and rows of strings; the first `left` columns are aligned left, the others right. "" in a row: empty.

        Texts of several words wrap inside their column, names and numbers do not; where a terminal is too narrow for these, it
        wraps whole lines of plain text: nothing is cut.
        """
        if self.json_only:
            return
        columns = [[row[i] for row in [header, *rows]] for i in range(len(header))]
        wraps = [any(" " in cell for cell in column[1:]) for column in columns]
        if not (self.out_terminal and self.rich and self._fits(columns, wraps)):
            if title:
                print(title)
            for cells in plain_table(header, rows, left):
                print(cells)
            sys.stdout.flush()
            return
        from rich import box
        from rich.table import Table
        table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < left else "right", no_wrap=not wraps[i])
        for row in rows:
            table.add_row(*row)
        self._console().print(table, markup=False)

    def _fits(self, columns: list, wraps: list) -> bool:
        """Whether the terminal is wide enough for the longest cell of each column, or its longest word where it wraps."""
        longest = [max(len(word) for cell in column for word in (cell.split() if wrap else [cell]) or [""])
                   for column, wrap in zip(columns, wraps)]
        return sum(longest) + 3 * len(columns) + 1 <= self._console().width  # a space on either side, a rule between

    # ---- stderr ------------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """One line beside the results."""
        print(" ".join(text.split()), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """A spinner on a terminal, nothing in a pipe."""
        if not (self.err_terminal and self.rich):
            yield
            return
        with self._console(err=True).status(text):
            yield

    @contextlib.contextmanager
    def progress(self, text: str, total: int, bytes_: bool = False) -> Iterator[Callable]:
        """A progress bar on a terminal, nothing in a pipe. Yields update(done, text=None, total=None)."""
        if not (self.err_terminal and self.rich):
            yield lambda done, text=None, total=None: None
            return
        from rich import progress as p
        count = p.DownloadColumn() if bytes_ else p.MofNCompleteColumn()
        with p.Progress(p.TextColumn("{task.description}"), p.BarColumn(), count, p.TimeRemainingColumn(),
                        console=self._console(err=True), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done, text=None, total=None: bar.update(task, completed=done, description=text, total=total)

    def _console(self, err: bool = False):
        from rich.console import Console
        colour = {"color_system": None} if os.environ.get("NO_COLOR") is not None else {}
        return Console(stderr=err, highlight=False, emoji=False, **colour)


def plain_table(header: list, rows: list, left: int = 1) -> list:
    """Lines of aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return ["  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
            for row in [header, *rows]]
