"""Soak: mixed traffic against prefill CP with shared KV and a guarded decode, every answer compared with stock's.

``python -m soak --seconds 600 --cp 2 --seed 1 [--fp8]`` in the tests directory; exit status 0 only if all is well.

``traffic``  what is asked, from a seed: lengths, shared prefixes, repeats, aborts, prompts that are too long.
``worker``   the process that forks both pairs of engines (``e2e.host``) and runs the soak.
``run``      traffic in rounds; after each the engines are at rest, are counted, and the answers are compared.
``probe``    what the soak wants to know of a scheduler process beyond ``e2e.faults``.
``report``   the figures, and what is wrong with them.
"""
