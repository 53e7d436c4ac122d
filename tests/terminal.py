"""A terminal for tests: what is written to it, and what stands there in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

MARK = b"\x1b[99;99n"  # nobody writes it


class Terminal:
    """``stream`` is for whoever writes, ``seen`` for whoever looks.

    A thread reads all the time: a terminal that nobody reads stops whoever writes to it after a few thousand characters.
    """

    def __init__(self, stream: TextIO, master: int) -> None:
        self.stream = stream
        self._master = master
        self._news = threading.Condition()
        self._data = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # the end of a terminal that nobody writes to any more
            while data := os.read(self._master, 1 << 16):
                with self._news:
                    self._data += data
                    self._news.notify_all()

    def seen(self) -> str:
        """What has been written since the last look, and until nothing more comes."""
        with self._news:
            while self._news.wait(0.1):
                pass
            os.write(self.stream.fileno(), MARK)  # what was written before has come when this has, however late
            assert self._news.wait_for(lambda: MARK in self._data, 60.0), "nobody reads the terminal"
            data, self._data = self._data.replace(MARK, b""), b""
        return data.decode()

    def screen(self) -> list[str]:
        """Of what has been written since the last look, the lines that stand there in the end."""
        return screen_of(self.seen())


@contextmanager
def terminal(columns: int = 60, rows: int = 3) -> Iterator[Terminal]:
    """One of this size; it ends with the block, when nobody writes any more."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with ExitStack() as stack:
        stack.callback(os.close, master)
        yield Terminal(stack.enter_context(os.fdopen(slave, "w")), master)


def screen_of(data: str) -> list[str]:
    """The lines that stand there in the end; of the codes only those that ``Bars`` uses."""
    lines, row, column = [""], 0, 0
    for up, clear, other in re.findall(r"\x1b\[(\d+)A|(\x1b\[J)|(.)", data, flags=re.S):
        if up:
            row -= int(up)
        elif clear:
            lines = [*lines[:row], lines[row][:column]]
        elif other == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif other == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column] + other + lines[row][column + 1 :]
            column += 1
    return lines
