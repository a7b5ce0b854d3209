"""Model-based tests: Hypothesis drives shared KV through requests, chunks, evictions and transfers beside an oracle.

One process plays all ranks of an attention-CP group, on a CPU and without servers. Real are, one of each per rank: the
allocator, the plan, the pool with its gather, the transfer split, and SGLang's prefix tree, ``ReqToTokenPool``,
``Req``, slot allocation and ``send_kv_chunk``. Stood in for are the model (rows of traceable bytes), the collectives of
torch.distributed, and decode.

``oracle``      what one unsharded pool would hold, and where the shared ones must hold it.
``collective``  all-gather and broadcast between ranks of one process, in lock step.
``rank``        one prefill rank.
``decode``      the decode side: page lists and a pool that counts writes.
``machine``     the rules and invariants.
``run``         runs them: ``cd tests && ../.venv/bin/python -m model.run --steps 1000000``.
"""
