"""What ComfyUI's ecosystem asks of a pack: each test names the rule that it is for."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# The rooms that ComfyUI imports.
ROOMS = ("demotion", "host", "nodes")
SHIPPED = [ROOT / "__init__.py", *sorted(p for room in ROOMS for p in (ROOT / room).glob("*.py"))]
JAVASCRIPT = sorted((ROOT / "js").glob("*.js")) + sorted((ROOT / "js").glob("*.mjs"))
# Methods that change a list, a dict or a tensor in place.
CHANGING = re.compile(r"append|extend|insert|pop|clear|update|setdefault|remove|sort|.*[^_]_")

needs_comfy_test = pytest.mark.skipif(
    importlib.util.find_spec("comfy_test") is None,
    reason="comfy-test is not installed: pip install -r tests/requirements.txt",
)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls in a tree by their dotted names, as far as they have one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def node_classes() -> Iterator[ast.ClassDef]:
    """Classes of the pack's nodes: those with a schema, and those they share."""
    for path in (ROOT / "nodes").glob("*.py"):
        for found in ast.parse(path.read_text("utf-8")).body:
            if isinstance(found, ast.ClassDef) and {"io.ComfyNode", "files.NamedOutput"} & {
                ast.unparse(base) for base in found.bases
            }:
                yield found


def test_the_search_for_nodes_finds_them() -> None:
    assert len(list(node_classes())) >= 26


@needs_comfy_test
def test_comfy_test_lint_is_clean() -> None:
    # comfy-test, levels SYNTAX and JAVASCRIPT: cp1252, no layers or autocast of torch's own, and no
    # script that another pack could collide with.
    command = [sys.executable, "-m", "comfy_test", "lint", "--strict", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_comfy_test
def test_comfy_test_finds_no_hazard(tmp_path: Path) -> None:
    # comfy-test, level HAZARDS, all but band D, which is for people to judge. It walks a folder
    # once a check, so it gets one without anything else.
    from comfy_test.orchestration.levels import hazards

    for path in [*SHIPPED, ROOT / "pyproject.toml", ROOT / "requirements.txt"]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    checks = [check for band, *_, check in hazards.CHECKS if band != hazards.BAND_D]
    assert [finding for check in checks for finding in check(tmp_path)] == []


def test_nodes_keep_no_state() -> None:
    # ComfyUI clones and locks a V3 class before it runs it: what is kept on it is lost or shared.
    for kind in node_classes():
        assert all(isinstance(part, (ast.FunctionDef, ast.Expr)) for part in kind.body), kind.name
        for part in ast.walk(kind):
            assert not isinstance(part, (ast.Global, ast.Nonlocal)), kind.name
            if isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
                assert not ast.unparse(part).startswith("cls."), f"{kind.name}: {ast.unparse(part)}"


def test_nodes_do_not_change_what_they_are_given() -> None:
    # Outputs are shared by reference (comfy-test, HAZARDS input-mutation).
    for kind in node_classes():
        (execute,) = [f for f in kind.body if getattr(f, "name", "") == "execute"] or [None]
        if execute is None:
            continue
        given = {argument.arg for argument in execute.args.args}
        for part in ast.walk(execute):
            if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(
                part.ctx, ast.Load
            ):
                assert root_of(part) not in given, f"{kind.name}: {ast.unparse(part)}"
        for name, _ in calls(execute):
            root, _, method = name.rpartition(".")
            changed = root in given and CHANGING.fullmatch(method)
            assert not changed, f"{kind.name}: {name}"


def root_of(part: ast.expr) -> str:
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        part = part.value
    return ast.unparse(part)


def test_nothing_shipped_runs_text_installs_or_unpickles() -> None:
    # Registry standards: no eval or exec, no packages at run time; and no pickles from files.
    for path in SHIPPED:
        for name, call in calls(ast.parse(path.read_text("utf-8"))):
            where = f"{path.name}:{call.lineno}: {name}"
            assert name not in ("eval", "exec", "compile", "__import__", "os.system"), where
            assert name.partition(".")[0] not in ("subprocess", "pickle", "marshal"), where
            if name == "torch.load":
                assert "weights_only=True" in ast.unparse(call), where


def test_the_pack_registers_once_and_adds_no_route() -> None:
    # With NODE_CLASS_MAPPINGS beside it ComfyUI never calls comfy_entrypoint.
    init = (ROOT / "__init__.py").read_text("utf-8")
    assert "comfy_entrypoint" in init and "NODE_CLASS_MAPPINGS" not in init
    for path in SHIPPED:
        text = path.read_text("utf-8")
        assert not re.search(r"add_routes|aiohttp|routes\.(get|post)", text), path.name


def test_scripts_only_display() -> None:
    # ComfyUI imports every .js of the web directory into every page; modules beside it are .mjs.
    kinds = {path.suffix for path in (ROOT / "js").rglob("*") if path.is_file()}
    assert kinds == {".css", ".js", ".md", ".mjs"}
    assert [path.name for path in (ROOT / "js").rglob("*.js")] == ["demotion.js"]
    for path in [*JAVASCRIPT, ROOT / "js" / "demotion.css"]:
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        # Nothing from elsewhere, no text that becomes markup or code.
        assert not re.search(r"https?:|//cdn|@import", text), path.name
        assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write", text), (
            path.name
        )
        assert not re.search(r"\beval\(|new Function|setTimeout\(['\"`]", text), path.name


def test_pyproject_is_as_the_registry_wants_it() -> None:
    project = (document := tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))["project"]
    comfy = document["tool"]["comfy"]
    # A name is lower-case, without ComfyUI in it, and does not change.
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", project["name"])
    assert "comfyui" not in project["name"] and len(project["name"]) < 100
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert (ROOT / project["license"]["file"]).is_file() and (ROOT / project["readme"]).is_file()
    assert project["description"] and project["requires-python"]
    assert any(kind.startswith("Operating System :: ") for kind in project["classifiers"])
    assert {"PublisherId", "DisplayName", "Icon", "requires-comfyui"} <= set(comfy)
    # Beside WEB_DIRECTORY it would load every script twice.
    assert "web" not in comfy
    required = (ROOT / "requirements.txt").read_text("utf-8").split()
    names = [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in required]
    assert sorted(names, key=str.lower) == sorted(project["dependencies"], key=str.lower)


def test_comfyui_reads_pyproject(comfy) -> None:
    from comfy_config import config_parser

    read = config_parser.extract_node_configuration(str(ROOT))
    assert read.project.name == "demotion" and read.tool_comfy.display_name == "ComfyUI-Demotion"
    assert read.project.supported_os == ["OS Independent"]
    assert read.project.supported_comfyui_version


def test_python_files_are_ascii() -> None:
    files = [path for path in ROOT.rglob("*.py") if ".comfyui" not in path.parts]
    assert files
    assert [path.name for path in files if not path.read_bytes().isascii()] == []
