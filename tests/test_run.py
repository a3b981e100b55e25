"""run.py without a network: installing, adopting a ComfyUI, and driving a stand-in server.

Every test has a copy of run.py in a pack folder of its own, so that nothing it does shows here.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

RUN = Path(__file__).resolve().parents[1] / "run.py"

# What run.py needs of a ComfyUI. The mode says how it behaves; every process leaves its id.
MAIN = """
import argparse, asyncio, json, os, pathlib, signal, subprocess, sys
from aiohttp import web

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--mode", default="")
options, _ = parser.parse_known_args()
here = pathlib.Path(__file__).parent
mode = options.mode or (here / "mode").read_text()
pids = [os.getpid()]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    pids.append(subprocess.Popen([sys.executable, "-c", sleeper]).pid)
(here / "pids").write_text(json.dumps(pids))
(here / "argv").write_text(json.dumps(sys.argv))
if mode == "dies":
    sys.exit("RuntimeError: there is no such GPU")
if mode == "no pack":
    print("Traceback (most recent call last):\\nModuleNotFoundError: no peft", flush=True)
    pack = "/custom_nodes/comfyui-demotion"
    print(f"Cannot import {pack} module for custom nodes: no peft", flush=True)
routes = web.RouteTableDef()
sockets = {}

@routes.get("/object_info")
async def object_info(request):
    return web.json_response({"KSampler": {}} if mode == "no pack" else {"DemotionProbe": {}})

