"""Reports of runs, whose events come from code that is not trusted."""

import json
from pathlib import Path

import pytest

from paddock.cli.output import Output
from paddock.cli.run import files, report
from paddock.cli.run.files import ImageFiles
from paddock.cli.run.report import JsonReport, exit_code_of
from paddock.kit.errors import TooLargeError
from paddock.run_code.events import CodeError, CodeResult, parse


@pytest.mark.parametrize(
    ("value", "code"),
    [("", 0), ("None", 0), ("3", 3), ("-1", 255), ("--5", 1), ("-", 1), ("²", 1), ("bye", 1)],
)
def test_the_exit_code_is_that_of_the_code_or_1(value: str, code: int) -> None:
    assert exit_code_of(CodeError("SystemExit", value)) == code


def test_json_has_the_formats_of_a_result_and_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collected = JsonReport(ImageFiles(tmp_path), Output("json"))
    event = parse(
        b'{"type":"result","text":"1","data":{"a":[1]},"chart":null,"extra":{"x":"\xff"}}'
    )
    assert event is not None
    collected.add(event)
    collected.finish("i1")
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result == {
        "is_main_result": False,
        "text": "1",
        "data": {"a": [1]},
        "extra": {"x": "\ufffd"},
    }


def test_json_has_results_up_to_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_COLLECTED_CHARACTERS", 1000)
    collected = JsonReport(ImageFiles(tmp_path), Output("json"))
    for _ in range(5):
        collected.add(CodeResult(text="x" * 400))
    collected.finish("i1")
    found = json.loads(capsys.readouterr().out)
    assert (len(found["results"]), found["resultsOmitted"]) == (2, 3)


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_images_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(files, limit, 3)
    images = ImageFiles(tmp_path)
    image = CodeResult(png="AA==")
    for _ in range(3):
        assert images.save(image)
    with pytest.raises(TooLargeError, match="more than"):
        images.save(image)
    assert len(list(tmp_path.iterdir())) == 3
