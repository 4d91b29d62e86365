"""The fake suite, installed in an interpreter of its own, for tests of several folders."""

from __future__ import annotations

import dataclasses

import fake_suite
import pytest

from deft.envs import suites
from deft.envs.suites import install


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The fake suite with files in a new folder, not installed yet; pip's part is done without a network."""
    lock, fingerprint = tmp_path / "fake.lock", tmp_path / "fake.fingerprint.json"
    lock.write_text(fake_suite.lock_text())
    suite = dataclasses.replace(fake_suite.SUITE, lock_file=lock, fingerprint_file=fingerprint)
    monkeypatch.setattr(fake_suite, "SUITE", suite)
    monkeypatch.setitem(suites.SUITES, "fake", "fake_suite")
    monkeypatch.setenv("DEFT_SUITES", str(tmp_path / "suites"))
    monkeypatch.setenv("FAKE_SUITE_FOLDER", str(tmp_path))
    monkeypatch.setattr(install, "_make_environment", fake_suite.make_interpreter)
    monkeypatch.setattr(install, "_install_packages", lambda suite, progress, wheels: progress(3, 3, "unpacking"))
    return suite


@pytest.fixture
def installed(fake):
    """The fake suite, installed."""
    install.install(fake)
    return fake
