"""Argument handling: the flag, and the one decision that the launching process makes.

The only patches that are applied whenever the plugin is loaded. They add the flag to SGLang's parser, note on the
``ServerArgs`` whether it was given, and decide once the arguments have been resolved and checked by SGLang itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cp_shared_kv.config import FLAG_DEST, FLAGS
from cp_shared_kv.patches import Patch, PatchGroup, argument

#: Underscore attributes survive pickling and are allowed on sealed ``ServerArgs`` of later releases.
FLAG_ATTRIBUTE = "_cp_shared_kv_flag"
DECISION_ATTRIBUTE = "_cp_shared_kv_decision"


def _add_cli_args(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    parser: argparse.ArgumentParser = argument(args, kwargs, 0, "parser")
    parser.add_argument(
        *FLAGS,
        dest=FLAG_DEST,
        action="store_true",
        default=False,
        help="Keep each page of the NSA/MLA KV cache on one prefill context-parallel rank instead of on all of them, "
        "for N times the logical capacity (plugin sglang-cp-shared-kv). The launch stops if a requirement is unmet.",
    )
    return result


def _from_cli_args(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from cp_shared_kv.plugin import attest_arguments

    namespace = argument(args, kwargs, 0, "args")
    asked = bool(getattr(namespace, FLAG_DEST, False))
    if asked:
        attest_arguments()  # nobody decides where the check of the arguments was replaced
    server_args = wrapped(*args, **kwargs)
    setattr(server_args, FLAG_ATTRIBUTE, asked)
    return server_args


def _check_server_args(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from cp_shared_kv.plugin import decide

    result = wrapped(*args, **kwargs)
    decide(instance)
    return result


GROUP = PatchGroup(
    name="arguments",
    patches=(
        Patch(
            "server_args.add_cli_args",
            _add_cli_args,
            why="the user turns shared KV on with a server flag, and a misspelt one must be an error",
            until="SGLang lets plugins add server flags",
        ),
        Patch(
            "server_args.from_cli_args",
            _from_cli_args,
            why="stock copies only its own fields from the command line, so the flag would be dropped",
            until="SGLang lets plugins add server flags",
        ),
        Patch(
            "server_args.check_server_args",
            _check_server_args,
            why="the gate needs resolved arguments (attn_cp_size, page_size, backends) and must run before any "
            "process is started or weight loaded",
            until="SGLang offers plugins a hook after argument resolution",
        ),
    ),
)
