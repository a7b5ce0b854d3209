"""End-to-end tests: real SGLang engines on the CPU platform, prefill and decode over real Mooncake.

``spec``     what to run and what came of it, as plain data; no SGLang import.
``control``  test-only switches inside scheduler processes: odd chunk sizes, mechanisms broken on purpose, pool dumps.
``host``     a process that imports SGLang once and forks engines from it.
``harness``  ``run(spec) -> Report``, for the tests; reports are kept, so that specs shared by tests run once.
"""
