"""Byte-exact tests of the Mooncake transfer between prefill CP ranks and decode ranks, without a model.

``scenario``  what to run and what was seen, as plain data; no SGLang import.
``standins``  the few SGLang objects that are not the real ones: server arguments, request, tree cache, schedulers.
``product``   the product's patches, resolved once.
``wire``      the tap on Mooncake's write call: counts pages and bytes, checks source addresses, injects faults.
``sabotage``  the product or stock SGLang broken on purpose, to show that the tests see it.
``prefill``   one prefill CP rank (process).
``decode``    one decode TP rank (process).
``pools``     pools of known bytes, process groups and the engine, for both sides.
``server``    a process that has imported SGLang once and forks the ranks of each scenario.
``harness``   ``run(scenario) -> Report``, for the tests.
``checks``    what must hold of a report.

PD_LOGS=1 in the environment prints the log of every rank after each scenario.
"""
