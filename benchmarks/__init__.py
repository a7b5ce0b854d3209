"""Benchmarks: ratios and counts, each measured in one run; ``python -m benchmarks`` prints them as one table.

``rows``       what a section measures: rows with budgets, and curves.
``processes``  a process that can import SGLang on a machine without a GPU.
``forward``    one forward of the real pool, and what it costs; pages drawn from the real allocators.
``capacity``   the capacity multiple after the workspace is paid for.
``gather``     bytes that a layer's gather receives, beside the bound and beside an all-reduce.
``slopes``     how costs grow with prefix, chunk, ranks and pool.
``transfer``   bytes and descriptors of a transfer to decode.
``engine``     prefill time of real servers, stock and shared.
``topk``       what a gather of selected pages alone would save; not part of ``make bench``.
``page``       docs/benchmarks.md, from the JSON of a run; ``svg`` draws its pictures.
``allocator``  throughput and waits of the allocator, beside stock's.
``ops``        operations that launch work, and waits for the device, of real servers' forwards beside stock's.
``cli``        the command line.

The harnesses are those of the tests and the demo, so ``tests`` and ``examples`` are put on the import path.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

for _name in ("tests", "examples"):
    if str(ROOT / _name) not in sys.path:
        sys.path.append(str(ROOT / _name))
