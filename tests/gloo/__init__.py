"""Pools on real gloo ranks, without a model: every byte against one unsharded stock pool.

``worker``  a process that imports SGLang once and forks the ranks.
``ranks``   starts it, for the tests.
"""
