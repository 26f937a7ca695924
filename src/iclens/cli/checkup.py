"""`iclens doctor`: what iclens runs on, whether it works there, and what to paste in a bug report.

Nothing here imports what may be broken: versions come from the packages' metadata, and jax is tried
by the self-test, in another process.
"""

import argparse
import fcntl
import getpass
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from iclens import __version__
from iclens.revision import revision

SELFTEST = (sys.executable, "-m", "iclens.cli.selftest")
CHECKS = ("device", "predictors", "training", "resume", "report")
"""What the self-test tells of, in this order."""
SELFTEST_SECONDS = 300
LEAST_MEMORY, LEAST_DISK = 2**30, 2**30
"""Bytes that have to be free."""
THREAD_LIMITS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
)
"""Variables of the environment that change how, or on what, jax computes."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    advice: str = ""
    """What to do, where it is a problem; empty where it is none."""


def doctor(arguments: list[str]) -> int:
    """Say what iclens runs on and whether it works there, to paste in a bug report."""
    parser = argparse.ArgumentParser(prog="iclens doctor", description=doctor.__doc__)
    parser.add_argument("--run", type=Path, default=Path(), help="folder where runs are to be")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    asked = parser.parse_args(arguments)
    checks = []
    for check in examine(asked.run):
        shown = Check(check.name, without_names(check.found), without_names(check.advice))
        checks.append(shown)
        if not asked.json:
            print(f"{'PROBLEM' if shown.advice else 'ok':8} {shown.name:16} {shown.found}")
            if shown.advice:
                print(f"{'':25} {shown.advice}")
            sys.stdout.flush()
    problems = sum(bool(check.advice) for check in checks)
    if asked.json:
        print(json.dumps({"ok": not problems, "checks": [asdict(check) for check in checks]}))
    else:
        print(f"{problems} problem{'s' * (problems != 1)}. In a bug report, paste all of this.")
    return 1 if problems else 0


def examine(folder: Path) -> Iterator[Check]:
    """All checks, each as soon as it is done; `folder` is where runs are to be."""
    yield Check("iclens", f"{__version__}, revision {revision() or 'not known'}")
    yield Check(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield from _versions()
    yield _cores()
    yield _memory()
    yield _cache()
    yield from _folder(folder)
    yield Check("sbatch", "on the path" if shutil.which("sbatch") else "not on the path")
    yield from _selftest()


def _versions() -> Iterator[Check]:
    """Each package that iclens asks for, and those of its extras."""
    try:
        requirements = metadata.requires("iclens") or []
        from packaging.requirements import Requirement
    except ModuleNotFoundError as error:  # also of metadata, where iclens is not installed
        yield Check("versions", f"not known: {error}", "install iclens with pip")
        return
    for requirement in map(Requirement, [*requirements, "jaxlib"]):
        if requirement.extras:  # of a package that is in the list without them
            continue
        extra = re.search(r"extra == ['\"](\w+)['\"]", str(requirement.marker or ""))
        name = requirement.name
        told = f"{name} ({extra[1]})" if extra else name
        mend = f"pip install '{name}{requirement.specifier}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(told, "not installed", "" if extra else mend)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Check(told, version)
        else:
            yield Check(told, f"{version}, expected {requirement.specifier}", mend)


def _cores() -> Check:
    every = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    limits = [f"{name}={os.environ[name]}" for name in THREAD_LIMITS if name in os.environ]
    quota, period = (_read("/sys/fs/cgroup/cpu.max") or "max 1").split()[:2]
    if quota != "max":
        limits.insert(0, f"{int(quota) / int(period):g} cores' time")
    found = f"{usable} of {every} usable" + (f"; limits: {', '.join(limits)}" if limits else "")
    return Check("cores", found)


def _memory() -> Check:
    known = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    if "MemAvailable" not in known:
        return Check("memory", "not known")
    free, every = (1024 * int(known[name]) for name in ("MemAvailable", "MemTotal"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        used = int(_read("/sys/fs/cgroup/memory.current").strip() or 0)
        every = min(every, int(limit))
        free = min(free, int(limit) - used)
    few = "end other programs, or train with fewer --workers" if free < LEAST_MEMORY else ""
    return Check("memory", f"{free / 2**30:.1f} of {every / 2**30:.1f} GiB free", few)


def _cache() -> Check:
    """The folder that compiled programs are kept in, where there is one."""
    name = "JAX_COMPILATION_CACHE_DIR"
    folder = os.environ.get(name, "")
    if not folder:
        return Check("compile cache", f"none ({name} is not set)")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = f"set {name} to a folder that you may write into, or unset it"
        return Check("compile cache", f"{folder}: {error.strerror}", advice)
    return Check("compile cache", folder)


def _folder(folder: Path) -> Iterator[Check]:
    """Whether runs can be in a folder: it holds locks between processes, and has room."""
    where = str(folder.resolve())
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix=".iclens-doctor-") as file,
            open(file.name) as again,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = "a lock that is held is given again"
            except BlockingIOError:
                found = ""
    except OSError as error:
        found = error.strerror or str(error)
    advice = "keep runs where you may write and flock works: give --out (and --run here)"
    yield Check("locks", f"{where}: {found or 'flock works'}", advice if found else "")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Check("disk", f"{where}: {error.strerror}", "give a folder that is there with --run")
        return
    advice = "make room, or keep runs elsewhere with --out" if free < LEAST_DISK else ""
    yield Check("disk", f"{free / 2**30:.1f} GiB free", advice)


def _selftest() -> Iterator[Check]:
    """Train a little in another process, which may die of what is wrong here."""
    try:
        ended = subprocess.run(SELFTEST, capture_output=True, text=True, timeout=SELFTEST_SECONDS)
        out, error = ended.stdout, ended.stderr
        code = f"ended with code {ended.returncode}"
    except subprocess.TimeoutExpired as late:
        out, error = (
            part.decode() if isinstance(part, bytes) else part or ""
            for part in (late.stdout, late.stderr)
        )
        code = f"was not done in {SELFTEST_SECONDS} s"
    told = {}
    for line in out.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            told[entry["name"]] = entry
    for name in CHECKS:
        if name not in told:  # and neither are the others after it
            last = (error.strip().splitlines() or [code])[-1]
            here = importlib.util.find_spec("jax") is not None
            advice = "report this" if told else "install jax again, or set JAX_PLATFORMS=cpu"
            yield Check(name, f"{code}: {last}", advice if here else "pip install iclens")
            return
        wrong = "" if told[name]["ok"] else "results cannot be relied on here: report this"
        yield Check(name, told[name]["found"], wrong)


def without_names(text: str) -> str:
    """A text without the home folder and the user's name in its paths."""
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without one, as in a container
        home = ""
    if len(home) > 1:
        text = text.replace(home, "~")
    try:
        user = re.escape(getpass.getuser())
    except (KeyError, OSError, ImportError):  # a user without a name
        return text
    return re.sub(rf"(?<=/){user}(?![\w.-])", "USER", text)


def _read(path: str) -> str:
    """A file of the system; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
