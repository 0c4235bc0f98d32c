"""`paddock simulate`: traces in virtual time."""

import builtins
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paddock.cli.program import program


def run(*arguments: str):
    return CliRunner().invoke(program, ["-o", "json", "simulate", *arguments])


def test_a_recorded_trace_is_replayed_and_drawn(tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.csv", tmp_path / "plot.png"
    trace.write_text("at,duration,count\n0,60,5\n30,60,10\n600,30,1\n")
    result = run(str(trace), "--plot", str(plot), "--start-seconds", "2")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert summary["claims"] == summary["served"] == 16
    assert summary["wait_max_seconds"] <= 2
    assert summary["largest_demand"] == 15
    assert summary["largest_pool"] <= 24
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize("kind", ["steady", "bursts", "wave"])
def test_a_generated_day_of_claims_runs_quickly_and_can_be_saved(kind, tmp_path: Path) -> None:
    kept = tmp_path / "trace.csv"
    made = run("--generate", kind, "--seconds", "3600", "--rate", "0.2", "--save-trace", str(kept))
    assert made.exit_code == 0, made.output
    summary = json.loads(made.output)
    assert summary["served"] == summary["claims"] > 50
    assert summary["scale_downs"] > 0
    again = json.loads(run(str(kept)).output)
    assert again["served"] == summary["served"]
    assert again["largest_pool"] == summary["largest_pool"]


def test_a_forecast_shortens_the_wait_of_bursts() -> None:
    common = ("--generate", "bursts", "--seconds", "3600", "--rate", "0.1", "--start-seconds", "20")
    plain = json.loads(run(*common).output)
    ahead = json.loads(run(*common, "--forecast").output)
    assert ahead["waited"] <= plain["waited"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("when,long\n1,2\n", "columns at and duration"),
        ("at,duration\nsoon,2\n", "trace.csv:2"),
        ("at,duration\n1,-2\n", "negative"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    result = run(str(trace))
    assert result.exit_code == 1
    assert words in result.stderr.replace("\n", "")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    result = run("--generate", "steady", "--seconds", "100", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install matplotlib" in result.stderr


def test_neither_trace_nor_generator_is_an_error() -> None:
    assert run().exit_code == 1
