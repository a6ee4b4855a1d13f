"""A computation over fixed tensors as a CUDA graph: recorded once, then replayed with no Python between launches."""

from collections.abc import Callable, Hashable

import torch


class Replays:
    """CUDA graphs by key, which share one pool of memory: a result is only good until the next call.

    What runs must read and write the same tensors each time and never wait for the device. The first thing that cannot
    be recorded ends it for good: `note` is told in one line.
    """

    def __init__(self, device: torch.device, note: Callable[[str], None]) -> None:
        self._device, self._note = device, note
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._is_off = False

    def __call__(self, key: Hashable, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """What `run` computes, by a replay of the run that was recorded for `key`; None if it cannot be recorded."""
        if self._is_off:
            return None
        if key not in self._graphs:
            try:
                self._graphs[key] = self._record(run)
            except RuntimeError as error:  # what a library says of a failed recording differs; the plain way remains
                self._is_off = True
                self._graphs.clear()
                first, _, _ = str(error).partition("\n")
                self._note(f"draft: its steps cannot be replayed as CUDA graphs and run one by one ({first})")
                return None
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The graph of `run` and where its result will be; it runs once before, for what libraries set up at first."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            run()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be copying weights at this time, which is none of this recording's business. Where one
        # fails, torch leaves its own stream the current one: the outer context puts the stream from before back.
        recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        with torch.cuda.stream(current), recording:
            result = run()
        return graph, result
