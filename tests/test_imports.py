"""Who may know whom, kept by the imports themselves; and the style that ruff can see."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("specexec", "offload", "app", "configs")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
FORBIDDEN_ROOMS = {
    "specexec": {"offload", "app", "configs"},
    "offload": {"specexec", "app", "configs"},
    "app": set(),
    "configs": set(ROOMS),
}
# Each module may import from its own room only those that come before it.
ORDER = {
    "specexec": [
        *(
            "tree",
            "device",
            "features",
            "frames",
            "lm",
            "acceptance",
            "budget",
            "sampling",
            "drafters",
            "verify",
            "rejection",
            "engine",
            "training",
        ),
    ],
    "offload": [
        *("entries", "quantize", "ggml", "gguf", "prequantized", "manifest", "checkpoint", "names", "layout", "store"),
        *("product", "stream", "prefill", "hardware", "plan", "overflow", "gather", "load", "shape", "working"),
        *("predict", "replay", "pack"),
    ],
}


def imported(path):
    """Dotted names of everything a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def used(path):
    """Dotted names of attributes such as torch.cuda or os.environ, and of functions called by their bare name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
    return names | imported(path)


def within(path):
    return path.relative_to(ROOT).as_posix()


def starts_with(names, prefix):
    return {name for name in names if name == prefix or name.startswith(prefix + ".")}


@pytest.mark.parametrize("path", FILES, ids=within)
def test_rooms_know_only_whom_they_may(path):
    room = path.relative_to(ROOT).parts[0]
    rooms = {name.split(".")[0] for name in imported(path)}
    assert not rooms & FORBIDDEN_ROOMS[room]
    if room in ORDER:
        module = path.relative_to(ROOT / room).with_suffix("").parts[0]
        if module != "__init__":
            later = ORDER[room][ORDER[room].index(module) + 1 :] if module in ORDER[room] else []
            assert not [name for name in later if starts_with(imported(path), f"{room}.{name}")]


@pytest.mark.parametrize("path", FILES, ids=within)
def test_things_stay_where_they_belong(path):
    file, names = within(path), used(path)
    if file not in ("offload/hardware.py", "offload/replay.py", "offload/store.py", "offload/stream.py"):
        assert not starts_with(names, "torch.cuda")
    if not file.startswith("app/"):
        assert not names & {"print", "typer", "argparse", "rich"}
    if file != "app/environment.py":
        assert not starts_with(names, "os.environ") | starts_with(names, "os.getenv")
    if file != "app/ui.py":
        assert not starts_with(names, "gradio")


def test_every_module_opens_with_a_sentence():
    for path in FILES:
        sentence = ast.get_docstring(ast.parse(path.read_text()))
        assert sentence, f"{path} has no docstring"


def test_nothing_undeclared_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["parquet"]]
    names = {re.match(r"[\w-]+", each)[0].replace("-", "_").lower() for each in declared}
    foreign = {name.split(".")[0] for path in FILES for name in imported(path)} - set(ROOMS) - sys.stdlib_module_names
    assert foreign <= names


def test_ruff_has_nothing_to_say():
    for arguments in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
