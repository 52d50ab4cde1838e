# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a config, it loads or is refused with a list of violations; nothing else is raised."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_rl.algorithms.config import GRPOMasterConfig
from nemo_rl.utils.config import ConfigError, build

RECIPE = Path(__file__).parents[1] / "data" / "recipe_nemo_rl.yaml"
JUNK: list[Any] = [
    *(None, 3, -1, 1.5, True, "x", "", "null", "???", float("nan"), float("inf")),
    *(
        [],
        {},
        [1],
        [None],
        {"a": 1},
        {"a": {"b": 1}},
        [{"a": 1}],
        {1: 2},
        {"enabled": True},
        {"enabled": "yes"},
    ),
    *("${nothing}", "${policy}", "${grpo}", "${div:1,0}", "${nonsense:1}"),
]


def _paths(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from _paths(value, (*prefix, key))


@pytest.mark.parametrize("seed", range(4))
def test_junk_anywhere_is_refused_and_never_crashes(seed):
    rng = random.Random(seed)
    good = OmegaConf.to_container(OmegaConf.load(RECIPE))
    paths = list(_paths(good))
    refused: list[ConfigError] = []
    for _ in range(12):
        tree: Any = copy.deepcopy(good)
        for path in rng.sample(paths, rng.randint(1, 3)):
            node = tree
            for key in path[:-1]:
                node = node[key] if isinstance(node, (dict, list)) and _has(node, key) else None
            if isinstance(node, (dict, list)) and _has(node, path[-1]):
                node[path[-1]] = copy.deepcopy(rng.choice(JUNK))
        try:
            build(OmegaConf.create(tree), GRPOMasterConfig)
        except ConfigError as error:
            refused.append(error)
    assert len(refused) > 5
    for error in refused:
        assert error.violations
        assert all(violation.key and violation.message for violation in error.violations)


def _has(node: dict[Any, Any] | list[Any], key: Any) -> bool:
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


def test_sections_that_contain_each_other_are_refused():
    good = OmegaConf.load(RECIPE)
    OmegaConf.update(good, "policy.hf_config_overrides", {"x": "${policy}"})
    with pytest.raises(ConfigError, match=r"policy.hf_config_overrides.x: cannot be resolved"):
        build(good, GRPOMasterConfig)
    OmegaConf.update(good, "policy.hf_config_overrides", {"x": "${data}"})
    OmegaConf.update(good, "data.train.kwargs", {"y": "${policy}"}, force_add=True)
    with pytest.raises(ConfigError, match=r"cannot be resolved: \$\{policy\} contains this key"):
        build(good, GRPOMasterConfig)
