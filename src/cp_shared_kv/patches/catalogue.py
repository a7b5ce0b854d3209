"""The catalogue of seams, as a page: ``python -m cp_shared_kv.patches.catalogue > docs/patches.md``.

Everything on the page is data: the patches of each group, the release table, and the reasons below for seams that are
not wrapped. Neither SGLang nor an accelerator is needed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from cp_shared_kv.patches import PatchGroup, arguments, builtin_groups
from cp_shared_kv.releases import ArgumentNames, Release, release_for, supported_versions

COMMAND = "python -m cp_shared_kv.patches.catalogue > docs/patches.md"

INTRODUCTION = f"""\
<!-- Generated. Change the data, then run: {COMMAND} -->

# Seams and patches

A *seam* is a function of SGLang that this plugin wraps or builds on. This page lists all of them, by the group of
patches that needs them. For each release it says where the seam lies and how it looked when it was taken up: its
parameters, and a *fingerprint*, the first 16 hex digits of the SHA-256 of its source.

| kind | meaning |
|---|---|
| wrap | the plugin wraps it while shared KV is on; undone, SGLang holds the very same object again |
| override | a class of the plugin overrides it; the stock class is left alone |
| relies on | the plugin calls it, or counts on what it does; it is checked but not touched |
| translate | a `ServerArgs` field whose name differs between releases |

**When a seam does not fit.** All seams are compared with SGLang's source before the first one is touched. One that is
missing, takes other parameters, has other source, or was taken by another plugin is refused, and every problem is named
in one message: the launch stops where shared KV was asked for, and SGLang stays stock where it was not.
`CP_SHARED_KV_ALLOW_CHANGED_SOURCE=1` trusts other source, with a warning; nothing trusts other parameters. Wrappers
that other plugins put on the same functions through SGLang's `HookRegistry` (`BEFORE`, `AFTER`, `AROUND`) are allowed;
its `REPLACE` is refused by the name of the plugin.

