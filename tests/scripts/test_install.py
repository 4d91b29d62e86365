"""`scripts/install.sh` and the targets of the Makefile, with programs that only record how they are called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "python $*" >> {log}
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *version_info*) exit {too_old} ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >> {log}
{command}
"""


class Machine:
    """A folder with a Python, perhaps a uv, and the calls of both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "calls"
        self.add("python", PYTHON, too_old=0)

    def add(self, name: str, text: str, **fields: object) -> None:
        path = self.folder / name
        path.write_text(text.format(log=self.log, **fields))
        path.chmod(0o755)

    def install(self, *extra: str, **variables: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(ROOT / "scripts" / "install.sh"), "python", str(self.folder / "venv"), *extra]
        path = f"{self.folder}:/usr/bin:/bin"
        return subprocess.run(words, env={"PATH": path, **variables}, cwd=ROOT, capture_output=True, text=True)

    def installs(self) -> list[str]:
        """The calls that install packages: the program and the last word."""
        calls = [line.split() for line in self.log.read_text().splitlines() if " install " in line]
        return [f"{words[0]} {words[-1]}" for words in calls]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_pip_installs_torch_and_the_runtime_dependencies(machine: Machine) -> None:
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.installs() == ["python torch==2.13.0", "python ."]
    steps = [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith("[")]
    assert steps == ["[1/3]", "[2/3]", "[3/3]"]
    assert "--quiet" not in machine.log.read_text()


def test_developer_extras_are_added_to_the_same_environment(machine: Machine) -> None:
    machine.install()
    machine.log.unlink()
    assert machine.install("dev").returncode == 0
    assert machine.installs() == ["python torch==2.13.0", "python .[dev]"]
    assert "-m venv" not in machine.log.read_text()  # it is there


def test_uv_installs_where_it_is_present(machine: Machine) -> None:
    machine.add("uv", UV, command="exit 0")
    assert machine.install().returncode == 0
    assert machine.installs() == ["uv torch==2.13.0", "uv ."]


def test_pip_takes_over_visibly_where_uv_fails(machine: Machine) -> None:
    machine.add("uv", UV, command="echo no such wheel >&2; exit 1")
    done = machine.install()
    assert done.returncode == 0
    assert machine.installs() == ["uv torch==2.13.0", "python torch==2.13.0", "python ."]
    assert "no such wheel" in done.stderr
    assert "uv could not install torch==2.13.0" in done.stdout


@pytest.mark.parametrize(
    ("variable", "flags"),
    [
        ("", ["--no-compile", "--no-compile"]),  # the default of uv
        ("1", ["--compile", "--compile", "--compile-bytecode", "--compile-bytecode"]),
    ],
)
def test_modules_are_compiled_now_where_python_would_not_keep_them(
    variable: str, flags: list[str], machine: Machine
) -> None:
    """With PYTHONDONTWRITEBYTECODE every command would compile PyTorch again."""
    assert machine.install(PYTHONDONTWRITEBYTECODE=variable).returncode == 0
    machine.add("uv", UV, command="exit 0")
    assert machine.install(PYTHONDONTWRITEBYTECODE=variable).returncode == 0
    calls = machine.log.read_text()
    assert machine.installs() == ["python torch==2.13.0", "python .", "uv torch==2.13.0", "uv ."]
    assert [word for word in calls.split() if word.startswith(("--compile", "--no-compile"))] == flags
    assert ("python -m compileall -q deft" in calls) == (variable == "1")


def test_an_old_python_is_rejected_in_one_line(machine: Machine) -> None:
    machine.add("python", PYTHON, too_old=1)
    done = machine.install()
    assert done.returncode == 1
    assert done.stderr == "Deft needs Python 3.11 or newer: make PYTHON=python3.11 …\n"


def dry_run(target: str, venv: Path) -> str:
    """What `make` would do for a target."""
    words = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}", "PYTHON=python3"]
    # Without the variables of a `make test` that runs these tests
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [("demo", "-m deft.demo"), ("phases", "-m deft.demo phases"), ("reach", "-m deft.demo reach")],
)
def test_what_trains_needs_no_developer_extras(target: str, command: str, tmp_path: Path) -> None:
    lines = dry_run(target, tmp_path / "venv").splitlines()
    assert f"bash scripts/install.sh python3 {tmp_path}/venv" in lines
    assert not [line for line in lines if "install.sh" in line and line.endswith("dev")]
    assert lines[-1] == f"{tmp_path}/venv/bin/python {command}"


def test_tests_need_the_developer_extras(tmp_path: Path) -> None:
    lines = [line for line in dry_run("test", tmp_path / "venv").splitlines() if "install.sh" in line]
    assert lines == [f"bash scripts/install.sh python3 {tmp_path}/venv{extra}" for extra in ("", " dev")]


def test_what_is_installed_is_reused(tmp_path: Path) -> None:
    for stamp in (".runtime", ".installed"):
        (tmp_path / stamp).touch()
    assert "install.sh" not in dry_run("demo", tmp_path) + dry_run("test", tmp_path)
