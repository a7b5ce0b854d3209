"""End-to-end tests: real SGLang engines on the CPU platform, prefill and decode over real Mooncake.

``spec``     what to run and what came of it, as plain data; no SGLang import.
``control``  test-only switches inside scheduler processes: odd chunk sizes, mechanisms broken on purpose, pool dumps.
``faults``   test-only faults inside scheduler processes, and records of what was written and released when.
``host``     a process that imports SGLang once and forks engines from it.
``harness``  ``run(spec) -> Report``, for the tests; reports are kept, so that specs shared by tests run once.
             ``Pair(spec)`` is a pair of engines that a test drives call by call.
``stack``    a pair on which faults are tried, and the proof that a fault did no harm.
"""
