import pytest

from air_hpc.cli.options import Option, parse
from air_hpc.errors import BadInput

OPTIONS = (
    Option(("-m", "--multirun"), "sweep"),
    Option(("-cd", "--config-dir"), "folder", "text", "DIR"),
    Option(("--tail",), "lines", "whole", "N"),
    Option(("--cfg",), "print", "text", "job", ("job", "all")),
    Option(("--tag",), "tags", "texts", "TAG"),
)


@pytest.mark.parametrize(
    "words",
    [
        ["a=1", "-m", "b=2", "--config-dir", "x"],
        ["-m", "--config-dir=x", "a=1", "b=2"],
        ["-cd", "x", "a=1", "b=2", "--multirun"],
    ],
)
def test_options_stand_anywhere_between_overrides(words: list[str]) -> None:
    parsed = parse(words, OPTIONS)
    assert parsed.rest == ("a=1", "b=2")
    assert parsed.flag("multirun")
    assert parsed.text("config_dir") == "x"


def test_what_follows_two_dashes_is_no_option() -> None:
    assert parse(["--", "-m", "--nothing"], OPTIONS).rest == ("-m", "--nothing")


def test_overrides_that_begin_with_hydras_signs_are_no_options() -> None:
    assert parse(["~model", "+a=-1", "b=-2"], OPTIONS).rest == ("~model", "+a=-1", "b=-2")


def test_every_mistake_is_listed() -> None:
    with pytest.raises(BadInput) as caught:
        parse(["--multirum", "--tail=x", "--cfg", "jbo", "-m=1", "--config-dir"], OPTIONS)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for piece in (
        "Did you mean --multirun?",
        "a whole number",
        "Did you mean job?",
        "needs a value",
    ):
        assert piece in text


def test_help_wins_over_mistakes() -> None:
    assert parse(["--nothing", "--help"], OPTIONS).flag("help")


def test_an_option_may_be_repeated_where_it_says_so() -> None:
    assert parse(["--tag", "a", "--tag=b"], OPTIONS).texts("tag") == ["a", "b"]
