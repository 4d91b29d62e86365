"""Installations of suites: complete, interrupted, damaged, outdated."""

import os
import sys

import pytest

from deft.cli import main
from deft.envs.suites import install
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
    def interrupted(suite, progress):
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


def test_an_error_of_pip_is_one_line(fake, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("DEFT_SUITES", str(tmp_path / "suites"))
    python = install.python_of(fake)
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\necho Collecting fake-suite==1.0\necho 'ERROR: No matching distribution found'\nexit 1\n"
    )
    python.chmod(0o755)
    seen = []
    with pytest.raises(RunError, match="pip could not install the suite fake: ERROR: No matching distribution found"):
        install._install_packages(fake, lambda *what: seen.append(what))
    assert seen == [(0, 3, "fake-suite==1.0")]
