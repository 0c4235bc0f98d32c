"""Lines of the stream, as clients of E2B parse them."""

import json
from datetime import UTC, datetime

from code_interpreter.e2b.lines import line_of
from code_interpreter.kernels.events import Accepted, Ended, Failure, Output, Result

NOW = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=UTC)


def parsed(event) -> dict:
    line = line_of(event, NOW)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line)


def test_each_event_has_its_line() -> None:
    assert parsed(Accepted(3)) == {"type": "number_of_executions", "execution_count": 3}
    assert parsed(Output("stdout", "hi\n")) == {
        "type": "stdout",
        "text": "hi\n",
        "timestamp": "2026-01-02T03:04:05.000600Z",
    }
    assert parsed(Output("stderr", "no"))["type"] == "stderr"
    assert parsed(Failure("E", "v", "t")) == {
        "type": "error",
        "name": "E",
        "value": "v",
        "traceback": "t",
    }
    assert parsed(Ended()) == {"type": "end_of_execution"}


def test_formats_have_their_names_and_others_are_extra() -> None:
    data = {
        "text/plain": "'quoted'",
        "image/png": "iVBOR",
        "e2b/chart": {"type": "line"},
        "application/x-own": [1],
        "text/html": None,
    }
    assert parsed(Result(data, is_main=True)) == {
        "type": "result",
        "text": "quoted",
        "png": "iVBOR",
        "chart": {"type": "line"},
        "is_main_result": True,
        "extra": {"application/x-own": [1]},
    }


def test_only_one_pair_of_quotes_is_removed() -> None:
    for text, shown in (("'a'", "a"), ("''a''", "'a'"), ("'a\"", "'a\""), ("'", "'"), ("2", "2")):
        assert parsed(Result({"text/plain": text}, is_main=True))["text"] == shown


def test_characters_at_which_clients_split_lines_are_escaped() -> None:
    separators = "\u2028\u2029\x85\x0b\x0c\x1c"
    line = line_of(Output("stdout", separators), NOW)
    assert len(line.decode("ascii").splitlines()) == 1
    assert json.loads(line)["text"] == separators


def test_formats_of_text_are_text_whatever_the_code_displays() -> None:
    data = {"text/html": 5, "image/png": ["x"], "text/latex": {"a": 1}, "e2b/data": {"a": [1]}}
    line = parsed(Result(data, is_main=False))
    assert (line["html"], line["png"], line["latex"]) == ("5", "['x']", "{'a': 1}")
    assert line["data"] == {"a": [1]}
