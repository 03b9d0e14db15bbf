"""What the suite makes of steps that fail, lack a program, or do not end; servers are left out."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiormq.exceptions import AMQPConnectionError

from bench import __main__ as command
from bench import compiled, suite
from bench.errors import BenchFailed, Unavailable
from bench.step import Form, Step
from relay.servers import ServerFailed


class NoServers:
    """In the place of a rig."""

    def __enter__(self) -> NoServers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"postgresql": "15", "rabbitmq": "3.10"}

    def complaints(self) -> list[str]:
        return []


class Called:
    """A step's work; counts its calls."""

    def __init__(self, figure: float = 1.0, error: Exception | None = None) -> None:
        self.count = 0
        self._figure, self._error = figure, error

    def __call__(self, _: Any) -> Sequence[dict[str, Any]]:
        self.count += 1
        if self._error is not None:
            raise self._error
        cpu = {"publisher": 1.0, "postgres": 1.0, "rabbitmq": 1.0}
        return [{"variant": "delete", "msgs_per_s": self._figure, "cpu_us_per_msg": cpu}]


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "Rig", NoServers)


def lines() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def test_a_step_that_fails_is_not_tried_again_and_the_others_go_on() -> None:
    good, bad = Called(), Called(error=BenchFailed("a server logged errors"))
    said, say = lines()
    outcome = suite.run(Form("short", 3), [Step("drain", "bad", 1.0, bad), Step("drain", "good", 1.0, good)], say)
    assert (good.count, bad.count) == (3, 1)
    assert outcome.failed == {"drain bad": "a server logged errors"}
    assert [run["turn"] for run in outcome.runs] == [1, 2, 3]
    assert "FAILED: drain bad: a server logged errors" in said


@pytest.mark.parametrize(
    "error",
    [ServerFailed("gone"), AMQPConnectionError("gone"), ConnectionRefusedError("gone"), asyncpg.InterfaceError("gone")],
)
def test_a_server_that_is_gone_fails_its_step_whoever_notices(error: Exception) -> None:
    _, say = lines()
    outcome = suite.run(Form("short", 1), [Step("a", "b", 1.0, Called(error=error))], say)
    assert outcome.failed == {"a b": "gone"}


def test_what_is_measured_once_comes_last() -> None:
    order: list[str] = []

    def note(name: str) -> Any:
        def measure(_: Any) -> Sequence[dict[str, Any]]:
            order.append(name)
            return []

        return measure

    _, say = lines()
    steps = [Step("a", "once", 1.0, note("once"), is_once=True), Step("a", "each", 1.0, note("each"))]
    suite.run(Form("short", 2), steps, say)
    assert order == ["each", "each", "once"]


def test_a_step_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "deadline_s", 0.05)

    def hang(_: Any) -> Sequence[dict[str, Any]]:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            pass
        return []

    _, say = lines()
    outcome = suite.run(Form("short", 1), [Step("a", "b", 1.0, hang)], say)
    assert outcome.failed == {"a b": "not done within 0 s"}


@pytest.mark.parametrize("error", [None, BenchFailed("disturbed"), Unavailable("no C compiler: install one")])
def test_the_command_reports_a_disturbed_suite_under_another_name(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step("drain", "delete", 1.0, Called(5.0)), Step("drain", "other", 1.0, Called(5.0, error))]
    monkeypatch.setattr(suite, "SCENARIOS", {"drain": lambda _: steps})
    code = command.main(["--json", str(tmp_path / "r.json"), "--repeats", "1", "--build", "pure"])
    output = capsys.readouterr()
    if isinstance(error, BenchFailed):
        assert code == 1
        assert "failed: drain other: disturbed" in output.err
        assert not (tmp_path / "r.json").exists()
        result = json.loads((tmp_path / "r.failed.json").read_text())
        assert result["failed"] == {"drain other": "disturbed"}
    else:
        assert code == 0
        result = json.loads((tmp_path / "r.json").read_text())
        assert bool(result["skipped"]) is (error is not None)
        assert ("install one" in output.out) is (error is not None)
    assert result["drain_msgs_s"] == 5.0


def test_a_document_that_cannot_be_written_is_not_measured_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Called()
    monkeypatch.setattr(suite, "SCENARIOS", {"drain": lambda _: [Step("drain", "delete", 1.0, work)]})
    (tmp_path / "file").touch()
    for target, why in (("file/r.json", "File exists"), ("", "Is a directory")):
        with pytest.raises(SystemExit) as ended:
            command.main(["--json", str(tmp_path / target), "--repeats", "1", "--build", "pure"])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    assert work.count == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("build", ["compiled", "pure"])
def test_it_says_of_which_build_the_programs_were(
    build: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(suite, "SCENARIOS", {"drain": lambda _: [Step("drain", "delete", 1.0, Called())]})

    def tree() -> Path:
        if build == "pure":
            raise Unavailable("there is no C compiler")
        return tmp_path

    monkeypatch.setattr(compiled, "compiled_tree", tree)
    assert command.main(["--json", str(tmp_path / "r.json"), "--repeats", "1"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["build"] == build
    assert ("PURE Python is measured: there is no C compiler" in capsys.readouterr().out) is (build == "pure")
    assert (str(tmp_path) in os.environ.get("PYTHONPATH", "")) is (build == "compiled")


def test_a_build_that_is_in_use_outlives_the_next_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test run after an edit removed the build that a benchmark was still measuring."""

    def wheel(directory: Path) -> Path:
        with zipfile.ZipFile(directory / "made.whl", "w") as archive:
            archive.writestr("relay/__init__.py", "")
        return directory / "made.whl"

    monkeypatch.setattr(compiled, "KEPT", tmp_path)
    monkeypatch.setattr(compiled, "_wheel", wheel)
    monkeypatch.setattr(compiled, "_held", [])
    used = compiled.compiled_tree()
    monkeypatch.setattr(compiled, "SOURCES", ("pyproject.toml",))
    other = compiled.compiled_tree()
    assert used != other
    assert (used / "relay" / "__init__.py").exists()
    for folder in compiled._held:
        os.close(folder)
    monkeypatch.setattr(compiled, "SOURCES", ("constraints.txt",))
    last = compiled.compiled_tree()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [last]
    os.close(compiled._held[-1])
