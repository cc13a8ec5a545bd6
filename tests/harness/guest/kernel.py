"""The guest's kernel: built once for a configuration, a patch and a version of the source, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

SOURCE_PACKAGE = "linux-source-6.12"
SOURCE = Path("/usr/src") / f"{SOURCE_PACKAGE}.tar.xz"
CONFIG = Path(__file__).resolve().with_name("kernel.config")
PATCH = CONFIG.with_name("kernel.patch")
INSTALL = Path(__file__).resolve().parents[3] / "scripts/install"
# What no guest has, and half of the source: drivers and documentation. Kconfig files stay.
LEFT_OUT = (
    *("*/drivers/gpu/*.[ch]", "*/drivers/media/*.[ch]", "*/sound/*.[ch]"),
    *("*/drivers/net/ethernet/*.[ch]", "*/drivers/net/wireless/*.[ch]"),
    *("*/Documentation/*.rst", "*/Documentation/*.yaml", "*/Documentation/*.txt"),
)
# Of other configurations and versions, such as other branches of work.
KEPT_MAX = 4
ABOUT_FILES = 785
_TELL_EVERY_S = 10.0
_LOG_LINES_MAX = 30
_COMPLAINT = re.compile(r"\berror:|\bError \d|Killed|undefined reference")


class BuildError(Exception):
    """There is no kernel, and none can be built; the text says why and what to do."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "irdmafs" / "rdma-guest"


def built_kernel() -> Path | None:
    """The kernel, if it is built: of this configuration and patch, and of the source that is installed (of
    any, if none is)."""
    version = _source_version()
    if version is not None:
        path = cache_directory() / _name(version)
        return path if path.is_file() else None
    kernels = cache_directory().glob(_name("*"))
    return max(kernels, key=lambda path: path.stat().st_mtime, default=None)


def is_at_hand() -> bool:
    """Return whether the kernel is built, or another process builds it now."""
    if built_kernel() is not None:
        return True
    try:
        with _lock_file().open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _lock_file() -> Path:
    return cache_directory() / "lock"


def build() -> Path:
    """The kernel, built if it is not. One process builds, others wait for it. Raises BuildError."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock_file().open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process builds; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        kernel = built_kernel()
        if kernel is None:
            kernel = _build(cache)
            _forget_old(cache, kernel)
        return kernel


def say(text: str) -> None:
    print(f"rdma_guest: {text}", file=sys.stderr, flush=True)


def _name(version: str) -> str:
    ours = hashlib.sha256(CONFIG.read_bytes() + PATCH.read_bytes()).hexdigest()
    return f"linux-{version}-{ours[:12]}"


def _source_version() -> str | None:
    if not SOURCE.is_file() or shutil.which("dpkg-query") is None:
        return None
    query = ("dpkg-query", "-W", "-f", "${Version}", SOURCE_PACKAGE)
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def _build(cache: Path) -> Path:
    if platform.machine() != "x86_64":
        raise BuildError(f"User-Mode Linux is for x86_64; this machine is {platform.machine()}")
    try:
        subprocess.run([INSTALL, "--packages-only", "guest"], stdout=sys.stderr, check=True)
    except subprocess.CalledProcessError:
        raise BuildError(
            "what the build needs is not installed, see above; as root: scripts/install guest"
        ) from None
    version = _source_version()
    if version is None:
        raise BuildError(f"there is no Debian package {SOURCE_PACKAGE} here, from which to build")
    for left in cache.glob("build-*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=cache))
    try:
        say(f"building linux {version}; this takes some minutes, once")
        begin = time.monotonic()
        _run("tar", "-xJf", SOURCE, "-C", work, *(f"--exclude={pattern}" for pattern in LEFT_OUT))
        _run("patch", "-s", "-p1", "-d", work / SOURCE_PACKAGE, "-i", PATCH)
        built = _compile(work / SOURCE_PACKAGE)
        _run("strip", built)
        kernel = cache / _name(version)
        os.rename(built, kernel)
        say(f"built {kernel} in {time.monotonic() - begin:.0f} s")
        return kernel
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(source: Path) -> Path:
    out = source / "o"
    out.mkdir()
    make = ("make", "-C", source, "ARCH=um", f"O={out}")
    _run(*make, "-s", f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig")
    chosen = set((out / ".config").read_text().split("\n"))
    wanted = re.findall(r"^CONFIG_\w+=(?!n$).*$", CONFIG.read_text(), re.MULTILINE)
    dropped = [line for line in wanted if line not in chosen]
    if dropped:
        raise BuildError(f"{SOURCE_PACKAGE} does not take {', '.join(dropped)} of {CONFIG}")
    processes = len(os.sched_getaffinity(0))
    _make([*(os.fspath(word) for word in make), f"-j{processes}", "linux"])
    return out / "linux"


def _make(command: list[str]) -> None:
    """Run make and tell how far it is. Raises BuildError with what it complains of, which others of its
    processes may have said a lot after, and the end of what it says."""
    log: deque[str] = deque(maxlen=_LOG_LINES_MAX)
    complaints: list[str] = []
    begin = told = time.monotonic()
    compiled = 0
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.append(line)
                if len(complaints) < _LOG_LINES_MAX and _COMPLAINT.search(line):
                    complaints.append(line)
                compiled += line.startswith("  CC ")
                now = time.monotonic()
                if now - told >= _TELL_EVERY_S:
                    told = now
                    say(f"{compiled} of about {ABOUT_FILES} files compiled, {now - begin:.0f} s")
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        said = "".join([*complaints, "...\n", *log])
        raise BuildError(f"{said}make failed: exit {process.returncode}")


def _run(*command: str | os.PathLike[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: exit {done.returncode}: {done.stderr.strip()}")


def _forget_old(cache: Path, kernel: Path) -> None:
    kernels = sorted(cache.glob("linux-*"), key=lambda path: path.stat().st_mtime)
    for path in kernels[:-KEPT_MAX]:
        if path != kernel:
            path.unlink()