Seams that are overridden or relied on go when the wrapped ones of their group go.
"""


@dataclass(frozen=True)
class Dependency:
    """A seam that is not wrapped: its kind (``override`` or ``relies on``), and why it is needed."""

    kind: str
    why: str


def _override(why: str) -> Dependency:
    return Dependency("override", why)


def _relies(why: str) -> Dependency:
    return Dependency("relies on", why)


_BALANCED = "pages are drawn on the host, cyclic in their owners; the stock kernel lays them out as slots"
_ON_HOST = "free pages are kept on the host, apart by owner"
_SHOWN = "reads the index-K buffer that the pool shows"
_CHECKS_LAYER = "what is read is the workspace, which must hold this very layer"

#: Group -> seam of its ``relies_on`` -> what it is needed for.
DEPENDENCIES: Mapping[str, Mapping[str, Dependency]] = {
    "page_ids": {
        "cache.prefix_kv_indices": _relies("gives the slots of a request's prefix"),
        "chunk_cache.cache_unfinished_req": _relies("leaves a request's pages as they are"),
        "tree.match_prefix": _relies("returns the slots that were inserted for these tokens"),
    },
    "capacity": {
        "allocator.alloc": _override(_BALANCED),
        "allocator.alloc_decode": _override(_BALANCED),
        "allocator.alloc_decode_kernel": _relies("lays drawn pages out as slots"),
        "allocator.alloc_extend": _override(_BALANCED),
        "allocator.alloc_extend_kernel": _relies("lays drawn pages out as slots"),
        "allocator.available_size": _override(_ON_HOST),
        "allocator.backup_state": _override(_ON_HOST),
        "allocator.clear": _override(_ON_HOST),
        "allocator.free": _override(_ON_HOST),
        "allocator.free_group_begin": _override("keeps what is freed until the group ends"),
        "allocator.free_group_end": _override("frees what a group has kept, by one call of free"),
        "allocator.free_page_ids": _override(_ON_HOST),
        "allocator.free_segment": _override(_ON_HOST),
        "allocator.get_all_free_pages": _override(_ON_HOST),
        "allocator.merge_and_sort_free": _override(_ON_HOST),
        "allocator.restore_state": _override(_ON_HOST),
        "allocator.init": _override("the allocator pages logical slots, N times as many as the pool holds"),
        "capacity.mla_kv_cache_dim": _relies("gives the bytes of a token in the MLA KV workspace that is charged for"),
        "index_key_cache.clear": _relies("lets go of the index-K buffers that the pool shows"),
        "index_key_cache.get_k_and_scale": _relies(_SHOWN),
        "index_key_cache.get_local_buffer": _relies(_SHOWN),
        "index_key_cache.init": _relies("holds the index-K buffers, one a layer, and the pool"),
        "index_key_cache.state_buf_infos": _relies("describes the index-K buffers that the pool shows"),
        "index_key_cache.store_quantized": _relies("writes to the index-K buffer that the pool shows"),
        "pool.get_contiguous_buf_infos": _override("a transfer registers the persistent tensors, not the workspace"),
        "pool.get_index_k_continuous": _override(_CHECKS_LAYER),
        "pool.get_index_k_scale_buffer": _override(_CHECKS_LAYER),
        "pool.get_index_k_scale_continuous": _override(_CHECKS_LAYER),
        "pool.get_index_k_with_scale_buffer": _override(_CHECKS_LAYER),
        "pool.get_key_buffer": _override(_CHECKS_LAYER),
        "pool.get_state_buf_infos": _override("a transfer registers the persistent tensors, not the workspace"),
        "pool.clear_buffers": _override("the persistent tensors are let go of too"),
        "pool.get_kv_size_bytes": _override("counts the persistent tensors, not the workspace"),
        "pool.get_kv_buffer_shape": _override("stock asks for it outside a forward, and takes it from a read"),
        "pool.get_value_buffer": _override(_CHECKS_LAYER),
        "pool.move_kv_cache": _override("refused: it goes by logical slots"),
        "pool.init": _relies("the shared pool takes over the tensors and attributes that it sets"),
        "pool.set_index_k_scale_buffer": _override("index-K is written only where the workspace holds the layer"),
        "pool.set_mla_kv_buffer": _override(
            "around the stock write, prefix pages are gathered into the workspace and owned pages kept"
        ),
    },
    "attention": {
        "attention.forward_extend": _relies(
            "writes a layer's MLA KV through the pool, on every rank, before it reads it by the tables of the metadata"
        ),
    },
    "transfer": {
        "prefill.process_inflight_queue": _relies(
            "goes by the group's poll, and clears a sender only when that says that the request has ended"
        ),
        "prefill.send_kv_chunk": _relies("hands the sender a chunk's logical pages in the order of the request"),
        "prefill.send_kv_pages": _relies("hands the sender a chunk's logical pages in the order of the request"),
        "transfer.conclude": _relies("tells decode of a request's end through `transfer.sync_status` alone"),
        "transfer.encode_status": _relies("its message has three frames: room, status, prefill rank"),
        "transfer.prepare_send_indices": _relies(
            "counts whole chunks, so it knows the last one, and asks the wrapped function for this rank's part of each"
        ),
        "transfer.queue_get": _relies("the transfer thread takes its chunks from this queue's buffer, under its lock"),
        "transfer.queue_put": _relies("chunks that are put into this queue's buffer can be found and dropped there"),
        "transfer.sender_abort": _relies("notes a failure, and so ends a request that nothing was sent of"),
        "transfer.sender_send": _relies(
            "counts whole chunks, so it knows the last one, and asks the wrapped function for this rank's part of each"
        ),
        "transfer.start_prefill_thread": _relies("notes in `transfer_infos` which decode ranks announced themselves"),
        "transfer.update_status": _relies(
            "a failure is seen by the next poll, and does not bring back a request that was cleared"
        ),
    },
    "prefill_queue": {
        "prefill.create_sender": _relies("makes a request's sender, which waits for decode, and queues nothing"),
    },
    "decode": {
        "decode.apply_status": _relies("notes prefill's answers by room, and ignores those for requests that are over"),
        "transfer.encode_status": _relies("its message has three frames: room, status, prefill rank"),
        "decode.pop_transferred": _relies("gives a request's pages away only after its receiver's poll says it ended"),
        "decode.receiver_abort": _relies("an abort of the client only notes a failure, which the poll then reports"),
        "decode.receiver_send_metadata": _relies("sets `init_time` when it tells prefill the pages, not before"),
        "decode.start_decode_thread": _relies("takes prefill's messages from `server_socket`, one receive for each"),
        "transfer.sync_status": _relies("its message has three frames: room, status, prefill rank"),
        "transfer.update_status": _relies(
            "a failure is seen by the next poll, and does not bring back a request that was cleared"
        ),
    },
}


def catalogued_groups() -> tuple[PatchGroup, ...]:
    """The product's own groups, by name: those of scheduler processes and that of the launching process."""
    return tuple(sorted((*builtin_groups(), arguments.GROUP), key=lambda group: group.name))


