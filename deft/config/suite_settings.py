"""Settings of the commands `deft suite …`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from deft.config.validation import Count, OutputPath, Place, Switch, settings


@settings
class SuiteInstallConfig:
    """Install a suite in a virtual environment of its own, or repair its installation."""

    suite: str
    """Name of the suite, as in `deft suite list`."""
    reinstall: Switch = False
    """Install again, even if the installation is complete."""
    wheels: tuple[Place, ...] = ()
    """Install from these folders of wheels, without a network; `deft suite download` makes them."""


@settings
class SuiteDownloadConfig:
    """Download the wheels of a suite, for `deft suite install --wheels` on a machine without a network."""

    suite: str
    """Name of the suite, as in `deft suite list`."""
    out: OutputPath
    """Folder of the wheels."""
    python_version: Annotated[str, Field(pattern=r"^3\.\d+$")] | None = None
    """Python of the other machine, such as 3.12; by default that of this one."""
    platform: tuple[Place, ...] = ()
    """Platforms of the other machine in the names of wheels, such as manylinux_2_28_x86_64; by default this one's."""


@settings
class SuiteListConfig:
    """List the suites, whether they are installed, and where."""


@settings
class SuiteCheckConfig:
    """Compare an installed suite with its fingerprint: initial states, first images and returns of fixed episodes."""

    suite: str
    """Name of the suite, as in `deft suite list`."""
    repeats: Count = 1
    """Play the episodes this many times."""
    suite_path: Place | None = None
    """Folder with the files of the suite that no package contains, such as the scenes of LIBERO."""
    update: Switch = False
    """Write the fingerprint into the package, after a deliberate change of the lock file."""
    merge: Switch = False
    """Write the fingerprint without the numbers that differ on this machine; for other processors."""
