"""How the cost of a forward grows with prefix, chunk, ranks and pool; nothing may grow with the pool."""

from __future__ import annotations

import dataclasses
from functools import partial
from statistics import median
from typing import Any

from gloo.forked import on_ranks

from .forward import PAGE, Forward, make_shared_pool, seconds_of
from .processes import sglang_process
from .rows import Measured, Row

LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward: ranks, pages of a rank's pool, prefix and chunk in pages, and the context that is paid for."""

    ranks: int
    pool: int
    prefix: int
    chunk: int
    context: int

    @property
    def pages(self) -> list[int]:
        """Logical pages of the request: the last ones of the pool."""
        last = self.pool * self.ranks
        return list(range(last - self.prefix - self.chunk + 1, last + 1))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one forward of ``LAYERS`` layers costs one rank.

    Attributes:
        received: bytes from other ranks.
        operations: operations dispatched that are not views.
        allocated: bytes of tensors that those operations made.
        workspace: bytes of the workspaces.
    """

    received: int
    operations: int
    allocated: int
    workspace: int


def _counting() -> Any:
    """A dispatch mode with ``operations`` and ``allocated`` as in :class:`Cost`; needs torch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.operations = self.allocated = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if not function.is_view:
                self.operations += 1
                given = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
                made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                self.allocated += sum(tensor.nbytes for tensor in made if tensor.data_ptr() not in given)
            return out

    return Counting()


def cost(rank: int, size: int, case: Case) -> Cost:
    """Cost of a forward on a gloo rank."""
    from cp_shared_kv.metrics import COUNTERS

    pool = make_shared_pool(rank, size, case.pool, case.context * PAGE, LAYERS)
    forward = Forward(pool, case.pages, case.prefix * PAGE, (case.prefix + case.chunk) * PAGE)
    forward.run()  # which layers need what is known from the second forward on
    before = COUNTERS.snapshot()["gathered_bytes"]
    with _counting() as counting:
        forward.run()
    received = COUNTERS.snapshot()["gathered_bytes"] - before
    return Cost(received, counting.operations, counting.allocated, pool.workspace_bytes)


def plan_time(base: Case, grown: Case, times: int) -> float:
    """Median wall time of the plan of ``grown`` over that of ``base``, made in turn."""
    import numpy as np

    from cp_shared_kv.layout import CpSharedKVLayout
    from cp_shared_kv.plan import build_plan, workspace_pages

    seconds: dict[Case, list[float]] = {base: [], grown: []}
    for case in [base, grown] * (times + 1):
        layout = CpSharedKVLayout(PAGE, case.ranks, 0)
        capacity = workspace_pages(case.context * PAGE, PAGE, case.ranks)
        tokens = case.prefix * PAGE, (case.prefix + case.chunk) * PAGE
        table = np.array([case.pages])
        plan = partial(build_plan, layout, table, tokens[:1], tokens[1:], capacity)
        seconds[case].append(seconds_of(plan))
    return median(seconds[grown]) / median(seconds[base])


#: Field of a cost, its title, and where it comes from.
COSTS = (
    ("received", "bytes received", "the product's counter"),
    ("operations", "operations", "dispatched by torch, views left out"),
    ("allocated", "bytes allocated", "tensors that operations make"),
    ("workspace", "workspace bytes", "of one context, both buffers"),
)
#: Growth of each cost that is allowed, as (budget, bound); costs that are not named have none.
Allowed = dict[str, tuple[float | None, str]]
SAME = (1, "exactly")


def measure(base: Case = Case(2, 128, 160, 4, 1400), factor: int = 8, times: int = 30) -> Measured:
    """Rows: each cost at a multiple of one size, over the cost at the base.

    Args:
        base: the forward that others are compared with.
        factor: how many times as large pool, prefix and chunk are.
        times: measurements of each plan.
    """
    linear = (factor * 1.02, "at most")
    ranks = 2 * base.ranks
    share = (1 - 1 / ranks) / (1 - 1 / base.ranks)
    grown: list[tuple[str, Case, Allowed]] = [
        (
            f"pool x {factor}",
            dataclasses.replace(base, pool=factor * base.pool),
            dict.fromkeys(("received", "operations", "allocated", "workspace"), SAME),
        ),
        (
            f"prefix x {factor}",
            dataclasses.replace(base, prefix=factor * base.prefix, pool=factor * base.pool),
            {"received": linear, "operations": SAME, "allocated": linear, "workspace": SAME},
        ),
        (
            f"chunk x {factor}",
            dataclasses.replace(base, chunk=factor * base.chunk),
            {"received": SAME, "operations": SAME, "allocated": linear, "workspace": SAME},
        ),
        (
            "ranks x 2",
            dataclasses.replace(base, ranks=ranks),
            {"received": (share * 1.02, "at most"), "operations": (1, "at most"), "workspace": (1.02, "at most")},
        ),
    ]
    start_size = f"{base.prefix} + {base.chunk} pages, CP {base.ranks}, {base.pool} pages a rank"
    how = f"{LAYERS} layers; {start_size} at the base; {{}}"
    measured = Measured()
    with sglang_process() as call:
        start: Cost = call(on_ranks, cost, base.ranks, base)[0]
        for name, case, allowed in grown:
            costs: Cost = call(on_ranks, cost, case.ranks, case)[0]
            for field, title, source in COSTS:
                ratio = getattr(costs, field) / getattr(start, field)
                budget, bound = allowed.get(field, (None, "at most"))
                measured.rows.append(Row(f"{title}, {name}", ratio, "ratio", how.format(source), budget, bound))
            ratio = call(plan_time, base, case, times)
            measured.rows.append(Row(f"plan time, {name}", ratio, "ratio", how.format("median on the host, in turn")))
    return measured
