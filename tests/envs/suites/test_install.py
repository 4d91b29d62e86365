"""Installations of suites: complete, interrupted, damaged, outdated."""

import os
import sys

import pytest

from deft.cli import main
from deft.envs.suites import SUITES, install
from deft.errors import InputError, RunError


def test_install_and_list(fake, capsys):
    before = sorted(os.listdir(sys.prefix))
    assert main(["suite", "list"]) == 0
    assert "not installed: deft suite install fake" in capsys.readouterr().out
    assert main(["suite", "install", "fake"]) == 0
    assert "installed: now" in capsys.readouterr().out
    assert main(["suite", "install", "fake"]) == 0
    assert "installed: already, and complete" in capsys.readouterr().out
    assert main(["suite", "list"]) == 0
    assert f"installed in {install.folder_of(fake)}" in capsys.readouterr().out
    assert sorted(os.listdir(sys.prefix)) == before


def test_an_interrupted_installation_is_repaired(fake, monkeypatch):
    def interrupted(suite, progress, wheels):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(install, "_install_packages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install.install(fake)
    assert install.state_of(fake) == install.INCOMPLETE
    with pytest.raises(InputError, match="the suite fake is installed incompletely: deft suite install fake"):
        fake.check_installed("fake/near")
    assert install.install(fake)
    assert install.state_of(fake) == install.INSTALLED


def test_an_interrupted_repair_is_not_taken_for_complete(installed, monkeypatch):
    def interrupt(folder, ignore_errors):
        raise KeyboardInterrupt

    monkeypatch.setattr(install.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        install.install(installed, reinstall=True)
    assert install.state_of(installed) == install.INCOMPLETE


def test_a_missing_file_is_found_and_repaired(installed):
    module = next(install.folder_of(installed).glob("lib/python*/site-packages/fake_suite.py"))
    module.unlink()
    assert install.differences(installed) == ["the file fake_suite.py is missing"]
    assert install.install(installed)
    assert module.exists()


def test_a_new_lock_file_makes_an_installation_outdated(installed):
    installed.lock.write_text(installed.lock.read_text() + "cloudpickle==0.0.1\n")
    assert install.state_of(installed) == install.OUTDATED
    with pytest.raises(RunError, match=r"not installed completely: cloudpickle is .*, the lock file has 0\.0\.1"):
        install.install(installed)
    assert install.state_of(installed) == install.INCOMPLETE


def test_a_folder_that_cannot_be_written_is_one_line(fake, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEFT_SUITES", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cannot be installed there .*; set DEFT_SUITES to another folder"):
        install.install(fake)


@pytest.fixture
def pip(fake, monkeypatch, tmp_path):
    """Replaces the interpreter of the suite by a script that writes its arguments and prints `said`."""
    monkeypatch.undo()
    monkeypatch.setenv("DEFT_SUITES", str(tmp_path / "suites"))

    def make(folder, said="", status=0):
        python = folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/arguments\n{said}\nexit {status}\n")
        python.chmod(0o755)

    make.arguments = lambda: (tmp_path / "arguments").read_text().splitlines()
    return make


def write_wheels(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / f"{name}-py3-none-any.whl").write_text("")
    return folder


def test_an_error_of_pip_is_one_line(fake, pip):
    said = "echo Collecting fake-suite==1.0\necho 'ERROR: No matching distribution found'"
    pip(install.folder_of(fake), said, status=1)
    seen = []
    with pytest.raises(RunError, match=r"pip could not install the suite fake: ERROR: No matching distribution found$"):
        install._install_packages(fake, lambda *what: seen.append(what))
    assert seen == [(0, 3, "fake-suite==1.0")]


def test_wheels_replace_the_network(fake, pip, tmp_path):
    said = "echo Processing ./first/fake_suite-1.0-py3-none-any.whl"
    pip(install.folder_of(fake), said)
    seen = []
    install._install_packages(fake, lambda *what: seen.append(what), [tmp_path / "first", tmp_path / "second"])
    assert seen == [(0, 3, "fake_suite-1.0-py3-none-any.whl")]
    links = [f"--find-links={tmp_path}/{name}" for name in ("first", "second")]
    assert pip.arguments()[3:7] == ["install", "--no-index", *links]


def test_a_wheel_for_another_interpreter_is_one_line(fake, pip, tmp_path):
    pip(install.folder_of(fake), "echo 'ERROR: No matching distribution found for numpy'", status=1)
    here = f"this is Python {sys.version_info[0]}.{sys.version_info[1]} on .*: deft suite download has flags for it"
    with pytest.raises(RunError, match=f"No matching distribution found for numpy; {here}"):
        install._install_packages(fake, lambda *_: None, [tmp_path])


def test_a_folder_without_a_wheel_is_named_before_anything_is_removed(installed, tmp_path, capsys):
    """Names of wheels have underscores; numpy and gymnasium are in the second folder, or missing."""
    first = write_wheels(tmp_path / "first", "Fake_Suite-1.0")
    assert main(["suite", "install", "fake", "--reinstall", "--wheels", str(first)]) == 2
    numpy = install.locked_packages(installed)["numpy"]
    assert f"--wheels {first}: no wheel of numpy {numpy} and 1 more; on a machine" in capsys.readouterr().err
    assert install.state_of(installed) == install.INSTALLED
    packages = install.locked_packages(installed)
    names = [f"{name}-{packages[name]}" for name in ("numpy", "gymnasium")]
    second = write_wheels(tmp_path / "second", *names)
    assert main(["suite", "install", "fake", "--reinstall", "--wheels", str(first), str(second)]) == 0


def test_download_for_this_machine_and_for_another(fake, pip, monkeypatch, tmp_path, capsys):
    """For this machine pip may build wheels; for another one it can only download them."""
    monkeypatch.setitem(SUITES, "fake", "fake_suite")
    monkeypatch.setattr("fake_suite.SUITE", fake)
    packages = install.locked_packages(fake)
    out = write_wheels(tmp_path / "out", *(f"{name.replace('-', '_')}-{packages[name]}" for name in packages))
    monkeypatch.setattr(install, "_make_environment", pip)
    assert main(["suite", "download", "fake", "--out", str(out)]) == 0
    assert pip.arguments()[3:5] == ["wheel", f"--wheel-dir={out}"]
    assert "wheels: 3" in capsys.readouterr().out
    other = ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
    assert main(["suite", "download", "fake", "--out", str(out), *other]) == 0
    expected = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
    assert pip.arguments()[3:8] == ["download", f"--dest={out}", *expected]
    assert main(["suite", "download", "fake", "--out", str(out), "--python-version", "312"]) == 2
    assert "python" in capsys.readouterr().err


def test_python_without_ensurepip_uses_its_own_pip(monkeypatch, tmp_path):
    """Debian's Python has ensurepip in another package; pip installs into other environments with --python."""
    python = tmp_path / "bin" / "python"
    assert install._pip_of(python) == [str(python), "-I", "-m", "pip"]
    monkeypatch.setattr(install, "_has", lambda module: module == "pip")
    assert install._pip_of(python) == [sys.executable, "-I", "-m", "pip", "--python", str(python)]
    install._make_environment(tmp_path)
    assert python.exists()
    assert not list(tmp_path.glob("bin/pip*"))
    monkeypatch.setattr(install, "_has", lambda module: False)
    with pytest.raises(RunError, match=r"neither ensurepip nor pip .*: apt install python3-venv"):
        install._pip_of(python)
