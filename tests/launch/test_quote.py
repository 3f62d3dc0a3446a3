import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from air_hpc.errors import BadInput
from air_hpc.launch import quote

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


def echoed(words: str) -> list[str]:
    """What bash makes of these words: each argument, as bytes between NULs."""
    script = f'for word in {words}; do printf "%s\\0" "$word"; done'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=150, deadline=None)
@given(values=st.lists(ANY_TEXT, min_size=1, max_size=4))
@example(values=["$(touch x)", "`id`", "a'b\"c", "*", "~", "!", "\\", "", " ", "-n", "#"])
def test_any_text_comes_out_of_bash_as_itself_or_is_refused(values: list[str]) -> None:
    if all(quote.bash_problem(value, "") is None for value in values):
        assert echoed(quote.bash_words(values)) == values
    else:
        assert not all(value.isprintable() for value in values)
        with pytest.raises(BadInput, match="control character"):
            quote.bash_words(values)


@pytest.mark.parametrize("value", ["a\nrm -rf /", "a\r", "a\x00b", "\x1b[2J", "a\u2028b", "\x7f"])
def test_control_characters_are_refused_by_name(value: str) -> None:
    with pytest.raises(BadInput) as caught:
        quote.bash(value, "launch.comment")
    assert caught.value.problems[0].key == "launch.comment"
    assert quote.header_problem(value, "launch.comment") is not None


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(BadInput, match="UTF-8"):
        quote.bash("a\udcffb")


@pytest.mark.parametrize("value", ["a\\b", "trailing\\", "\\'"])
def test_a_backslash_is_refused_in_a_header_and_kept_in_the_body(value: str) -> None:
    assert quote.header_problem(value, "launch.comment") is not None
    assert echoed(quote.bash(value)) == [value]


@pytest.mark.parametrize("value", ["a b", "it's", 'say "hi"', "a # b", "$HOME", "ü ☃", "k=v w"])
def test_everything_else_may_stand_in_a_header(value: str) -> None:
    assert quote.header_problem(value, "launch.comment") is None
