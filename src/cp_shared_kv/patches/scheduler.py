"""Scheduler start: attest before pools are built, report the capacity, refuse prompts that can never be scheduled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from cp_shared_kv.gate import BOTH, role_of
from cp_shared_kv.patches import Patch, PatchGroup, argument

logger = logging.getLogger("cp_shared_kv")


def longest_schedulable_input(logical_tokens: int, page_size: int) -> int:
    """Longest prompt that SGLang's prefill budget can ever admit, in tokens.

    The budget wants prompt + 1 output token + one page strictly below the free tokens; anything longer waits forever
    at the head of the queue.
    """
    return logical_tokens - page_size - 2


def _init(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from cp_shared_kv.plugin import attest_scheduler

    server_args = argument(args, kwargs, 0, "server_args")
    attest_scheduler(server_args)
    result = wrapped(*args, **kwargs)
    if role_of(server_args) == "decode":
        return result
    scheduler = instance
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    # Stock rejects only from `max_req_input_len` on, and with truncation allowed serves exactly that length.
    limit = longest_schedulable_input(scheduler.max_total_num_tokens, scheduler.page_size)
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, limit)
    logger.info(
        "CP shared KV scheduler capacity: logical_tokens=%d, physical_tokens_per_rank=%d, cp_size=%d",
        scheduler.max_total_num_tokens,
        pool.physical_size,
        pool.layout.cp_size,
    )
    return result


GROUP = PatchGroup(
    name="scheduler",
    roles=BOTH,
    patches=(
        Patch(
            "scheduler.init",
            _init,
            why="every seam must be proven in place before the first pool is built; stock accepts prompts within a "
            "page of the capacity that it can never schedule, and they block the queue",
            until="SGLang stops the server when a plugin fails, and admits by the budget that it schedules by",
        ),
    ),
)
