"""The demo's one table: capacity, each prompt, each rank, and the prompt that only shared KV can serve."""

from __future__ import annotations

from collections.abc import Sequence

from pd_report import PAGE_SIZE, Answer, Comparison

GAP = "  "


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows with aligned columns: those named by ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = [c.ljust(width) if i in left else c.rjust(width) for i, (c, width) in enumerate(cells)]
        lines.append(GAP.join(aligned).rstrip())
    return lines


def per_rank(values: Sequence[int]) -> str:
    """``3+2``: one figure a rank, in rank order."""
    return "+".join(map(str, values)) if values else "-"


def megabytes(count: int) -> str:
    """Bytes as megabytes with two decimals."""
    return f"{count / 1e6:,.2f} MB"


def _difference(value: float | None) -> str:
    return "differs" if value is None else f"{value:.1f}" if value == 0 else f"{value:.2g}"


def capacity_rows(c: Comparison) -> list[list[str]]:
    """Memory per rank and what the server makes of it."""
    pool = [max(p.pool_tokens, default=0) for p in (c.stock, c.shared)]
    return [
        ["capacity", "stock", "CP shared KV", ""],
        ["KV pool of one rank, tokens", *(f"{tokens:,}" for tokens in pool), "the same memory"],
        ["KV pool of one rank, bytes", *(megabytes(t // PAGE_SIZE * c.page_bytes) for t in pool), ""],
        [
            "workspace of one rank",
            "-",
            megabytes(c.shared.workspace_bytes),
            f"{c.shared.workspace_layers} of one context, whatever the number of layers",
        ],
        [
            "prompt tokens the server can keep",
            f"{c.stock.capacity_tokens:,}",
            f"{c.shared.capacity_tokens:,}",
            f"{c.shared.capacity_tokens / max(1, c.stock.capacity_tokens):.2f} times",
        ],
    ]


def prompt_rows(c: Comparison) -> list[list[str]]:
    """One row a prompt: pages on each rank, pages sent by each rank, and how the answers compare."""
    rows = [
        ["", "prompt", "from", "", "held,", "held,", "sent,", "sent,", "greatest"],
        ["prompt", "tokens", "cache", "pages", "stock", "shared", "stock", "shared", "|dlogprob|"],
    ]
    for prompt in c.prompts:
        stock, shared = c.stock.answers[prompt.name], c.shared.answers[prompt.name]
        served = prompt is not c.long
        pages = per_rank(c.shared_pages(prompt))
        rows.append(
            [
                prompt.name,
                f"{len(prompt.tokens):,}",
                str(max((r.cached_tokens for r in shared.ranks), default=0)),
                str(prompt.pages),
                per_rank([prompt.pages] * len(stock.ranks)) if served else "not served",
                pages,
                per_rank(c.stock_pages(prompt)) if served else "not served",
                pages,
                _difference(c.difference(prompt)) + (" " if served else "*"),
            ]
        )
    return rows


def rank_rows(c: Comparison) -> list[list[str]]:
    """One row a rank, summed over the prompts that both served."""
    served = [p for p in c.prompts if p is not c.long]
    total = sum(p.pages for p in served)
    stock_sent = [sum(column) for column in zip(*(c.stock_pages(p) for p in served), strict=True)]
    shared_sent = [sum(column) for column in zip(*(c.shared_pages(p) for p in served), strict=True)]
    held, sent = [[total] * len(stock_sent), shared_sent], [stock_sent, shared_sent]

    def row(name: str, figures: Sequence[int]) -> list[str]:
        return [name, *(cell for pages in figures for cell in (str(pages), megabytes(pages * c.page_bytes)))]

    rows = [
        ["", "held, stock", "", "held, shared", "", "sent, stock", "", "sent, shared", ""],
        ["rank", *["pages", "bytes"] * 4],
    ]
    rows += [row(f"rank {rank}", figures) for rank, figures in enumerate(zip(*held, *sent, strict=True))]
    rows.append(row("all ranks", [sum(figures) for figures in (*held, *sent)]))
    return rows


def _tokens(answer: Answer) -> str:
    return " ".join(map(str, answer.output_ids)) if answer.output_ids else answer.error or "no answer"


def long_rows(c: Comparison) -> list[list[str]]:
    """What each set of servers made of the prompt that one rank's pool cannot hold."""
    stock, shared, reference = (p.answers[c.long.name] for p in (c.stock, c.shared, c.reference))

    def computed(answer: Answer) -> str:
        return (
            ", ".join(f"{n:,} token{'s' * (n > 1)}" for n in sorted({r.input_tokens for r in answer.ranks}))
            or "nothing"
        )

    rows = [["", "HTTP", "prefill computed", "answer", "tokens of the answer"]]
    for name, answer, verdict in (
        ("stock", stock, "wrong: not served"),
        ("CP shared KV", shared, "right: same logprobs" if c.difference(c.long) == 0 else "WRONG"),
        (f"reference: stock, CP 1, {c.reference.capacity_tokens:,} tokens", reference, "right"),
    ):
        rows.append([name, str(answer.status), computed(answer), verdict, _tokens(answer)])
    return rows


def render(c: Comparison) -> str:
    """The whole table."""
    blocks = [
        columns(capacity_rows(c), left=(0, 3)),
        columns(prompt_rows(c)),
        columns(rank_rows(c)),
        columns(long_rows(c), left=(0, 3, 4)),
    ]
    width = max(len(line) for block in blocks for line in block)
    served = len(c.prompts) - 1
    titles = (
        f"CP {c.shared.cp_size}, bfloat16 KV; a page is {PAGE_SIZE} tokens, {c.page_bytes:,} bytes with its index-K",
        "Pages of each prompt that rank 0 + rank 1 + ... hold and send; with shared KV a rank sends what it holds",
        f"Every rank, over the {served} prompts that both serve (a shared prefix counts each time)",
        f"The prompt that only shared KV serves: {len(c.long.tokens):,} tokens against a pool of "
        f"{max(c.stock.pool_tokens, default=0):,} tokens a rank",
    )
    lines: list[str] = []
    for title, block in zip(titles, blocks, strict=True):
        lines += ["=" * width if not lines else "-" * width, title, "", *block]
    lines += [
        "=" * width,
        "* against the reference; all others against stock. SGLang 0.5.12 does not serve a prompt that is too long: it",
        "  computes a prompt of one token in its place, and decode answers 200 with an unrelated text.",
    ]
    return "\n".join(lines)
