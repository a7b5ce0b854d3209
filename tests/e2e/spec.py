"""What a run consists of and what it reported. Plain data, so that tests and host share it without SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """Prompts that are sent together, and the switches that hold for them.

    Attributes:
        name: for reports.
        prompts: token ids of each request; sent as one batch to prefill and decode.
        chunk: chunk size in tokens for this step, also one that the command line would refuse; None keeps the server's.
        breaks: mechanism broken on purpose (see ``control.BREAKS``), or None.
        sides: engines that get the prompts.
        room: bootstrap room of the first prompt; None for a new one.
        server_info: ask the prefill engine for its server info before the prompts are sent.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    chunk: int | None = None
    breaks: str | None = None
    sides: tuple[str, ...] = ("prefill", "decode")
    room: int | None = None
    server_info: bool = False


@dataclass(frozen=True)
class Spec:
    """One prefill engine and one decode engine.

    Attributes:
        steps: what to send, in order.
        cp_size: ranks of the prefill engine.
        shared: whether the prefill engine runs with shared KV.
        tokens: ``--max-total-tokens`` of the prefill engine: physical per rank under shared KV.
        kv: KV cache dtype.
        chunk: chunked prefill size; -1 turns chunking off.
        context_length: longest request.
        overlap: overlap scheduling.
        new_tokens: tokens to generate.
        dump: compare pools: every prefill rank reports its persistent pool after each step.
        count: every prefill rank counts the operations and waits of its forwards, and reports them with the dump.
        spawn: start processes as SGLang does (slow); otherwise fork them from one that has imported SGLang.
        decode_tokens: ``--max-total-tokens`` of the decode engine.
        decode_plugin: load the plugin on the decode side too, asked for by ``SGLANG_PLUGINS`` alone.
        decode_shared: turn the plugin on at the decode side, which then keeps pages until prefill is done with them.
        auto: ask for shared KV by ``SGLANG_PLUGINS`` alone.
        foreign_patch: have somebody else replace one of the seams before the prefill engine starts.
        environ: further environment of the prefill engine, as ``(name, value)`` pairs.
        decode_environ: the same of the decode engine.
        overrides: further arguments of the prefill engine, as ``(name, value)`` pairs.
    """

    steps: tuple[Step, ...]
    cp_size: int = 2
    shared: bool = False
    tokens: int = 4096
    kv: str = "bfloat16"
    chunk: int = 512
    context_length: int = 6000
    overlap: bool = False
    new_tokens: int = 6
    dump: bool = False
    count: bool = False
    spawn: bool = False
    decode_tokens: int = 8192
    decode_plugin: bool = False
    decode_shared: bool = False
    auto: bool = False
    foreign_patch: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    decode_environ: tuple[tuple[str, str], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()


@dataclass
class Answer:
    """Answer to one request of one side: tokens and their logprobs, or the error text."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    error: str | None = None


@dataclass
class Report:
    """What a run reported.

    Attributes:
        answers: decode's answers by step name.
        prefill_answers: the prefill engine's answers by step name.
        dumps: by step name, what each prefill rank dumped (see ``control.dump``), in rank order.
        server_info: by step name, what the prefill engine said of itself.
        log: the prefill engine's output.
        decode_log: the decode engine's output.
        failure: why an engine did not start, or None.
    """

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    prefill_answers: dict[str, list[Answer]] = field(default_factory=dict)
    dumps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    server_info: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    decode_log: str = ""
    failure: str | None = None
