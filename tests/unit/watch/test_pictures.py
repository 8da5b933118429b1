"""What `watch` and `replay` show, and that it fits the screen."""

from __future__ import annotations

import re

import pytest

from tests.unit.watch import pictures
from vllmdiag.model.errors import UsageError
from vllmdiag.model.watch import Frame
from vllmdiag.render.live import event_line, live_text
from vllmdiag.render.page import Style, columns
from vllmdiag.watch.frames import frame_at
from vllmdiag.watch.replay import chosen, stills


def test_a_picture_of_mid_work_shows_motion_and_its_rate() -> None:
    frame = pictures.moving()
    assert frame.still_s is None
    assert frame.messages_per_s == 4.0
    assert not frame.bad


def test_a_picture_after_the_stall_says_who_lags_since_when_and_what_was_found() -> None:
    frame = pictures.stalled()
    assert frame.view is not None
    broadcast = frame.view.rings[0]
    assert (broadcast.motion, broadcast.still_s) == ("stuck", 8.9)
    assert [r.unread_s for r in broadcast.readers] == [None, 8.9]
    assert [(r.lag, r.party) for r in broadcast.readers] == [(0, pictures.TP0), (1, pictures.TP1)]
    assert frame.still_s == pytest.approx(8.9)
    assert frame.bad
    assert frame.status.startswith("process-stopped: ")
    assert [m.label for m in frame.view.members if m.abnormal] == ["Worker_TP1"]


def test_before_the_first_look_and_after_the_end_there_are_pictures_too() -> None:
    early = frame_at(pictures.generation(), 0.0)
    assert early.view is not None
    assert not early.bad
    assert frame_at(pictures.generation(), 20.0).at == "2026-12-01T07:00:20.000Z"


@pytest.mark.parametrize("height", [6, 12, 20, 24, 60])
@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize(
    "frame", [pictures.moving(), pictures.stalled(), pictures.waiting()], ids=["moving", "stalled", "waiting"]
)
def test_no_row_is_wider_than_the_screen(frame: Frame, width: int, height: int) -> None:
    text = live_text(frame, Style(width=width), height)
    assert all(columns(row) <= width or " " not in row.strip() for row in text.splitlines())


def test_rings_for_which_there_is_no_room_are_counted_and_those_that_stand_stay() -> None:
    text = live_text(pictures.stalled(), Style(), 22)
    assert "broadcast ring" in text
    assert "and 1 more ring: no room" in text
    assert len(text.splitlines()) <= 22
    assert "more ring" not in live_text(pictures.stalled(), Style(), 60)


def test_colour_adds_nothing_but_escape_sequences() -> None:
    coloured = live_text(pictures.stalled(), Style(colour=True))
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == live_text(pictures.stalled(), Style())


def test_an_event_is_one_line_whatever_stands_in_it() -> None:
    event = pictures.generation().events[0].event
    line = event_line(event, Style())
    assert line == "2026-12-01T07:00:08.500Z  stall      Worker_TP1 (pid 13) is stopped (T)\n"


def test_the_times_in_which_nothing_moved_are_found() -> None:
    assert stills(pictures.generation()) == ((3.1, 20.0),)


def test_the_last_server_is_shown_unless_another_is_named() -> None:
    assert chosen(pictures.recording(), None).begin.generation == 2
    assert chosen(pictures.recording(), 1).begin.generation == 1
    with pytest.raises(UsageError, match="no server 3"):
        chosen(pictures.recording(), 3)