def undocumented() -> list[str]:
    """Relied-on seams without a reason in ``DEPENDENCIES``, and reasons without a seam, as ``group: seam``."""
    relied_on = {(group.name, seam) for group in catalogued_groups() for seam in group.relies_on}
    reasons = {(group, seam) for group, seams in DEPENDENCIES.items() for seam in seams}
    return [f"{group}: {seam}" for group, seam in sorted(relied_on ^ reasons)]


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _spans(value: Callable[[Release], Any]) -> Iterator[tuple[str, Any]]:
    """Runs of releases with one value, as ``first to last``, and the value."""
    for found, run in itertools.groupby((release_for(version) for version in supported_versions()), key=value):
        versions = [release.version for release in run]
        yield versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}", found


def _seam(seam: str, kind: str, why: str, until: str | None) -> Iterator[str]:
    yield f"### `{seam}`: {kind}\n"
    yield f"- Why: {why}."
    if until is not None:
        yield f"- Can go when: {until}."
    yield ""
    yield _cells("SGLang", "symbol", "parameters", "fingerprint")
    yield "|---|---|---|---|"
    for versions, found in _spans(lambda release: release.targets.get(seam) or release.absent.get(seam)):
        if isinstance(found, str):
            yield _cells(versions, f"none: {found}", "", "")
        elif found is not None:
            parameters = ", ".join(found.parameters)
            yield _cells(versions, _code(found.path), _code(parameters), _code(found.fingerprint))
    yield ""


def _group(group: PatchGroup) -> Iterator[str]:
    yield f"## {group.name}\n"
    purpose = sys.modules[group.patches[0].wrapper.__module__].__doc__ or ""
    yield f"{purpose.strip().splitlines()[0]}\n"
    roles = f"scheduler processes of {' and '.join(group.roles)} servers"
    yield f"Patched in: {'the launching process' if group is arguments.GROUP else roles}.\n"
    wrapped = {patch.seam: patch for patch in group.patches}
    for seam in sorted({*wrapped, *group.relies_on}):
        if seam in wrapped:
            yield from _seam(seam, "wrap", wrapped[seam].why, wrapped[seam].until)
        else:
            dependency = DEPENDENCIES[group.name][seam]
            yield from _seam(seam, dependency.kind, dependency.why, None)


def _arguments() -> Iterator[str]:
    yield "## Names of arguments: translate\n"
    yield "Fields of `ServerArgs`, their flags and values, which the gate knows by the name a release gives them.\n"
    spans = list(_spans(lambda release: release.arguments))
    yield _cells("name here", *(versions for versions, _ in spans))
    yield "|---|" + "---|" * len(spans)
    names = [field.name for field in fields(ArgumentNames)]
    columns = zip(*(astuple(arguments) for _, arguments in spans), strict=True)
    for name, column in sorted(zip(names, columns, strict=True)):
        yield _cells(_code(name), *(_code(value) for value in column))
    yield ""


def render() -> str:
    """The whole page, Markdown.

    Raises:
        LookupError: a relied-on seam has no reason, or a reason no seam.
    """
    if problems := undocumented():
        raise LookupError(f"DEPENDENCIES in {__name__} does not match relies_on of the groups: {', '.join(problems)}")
    lines = [INTRODUCTION]
    for group in catalogued_groups():
        lines += _group(group)
    return "\n".join([*lines, *_arguments()]).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
