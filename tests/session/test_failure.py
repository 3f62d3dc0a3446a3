"""The facts of an exception: types, texts, the system's error, and whose code raised it."""

from __future__ import annotations

import errno
import json

import pytest

from air_hpc.errors import BadInput
from air_hpc.rundir.fence import Token
from air_hpc.session.failure import MESSAGE_CHARS, MOST_CAUSES, error_facts


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_types_are_named_as_a_traceback_prints_them() -> None:
    facts = error_facts(raised(json.JSONDecodeError("x", "y", 0)))
    assert facts["exceptions"] == [
        "json.decoder.JSONDecodeError", "ValueError", "Exception", "BaseException",
    ]  # fmt: skip


def test_the_systems_error_is_named() -> None:
    assert error_facts(raised(OSError(errno.ENOSPC, "full")))["errno"] == "ENOSPC"
    assert error_facts(raised(OSError("no number")))["errno"] is None


def test_only_stated_causes_are_told_and_not_without_end() -> None:
    error: BaseException = ValueError("0")
    for number in range(1, 9):
        error = raised(ValueError(str(number)), error)
    assert error_facts(error)["causes"] == [
        f"ValueError: {8 - n}" for n in range(1, MOST_CAUSES + 1)
    ]
    one = ValueError("circle")
    one.__cause__ = one
    assert error_facts(one)["causes"] == []


def test_an_error_inside_a_library_is_the_users_who_called_it() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    frame = error_facts(caught.value)["frame"]
    assert (frame["origin"], frame["file"]) == ("user", __file__)


def test_an_error_inside_this_platform_is_its_own() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Token.parse("x")
    assert error_facts(caught.value)["frame"]["origin"] == "platform"
    assert error_facts(BadInput.single("a", 1, "x"))["frame"] is None, "never raised"


def test_facts_are_bounded_and_plain() -> None:
    facts = error_facts(raised(RuntimeError("x" * 10_000)))
    assert len(facts["message"]) == MESSAGE_CHARS
    json.dumps(facts)
