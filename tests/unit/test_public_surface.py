# SPDX-License-Identifier: Apache-2.0
"""The documented surface: module paths, names, parameters and defaults stay importable and callable as documented.

`tests/data/public_surface.json` is the documentation as data. A documented name that a later issue brings stands in
`PENDING` with the reason; once it exists, the entry must go.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.utils.config_model import ConfigModel

SURFACE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "public_surface.json").read_text())

_DTENSOR = "the DTensor backend comes with a later issue"
_PACKING = "sequence packing comes with a later issue"

PENDING: dict[str, dict[str, str]] = {
    "nemo_rl.models.policy.dtensor_policy_worker": {"*": _DTENSOR},
    "nemo_rl.models.policy.dtensor_policy_worker_v2": {"*": _DTENSOR},
    "nemo_rl.models.policy.megatron_policy_worker": {
        "setup_megatron_model": "took a ConfigContainer of another package; the name stays and says what replaces it",
    },
    "nemo_rl.data.packing.algorithms": {"*": _PACKING},
    "nemo_rl.data.packing.metrics": {"*": _PACKING},
}

STRUCTURAL = {"NamedTuple", "Protocol", "LossFunction"}  # documented bases that need no subclassing


def pending(module: str, name: str) -> bool:
    names = PENDING.get(module, {})
    return "*" in names or name in names or name.split(".")[0] in names


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def undecorated(obj: Any) -> Any:
    """The class behind a Ray actor class."""
    metadata = getattr(obj, "__ray_metadata__", None)
    return obj if metadata is None else metadata.modified_class


def problems(module: str) -> dict[str, str]:
    """Documented name of `module` -> what is wrong with it."""
    documented, loaded = SURFACE[module], importlib.import_module(module)
    found: dict[str, str] = {}
    for name in [*documented["functions"], *documented["data"], *documented["classes"]]:
        if not hasattr(loaded, name):
            found[name] = "does not exist"
    for name, params in documented["functions"].items():
        if name not in found:
            found |= _signature_problem(name, getattr(loaded, name), params)
    for name, entry in documented["classes"].items():
        if name not in found:
            found |= _class_problems(name, undecorated(getattr(loaded, name)), entry)
    return found


def _class_problems(name: str, cls: type, entry: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    known = _fields(cls)
    found |= {f"{name}.{field}": "no such field" for field in entry["fields"] if field not in known}
    parents = {base.__name__ for base in cls.__mro__}
    for base in entry["bases"]:
        simple = base.split("[")[0].split(".")[-1]
        if simple not in parents | STRUCTURAL:
            found[name] = f"is no {simple}"
    for method, expected in entry["methods"].items():
        full = f"{name}.{method}"
        attribute = inspect.getattr_static(cls, method, None)
        if attribute is None:
            found[full] = "does not exist"
        elif expected["kind"] == "property":
            if not isinstance(attribute, property):
                found[full] = "is no property"
        else:
            function = attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute
            found |= _signature_problem(full, function, expected["params"])
    return found


def _fields(cls: type) -> set[str]:
    if issubclass(cls, ConfigModel):
        return set(cls.documented_fields())
    own = {key for base in cls.__mro__ for key in getattr(base, "__annotations__", {})}
    return own | set(dir(cls)) | {"__extra__"}


def _signature_problem(name: str, function: Any, params: list[str]) -> dict[str, str]:
    """Documented parameters come first, in order and with their defaults; what is newer has a default."""
    actual = list(inspect.signature(function).parameters.values())
    takes_any = {p.kind for p in actual} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    by_name = {p.name: p for p in actual}
    position = 0
    for text in params:
        wanted, _, default = text.partition("=")
        if wanted.startswith("*"):
            if wanted != "*" and not takes_any:
                return {name: f"takes no {wanted}"}
            continue
        if wanted not in by_name:
            return {name: f"has no parameter {wanted}; it takes {', '.join(by_name)}"}
        parameter = by_name[wanted]
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and not any("*" in p for p in params):
            if actual[position].name != wanted:
                return {name: f"{wanted} is not parameter {position}"}
            position += 1
        if default and not _same_default(default, parameter.default):
            return {name: f"{wanted} defaults to {parameter.default!r} instead of {default}"}
    documented = {text.partition("=")[0].lstrip("*") for text in params}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in actual:
        if parameter.name not in documented and parameter.default is inspect.Parameter.empty:
            if parameter.kind not in variadic:
                return {name: f"needs {parameter.name}, which is not documented"}
    return {}


def _same_default(documented: str, actual: Any) -> bool:
    if actual is inspect.Parameter.empty:
        return False
    try:
        return actual == ast.literal_eval(documented)
    except ValueError:  # an expression such as a name of another module
        return True


@pytest.mark.parametrize("module", list(SURFACE))
def test_documented_names_exist_as_documented(module):
    if not exists(module):
        assert "*" in PENDING.get(module, {}), f"{module} does not exist and is not pending"
        pytest.skip(PENDING[module]["*"])
    assert "*" not in PENDING.get(module, {}), f"{module} exists; take it out of PENDING"
    found = problems(module)
    wrong = {name: what for name, what in found.items() if not pending(module, name)}
    assert wrong == {}
    stale = [
        name
        for name in PENDING.get(module, {})
        if not any(full.split(".")[0] == name or full == name for full in found)
    ]
    assert stale == [], "these exist as documented now; take them out of PENDING"


def test_pending_names_are_documented():
    for module, names in PENDING.items():
        documented = SURFACE[module]
        for name in names:
            parts = name.split(".")
            assert name == "*" or parts[0] in [
                *documented["functions"],
                *documented["data"],
                *documented["classes"],
            ], name
            if len(parts) == 2:
                assert parts[1] in documented["classes"][parts[0]]["methods"], name


def test_the_check_notices_what_it_should():
    def newer(self, data, greedy=False, *, seeds=None): ...

    def renamed(self, batch, greedy=False): ...

    def other_default(self, data, greedy=True): ...

    def demanding(self, data, extra, greedy=False): ...

    wanted = ["self", "data", "greedy=False"]
    assert _signature_problem("f", newer, wanted) == {}
    assert "no parameter data" in _signature_problem("f", renamed, wanted)["f"]
    assert "defaults to True" in _signature_problem("f", other_default, wanted)["f"]
    assert _signature_problem("f", demanding, wanted) != {}
