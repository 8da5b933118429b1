"""A terminal that is drawn over and over: the alternate screen, its size of the moment, and no trace afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from types import FrameType

import msgspec

from vllmdiag.model.watch import Frame
from vllmdiag.render.live import live_text
from vllmdiag.render.page import Style

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END = "\x1b[J"
_KEYS = {"\x1b[C": "right", "\x1b[D": "left"}


class Screen:
    """Draws pictures and reads single keys; a context manager. Ctrl-C stays what it is.

    Args:
        style: dress of the pictures; the width follows the terminal.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._last: Frame | None = None
        self._drawing = False
        self._keys = sys.stdin.isatty()

    def __enter__(self) -> Screen:  # noqa: PYI034  Self needs Python 3.11
        if self._keys:
            self._mode = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._before = signal.signal(signal.SIGWINCH, self._resized)
        _write(_ENTER)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGWINCH, self._before)
        with contextlib.suppress(OSError):  # the terminal may have gone
            _write(_LEAVE)
        if self._keys:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._mode)

    def show(self, frame: Frame) -> None:
        """Draw a picture over the last one, cut to the size that the terminal has now."""
        self._last, self._drawing = frame, True
        size = shutil.get_terminal_size()
        style = msgspec.structs.replace(self._style, width=max(40, size.columns))
        lines = live_text(frame, style, size.lines).splitlines()[: size.lines - 1]
        _write(_HOME + "".join(f"{line}{_TO_END_OF_LINE}\r\n" for line in lines) + _TO_END)
        self._drawing = False

    def key(self, wait_s: float) -> str:
        """A key that is pressed within so long: a letter, ``left``, ``right``; empty where none is."""
        if not select.select([sys.stdin] if self._keys else [], [], [], wait_s)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 8).decode("ascii", "replace")
        return _KEYS.get(pressed, pressed[:1])

    def _resized(self, _signal: int, _frame: FrameType | None) -> None:
        if self._last is not None and not self._drawing:  # else the next picture has the new size
            self.show(self._last)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
