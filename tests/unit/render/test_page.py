from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from vllmdiag.render.page import Page, Span, Style, clean, columns

WORDS = st.lists(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=6), min_size=1, max_size=40)


@given(st.text())
def test_no_text_from_the_machine_can_steer_a_terminal_or_break_a_line(text: str) -> None:
    page = Page(Style())
    page.line(Span(text, "bad"))
    page.table([(text, text)])
    assert page.text().count("\n") == 2
    assert not any(unicodedata.category(c) in {"Cc", "Cf"} for c in page.text() if c != "\n")


@given(st.text())
def test_cleaning_keeps_one_character_for_one(text: str) -> None:
    assert len(clean(text)) == len(text)


@given(st.text())
def test_ascii_pages_hold_ascii_only(text: str) -> None:
    page = Page(Style(ascii=True))
    page.line(text, "·→✓")
    assert page.text().isascii()


@given(WORDS, st.integers(40, 100))
def test_wrapping_keeps_every_word_and_the_width(words: list[str], width: int) -> None:
    page = Page(Style(width=width))
    page.line(" ".join(words), indent=2, hang=4)
    assert page.text().split() == [word for text in words for word in clean(text).split()]
    assert all(columns(line) <= width for line in page.text().splitlines())


def test_a_pipe_has_no_width() -> None:
    page = Page(Style())
    page.line("word " * 100)
    assert page.text().count("\n") == 1


def test_a_command_to_copy_is_never_broken() -> None:
    page = Page(Style(width=40))
    command = "vllmdiag diagnose 2839 --window 10 --format json --output verdict.json"
    page.line("next  ", Span(command, whole=True), "   (why: it says)")
    assert command in page.text()


def test_columns_align_also_for_wide_and_combining_characters() -> None:
    page = Page(Style())
    page.table([("模型", "x"), ("abcd", "x"), ("e\u0301abc", "x")])
    assert {columns(line[: line.index("x")]) for line in page.text().splitlines()} == {6}


def test_a_column_without_content_vanishes_with_its_title() -> None:
    page = Page(Style())
    page.table([("a", "", "c")], header=("one", "two", "three"))
    assert page.text() == "ONE  THREE\na    c\n"


def test_an_empty_table_adds_nothing() -> None:
    page = Page(Style())
    page.table([], header=("one", "two"))
    assert page.text().strip() == ""
