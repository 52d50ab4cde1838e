# SPDX-License-Identifier: Apache-2.0
"""Validation of a resolved config tree: every violation at once, with dotted keys and suggestions. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from nemo_rl.utils.config_model import ConfigModel, Hint, NotYet, Violation, marker
from nemo_rl.utils.config_schema import branches, schema_keys

_MAX_ROUNDS = 4


def validate[T: ConfigModel](data: Mapping[str, Any], cls: type[T]) -> tuple[T | None, list[Violation]]:
    """Check a plain tree against `cls`.

    What is wrong is taken out and the rest is checked further, so that one run reports everything; a check across keys
    is left out where one of its keys is broken.

    Returns:
        The model (None if there is any violation) and the violations: unknown keys, wrong types,
        what is not supported yet, and what does not fit together.
    """
    tree = _copy(data)
    problems: list[Violation] = []
    broken: set[str] = set()
    for path, suggestions, instead in list(_unknown_keys(tree, cls, "")):
        value = _pop(tree, path)
        problems.append(Violation(path, instead) if instead else _unknown_key(path, suggestions, value, cls))
        leaves = list(_leaf_paths(value)) if isinstance(value, Mapping) else [""]
        broken.update(name + leaf for name in (path, *suggestions) for leaf in leaves)
    config = None
    for _ in range(_MAX_ROUNDS):
        try:
            config = cls.model_validate(tree, by_alias=True, by_name=False)
            break
        except ValidationError as error:
            found = _type_problems(error, tree)
            problems.extend(found)
            broken.update(item.key for item in found)
            if not [item for item in found if _pop(tree, item.key) is not _ABSENT]:
                break
    if config is not None:
        problems.extend(_unsupported(config, ""))
        problems.extend(
            violation
            for violation in _cross_checks(config, "")
            if not any(_touches(key, broken) for key in (violation.key, *violation.reads))
        )
    return (None if problems else config), problems


def hints(config: ConfigModel) -> Iterator[str]:
    """Give one sentence per performance hint that is set to something else than its default."""
    for path, section, key in _enabled_fields(config, ""):
        info = type(section).documented_fields()[key][1]
        hint = marker(info, Hint)
        default = info.get_default(call_default_factory=True, validated_data={})
        if hint is not None and section[key] != default:
            yield f"{path}={section[key]} has no effect in this version: {hint.why}"


def _unknown_keys(
    data: Mapping[str, Any], cls: type[ConfigModel], prefix: str
) -> Iterator[tuple[str, list[str], str]]:
    """Give every key that the schema does not know: path, keys it may have meant, what replaces it if it is gone."""
    known = cls.documented_fields()
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in known:
            if key in cls.gone:
                yield path, [], cls.gone[key]
            else:
                yield path, [f"{prefix}{name}" for name in closest(key, list(known))], ""
            continue
        below = branches(known[key][1].annotation)
        if isinstance(value, Mapping) and below.section:
            yield from _unknown_keys(value, below.section, f"{path}.")
        elif isinstance(value, Mapping) and below.values:
            for name, item in value.items():
                if isinstance(item, Mapping):
                    yield from _unknown_keys(item, below.values, f"{path}.{name}.")
        elif isinstance(value, list) and below.items:
            for i, item in enumerate(value):
                if isinstance(item, Mapping):
                    best = min(
                        below.items, key=lambda c, keys=set(item): len(keys - set(c.documented_fields()))
                    )
                    yield from _unknown_keys(item, best, f"{path}.{i}.")


def closest(word: str, words: list[str], limit: int = 3) -> list[str]:
    """Give up to `limit` of `words` that `word` may be a misspelling of, the best first."""
    near = [w for w in words if _one_edit_apart(word, w)]
    return (near + [w for w in difflib.get_close_matches(word, words, limit, 0.6) if w not in near])[:limit]


def _one_edit_apart(a: str, b: str) -> bool:
    if abs(len(a) - len(b)) > 1 or max(len(a), len(b)) < 2:
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    swapped = a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :]
    return a[i + 1 :] == b[i + 1 :] or a[i + 1 :] == b[i:] or a[i:] == b[i + 1 :] or swapped


def _unknown_key(path: str, suggestions: list[str], value: Any, cls: type[ConfigModel]) -> Violation:
    """Say what an unknown key may have meant; the single leaf below a misspelt section is followed."""
    leaves = list(_leaf_paths(value)) if isinstance(value, Mapping) else []
    tail = leaves[0] if len(leaves) == 1 else ""
    keys = schema_keys(cls)
    leaf = (path + tail).rsplit(".", 1)[-1]
    if not suggestions:
        places = [key for key in keys if key.rsplit(".", 1)[-1] == leaf][:3]
        return Violation(
            path + tail, "unknown key" + (f"; did you mean {' or '.join(places)}?" if places else "")
        )
    places = [key for key in keys if key.rsplit(".", 1)[-1] == leaf]
    elsewhere = bool(tail) and not any(name + tail in keys for name in suggestions)
    rest = "" if elsewhere and not places else tail  # suggest no key that does not exist
    message = f"unknown key; did you mean {' or '.join(name + rest for name in suggestions)}?"
    if elsewhere and places:
        message += f" (the schema has {leaf} at {places[0]})"
    return Violation(path + tail, message)


def _leaf_paths(value: Mapping[str, Any]) -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from (f".{key}{rest}" for rest in _leaf_paths(item))
        else:
            yield f".{key}"


def _type_problems(error: ValidationError, data: Mapping[str, Any]) -> list[Violation]:
    """Turn pydantic's errors into violations.

    Of the branches of a union only the one that fits the data is kept, and a derived value is not reported beside its
    source.
    """
    by_key: dict[str, list[str]] = {}
    derived: set[str] = set()
    for item in error.errors(include_url=False, include_context=False):
        missing = item["type"] == "missing"
        key, written = _data_path(item["loc"], data, missing)
        message = item["msg"].removeprefix("Value error, ")
        if missing:
            message = "is required"
        elif not isinstance(item["input"], (Mapping, list)):
            message = f"{message[0].lower()}{message[1:]}, got {item['input']!r}"
        by_key.setdefault(key, []).append(message)
        if not written and not missing:
            derived.add(key)
    if len(derived) < len(by_key):
        by_key = {key: messages for key, messages in by_key.items() if key not in derived}
    deepest = [key for key in by_key if not any(other.startswith(f"{key}.") for other in by_key)]
    return [Violation(key, " or ".join(dict.fromkeys(by_key[key]))) for key in deepest]


def _data_path(loc: tuple[int | str, ...], data: Any, missing: bool) -> tuple[str, bool]:
    """Give the dotted key of an error location, without union tags, and whether the user wrote it."""
    parts, node, written = [], data, True
    for i, part in enumerate(loc):
        if isinstance(node, Mapping) and (part in node or (missing and i == len(loc) - 1)):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        elif isinstance(node, Mapping) and isinstance(part, str) and part.isidentifier() and part.islower():
            node, written = {}, False  # a derived or default section that the user did not write
        else:
            continue
        parts.append(str(part))
    return ".".join(parts), written


def _enabled_fields(section: ConfigModel, prefix: str) -> Iterator[tuple[str, ConfigModel, str]]:
    """Walk (path, section, key) over the tree; of a section with ``enabled: false`` only `enabled` is visited."""
    keys = section.keys()
    if "enabled" in section and section["enabled"] is False:
        keys = ["enabled"]
    for key in keys:
        path = f"{prefix}{key}"
        yield path, section, key
        for name, child in _child_sections(section[key]):
            yield from _enabled_fields(child, f"{path}{name}.")


def _child_sections(value: Any) -> Iterator[tuple[str, ConfigModel]]:
    if isinstance(value, ConfigModel):
        yield "", value
    elif isinstance(value, Mapping):
        yield from ((f".{name}", item) for name, item in value.items() if isinstance(item, ConfigModel))
    elif isinstance(value, list):
        yield from ((f".{i}", item) for i, item in enumerate(value) if isinstance(item, ConfigModel))


def _unsupported(config: ConfigModel, prefix: str) -> Iterator[Violation]:
    for path, section, key in _enabled_fields(config, prefix):
        limit = marker(type(section).documented_fields()[key][1], NotYet)
        if limit is not None and not limit.accepts(section[key]):
            value = section[key]
            shown = str(value).lower() if isinstance(value, bool) else value
            what = "is" if isinstance(value, (ConfigModel, dict)) else f"{shown} is"
            yield Violation(path, f"{what} not supported yet; use {limit.use}")


def _cross_checks(section: ConfigModel, prefix: str) -> Iterator[Violation]:
    if "enabled" in section and section["enabled"] is False:
        return
    for item in section.violations():
        yield Violation(prefix + item.key, item.message, tuple(prefix + key for key in item.reads))
    for key in section:
        for name, child in _child_sections(section[key]):
            yield from _cross_checks(child, f"{prefix}{key}{name}.")


def _touches(key: str, broken: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in broken)


_ABSENT = object()


def _pop(data: Any, path: str) -> Any:
    """Take the value at a dotted path out of nested dictionaries and lists."""
    *parents, last = path.split(".")
    node = data
    for part in parents:
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return _ABSENT
    if isinstance(node, dict):
        return node.pop(last, _ABSENT)
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        return node.pop(int(last))
    return _ABSENT


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
