"""The house rules that a machine can read: what may import what, what is packed, what may stand in a tracked file."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "relay"

SIDE_EFFECTS = {"asyncio", "asyncpg", "aio_pika", "aiormq", "time", "random", "logging", "datetime", "os", "socket"}
DATABASE_SIDE = ("relay.outbox", "relay.outbox_sql", "relay.sessions", "relay.settling", "relay.rows", "relay.database")
ENGINE = ("relay.core", "relay.engine", "relay.runner", "relay.reader", "relay.publisher", "relay.settler")
MAY_READ_THE_ENVIRONMENT = {
    "relay/cli/__init__.py": "hands it to config.load",
    "relay/servers/process.py": "passes the PATH to the throwaway servers",
}


def tracked_files() -> list[Path]:
    """What git tracks, but for binary files; a test that needs it is skipped in an unpacked sdist, and without git."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout, or no git")
    # Whoever the checkout belongs to: root runs the tests over another user's too.
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    paths = (ROOT / name for name in listing.decode().split("\0") if name)
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()]


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imports(module: str, path: Path) -> set[str]:
    """Every module that a file imports, at its top or later, under its full name."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def is_within(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def all_imports() -> dict[str, set[str]]:
    return {module: imports(module, path) for module, path in modules()}


def own(names: set[str]) -> set[str]:
    return {name for name in names if is_within(name, ("relay",)) and name != "relay"}


def test_the_reading_of_imports_sees_them() -> None:
    found = all_imports()
    assert "relay.message" in found["relay.core.ports.outbox"]
    assert "asyncpg" in found["relay.sessions"]


def test_the_core_decides_and_does_nothing_else() -> None:
    """A decision that reads a clock or awaits could not run in the simulation."""
    wrong = {
        module: sorted(found)
        for module, names in all_imports().items()
        if is_within(module, ("relay.core",)) and (found := {n for n in names if n.split(".")[0] in SIDE_EFFECTS})
    }
    assert wrong == {}


def test_the_core_depends_on_nothing_but_messages_and_errors() -> None:
    allowed = ("relay.core", "relay.message", "relay.errors")
    wrong = {
        module: sorted(found)
        for module, names in all_imports().items()
        if is_within(module, ("relay.core",)) and (found := {n for n in own(names) if not is_within(n, allowed)})
    }
    assert wrong == {}


def test_outbox_and_broker_do_not_know_each_other() -> None:
    for module, names in all_imports().items():
        if is_within(module, DATABASE_SIDE):
            assert not any(is_within(name, ("relay.broker",)) for name in names), module
        if is_within(module, ("relay.broker",)):
            assert not any(is_within(name, DATABASE_SIDE) for name in names), module


def test_only_the_database_side_and_the_broker_side_speak_to_their_drivers() -> None:
    """The engine would be bound to one broker, and to a real one in the simulation."""
    for module, names in all_imports().items():
        if is_within(module, ENGINE):
            drivers = {name for name in names if is_within(name, ("asyncpg", "aio_pika", "aiormq", "pamqp"))}
            assert not drivers, f"{module} imports {drivers}"


def test_adapters_do_not_import_what_runs_them() -> None:
    above = ("relay.cli", "relay.daemon", "relay.runner", "relay.engine")
    for module, names in all_imports().items():
        if is_within(module, (*DATABASE_SIDE, "relay.broker")):
            assert not any(is_within(name, above) for name in names), module


def test_the_consumer_half_imports_nothing_of_the_engine() -> None:
    for module, names in all_imports().items():
        if is_within(module, ("relay.inbox",)):
            assert not any(is_within(name, ENGINE) for name in names), module


def test_only_the_command_line_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}
    }
    assert readers <= set(MAY_READ_THE_ENVIRONMENT)


def test_no_tracked_file_names_a_registry_or_this_workplace() -> None:
    """A host in a lock file or a path of one machine breaks the next machine."""
    # In two parts each, so that this file does not hold what it looks for.
    hosts = "|".join(
        ["pypi" + r"\.org", "python" + "hosted", r"registry\.npm" + "js", r"deb\.deb" + "ian", r"proxy\.go" + "lang"]
    )
    paths = "|".join([r"(?<![\w.])/wo" + "rk/", r"(?<![\w.])/ro" + "ot/", r"\.\./sha" + "red", "bash" + "_jobs"])
    pattern = re.compile(f"{hosts}|{paths}", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_constraints_are_plain_pins() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    names = [line.partition("==")[0].lower() for line in lines]
    assert names == sorted(set(names))


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        pins[canonicalize_name(name)] = version
    for text in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_the_package_holds_the_sql_and_the_type_marker(tmp_path: Path) -> None:
    """An installed relay migrates by the files of sql/, which stand outside of its package in the repository."""
    for target in ("wheel", "sdist"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=60,
        )
    expected = {f"relay/_sql/{path.relative_to(ROOT / 'sql')}" for path in (ROOT / "sql").rglob("*.sql")}
    assert expected
    expected |= {"relay/py.typed", "relay/cli/__init__.py"}
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "constraints.txt"} <= names
    # What the tests look at is there for whoever runs them from the sdist.
    assert {"Dockerfile", ".dockerignore", "compose.yaml", "deploy/kubernetes/sidecar.yaml"} <= names
    assert ".ci/hatch_build.py" in names, "without it no wheel can be built from the sdist"


def test_the_files_that_are_begun_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
