# SPDX-License-Identifier: Apache-2.0
"""``nemo-rl config``: look at a configuration without running it.

nemo-rl config show    --config FILE [key=value ...]   the resolved tree, defaults included
nemo-rl config check   --config FILE [key=value ...]   every violation at once, or the batch equation
nemo-rl config explain KEY [KEY ...]                   type, default, meaning and where a key is used
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nemo_rl.cli.config_args import add_config_arguments, compose_from_args

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_rl.algorithms.config import GRPOMasterConfig, SFTMasterConfig

_PLANNED = ("dpo", "rm", "distillation", "ppo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``nemo-rl config`` on `parser`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="show|check|explain")
    show = verbs.add_parser("show", help="print the resolved tree, defaults included")
    check = verbs.add_parser("check", help="print every violation, or the batch equation")
    for verb in (show, check):
        add_config_arguments(verb)
    show.add_argument("--key", help="print this section only")
    explain = verbs.add_parser("explain", help="say what a key means and where it is used")
    explain.add_argument("keys", nargs="+", metavar="KEY", help="dotted key, or the last part of one")
    explain.add_argument("--algorithm", choices=("grpo", "sft"), help="look in this tree only")


def run(args: argparse.Namespace) -> int:
    """Run the verb; 0 is fine, 2 is a configuration or a key that is wrong."""
    return {"show": _show, "check": _check, "explain": _explain}[args.verb](args)


def _show(args: argparse.Namespace) -> int:
    import yaml

    from nemo_rl.utils.config import build

    tree, path = compose_from_args(args)
    shown: Any = build(tree, master_class(tree, path), source=path).to_dict()
    for part in args.key.split(".") if args.key else ():
        if not isinstance(shown, dict) or part not in shown:
            print(f"nemo-rl config show: there is no key {args.key}", file=sys.stderr)
            return 2
        shown = shown[part]
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip().removesuffix("\n..."))
    return 0


def _check(args: argparse.Namespace) -> int:
    from nemo_rl.algorithms.batch_plan import batch_equation
    from nemo_rl.utils.config import build

    tree, path = compose_from_args(args)
    config = build(tree, master_class(tree, path), source=path)
    print(f"{path}: ok\n{batch_equation(config)}")
    return 0


def master_class(tree: DictConfig, path: str) -> type[GRPOMasterConfig] | type[SFTMasterConfig]:
    """Give the class of the whole tree by the algorithm section that it has.

    Raises:
        ConfigError: no section names an algorithm, or one that is not supported yet.
    """
    from nemo_rl.algorithms.config import MASTER_CONFIGS
    from nemo_rl.utils.config import ConfigError
    from nemo_rl.utils.config_model import Violation
    from nemo_rl.utils.config_validate import closest

    known = list(MASTER_CONFIGS)
    found = [name for name in known if name in tree]
    if len(found) == 1:
        return MASTER_CONFIGS[found[0]]
    names = " or ".join(known)
    planned = [name for name in _PLANNED if name in tree]
    if planned:
        raise ConfigError([Violation(planned[0], f"this algorithm is not supported yet; use {names}")], path)
    near = [word for key in tree for word in closest(str(key), known, 1)]
    if len(found) == 0 and near:
        return MASTER_CONFIGS[near[0]]  # validation reports the misspelt section
    what = f"sections of two algorithms: {', '.join(found)}" if found else f"no section {names}"
    raise ConfigError(
        [Violation(names, f"the tree has {what}; it needs one, which chooses the algorithm")], path
    )


def _explain(args: argparse.Namespace) -> int:
    from nemo_rl.algorithms.config import MASTER_CONFIGS
    from nemo_rl.utils.config_explain import explain

    masters = [MASTER_CONFIGS[args.algorithm]] if args.algorithm else list(MASTER_CONFIGS.values())
    status = 0
    for i, key in enumerate(args.keys):
        text, found = explain(key, masters)
        if not found:
            status = 2
        print(("\n" if i else "") + text, file=sys.stdout if found else sys.stderr)
    return status