@routes.get("/ws")
async def ws(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    sockets[request.query["clientId"]] = socket
    await socket.send_json({"type": "status", "data": {}})
    await socket.send_bytes(b"a preview picture")
    async for _ in socket:
        pass
    return socket

@routes.post("/prompt")
async def prompt(request):
    job = await request.json()
    found = {"1": {"errors": [{"message": "Value not in list", "details": "vae: x.pt"}]}}
    if mode == "refuses":
        error = {"message": "no", "details": ""}
        return web.json_response({"error": error, "node_errors": found}, status=400)
    if mode == "runs a part":
        return web.json_response({"prompt_id": "p", "node_errors": found})
    asyncio.create_task(play(sockets[job["client_id"]]))
    return web.json_response({"prompt_id": "p", "node_errors": {}})

async def play(socket):
    async def tell(kind, **data):
        await socket.send_json({"type": kind, "data": {"prompt_id": "p", **data}})
    await socket.send_json({"type": "executing", "data": {"prompt_id": "another", "node": None}})
    await tell("execution_cached", nodes=["0"])
    await tell("executing", node="1", display_node="1")
    for value in (1, 2):
        state = {"value": value, "max": 4, "state": "running"}
        await tell("progress_state", nodes={"1": state})
    if mode == "vanishes":
        print("Killed: out of memory", flush=True)
        os._exit(9)
    if mode == "fails":
        await tell("execution_error", node_id="1", exception_message="3 channels, not 16\\n")
    if mode == "interrupted":
        await tell("execution_interrupted", node_id="1")
    await tell("executing", node=None)

@routes.post("/{what:queue|interrupt}")
async def take_back(request):
    with (here / "taken back").open("a") as file:
        file.write(request.match_info["what"] + json.dumps(await request.json()))
    return web.Response()

@routes.get("/history/p")
async def history(request):
    files = [{"label": "gap map", "filename": "map.png", "subfolder": "demotion", "type": "output"}]
    status = "error" if mode in ("fails", "interrupted") else "success"
    entry = {"outputs": {"1": {"files": files, "text": ["0.12 +- 0.03"]}, "2": {"images": []}},
             "status": {"status_str": status}}
    return web.json_response({"p": entry})

app = web.Application()
app.add_routes(routes)
web.run_app(app, host="127.0.0.1", port=options.port, handle_signals=False, print=None)
"""

PROMPT = {
    "0": {"class_type": "UNETLoader", "inputs": {}},
    "1": {"class_type": "DemotionProbe", "inputs": {}, "_meta": {"title": "Measure gradients"}},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module, in a pack of its own."""
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setenv("DEMOTION_CPU", "1")  # no need to ask torch
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what a killed run.py leaves goes with the test
    pack = tmp_path / "pack"
    (pack / "tests").mkdir(parents=True)
    (pack / ".comfyui").mkdir()
    (pack / "requirements.txt").write_text("aiohttp\n")
    (pack / "tests" / "requirements.txt").write_text("pytest\n")
    (pack / "workflows" / "api").mkdir(parents=True)
    shutil.copy(RUN, pack)
    spec = importlib.util.spec_from_file_location("run_under_test", pack / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WORKFLOW.write_text(json.dumps(PROMPT))
    return module


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """A stand-in for a user's ComfyUI."""
    folder = tmp_path / "ComfyUI"
    (folder / "custom_nodes").mkdir(parents=True)
    (folder / "requirements.txt").write_text("# all of it\naiohttp>=3\n")
    (folder / "main.py").write_text(MAIN)
    (folder / "mode").write_text("works")
    return folder


def command_line(run: ModuleType, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, run.__file__, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )


def serve(run: ModuleType, comfyui: Path) -> subprocess.Popen:
    """`run.py serve` on the stand-in, once its server is up."""

    def heed_signals() -> None:  # a shell starts what runs in the background deaf to Ctrl-C
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, run.__file__, "serve", "--comfyui", comfyui, "--python", sys.executable],
        preexec_fn=heed_signals,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any("ComfyUI is at http://127.0.0.1:" in line for line in process.stdout)
    return process


def none_left(comfyui: Path) -> bool:
    """Whether every process of the stand-in ends within a few seconds."""
    pids = json.loads((comfyui / "pids").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(map(running, pids)):
            return True
        time.sleep(0.05)
    return False


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------------------------------------
# installing


def test_a_stage_is_done_once_until_its_key_changes(run: ModuleType, tmp_path: Path) -> None:
    done = []
    for key in ("a", "a", "b"):
        run.stage("Installing", tmp_path / "stamps" / "x", key, lambda step: done.append(step))
    assert len(done) == 2


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_stage_is_done_again(
    run: ModuleType, tmp_path: Path, failure: type[BaseException]
) -> None:
    stamp, done = tmp_path / "stamps" / "x", []
    run.stage("Installing", stamp, "old", lambda step: None)

    def interrupted(step: object) -> None:
        raise failure

    with pytest.raises(failure):
        run.stage("Installing", stamp, "new", interrupted)
    assert not stamp.exists()
    run.stage("Installing", stamp, "old", lambda step: done.append(step))
    assert done, "the old install was half replaced: it must not be believed either"


def test_a_half_installed_package_is_forgotten(run: ModuleType, tmp_path: Path) -> None:
    for name, files in {"whole": ["METADATA", "INSTALLER"], "half": ["METADATA"]}.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        for file in files:
            (info / file).touch()
    run.forget_half_installed(tmp_path)
    assert [path.name for path in tmp_path.glob("*.dist-info")] == ["whole-1.0.dist-info"]


def test_two_installs_do_not_run_at_once(run: ModuleType, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as other:
        with run.locked(tmp_path / "lock"):
            assert not run.try_lock(other)
        assert run.try_lock(other)


def archive_of(path: Path, *members: tuple[str, bytes | None]) -> Path:
    """A tar.gz of these members; one without content is a symbolic link."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content or b""))
    return path


def test_only_the_tree_is_unpacked(run: ModuleType, tmp_path: Path) -> None:
    archive = archive_of(
        tmp_path / "a.tar.gz",
        ("a-1/setup.py", b"no"),
        ("a-1/vendor/Other/x.py", b"no"),
        ("a-1/vendor/ComfyUI/main.py", b"yes"),
        ("a-1/vendor/ComfyUI/comfy/ops.py", b"yes"),
    )
    run.unpack(archive, "a-1/vendor/ComfyUI", tmp_path / "tree")
    files = {str(p.relative_to(tmp_path / "tree")) for p in (tmp_path / "tree").rglob("*.py")}
    assert files == {"main.py", str(Path("comfy/ops.py"))}


@pytest.mark.parametrize(
    "member",
    [
        ("a-1/vendor/ComfyUI/../../../escaped", b"x"),
        ("a-1/vendor/ComfyUI//escaped", b"x"),
        ("a-1/vendor/ComfyUI/link", None),
    ],
)
def test_an_archive_cannot_write_elsewhere(
    run: ModuleType, tmp_path: Path, member: tuple[str, bytes | None]
) -> None:
    archive = archive_of(tmp_path / "a.tar.gz", member)
    with pytest.raises(run.Stop, match="leads out"):
        run.unpack(archive, "a-1/vendor/ComfyUI", tmp_path / "deep" / "er" / "tree")
    assert not list(tmp_path.rglob("escaped"))


def carry(run: ModuleType, monkeypatch: pytest.MonkeyPatch, main: bytes) -> bytes:
    """Let pip bring an archive with this main.py; the archive's bytes."""
    archive = archive_of(run.HOME / "made.tar.gz", (f"{run.CARRIER_TREE}/main.py", main))

    def pip(step: object, python: str, *arguments: str, env: object) -> None:
        assert "--require-hashes" in arguments
        shutil.copy(archive, Path(arguments[arguments.index("--dest") + 1]))

    monkeypatch.setattr(run, "pip", pip)
    return archive.read_bytes()


def test_a_wrong_archive_is_not_unpacked(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    carry(run, monkeypatch, b"evil")
    with pytest.raises(run.Stop, match="not unpacked"):
        run.fetch_comfyui(None, run.Host(run.HOME / "ComfyUI", sys.executable))
    assert not (run.HOME / "ComfyUI").exists()
    assert not (run.HOME / "download").exists()


def test_the_right_archive_replaces_the_old_tree(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = run.Host(run.HOME / "ComfyUI", sys.executable)
    host.comfyui.mkdir()
    (host.comfyui / "left_over.py").touch()
    monkeypatch.setattr(run, "CARRIER_SHA256", run.digest(carry(run, monkeypatch, b"new")))
    run.fetch_comfyui(None, host)
    assert [path.name for path in host.comfyui.iterdir()] == ["main.py"]


def test_too_little_disk(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "INSTALL_BYTES", 1e30)
    with pytest.raises(run.Stop, match="GB are free at .*--comfyui"):
        run.install(with_tests=False)


def test_an_unsupported_python(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HIGHEST_PYTHON", (3, 9))
    run.check_python(ours=False)  # a user's own may be newer than what was tried here
    with pytest.raises(run.Stop, match="not supported: run this with Python"):
        run.check_python(ours=True)


def test_no_network(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{run.port_to_listen_on(None)}")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(run.Stop, match="cannot be reached: check network"), run.Step("x") as step:
        run.pip(step, sys.executable, "install", "no-such-package-at-all")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("OSError: [Errno 28] No space left on device\n", "The disk is full: free about 10 GB and"),
        ("x\nERROR: No matching distribution found for a==9\n", "No matching distribution found"),
        ("unheard of", "unheard of"),
    ],
)
def test_what_is_said_of_a_failed_install(run: ModuleType, output: str, said: str) -> None:
    assert said in run.diagnosis(output)
    assert "run the same command again" in run.diagnosis(output)


# ---------------------------------------------------------------------------------------------
# a ComfyUI that the user has


def test_a_folder_without_comfyui(run: ModuleType, tmp_path: Path) -> None:
    done = command_line(run, "demo", "--comfyui", tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith(f"run.py: There is no ComfyUI in {tmp_path / 'nowhere'}")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_requirement_is_one_pip_command(run: ModuleType, comfyui: Path) -> None:
    (comfyui / "requirements.txt").write_text(
        "aiohttp>=3  # there\npip>=1000\nno-such-package~=2.0\nnot-for-us; python_version < '3'\n"
    )
    done = command_line(run, "demo", "--comfyui", comfyui, "--python", sys.executable)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"{sys.executable} -m pip install 'pip>=1000' 'no-such-package~=2.0'"
    assert not any((comfyui / "custom_nodes").iterdir()), "nothing is changed before that"


def test_installing_is_done_only_when_asked_for(
    run: ModuleType, comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.PACK / "requirements.txt").write_text("no-such-package\n")
    asked = []
    monkeypatch.setattr(run, "pip", lambda step, *arguments: asked.append(arguments))
    with pytest.raises(run.Stop, match="lacks requirements"):  # pip brought nothing here
        run.adopt(comfyui, sys.executable, with_tests=False, may_install=True)
    assert asked == [(sys.executable, "install", "no-such-package")]


def test_which_python(run: ModuleType, comfyui: Path) -> None:
    assert run.find_python(comfyui, None) == sys.executable
    for folder in (".venv", "venv"):
        own = Path(run.venv_python(comfyui / folder))
        own.parent.mkdir(parents=True)
        own.touch()
        assert run.find_python(comfyui, None) == str(own)
    assert run.find_python(comfyui, sys.executable) == sys.executable
    with pytest.raises(run.Stop, match="There is no Python at /no/python"):
        run.find_python(comfyui, "/no/python")


def test_a_python_that_does_not_work(run: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(run.Stop, match="no such library.*--python"):
        run.missing_requirements(str(broken), [])


def test_the_link_is_made_once(run: ModuleType, comfyui: Path) -> None:
    nodes = comfyui / "custom_nodes"
    assert [run.link(nodes), run.link(nodes)] == ["comfyui-demotion"] * 2
    assert [path.resolve() for path in nodes.iterdir()] == [run.PACK]


def test_no_link_where_the_pack_is_already(run: ModuleType, comfyui: Path) -> None:
    (comfyui / "custom_nodes" / "Demotion").symlink_to(run.PACK)
    assert run.link(comfyui / "custom_nodes") == "Demotion"
    assert run.link(run.PACK.parent) == "pack"
    assert len(list((comfyui / "custom_nodes").iterdir())) == 1


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_what_a_user_put_there_stays(run: ModuleType, comfyui: Path, kind: str) -> None:
    place = comfyui / "custom_nodes" / "comfyui-demotion"
    place.mkdir() if kind == "folder" else place.symlink_to("nowhere")
    with pytest.raises(run.Stop, match="move one of the two away"):
        run.link(comfyui / "custom_nodes")
    assert place.is_symlink() == (kind == "broken link")


# ---------------------------------------------------------------------------------------------
# the server


def server(run: ModuleType, comfyui: Path, mode: str = "works", **options: object) -> object:
    log = run.HOME / "server.log"
    return run.Server(comfyui, sys.executable, log, arguments=["--mode", mode], **options)


def test_a_server_is_ready_inside_and_gone_after(run: ModuleType, comfyui: Path) -> None:
    with server(run, comfyui) as live:
        assert "DemotionProbe" in run.fetch(f"{live.url}/object_info")
        argv = json.loads((comfyui / "argv").read_text())
        assert live.output == comfyui / "output"
    assert none_left(comfyui)
    assert {"--cpu", "--disable-all-custom-nodes", "sqlite:///:memory:"} <= set(argv)
    assert not Path(argv[argv.index("--temp-directory") + 1]).exists()


def test_a_base_folder_and_other_packs(run: ModuleType, comfyui: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "custom_nodes").mkdir(parents=True)
    with server(run, comfyui, base=base, alone=False) as live:
        argv = json.loads((comfyui / "argv").read_text())
        assert live.output == base / "output"
    assert argv[argv.index("--base-directory") + 1] == str(base)
    assert "--disable-all-custom-nodes" not in argv
    assert not any((comfyui / "custom_nodes").iterdir())


def test_a_server_that_does_not_listen_to_reason(
    run: ModuleType, comfyui: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = run.end
    monkeypatch.setattr(run, "end", lambda process: end(process, patience=0.3))
    with pytest.raises(ValueError, match="in the test"), server(run, comfyui, "stubborn"):
        raise ValueError("in the test")
    assert none_left(comfyui)


def test_a_server_that_dies_shows_the_end_of_its_log(run: ModuleType, comfyui: Path) -> None:
    with pytest.raises(run.Stop, match="ended with code 1(?s:.*)there is no such GPU"):
        server(run, comfyui, "dies").__enter__()


def test_a_pack_that_cannot_be_loaded_says_why(run: ModuleType, comfyui: Path) -> None:
    with pytest.raises(run.Stop, match="Traceback(?s:.*)no peft(?s:.*)Cannot import") as stop:
        server(run, comfyui, "no pack").__enter__()
    assert str(stop.value).endswith("for custom nodes: no peft")
    assert none_left(comfyui)


def test_a_port_in_use(run: ModuleType, comfyui: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        python = ["--python", sys.executable]
        done = command_line(run, "serve", "--comfyui", comfyui, *python, "--port", port)
    assert done.returncode == 1
    assert done.stderr.startswith(f"run.py: Port {port} cannot be used (")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -9)]
)
def test_no_process_is_left(run: ModuleType, comfyui: Path, number: str, code: int) -> None:
    if number == "SIGKILL" and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    process = serve(run, comfyui)
    process.send_signal(getattr(signal, number))
    assert process.wait(15) == code
    assert none_left(comfyui)


def test_serving_ends_with_a_server_that_dies(run: ModuleType, comfyui: Path) -> None:
    process = serve(run, comfyui)
    [pid] = json.loads((comfyui / "pids").read_text())
    os.kill(pid, signal.SIGTERM)
    assert process.wait(15) == 1


# ---------------------------------------------------------------------------------------------
# a workflow


def test_a_workflow_is_followed_to_its_end(run: ModuleType, comfyui: Path) -> None:
    events = []
    with server(run, comfyui) as live:
        entry = run.queue(live.url, PROMPT, lambda kind, data: events.append(kind))
    assert entry["status"]["status_str"] == "success"
    assert events == [
        "execution_cached",
        "executing",
        "progress_state",
        "progress_state",
        "executing",
    ], "another client's events are not ours"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("fails", "Measure gradients: 3 channels, not 16"),
        ("interrupted", "Measure gradients: interrupted"),
        ("refuses", "Measure gradients: Value not in list: vae: x.pt"),
        ("runs a part", "Measure gradients: Value not in list: vae: x.pt"),
    ],
)
def test_a_failing_workflow_names_its_node(
    run: ModuleType, comfyui: Path, mode: str, said: str
) -> None:
    with server(run, comfyui, mode) as live, pytest.raises(run.Stop) as stop:
        run.queue(live.url, PROMPT)
    assert str(stop.value) == said
    if mode == "runs a part":
        taken_back = (comfyui / "taken back").read_text()
        assert taken_back == 'queue{"delete": ["p"]}interrupt{"prompt_id": "p"}'


def demo(run: ModuleType, comfyui: Path, mode: str) -> subprocess.CompletedProcess:
    (comfyui / "mode").write_text(mode)
    return command_line(run, "demo", "--comfyui", comfyui, "--python", sys.executable)


def test_the_demo_names_its_files(run: ModuleType, comfyui: Path) -> None:
    made = comfyui / "output" / "demotion" / "map.png"
    made.parent.mkdir(parents=True)
    made.touch()
    done = demo(run, comfyui, "works")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"gap map  {made}" in done.stdout
    assert "[ 2/2] Measure gradients  " in done.stdout
    assert "Measure gradients:\n  0.12 +- 0.03" in done.stdout
    assert none_left(comfyui)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("works", "without its files: "),  # it names map.png, and there is none
        ("fails", "Measure gradients: 3 channels, not 16\n"),
        ("vanishes", "Killed: out of memory"),
    ],
)
def test_a_failing_demo_never_reports_success(
    run: ModuleType, comfyui: Path, mode: str, said: str
) -> None:
    done = demo(run, comfyui, mode)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert none_left(comfyui)


def test_the_time_left_counts_from_where_a_run_continues(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    progress = run.Progress(PROMPT, every=5)
    progress("executing", {"node": "1"})
    for value, seconds in ((600, 0), (601, 1), (610, 10)):  # 600 of 1000 were kept
        now[0] = 100.0 + seconds
        state = {"value": value, "max": 1000, "state": "running"}
        progress("progress_state", {"nodes": {"1": state}})
    progress("executing", {"node": None})
    assert capsys.readouterr().out.splitlines() == [
        "[ 1/2] Measure gradients 61% 6:30 left",
        f"{'[ 1/2] Measure gradients':<56}   10.0 s",
    ]


# ---------------------------------------------------------------------------------------------
# commands


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ([], ["tests"]),
        (["-k", "cosine", "-x"], ["tests", "-k", "cosine", "-x"]),
        (["tests/families", "-x"], ["tests/families", "-x"]),
        (["tests/families/test_wan.py::test_it"], ["tests/families/test_wan.py::test_it"]),
    ],
)
def test_what_pytest_gets(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, given: list[str], passed_on: list[str]
) -> None:
    (run.PACK / "tests" / "families").mkdir()
    (run.PACK / "tests" / "families" / "test_wan.py").touch()
    monkeypatch.chdir(run.PACK)
    monkeypatch.setenv("COMFYUI_PATH", "")
    commands = []
    monkeypatch.setattr(run, "hand_over", commands.append)
    run.test(run.Host(Path("C"), "py"), run.parse(["test", *given])[1])
    start = ["py", "-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", "tests"]
    assert commands == [[*start, *passed_on]]
    assert os.environ["COMFYUI_PATH"] == "C"


@pytest.mark.parametrize(
    "wrong",
    [["demo", "--unknown"], ["demo", "--install"], ["test", "--port", "8188"], ["nothing"]],
)
def test_a_wrong_command_line(run: ModuleType, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        run.parse(wrong)
    assert exit.value.code == 2
