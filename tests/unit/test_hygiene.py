# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a linter does not know: sizes, prints, licence lines, paths, configs that load."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from nemo_rl.algorithms.config import MASTER_CONFIGS
from nemo_rl.cli.config import master_class
from nemo_rl.utils.config import build, compose

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 120
MAY_PRINT = ("nemo_rl/cli/", "megatron_bridge/cli.py", "scripts/")
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FRAGMENTS = [path for path in CONFIGS if path.parent.name == "base"]


@cache
def tracked(pattern: str) -> tuple[Path, ...]:
    """Files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return tuple(path for name in names.splitlines() if (path := ROOT / name).is_file())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_there_is_something_to_check():
    assert len(tracked("*.py")) > 50
    assert len(CONFIGS) > len(FRAGMENTS) > 0


def test_files_are_short():
    lengths = {name(path): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in tracked("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{name(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_only_the_command_line_prints():
    printing = []
    for path in tracked("*.py"):
        file = name(path)
        if file.startswith(("nemo_rl/", "megatron_bridge/")) and not file.startswith(MAY_PRINT):
            printing += [
                f"{file}:{node.lineno}"
                for node in ast.walk(tree(path))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            ]
    assert printing == []


def test_every_source_file_has_its_licence_line():
    missing = [
        name(path)
        for path in tracked("*.py")
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    missing += [
        name(path)
        for path in tracked("*.sh")
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert missing == []


def test_no_machine_path_or_registry_host():
    """Nothing of the machine that it was written on."""
    pattern = re.compile(r"/(?:work|root|home)/\w|/tmp/boot|index-url|pypi\.org|files\.pythonhosted")
    found = []
    for suffix in ("*.py", "*.sh", "*.yaml", "*.toml", "*.md", "*.txt"):
        for path in tracked(suffix):
            if path != Path(__file__):
                found += [f"{name(path)}: {match[0]}" for match in pattern.finditer(path.read_text())]
    assert found == []


def test_packages_have_an_init_file():
    folders = {
        path.parent
        for path in tracked("*.py")
        if name(path).startswith(("nemo_rl/", "megatron_bridge/", "tests/"))
    }
    assert [name(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_no_default_at_a_call_site_of_a_config():
    """`config.get("key", default)` hides a default that belongs into the class."""
    receivers = re.compile(r"(config|cfg)$")
    found = []
    for path in tracked("nemo_rl/**/*.py"):
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get"
            ):
                receiver = ast.unparse(node.func.value)
                if receivers.search(receiver) and len(node.args) == 2:
                    found.append(f"{name(path)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in FRAGMENTS], ids=name)
def test_every_shipped_config_loads(path):
    composed = compose(path)
    build(composed, master_class(composed, str(path)), source=str(path))


def test_every_fragment_is_used():
    text = "\n".join(path.read_text() for path in CONFIGS)
    assert [name(path) for path in FRAGMENTS if path.name not in text] == []


@pytest.mark.parametrize("algorithm", list(MASTER_CONFIGS))
def test_there_is_an_exemplar_of_every_algorithm(algorithm):
    exemplar = ROOT / "configs" / f"{algorithm}.yaml"
    assert algorithm in yaml.safe_load(exemplar.read_text())


def test_requirements_pin_every_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for file, wanted in (("base", project["dependencies"]), ("dev", project["optional-dependencies"]["dev"])):
        lines = (ROOT / "requirements" / f"{file}.txt").read_text().splitlines()
        pins = {line.split("==")[0] for line in lines if "==" in line}
        for requirement in wanted:
            plain = re.split(r"[\[<>=!~ ]", requirement)[0]
            assert plain in pins, f"{plain} is not pinned in requirements/{file}.txt"
        loose = [line for line in lines if line and not line.startswith(("#", "-r")) and "==" not in line]
        assert loose == []


def test_readme_starts_with_a_command():
    lines = (ROOT / "README.md").read_text().splitlines()[:20]
    assert any("bash scripts/quickstart.sh" in line for line in lines)
