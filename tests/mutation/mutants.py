"""The mutants: what is broken where, and the tests that are to see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One small break.

    Attributes:
        name: what is broken, as a fact.
        file: path under ``src/cp_shared_kv``.
        old: text that occurs there exactly once.
        new: what it becomes.
        tests: arguments for pytest: the tests that are to see it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The broken source.

        Raises:
            ValueError: the text is not there, or not once: the list is behind the product.
        """
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} holds {times} times {self.old!r}")
        return source.replace(self.old, self.new)


MODEL = ("tests/model",)
POOL = ("tests/gloo/test_pool_bytes.py",)
GROUP = ("tests/gloo/test_group.py",)
MISUSE = ("tests/gloo/test_pool_misuse.py",)
SELF_CHECK = ("tests/gloo/test_pool_self_check.py",)
PD = ("tests/pd/test_mooncake_pd.py",)
FAILURES = ("tests/pd/test_failures.py",)


def unit(name: str) -> tuple[str, ...]:
    return (f"tests/unit/test_{name}.py",)


MUTANTS = (
    # Who owns which page.
    Mutant(
        "the owner formula is off by one",
        "layout.py",
        "return np.where(array <= DUMMY_PAGE, NO_OWNER, (array - 1) % self.cp_size)",
        "return np.where(array <= DUMMY_PAGE, NO_OWNER, array % self.cp_size)",
        unit("layout"),
    ),
    Mutant(
        "the owner formula is off by one in torch alone",
        "layout.py",
        "return ((pages - 1) % self.cp_size).masked_fill",
        "return (pages % self.cp_size).masked_fill",
        unit("layout"),
    ),
    Mutant(
        "physical pages are off by one",
        "layout.py",
        "return (np.maximum(array, DUMMY_PAGE) + (self.cp_size - 1)) // self.cp_size",
        "return (np.maximum(array, DUMMY_PAGE) + self.cp_size) // self.cp_size",
        unit("layout"),
    ),
    Mutant(
        "positions are not filtered with their pages",
        "layout.py",
        "position_array[mine].astype(np.int32),",
        "position_array[: mine.sum()].astype(np.int32),",
        unit("layout"),
    ),
    Mutant(
        "positions count from the chunk, not from the request",
        "layout.py",
        "np.arange(chunk_page_start, chunk_page_start + len(pages))",
        "np.arange(len(pages))",
        unit("layout"),
    ),
    # The plan.
    Mutant(
        "the page that the prefix ends in is not gathered",
        "plan.py",
        "read, last = ceil_div(prefix_len, page_size), ceil_div(seq_len, page_size)",
        "read, last = prefix_len // page_size, ceil_div(seq_len, page_size)",
        MODEL,
    ),
    Mutant(
        "the page that the prefix ends in is not kept",
        "plan.py",
        "pages[prefix_len // page_size : last]",
        "pages[read:last]",
        MODEL,
    ),
    Mutant(
        "the surplus of ranks overlaps",
        "plan.py",
        "            end += extra\n",
        "",
        unit("plan"),
    ),
    Mutant(
        "pages are kept at their logical number",
        "plan.py",
        "keep_physical=layout.logical_pages_to_physical_np(kept)",
        "keep_physical=kept",
        MODEL,
    ),
    Mutant(
        "rows that pad a batch look past the page table",
        "plan.py",
        "(tables.shape[0], tables.shape[1] + 1), trash",
        "(tables.shape[0], tables.shape[1]), trash",
        unit("plan"),
    ),
    Mutant(
        "two requests may write one page",
        "plan.py",
        "if len(np.unique(writes)) < len(writes):",
        "if False:",
        unit("plan"),
    ),
    Mutant(
        "the workspace has no trash page",
        "plan.py",
        "ceil_div(context_pages, SLACK_FRACTION)) + 1",
        "ceil_div(context_pages, SLACK_FRACTION))",
        unit("plan"),
    ),
    Mutant(
        "new pages that stay partly empty are not laid out from the pool",
        "plan.py",
        "if int(seq) % layout.page_size]",
        "if False]",
        MODEL,
    ),
    # The pool.
    Mutant(
        "the gather is skipped",
        "pool.py",
        "        if self._gather is not None and active.plan.gathered_pages:\n",
        "        if False:\n",
        MODEL,
    ),
    Mutant(
        "the plan of the forward before is used",
        "pool.py",
        "        self._active = ActivePlan(plan, self.page_size, self.device)",
        "        self._last = getattr(self, '_last', None) or ActivePlan(plan, self.page_size, self.device)\n"
        "        self._active = self._last",
        POOL,
    ),
    Mutant(
        "a plan outlives its forward",
        "patches/attention.py",
        "        if end is not None:\n            end()",
        "        pass",
        MISUSE,
    ),
    Mutant(
        "index-K is not kept",
        "pool.py",
        "            self._storing_index_k = False\n        self._keep(self._index, layer_id)",
        "            self._storing_index_k = False",
        MODEL,
    ),
    Mutant(
        "the layer in the workspace is not checked",
        "pool.py",
        "if held != layer_id:",
        "if False:",
        MISUSE,
    ),
    Mutant(
        "padding rows are written over the first page of a request",
        "pool.py",
        "self.page_table, self._spans, self.page_size, width, rows, TRASH_SLOT",
        "self.page_table, self._spans, self.page_size, width, rows, self.page_size",
        POOL,
    ),
    Mutant(
        "a surplus is not sent",
        "collectives.py",
        "            _send_surplus(regions, self.rank",
        "            (lambda *a: None)(regions, self.rank",
        POOL,
    ),
    Mutant(
        "pages are looked for at another rank's place",
        "plan.py",
        "        place[where[:share]] = rank * share + ",
        "        place[where[:share]] = (layout.cp_size - 1 - rank) * share + ",
        POOL,
    ),
    Mutant(
        "a rank gathers into its own part alone",
        "collectives.py",
        "                _all_gather(outputs[first",
        "                (lambda *a: None)(outputs[first",
        POOL,
    ),
    Mutant(
        "the self-check of the group finds nothing",
        "collectives.py",
        "if found != expected or",
        "if False and",
        GROUP,
    ),
    # Capacity.
    Mutant(
        "the workspace is not charged",
        "patches/capacity.py",
        "return available - charge",
        "return available",
        GROUP,
    ),
    Mutant(
        "the index-K workspace is not charged",
        "patches/capacity.py",
        "(kv_bytes + index_bytes)",
        "kv_bytes",
        GROUP,
    ),
    Mutant(
        "ranks that disagree about the capacity go on",
        "patches/capacity.py",
        "if any(other != said[0] for other in said):",
        "if False:",
        GROUP,
    ),
    Mutant(
        "logical size and physical size need not fit",
        "allocator.py",
        "if logical_size != physical_size * cp_size:",
        "if False:",
        unit("allocator"),
    ),
    Mutant(
        "owners do not go on from a request's last page",
        "allocator.py",
        "            first = left.index(max(left)) if owner == NO_OWNER else (owner + 1) % ranks\n            parts",
        "            first = left.index(max(left))\n            parts",
        unit("allocator"),
    ),
    Mutant(
        "an owner without free pages strands those of the others",
        "allocator.py",
        "            owners, left = self._owners_past_empty(counts, previous)",
        "            return None",
        unit("allocator"),
    ),
    Mutant(
        "the page of a cached prefix is asked from the device though it was told",
        "allocator.py",
        "        last_pages, self._last_pages = self._last_pages, None",
        "        last_pages, self._last_pages = None, None",
        unit("allocator"),
    ),
    Mutant(
        "a long prefix is padded without limit",
        "plan.py",
        "(at_bound or total < PADDING_COUNTS_FROM)",
        "True",
        unit("plan"),
    ),
    # One layer ahead.
    Mutant(
        "a layer does not wait for its prefix",
        "prefetch.py",
        "        self._streams.current_stream().wait_event(ready)\n",
        "        pass\n",
        unit("prefetch"),
    ),
    Mutant(
        "a fetch does not wait for the buffer's previous tenant",
        "prefetch.py",
        "        self._side.wait_stream(self._streams.current_stream())\n",
        "",
        unit("prefetch"),
    ),
    Mutant(
        "a forward that has failed leaves its fetch running",
        "prefetch.py",
        "            self._streams.current_stream().wait_stream(self._side)\n",
        "            pass\n",
        unit("prefetch"),
    ),
    Mutant(
        "a fetch does not wait for a loader",
        "pool.py",
        "            self.layer_transfer_counter.wait_until(layer)",
        "            pass",
        unit("public_faults"),
    ),
    # Page ids on the host.
    Mutant(
        "requests of other namespaces share their pages",
        "host_pages.py",
        "    return tuple(getattr(req, name) for name in installed().tree_namespace)",
        "    return ()",
        unit("host_pages"),
    ),
    Mutant(
        "a request keeps its own pages where the tree had some already",
        "host_pages.py",
        "        pages[first:start] = given\n",
        "",
        unit("host_pages"),
    ),
    Mutant(
        "pages that a request puts in the tree are not noted",
        "host_pages.py",
        "        self._cached.put(before, parts[start - first :], pages[start:end])\n",
        "",
        unit("host_pages"),
    ),
    Mutant(
        "wrongly noted pages are not noticed",
        "host_pages.py",
        "            if self._outcomes.popleft()[1].item():",
        "            if self._outcomes.popleft()[1].item() and False:",
        unit("host_pages"),
    ),
    # Divergence.
    Mutant(
        "ranks that diverge go on",
        "divergence.py",
        "if any(not torch.equal(other, said[0]) for other in said):",
        "if False:",
        GROUP,
    ),
    Mutant(
        "the checksum forgets earlier forwards",
        "divergence.py",
        "zlib.crc32(used.tobytes(), self.checksum)",
        "zlib.crc32(used.tobytes(), 0)",
        unit("divergence"),
    ),
    # Transfer.
    Mutant(
        "the end of a chunk is that of this rank's pages",
        "transfer.py",
        "PagePositions(positions, chunk.stop)",
        "PagePositions(positions, int(positions[-1]) + 1 if len(positions) else 0)",
        unit("transfer"),
    ),
    Mutant(
        "positions are not checked against decode's pages",
        "patches/transfer.py",
        '    problem = chunk_problem(named["index_slice"].stop, state, _destinations(manager, room))\n',
        "    problem = None\n",
        PD,
    ),
    Mutant(
        "every rank sends all index-K pages",
        "patches/transfer.py",
        "        source[i], destination[i] = split_state(layout, source[i], destination[i])\n",
        "",
        PD,
    ),
    Mutant(
        "the return code of the state transfer is ignored",
        "patches/transfer.py",
        "        sending.failed_state.add((req.room, req.mooncake_session_id))\n",
        "",
        PD,
    ),
    Mutant(
        "decode is told of a failure while other ranks write",
        "patches/transfer.py",
        "        if not everywhere:\n",
        "        if False:\n",
        FAILURES,
    ),
    Mutant(
        "a rank that fails tells decode at once",
        "patches/transfer.py",
        "        return None  # decode is told when all ranks are quiet\n",
        "        pass\n",
        FAILURES,
    ),
    Mutant(
        "chunks of a failed request are still written",
        "patches/transfer.py",
        "    if manager.request_status.get(room, KVPoll.Failed) == KVPoll.Failed:\n        return True\n",
        "",
        FAILURES,
    ),
    Mutant(
        "an exception ends the transfer thread",
        "patches/transfer.py",
        "            if room is None:\n",
        "            if True:\n",
        PD,
    ),
    Mutant(
        "a failed write refuses the decode server for good",
        "patches/prefill_queue.py",
        "            manager.failed_sessions.discard(session)\n",
        "",
        FAILURES,
    ),
    Mutant(
        "a request that decode has no room for is computed",
        "patches/prefill_queue.py",
        "    if problem is None:\n        return False",
        "    return False",
        (*PD, "-k", "before_a_byte"),
    ),
    Mutant(
        "decode is not told of requests that ended before it announced itself",
        "patches/transfer.py",
        "        sending.unanswered.add(room)\n",
        "        pass\n",
        FAILURES,
    ),
    Mutant(
        "decode gives pages away while prefill writes",
        "patches/decode.py",
        "    if time.monotonic() < until:\n        return KVPoll.WaitingForInput\n",
        "",
        FAILURES,
    ),
    Mutant(
        "a thread that is at a room counts as done with it",
        "rooms.py",
        "            return self.room != room\n",
        "            return True\n",
        unit("rooms"),
    ),
    # Failing closed.
    Mutant(
        "changed source is trusted",
        "seams.py",
        "elif found.fingerprint != target.fingerprint:",
        "elif False:",
        unit("seams"),
    ),
    Mutant(
        "changed parameters are trusted",
        "seams.py",
        "        if found.parameters != target.parameters:\n",
        "        if False:\n",
        unit("seams"),
    ),
    Mutant(
        "the gate names the first unmet requirement only",
        "gate.py",
        "        if refusals := self.refusals(facts):\n",
        "        if refusals := self.refusals(facts)[:1]:\n",
        unit("gate"),
    ),
    Mutant(
        "fp8 KV in trtllm's layout passes the gate",
        "gate.py",
        "if fp8 and trtllm else None",
        "if False else None",
        unit("gate"),
    ),
    Mutant(
        "the switch does not beat the plugin list",
        "config.py",
        "    if switch is not None:\n",
        "    if switch is not None and not environ.get(PLUGINS_ENV):\n",
        unit("config"),
    ),
    Mutant(
        "any pickle of the arguments patches the process it arrives in",
        "plugin.py",
        "return _arrive if spawning else _TravellingDecision",
        "return _arrive",
        unit("plugin"),
    ),
    Mutant(
        "a scheduler whose decisions differ goes on",
        "plugin.py",
        "    if carried is None or decision is None or carried.decision != decision:\n",
        "    if carried is None or decision is None:\n",
        unit("plugin"),
    ),
)
