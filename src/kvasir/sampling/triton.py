"""The sampler on a device: from float32 logits to tokens, with the bits of the reference (sampler.py).

    measure_tiles    greatest logits of each tile; processors first, for rows that change their logits
    count_bins       for top-k and top-p: the number and weight of the tokens in each of 2048 ranges of logits
    list_tokens      lists the tokens of the ranges in which the kept head of all tokens may end
    cut_list         finds the head's last token
    draw_tiles       of each tile, the token with the least score (gumbel.py)
    finish           the token; it is written to the row's ids, too
    describe_tiles   log-probabilities: the sums, ranks and best tokens of each tile
    describe         log-probabilities of the slot

A step makes those launches that some of its rows need: 2 if all are greedy, 3 without top-k, top-p and
log-probabilities, 8 at most. Grids depend only on the number of slots, so the launches can be captured in a graph. Each
row takes part in what its own parameters ask for. Tiles are joined by maxima and by sums of integers, exact in any
order; floats are combined as in numerics.py, by the same IEEE operations in float64.

Letters: S slots, V vocabulary, T tiles, L listed tokens, K best tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from kvasir.ops.launch import INTERPRETED, for_large_tiles, launch
from kvasir.sampling import device_layout as layout
from kvasir.sampling.device_layout import BINS, LISTED
from kvasir.sampling.triton_draw import draw_tiles, finish
from kvasir.sampling.triton_filters import count_bins, cut_list, list_tokens
from kvasir.sampling.triton_logprobs import describe, describe_tiles
from kvasir.sampling.triton_processors import measure_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.sampling.device_state import Logprobs, Needs, SamplerState, Workspace

LIST_LANES = 128


def sample(
    logits: Tensor,
    rows_S: Tensor,
    known_S: Tensor,
    ids: Tensor,
    state: SamplerState,
    work: Workspace,
    tokens_S: Tensor,
    errors_S: Tensor,
    *,
    needs: Needs,
    masks: Tensor | None = None,
    mask_S: Tensor | None = None,
    logprobs: Logprobs | None = None,
) -> None:
    """One token for each slot; it is also written to the row's ids at its position, unless there is an error.

    logits: float32 [S, V], rows at any distance; not modified. rows_S: int32, the row of each slot, -1 for none.
    known_S: int32, the number of the row's known ids, which is the position of the token. ids: int32 [rows, any], of
    which a slot reads the known ones of its row. tokens_S, errors_S: int32, written: -1 with an error or without a row,
    and the code of the error (`device_state.error_text`). needs: at least what the rows need. masks: int32 words
    [any, words], bit i & 31 of word i >> 5 allows token i. mask_S: int32, the mask of each slot, -1 for none; read if
    `needs.processes`. logprobs: written for the slots that want them; required if `needs.logprobs`.
    """
    slots, vocab = logits.shape
    tiles, tile = work.tiles, work.tile
    lanes = triton.next_power_of_2(tiles)
    sub = _sub(work)
    grid, size = (tiles, slots), slots * vocab
    if not needs.processes:
        masks = None
    _measure(logits, rows_S, known_S, ids, state.params, state.lists, work, needs.lists, needs.processes, masks, mask_S)
    source = (
        *(logits, logits.stride(0), rows_S, state.params),
        *(work.x_SV, work.changed_S, work.raw_ST, work.best_ST),
    )
    if needs.lists:
        launch(
            count_bins,
            grid,
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            BINS=BINS,
            bytes=4 * size,
            num_warps=4,
        )
        launch(
            list_tokens,
            grid,
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            work.found_S,
            work.listed_SL,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            BINS=BINS,
            LISTED=LISTED,
            bytes=4 * size,
            num_warps=4,
        )
        launch(
            cut_list,
            (slots,),
            *source,
            work.low_ST,
            work.bin_counts_SB,
            work.bin_weights_SB,
            work.listed_SL,
            work.cuts_S,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            BINS=BINS,
            LISTED=LISTED,
            num_warps=16,
        )
    if needs.draws:
        launch(
            draw_tiles,
            grid,
            *source,
            known_S,
            work.cuts_S,
            work.scores_ST,
            work.drawn_ST,
            vocab,
            TILES=tiles,
            TILE_LANES=lanes,
            TILE=tile,
            SUB=sub,
            LISTS=needs.lists,
            bytes=4 * size,
            num_warps=4,
        )
    launch(
        finish,
        (slots,),
        rows_S,
        known_S,
        ids,
        ids.stride(0),
        state.params,
        work.raw_ST,
        work.best_ST,
        work.scores_ST,
        work.drawn_ST,
        tokens_S,
        errors_S,
        TILES=tiles,
        TILE_LANES=lanes,
        DRAW=needs.draws,
        num_warps=1,
    )
    if needs.logprobs:
        assert logprobs is not None, "a slot wants log-probabilities, and there is no room for them"
        _describe(logits, rows_S, state.params, work, tokens_S, logprobs)


def describe_known(
    logits: Tensor, rows_S: Tensor, settings: Tensor, work: Workspace, tokens_S: Tensor, logprobs: Logprobs
) -> None:
    """Log-probabilities of given tokens. rows_S: int32, the row of `settings` for each slot, -1 for none. settings:
    int64 [rows, WIDTH], of which Column.LOGPROBS is read. tokens_S: int32 ids within the vocabulary. work.raw_ST:
    afterwards the key of the greatest logit of each tile, see `device_state.bad_logits`."""
    _measure(logits, rows_S, rows_S, rows_S[None], settings, rows_S[None], work)
    _describe(logits, rows_S, settings, work, tokens_S, logprobs)


def _measure(
    logits: Tensor,
    rows_S: Tensor,
    known_S: Tensor,
    ids: Tensor,
    settings: Tensor,
    lists: Tensor,
    work: Workspace,
    filters: bool = False,
    processes: bool = False,
    masks: Tensor | None = None,
    mask_S: Tensor | None = None,
) -> None:
    """See `measure_tiles`. filters: whether `count_bins` follows. Without processors neither ids nor lists are read."""
    slots, vocab = logits.shape
    masking = (rows_S, 0, rows_S) if masks is None else (masks, masks.shape[1], mask_S)  # without masks none is read
    launch(
        measure_tiles,
        (work.tiles, slots),
        logits,
        logits.stride(0),
        rows_S,
        known_S,
        ids,
        ids.stride(0),
        settings,
        lists,
        lists.stride(0),
        *masking,
        work.x_SV,
        work.counts_SV,
        work.changed_S,
        work.raw_ST,
        work.best_ST,
        work.low_ST,
        work.bin_counts_SB,
        work.bin_weights_SB,
        work.found_S,
        vocab,
        TILES=work.tiles,
        TILE=work.tile,
        SUB=_sub(work),
        BINS=BINS,
        LANES=LIST_LANES,
        LISTS=filters,
        PROCESS=processes,
        MASKED=masks is not None,
        bytes=4 * slots * vocab,
        num_warps=4,
        **for_large_tiles(),
    )


def _describe(
    logits: Tensor, rows_S: Tensor, settings: Tensor, work: Workspace, tokens_S: Tensor, logprobs: Logprobs
) -> None:
    """See `describe_tiles` and `describe`."""
    slots, vocab = logits.shape
    lanes = triton.next_power_of_2(work.tiles)
    raw = (logits, logits.stride(0), rows_S, settings, work.raw_ST, tokens_S)
    tiled = (work.totals_ST, work.ahead_ST, work.bests_STK)
    launch(
        describe_tiles,
        (work.tiles, slots),
        *raw,
        *tiled,
        vocab,
        layout.MAX_BEST,
        TILES=work.tiles,
        TILE_LANES=lanes,
        TILE=work.tile,
        SUB=_sub(work),
        bytes=4 * slots * vocab,
        num_warps=8,
    )
    launch(
        describe,
        (slots,),
        *raw,
        *tiled,
        logprobs.logprobs_S,
        logprobs.ranks_S,
        logprobs.best_ids_SK,
        logprobs.best_logprobs_SK,
        vocab,
        layout.MAX_BEST,
        TILES=work.tiles,
        TILE_LANES=lanes,
        BEST_LANES=triton.next_power_of_2(layout.MAX_BEST),
        num_warps=4,
    )


def _sub(work: Workspace) -> int:
    """Tokens that a program handles at a time."""
    return work.tile if INTERPRETED else min(work.tile, 1024)
