"""The man page says what the command line says."""

from __future__ import annotations

import subprocess

import pytest

from tools import manpage
from vllmdiag.cli import surface
from vllmdiag.cli.app import VERBS


def test_the_page_in_the_tree_is_that_of_this_command_line() -> None:
    assert manpage.PAGE.read_text(encoding="utf-8") == manpage.text(), "python -m tools.manpage"


@pytest.mark.needs("groff")
def test_it_reads_as_a_manual_and_has_every_verb_and_option() -> None:
    command = ["groff", "-man", "-Tutf8", "-Kutf8", "-P-cbou", "-rLL=300n", "-ww", str(manpage.PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    text = done.stdout
    for name in VERBS:
        assert f"vllmdiag {name}" in text
        for option in surface.verb(name).options:
            assert all(flag in text for flag in option.flags)
