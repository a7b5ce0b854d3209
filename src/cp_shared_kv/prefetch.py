"""One layer ahead: which layer's prefix is fetched when, on which stream, and who waits for whom.

The prefix of layer l + 1 is in the pools before layer l begins, so it can travel while layer l computes. There are two
buffers of each kind of data; layer l uses ``l % 2``. At the first write point of layer l, which every rank reaches:

    compute stream   ... layer l-1 | wait for fetch l | layer l ............. | wait for fetch l+1 | layer l+1 ...
    side stream                    | wait for compute | fetch l+1 ........... |

The side stream waits for all that the compute stream was given until then, and with it for the reads of layer l - 1,
the previous tenant of the buffer of layer l + 1, and for the pool writes of earlier forwards. The compute stream waits
for the fetch before it touches the buffer. All fetches of a forward that communicates run on the side stream, in the
same order on every rank. On a CPU, whose streams are empty shells, the same calls run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

#: Buffers of each kind when fetching ahead: for the layer that computes, and for the next.
BUFFERS = 2


def workspace_count(prefetch: bool) -> int:
    """Workspaces of a pool: one, or one for each buffer where layers are fetched ahead."""
    return BUFFERS if prefetch else 1


class LayerPrefetch:
    """Decides when the pages of a layer are fetched.

    Args:
        fetch: ``fetch(kinds, layer)`` fetches some kinds of a layer's data into its buffers, by work on the current
            stream.
        kinds: kinds of data, in the order in which a layer needs them.
        layers: number of layers; they are numbered from 0.
        streams: module with ``Stream``, ``Event``, ``stream`` and ``current_stream`` (``torch.cuda``), or None to fetch
            each layer when it is needed.
    """

    def __init__(
        self, fetch: Callable[[Sequence[Any], int], None], kinds: Sequence[Hashable], layers: int, streams: Any
    ) -> None:
        self._fetch = fetch
        self._kinds = tuple(kinds)
        self._layers = layers
        self._streams = streams
        self._side: Any = None if streams is None else streams.Stream()
        #: What the layers of earlier forwards needed; some layers reuse another's selection and need no index-K.
        self._needed: set[tuple[Hashable, int]] = set()
        #: By kind and buffer: the layer that was fetched ahead into it, and the event after that.
        self._ready: dict[tuple[Hashable, int], tuple[int, Any]] = {}
        self._next = 0
        self._is_ahead = False

    def begin(self, communicates: bool) -> None:
        """Begin a forward.

        Args:
            communicates: whether fetches of this forward take time, so that fetching ahead pays.
        """
        self.end()
        self._is_ahead = communicates and self._streams is not None
        if self._is_ahead:
            self._fetch_ahead(0)

    def end(self) -> None:
        """End the forward, also after an error: what comes next on the compute stream comes after all fetches."""
        if self._is_ahead:
            self._streams.current_stream().wait_stream(self._side)
        self._is_ahead = False
        self._ready.clear()

    def forget(self) -> None:
        """Forget which layers needed what."""
        self._needed.clear()

    def need(self, kind: Hashable, layer: int) -> None:
        """Return once work that is given to the compute stream from here on finds the layer's prefix in its buffer.

        Called at write points, in the same order on every rank; never waits on the host.
        """
        self._needed.add((kind, layer))
        if not self._is_ahead:
            self._fetch([kind], layer)
            return
        fetched, ready = self._ready.pop((kind, layer % BUFFERS), (None, None))
        if fetched != layer:
            ready = self._fetch_on_side([kind], layer)
        self._streams.current_stream().wait_event(ready)
        if layer + 1 > self._next:
            self._fetch_ahead(layer + 1)

    def _fetch_ahead(self, layer: int) -> None:
        self._next = layer
        kinds = [kind for kind in self._kinds if (kind, layer) in self._needed]
        if layer < self._layers and kinds:
            ready = self._fetch_on_side(kinds, layer)
            self._ready.update({(kind, layer % BUFFERS): (layer, ready) for kind in kinds})

    def _fetch_on_side(self, kinds: Sequence[Hashable], layer: int) -> Any:
        self._side.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._side):
            self._fetch(kinds, layer)
            ready = self._streams.Event()
            ready.record(self._side)
        return ready
