"""`.ci/setup` on machines that this is not: its functions, with an apt that is none."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from relay.servers.programs import ServersUnavailable, find_rabbitmq

SETUP = Path(__file__).parent.parent / ".ci" / "setup"

# Nothing outside of the test's own folder is touched, and what apt is asked for is written down; `nowhere` is unknown.
FAKES = """
source {setup}
cd {folder}
mkdir -p .venv
POLICY=$PWD/policy CLUSTER_CONF=$PWD/cluster.conf LOCK=$PWD/lock
unset RELAY_TEST_DATABASE_URL RELAY_TEST_AMQP_URL
may_use_apt() {{ true; }}
command() {{ [ "$2" != flock ] && builtin command "$@"; }}
missing_servers() {{ true; }}
postgres_version() {{ printf 15; }}
rabbitmq_version() {{ printf 3.10.8; }}
run_apt() {{ echo "$*" >>asked; case " $* " in *" nowhere "*) return 100 ;; esac; }}
"""


def asked(folder: Path) -> list[str]:
    """What apt was to do, since the last look."""
    file = folder / "asked"
    found = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line.removeprefix("install -y --no-install-recommends ") for line in found]


def setup(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    text = FAKES.format(setup=shlex.quote(str(SETUP)), folder=shlex.quote(str(folder))) + script
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30, check=False)


def test_one_unknown_package_loses_no_other_and_is_not_asked_for_again(tmp_path: Path) -> None:
    """Each `make` of a machine without prometheus updated the lists, and installed nothing."""
    script = "missing_tools() { printf 'nowhere gcc '; }\nset_up_programs"
    first = setup(tmp_path, script)
    assert (first.returncode, "left out: nowhere gcc" in first.stderr) == (0, True), first.stderr
    assert asked(tmp_path) == ["update", "nowhere gcc", "nowhere", "gcc"]
    again = setup(tmp_path, script)
    assert (again.returncode, again.stderr, asked(tmp_path)) == (0, "", [])
    setup(tmp_path, script.replace("gcc", "pgbouncer"))
    assert asked(tmp_path)[1] == "nowhere pgbouncer"
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("version", "is_old"), [("3.9.13", True), ("3.10.8", False), ("3.13.7", False), ("4.3.6", False), ("", False)]
)
def test_a_broker_that_is_too_old_is_said_to_be(tmp_path: Path, version: str, is_old: bool) -> None:
    done = setup(
        tmp_path, f"missing_tools() {{ true; }}\nrabbitmq_version() {{ printf '{version}'; }}\nset_up_programs"
    )
    assert (done.returncode, "RabbitMQ 3.9.13 is too old: 3.10" in done.stderr) == (int(is_old), is_old), done.stderr


def test_the_version_here_is_told() -> None:
    """And none where there is no broker: the tests may run on servers elsewhere."""
    try:
        find_rabbitmq()
        is_here = True
    except ServersUnavailable:
        is_here = False
    script = f"source {shlex.quote(str(SETUP))}; rabbitmq_version || true; old_servers"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.count(".") >= 1, "old" in done.stdout) == (0, is_here, False), done


def test_where_python_is_too_old_the_one_beside_it_is_tried(tmp_path: Path) -> None:
    script = "find_python() { grep -q python3.11 asked 2>/dev/null && echo true; }\nmake_venv"
    done = setup(tmp_path, script)
    assert (done.returncode, asked(tmp_path)) == (0, ["update", "python3 python3-venv", "python3.11 python3.11-venv"])


KILLED = "run_apt() { kill -KILL $$; }\napt_install gcc"
"""A set-up that ends amid its installation, with no chance to put anything back."""


@pytest.mark.parametrize("own", ["#!/bin/sh\nexit 104\n", None])
def test_a_setup_that_was_killed_loses_no_policy_and_leaves_none(tmp_path: Path, own: str | None) -> None:
    """The next one took what the killed one had left for the machine's own: no service started any more, for ever."""
    policy = tmp_path / "policy"
    if own is not None:
        policy.write_text(own)
    for _ in range(2):
        assert setup(tmp_path, KILLED).returncode == -9
        assert "exit 101" in policy.read_text()
    done = setup(tmp_path, "apt_install gcc")
    assert (done.returncode, asked(tmp_path)) == (0, ["update", "gcc"])
    assert (policy.read_text() if policy.exists() else None) == own
    assert not list(tmp_path.glob("*saved"))


@pytest.mark.parametrize("own", ["#!/bin/sh\nexit 104\n", None])
def test_what_a_killed_setup_left_goes_though_nothing_is_to_be_installed(tmp_path: Path, own: str | None) -> None:
    policy = tmp_path / "policy"
    if own is not None:
        policy.write_text(own)
    setup(tmp_path, KILLED)
    assert setup(tmp_path, "undo_killed_setup").returncode == 0
    assert (policy.read_text() if policy.exists() else None) == own


def test_a_policy_of_somebody_elses_stays(tmp_path: Path) -> None:
    """One that answers as ours does is no leaving of a killed set-up: container images have it."""
    policy = tmp_path / "policy"
    policy.write_text("#!/bin/sh\nexit 101\n")
    assert setup(tmp_path, "undo_killed_setup; apt_install gcc").returncode == 0
    assert policy.read_text() == "#!/bin/sh\nexit 101\n"


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_python_is_installed_under_the_same_lock_as_the_servers(tmp_path: Path) -> None:
    """Two set-ups at once each took the other's policy for the machine's own."""
    script = """
        unset -f command
        run_apt() { flock -n "$LOCK" true && echo free >>asked || echo held >>asked; }
        find_python() { [ -e asked ] && echo true; }
        make_venv
        missing_tools() { [ -e done ] || printf 'gcc '; touch done; }
        set_up_programs
        flock -n "$LOCK" true && echo free >>asked
    """
    done = setup(tmp_path, script)
    assert (done.returncode, asked(tmp_path)) == (0, ["held", "held", "held", "free"]), done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_a_setup_leaves_alone_what_another_one_is_using(tmp_path: Path) -> None:
    """Put back amid its installation, the machine's own policy would let the packages' services start."""
    script = """
        unset -f command
        run_apt() { (exec 9>&-; undo_killed_setup); grep -c 101 "$POLICY" >>asked; }
        apt_install gcc
    """
    assert (setup(tmp_path, script).returncode, asked(tmp_path)) == (0, ["1", "1"])
    assert not (tmp_path / "policy").exists()


def test_a_bare_image_gets_make_and_git(tmp_path: Path) -> None:
    """`.ci/run` ended with "make: command not found" on the images of Debian and Ubuntu."""
    script = """
        python_headers() { true; }
        command() { [ "$2" != make ] && [ "$2" != git ] && builtin command "$@"; }
        missing_tools
    """
    done = setup(tmp_path, script)
    assert done.stdout.startswith("make git "), done
