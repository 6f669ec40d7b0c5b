"""Finding server programs, and installing them with apt where this process may."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from springtide_testbed.errors import PartUnavailableError

_INSTALL_LIMIT_SECONDS = 900.0
_NO_INSTALL = "SPRINGTIDE_TESTBED_NO_INSTALL"


def require(find: Callable[[], Path | None], *, what: str, package: str, variable: str) -> Path:
    """The folder with a server's programs; installs ``package`` when it is not there.

    Installing needs root and apt, and is left alone when SPRINGTIDE_TESTBED_NO_INSTALL is set.
    Raises PartUnavailableError that names the remedy.
    """
    named = os.environ.get(variable)
    if named and find() is None:
        raise PartUnavailableError(
            f"{variable}={named!r} holds no {what} programs; let it name the folder that does"
        )
    folder = find()
    if folder is not None:
        return folder
    remedy = f"install it ('apt-get install {package}') or let {variable} name its program folder"
    if os.geteuid() != 0 or shutil.which("apt-get") is None or os.environ.get(_NO_INSTALL):
        raise PartUnavailableError(f"{what} is not on this machine: {remedy}")
    failure = apt_install(package)
    folder = find()
    if folder is None:
        raise PartUnavailableError(
            f"{what} is not on this machine and apt could not install it ({failure}): {remedy}"
        )
    return folder


def apt_install(package: str) -> str:
    """Install one Debian package; returns the reason of a failure, or "" when it went well.

    Two parts that start at the same time wait for each other: apt itself has one lock.
    """
    env = os.environ | {
        "DEBIAN_FRONTEND": "noninteractive",
        # In run level 1 the package does not start its own, system-wide server.
        "RUNLEVEL": "1",
    }
    options = ["-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
    with (Path(tempfile.gettempdir()) / "springtide-testbed-apt.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["apt-get", *options, "update"],
            ["apt-get", *options, "install", "--no-install-recommends", package],
        ):
            try:
                done = subprocess.run(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_INSTALL_LIMIT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"{' '.join(command[:1])} took more than {_INSTALL_LIMIT_SECONDS:g} s"
            if done.returncode != 0 and "install" in command:
                lines = (done.stderr or done.stdout).strip().splitlines()
                return lines[-1] if lines else f"exit code {done.returncode}"
    return ""
