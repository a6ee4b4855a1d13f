"""A causal LM together with the KV rows that it has already computed; nothing is computed twice.

Rows 0..P-1 hold the committed context, the rows behind them the nodes of the pending tree, in order. The next call
brings a longer context: those pending nodes that it contains are moved into place, the others are dropped, and only the
rest is computed.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface, create_masks_for_generate

from specexec.device import compute_device
from specexec.features import FeatureTap
from specexec.frames import Frame, Recorder, frame_shape, make_frame
from specexec.tree import TokenTree, ancestors, depths, is_chain

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


class RowLayer(CacheLayerMixin):
    """One layer's keys and values in preallocated rows; how many are filled only the RowCache knows."""

    is_croppable = True

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self._cache.max_rows
        # Rows that are hidden still take part in products, so that they must hold numbers where passes reach over them.
        make = torch.Tensor.new_zeros if self._cache.is_framed else torch.Tensor.new_empty
        self.keys = make(key_states, (*key_states.shape[:2], rows, key_states.shape[-1]))
        self.values = make(value_states, (*value_states.shape[:2], rows, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (frame := self._cache.frame) is not None:
            self.keys.index_copy_(2, frame.slots, key_states)
            self.values.index_copy_(2, frame.slots, value_states)
            return self.keys[:, :, : frame.num_rows], self.values[:, :, : frame.num_rows]
        start = self._cache.num_rows
        end = start + key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._cache.num_rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.num_rows + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.max_rows

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError("rows are dropped by RowCache.num_rows, which all layers share")

    def copy(self, other: "RowLayer", start: int, end: int, dtype: torch.dtype) -> None:
        """Take rows start..end-1 from another model's layer."""
        if not self.is_initialized:
            self.lazy_initialization(other.keys.to(dtype), other.values.to(dtype))
        self.keys[:, :, start:end] = other.keys[:, :, start:end]
        self.values[:, :, start:end] = other.values[:, :, start:end]

    def move(self, rows: torch.Tensor, start: int) -> None:
        """Copy `rows` (int64 [n]) to start..start+n-1; index_select copies first, so that overlap does no harm."""
        if self.is_initialized:
            end = start + len(rows)
            self.keys[:, :, start:end] = self.keys.index_select(2, rows)
            self.values[:, :, start:end] = self.values.index_select(2, rows)


class RowCache(Cache):
    """Keys and values of all layers. A pass writes behind `num_rows` and leaves the number alone: until the caller
    advances it, nothing has happened, so an interrupted pass needs no clean-up.

    is_framed: whether passes may come in frames. frame: where the pass under way writes and how far it sees, if it is
        one of those; else it writes behind the `num_rows` and sees up to there.
    """

    def __init__(self, num_layers: int, max_rows: int, *, is_framed: bool = False) -> None:
        self.num_rows = 0
        self.max_rows = max_rows
        self.is_framed = is_framed
        self.frame: Frame | None = None
        super().__init__(layers=[RowLayer(self) for _ in range(num_layers)])


class CachedLM:
    """A causal LM and its KV rows.

    model: any transformers causal LM whose layers all attend (full, sliding window or chunked).
    max_rows: the longest context plus the largest tree that it will ever hold.
    vocab_size: ids beyond it are padding of the embedding matrix and are cut off the logits; default: all rows.
    rows_of: a model of the same shape whose committed rows this one reads in place of its own. A quantized copy errs
        less over the original's rows (its first guess is right for 86 % of the demo model's tokens instead of 80 %),
        and never prefills what the original has seen.
    num_computed: tokens of contexts that passes have computed so far; those whose rows were at hand do not count.
    Raises ValueError, naming the kind, for models with layers that keep a recurrent state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_rows: int,
        *,
        vocab_size: int | None = None,
        rows_of: "CachedLM | None" = None,
    ) -> None:
        self.model = model
        self._rows_of = rows_of
        self.device = compute_device(model)
        self.max_rows = max_rows
        config = model.config.get_text_config()
        self.vocab_size = min(vocab_size or config.vocab_size, config.vocab_size)
        self._patterns = _attention_patterns(model)
        self._cache = RowCache(config.num_hidden_layers, max_rows)
        self._taps: list[FeatureTap] = []
        self._record: Recorder | None = None
        self._frames: dict[tuple[int, int], Frame] = {}
        self.num_computed = 0
        self.clear()

    @property
    def layers(self) -> nn.ModuleList:
        """The model's decoder layers, in order of use."""
        parts, count = self.model.get_decoder().children(), len(self._cache.layers)
        return next(part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count)

    @property
    def num_committed(self) -> int:
        """Rows of the context that need not be computed again."""
        return len(self._context)

    @property
    def num_free(self) -> int:
        """Rows left behind the context and the pending tree."""
        return self.max_rows - self._cache.num_rows

    def num_reusable(self, context: np.ndarray) -> int:
        """How many leading tokens of `context` the committed rows already cover; its last token never counts."""
        shared = min(len(self._context), len(context) - 1)
        differing = np.flatnonzero(self._context[:shared] != context[:shared])
        return int(differing[0]) if len(differing) else shared

    def tap(self, layers: Sequence[int], *, final_norm: bool = False) -> FeatureTap:
        """Keep what `layers` put out from now on (see FeatureTap); rows that passes have computed so far are forgotten.

        Raises ValueError for ids of layers that the model does not have, and for a copy that reads another's rows.
        """
        if self._rows_of is not None:
            raise ValueError("rows read from another model come without features: tap that model")
        tap = FeatureTap(self.model, layers, self.max_rows, final_norm=final_norm, commit=self._commit)
        self._taps.append(tap)
        self.clear()
        return tap

    def record_steps(self, record: Recorder) -> None:
        """Have `record` run every `extend` from now on, as a pass of one of a few fixed shapes, as long as it can; rows
        that passes have computed so far are forgotten.
        """
        self._record = record
        self._cache = RowCache(len(self._cache.layers), self.max_rows, is_framed=True)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._context = np.empty(0, np.int64)  # the committed tokens, one per row
        self._forget_pending()
        self._cache.num_rows = self._num_adopted = 0

    def prefill(self, context: np.ndarray) -> torch.Tensor:
        """Logits [1, V] of what follows `context` (int64 [length]); only rows not yet held are computed."""
        empty = np.empty(0, np.int64)
        return self._advance(context, empty, empty)

    def extend(self, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """Add nodes to the pending tree and score them: logits [n, V]. `parents` counts all pending nodes (or ROOT)."""
        return self._forward(np.empty(0, np.int64), tokens, parents)[-len(tokens) :]

    def _advance(self, context: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        if len(context) + len(tokens) > self.max_rows:
            raise ValueError(
                f"{len(context)} tokens of context and {len(tokens)} of the tree do not fit into the {self.max_rows} "
                "rows of the KV cache; shorten the prompt or raise --ctx"
            )
        self._commit(context)
        if self._rows_of is not None:
            self._adopt(self._rows_of, context)
        return self._forward(context[len(self._context) :], tokens, parents)

    @torch.inference_mode()
    def _commit(self, context: np.ndarray) -> int:
        """Keep every row that `context` shares with the committed and pending ones, drop the rest, count the kept."""
        tree = TokenTree(self._tokens, self._parents, np.empty(0, np.float32))
        kept = self.num_reusable(context)
        path = tree.path(context[kept:-1].tolist()) if kept == len(self._context) else []
        # Pending nodes are forgotten before rows move: an interrupt in between costs work, never correctness.
        self._context = self._context[:kept]
        self._forget_pending()
        self._cache.num_rows = kept
        if path and path != list(range(len(path))):
            rows = torch.tensor(path, device=self.device) + kept
            for part in (*self._cache.layers, *self._taps):
                part.move(rows, kept)
        self._context = context[: kept + len(path)].copy()
        self._cache.num_rows = len(self._context)
        return len(self._context)

    def _forget_pending(self) -> None:
        self._tokens = self._parents = self._depths = np.empty(0, np.int64)
        self._seen = np.empty((0, 0), bool)

    @torch.inference_mode()
    def _adopt(self, source: "CachedLM", context: np.ndarray) -> None:
        """Overwrite the committed rows, and add to them, with those that `source` has computed of `context`."""
        source._commit(context)
        start, end = min(self._num_adopted, len(self._context)), len(source._context)
        for mine, theirs in zip(self._cache.layers, source._cache.layers, strict=True):
            if start < end:
                mine.copy(theirs, start, end, self.model.dtype)
        if end > len(self._context):
            self._context = source._context
            self._cache.num_rows = end
        self._num_adopted = end

    @torch.inference_mode()
    def _forward(self, tail: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> torch.Tensor:
        """Compute rows for context tokens, then for nodes: logits of the last context token and of each node."""
        parents = np.concatenate([self._parents, parents])
        deep, seen = depths(parents, self._depths), ancestors(parents, self._seen)
        context = np.concatenate([self._context, tail])
        positions = np.concatenate([np.arange(len(context)), len(context) - 1 + deep])
        # The rows to compute: the context's tail and the new nodes; those between them are pending already.
        queries = np.r_[len(self._context) : len(context), len(context) + len(self._parents) : len(positions)]
        logits = None if len(tail) else self._recorded(tokens, queries, positions, seen)
        if logits is None:
            with ExitStack() as listening:
                for tap in self._taps:
                    listening.enter_context(tap.listening(self._cache.num_rows))
                logits = self.model(
                    input_ids=torch.from_numpy(np.concatenate([tail, tokens]))[None].to(self.device),
                    position_ids=torch.from_numpy(positions[queries])[None].to(self.device),
                    # Text without branches needs no mask of ours: the library's own is causal.
                    attention_mask=None if is_chain(parents) else self._masks(queries, positions, seen),
                    cache=self._cache,
                    use_cache=True,
                    logits_to_keep=min(len(tail), 1) + len(tokens),
                ).logits[0]
        self.num_computed += len(tail)
        self._context, self._tokens = context, np.concatenate([self._tokens, tokens])
        self._parents, self._depths, self._seen = parents, deep, seen
        self._cache.num_rows = len(positions)
        return logits[:, : self.vocab_size]

    def _recorded(
        self, tokens: np.ndarray, queries: np.ndarray, positions: np.ndarray, seen: np.ndarray
    ) -> torch.Tensor | None:
        """Logits of a pass over nodes in a frame, or None where there is no recorder, or no frame that fits."""
        shape = frame_shape(len(tokens), self._cache.num_rows, self.max_rows)
        if self._record is None or shape is None or self._taps:
            return None
        masks = self._masks(queries, positions, seen)
        if shape not in self._frames:
            self._frames[shape] = make_frame(shape, masks)
        frame = self._frames[shape]
        frame.fill(tokens, positions[queries], self._cache.num_rows, masks)

        def run() -> torch.Tensor:
            self._cache.frame = frame
            try:
                return self.model(
                    input_ids=frame.ids,
                    position_ids=frame.positions,
                    attention_mask=frame.masks,
                    cache=self._cache,
                    use_cache=True,
                ).logits[0]
            finally:
                self._cache.frame = None

        logits = self._record(shape, run)
        if logits is None:
            self._record = None
            self._frames.clear()
            return None
        return logits[: len(tokens)].clone()  # the next pass of this shape overwrites them

    def _masks(
        self, queries: np.ndarray, positions: np.ndarray, seen: np.ndarray
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks [1, 1, Q, rows], one per attention pattern (eager attention misreads booleans).

        queries: the rows to compute; positions: of all rows; seen: the ancestors of the nodes, which are the last rows.
        """
        num_context = len(positions) - len(seen)
        visible = torch.ones(len(queries), len(positions), dtype=torch.bool)  # the patterns below hide what lies ahead
        in_tree = queries >= num_context
        visible[in_tree, num_context:] = torch.from_numpy(seen[queries[in_tree] - num_context])
        visible[~in_tree, num_context:] = False
        keys, zero = torch.from_numpy(positions), torch.zeros((), dtype=torch.long)

        def mask(pattern: Callable) -> torch.Tensor:
            shown = visible & pattern(zero, zero, keys[queries][:, None], keys[None, :])
            hidden = torch.full(shown.shape, torch.finfo(self.model.dtype).min, dtype=self.model.dtype)
            return hidden.masked_fill_(shown, 0)[None, None].to(self.device)

        if isinstance(self._patterns, dict):
            return {kind: mask(pattern) for kind, pattern in self._patterns.items()}
        return mask(self._patterns)


def score_tree(target: CachedLM, context: np.ndarray, tree: TokenTree) -> torch.Tensor:
    """Logits [1 + N, V] that the target gives after `context` and after each node of `tree`, in one pass."""
    return target._advance(context, tree.tokens, tree.parents)


def as_ids(tokens: Sequence[int]) -> np.ndarray:
    """Token ids as the int64 array that contexts are made of."""
    return np.asarray(tokens, dtype=np.int64)


def _attention_patterns(model: PreTrainedModel) -> Callable | dict[str, Callable]:
    """Which earlier positions the model's layers see: (batch, head, query position, key position) -> bool.

    The library's own mask factory is asked for its patterns instead of its masks. It counts rows where we count
    positions, which differ inside a tree: a window reaches as far back along a branch as it would in plain text.
    """
    config = copy.deepcopy(model.config.get_text_config())
    kinds = set(getattr(config, "layer_types", None) or [])
    if getattr(model, "_is_stateful", False) or kinds - ATTENTION_KINDS:
        named = ", ".join(sorted(kinds - ATTENTION_KINDS)) or "recurrent state"
        raise ValueError(
            f"{config.model_type} has layers of kind {named}: a tree of guesses cannot be verified over a recurrent "
            "state; use a model with full or sliding attention"
        )
    AttentionMaskInterface.register("specexec_pattern", _pattern_itself)
    config._attn_implementation = "specexec_pattern"
    return create_masks_for_generate(config, torch.empty(1, 1, 1), attention_mask=None, cache=None)


def _pattern_itself(*args: object, mask_function: Callable, **kwargs: object) -> Callable:
    return mask_function
