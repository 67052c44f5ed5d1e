"""Device code. Triton compiles these functions from source, so shared values are passed as arguments, not imported.

Factors are read in place. A table of places (`atmm.places`) has the address of A [rank, d_in] and Bt [rank, d_out] for
each slot and site; a table of tiles (`atmm.triton.lanes`) has slots. Ranks are never the contiguous dimension, so that
every load is 128 bits wide without padding ranks in memory. Hidden values are float32 planes [planes, rows, width]:
each site of the group has `hidden_rows` rows, one per token and lane; columns past a rank are zero.
"""

import triton
import triton.language as tl


@triton.jit
def _add_product(
    sums, x_at, a_at, k, start, stop, in_tile, in_rank,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + x A^T over inputs start to stop; x_at and a_at point to the first BLOCK_K inputs."""
    for first in range(start, stop, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at, mask=in_tile[:, None], other=0.0)
            a = tl.load(a_at, mask=in_rank[None, :], other=0.0)
        else:
            in_sum = (first + k) < stop
            x = tl.load(x_at, mask=in_tile[:, None] & in_sum[None, :], other=0.0)
            a = tl.load(a_at, mask=in_rank[None, :] & in_sum[:, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision=PRECISION)
        x_at += BLOCK_K
        a_at += BLOCK_K
    return sums


@triton.jit
def _factor(origin_ptr, place, FIELD: tl.constexpr, LINE: tl.constexpr):
    """A factor's first element and the length of its rows, in elements. LINE: elements in 16 bytes.

    Both are computed as products, so that the compiler knows their divisibility and emits wide loads.
    """
    return origin_ptr + tl.load(place + FIELD) * LINE, tl.load(place + FIELD + 1) * LINE


@triton.jit(do_not_specialize_on_alignment=["tile_ptr"])
def shrink(
    x_ptr, origin_ptr, hidden_ptr, places_ptr,
    d_in, x_stride, plane_stride, hidden_stride, slot_stride, hidden_rows, tile_ptr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SITES: tl.constexpr, EVEN_K: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden[plane, site, row] = x[token] A[rows]^T over one share of d_in, for every site of a group.

    Grid (tiles, rank blocks x sites, planes).
    """
    tile = tile_ptr + tl.program_id(0) * 4
    first_token = tl.load(tile)
    count = tl.load(tile + 1)
    site = tl.program_id(1) % SITES
    first_rank = (tl.program_id(1) // SITES) * BLOCK_R
    place = places_ptr + tl.load(tile + 2) * slot_stride + site * 8
    rank = tl.load(place + 4).to(tl.int32)
    if (count == 0) | (first_rank >= rank):
        return
    hidden_row = (site * hidden_rows + tl.load(tile + 3)).to(tl.int64)
    a_ptr, a_stride = _factor(origin_ptr, place, 0, LINE)
    m = tl.arange(0, BLOCK_M)
    r = first_rank + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    in_tile = m < count
    in_rank = r < rank
    # Shares are whole blocks, so that only the last one can be partial.
    share = tl.cdiv(tl.cdiv(d_in, BLOCK_K), tl.num_programs(2)) * BLOCK_K
    start = tl.program_id(2) * share
    stop = tl.minimum(start + share, d_in)
    x_at = x_ptr + (first_token + m).to(tl.int64)[:, None] * x_stride + (start + k)[None, :]
    a_at = a_ptr + r[None, :] * a_stride + (start + k)[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    sums = _add_product(sums, x_at, a_at, k, start, stop, in_tile, in_rank, BLOCK_K, EVEN_K, PRECISION)
    plane = hidden_ptr + tl.program_id(2).to(tl.int64) * plane_stride
    tl.store(plane + (hidden_row + m)[:, None] * hidden_stride + r[None, :], sums, mask=in_tile[:, None])


@triton.jit(do_not_specialize_on_alignment=["tile_ptr"])
def expand(
    y_ptr, hidden_ptr, origin_ptr, places_ptr,
    column, y_stride, plane_stride, hidden_stride, slot_stride, hidden_rows, tile_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr, PLANES: tl.constexpr, EVEN_N: tl.constexpr, LINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[token] += sum over the tile's lanes of sign * hidden Bt[rows].

    Grid (tiles, blocks of the widest d_out, sites). The lanes of a tile cover the same tokens, and no other tile covers
    them, so that one program writes each element of y. column: the column of the group's outputs at which y starts.
    """
    tile = tile_ptr + tl.program_id(0) * (2 + 3 * PARTS)
    count = tl.load(tile + 1)
    site = tl.program_id(2)
    own = places_ptr + site * 8
    d_out = tl.load(own + 5).to(tl.int32)
    if (count == 0) | (tl.program_id(1) * BLOCK_N >= d_out):
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    in_tile = m < count
    in_row = n < d_out
    hidden_ptr += (site * hidden_rows).to(tl.int64) * hidden_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        place = own + tl.load(tile + 2 + 3 * part) * slot_stride
        hidden_row = tl.load(tile + 3 + 3 * part).to(tl.int64)
        sign = tl.load(tile + 4 + 3 * part)
        rank = tl.load(place + 4).to(tl.int32) * (sign != 0)
        bt_ptr, bt_stride = _factor(origin_ptr, place, 2, LINE)
        for first_rank in tl.static_range(0, MAX_RANK, BLOCK_R):
            if first_rank < rank:
                in_rank = (first_rank + r) < rank
                mask = in_rank[:, None] if EVEN_N else in_rank[:, None] & in_row[None, :]
                bt = tl.load(bt_ptr + (first_rank + r)[:, None] * bt_stride + n[None, :], mask=mask, other=0.0)
                at = hidden_ptr + (hidden_row + m)[:, None] * hidden_stride + (first_rank + r)[None, :]
                hidden = tl.load(at, mask=in_tile[:, None], other=0.0)
                for plane in tl.static_range(1, PLANES):
                    hidden += tl.load(at + plane * plane_stride, mask=in_tile[:, None], other=0.0)
                hidden *= sign.to(tl.float32)
                sums = tl.dot(hidden.to(origin_ptr.dtype.element_ty), bt, sums, input_precision=PRECISION)
    # Loaded here and not above, to reduce register pressure in the loop.
    token = (tl.load(tile) + m).to(tl.int64)[:, None]
    own_column = tl.load(own + 6) - column
    if EVEN_N:
        own_column = tl.multiple_of(own_column, 16)
    y_at = y_ptr + token * y_stride + own_column + n[None, :]
    mask = in_tile[:, None] if EVEN_N else in_tile[:, None] & in_row[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["tile_ptr"])
def single(
    y_ptr, x_ptr, origin_ptr, places_ptr, column, d_in, y_stride, x_stride, slot_stride, tile_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr,
    PARTS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, LINE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both products in one launch: every block of d_out repeats the shrink of its tokens, from factors in the cache.

    Grid and tiles as in `expand`.
    """
    tile = tile_ptr + tl.program_id(0) * (2 + 3 * PARTS)
    first_token = tl.load(tile)
    count = tl.load(tile + 1)
    own = places_ptr + tl.program_id(2) * 8
    d_out = tl.load(own + 5).to(tl.int32)
    if (count == 0) | (tl.program_id(1) * BLOCK_N >= d_out):
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    in_tile = m < count
    in_row = n < d_out
    token = (first_token + m).to(tl.int64)[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        place = own + tl.load(tile + 2 + 3 * part) * slot_stride
        sign = tl.load(tile + 4 + 3 * part)
        rank = tl.load(place + 4).to(tl.int32) * (sign != 0)
        a_ptr, a_stride = _factor(origin_ptr, place, 0, LINE)
        bt_ptr, bt_stride = _factor(origin_ptr, place, 2, LINE)
        for first_rank in tl.static_range(0, MAX_RANK, BLOCK_R):
            if first_rank < rank:
                in_rank = (first_rank + r) < rank
                x_at = x_ptr + token * x_stride + k[None, :]
                a_at = a_ptr + (first_rank + r)[None, :] * a_stride + k[:, None]
                hidden = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
                hidden = _add_product(hidden, x_at, a_at, k, 0, d_in, in_tile, in_rank, BLOCK_K, EVEN_K, PRECISION)
                mask = in_rank[:, None] if EVEN_N else in_rank[:, None] & in_row[None, :]
                bt = tl.load(bt_ptr + (first_rank + r)[:, None] * bt_stride + n[None, :], mask=mask, other=0.0)
                hidden *= sign.to(tl.float32)
                sums = tl.dot(hidden.to(origin_ptr.dtype.element_ty), bt, sums, input_precision=PRECISION)
    own_column = tl.load(own + 6) - column
    if EVEN_N:
        own_column = tl.multiple_of(own_column, 16)
    y_at = y_ptr + token * y_stride + own_column + n[None, :]
    mask = in_tile[:, None] if EVEN_N else in_tile[:, None] & in_row[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_at, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tile_ends(length_ptr, batch, TILE: tl.constexpr, BATCH: tl.constexpr):
    """Tiles of the contexts up to and with each request, [BATCH]."""
    d = tl.arange(0, BATCH)
    return tl.cumsum(tl.cdiv(tl.load(length_ptr + d, mask=d < batch, other=0), TILE), 0)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["place_ptr", "length_ptr", "table_ptr"])
def decode_part(
    out_ptr, part_ptr, stat_ptr, q_ptr, kv_ptr,
    out_stride, q_stride, q_head_stride, block_rows, row_stride, table_stride,
    place_ptr, length_ptr, table_ptr, batch, scale,
    GROUP: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one group of query heads over an equal share of the tiles of all contexts, read from KV blocks.

    Grid (shares, KV heads). A share is adjacent tiles, which may belong to several requests. A context within one share
    goes to out; of others, sums and their scales go to part and stat, which `decode_join` combines: to place 0 of the
    share's two if the context began before it, else to place 1. The keys of a block are the first BLOCK of its
    block_rows rows after kv_ptr, its values the BLOCK rows behind them. scale: of the scores, times log2(e).
    """
    h = tl.program_id(1)
    ends = _tile_ends(length_ptr, batch, TILE, BATCH)
    total = tl.max(ends, 0)
    share = tl.cdiv(total, tl.num_programs(0))
    tile = tl.program_id(0) * share
    last = tl.minimum(tile + share, total)
    g = tl.arange(0, PAD)
    e = tl.arange(0, HEAD)
    n = tl.arange(0, TILE)
    in_group = g < GROUP
    blocks = tl.arange(0, TILE // BLOCK)
    while tile < last:
        d = tl.sum((ends <= tile).to(tl.int32), 0)
        end = tl.min(tl.where(ends > tile, ends, total), 0)
        length = tl.load(length_ptr + d)
        own = end - tl.cdiv(length, TILE)  # its first tile
        start, stop = (tile - own) * TILE, tl.minimum((last - own) * TILE, length)
        place = tl.load(place_ptr + d).to(tl.int64)
        q_at = q_ptr + place * q_stride + (h * GROUP + g)[:, None] * q_head_stride + e[None, :]
        q = tl.load(q_at, mask=in_group[:, None], other=0.0)
        top = tl.full((PAD,), float("-inf"), tl.float32)
        weights = tl.zeros((PAD,), tl.float32)
        sums = tl.zeros((PAD, HEAD), tl.float32)
        for first in range(start, stop, TILE):
            in_context = first + n < stop
            # One entry per block, repeated for its tokens: one load per token would be as many loads as K and V have.
            entry = first // BLOCK + blocks
            block = tl.load(table_ptr + d * table_stride + entry, mask=entry * BLOCK < stop, other=0).to(tl.int64)
            rows = (block * block_rows)[:, None] + tl.arange(0, BLOCK)[None, :]
            kv_at = kv_ptr + tl.reshape(rows, (TILE,)) * row_stride + h * HEAD
            k = tl.load(kv_at[None, :] + e[:, None], mask=in_context[None, :], other=0.0)
            scores = tl.where(in_context[None, :], tl.dot(q, k, input_precision=PRECISION) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            shrunk = tl.exp2(top - higher)
            weights = weights * shrunk + tl.sum(p, 1)
            v = tl.load(kv_at[:, None] + (BLOCK * row_stride + e)[None, :], mask=in_context[:, None], other=0.0)
            sums = tl.dot(p.to(v.dtype), v, sums * shrunk[:, None], input_precision=PRECISION)
            top = higher
        if (start == 0) & (stop == length):
            out_at = out_ptr + place * out_stride + (h * GROUP + g)[:, None] * HEAD + e[None, :]
            tl.store(out_at, (sums / weights[:, None]).to(out_ptr.dtype.element_ty), mask=in_group[:, None])
        else:
            part = (tl.program_id(0) * 2 + (start == 0).to(tl.int32)) * KV_HEADS + h
            part_at = part_ptr + (part.to(tl.int64) * GROUP + g[:, None]) * HEAD + e[None, :]
            tl.store(part_at, sums, mask=in_group[:, None])
            stat_at = stat_ptr + part * (2 * GROUP) + g
            tl.store(stat_at, top, mask=in_group)
            tl.store(stat_at + GROUP, weights, mask=in_group)
        tile = end


@triton.jit(do_not_specialize=["batch", "shares"], do_not_specialize_on_alignment=["place_ptr", "length_ptr"])
def decode_join(
    out_ptr, part_ptr, stat_ptr, out_stride, place_ptr, length_ptr, batch, shares,
    GROUP: tl.constexpr, HEAD: tl.constexpr, KV_HEADS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Combine what `decode_part` wrote of contexts in several shares, PARTS at a time. Grid (requests, query heads)."""
    d, head = tl.program_id(0), tl.program_id(1)
    ends = _tile_ends(length_ptr, batch, TILE, BATCH)
    share = tl.cdiv(tl.max(ends, 0), shares)
    end = tl.sum(tl.where(tl.arange(0, BATCH) == d, ends, 0), 0)
    start = end - tl.cdiv(tl.load(length_ptr + d), TILE)
    first, last = start // share, (end - 1) // share
    if first == last:
        return
    e = tl.arange(0, HEAD)
    top, weights = float("-inf"), 0.0
    sums = tl.zeros((HEAD,), tl.float32)
    for some in range(first, last + 1, PARTS):
        s = some + tl.arange(0, PARTS)
        in_context = s <= last
        part = (s * 2 + (s == first).to(tl.int32)) * KV_HEADS + head // GROUP
        stat_at = stat_ptr + part * (2 * GROUP) + head % GROUP
        tops = tl.load(stat_at, mask=in_context, other=float("-inf"))
        own = tl.load(stat_at + GROUP, mask=in_context, other=0.0)
        part_at = part_ptr + (part.to(tl.int64) * GROUP + head % GROUP)[:, None] * HEAD + e[None, :]
        values = tl.load(part_at, mask=in_context[:, None], other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        scales, shrunk = tl.exp2(tops - higher), tl.exp2(top - higher)
        sums = sums * shrunk + tl.sum(values * scales[:, None], 0)
        weights = weights * shrunk + tl.sum(own * scales, 0)
        top = higher
    place = tl.load(place_ptr + d).to(tl.int64)
    tl.store(out_ptr + place * out_stride + head * HEAD + e, (sums / weights).to(out_ptr.dtype.element_ty))


@triton.jit
def normalize(
    out_ptr, x_ptr, weight_ptr, width, x_stride, head_stride, epsilon,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = weight * (x / sqrt(mean(x^2) + epsilon)), the quotient rounded to x's type first.

    Grid (tokens * HEADS); the heads of a token are head_stride apart in x, and adjacent in out.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    in_row = c < width
    start = row // HEADS * x_stride + row % HEADS * head_stride
    x = tl.load(x_ptr + start + c, mask=in_row, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)
    quotient = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + c, (weight * quotient).to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def gate_product(
    out_ptr, gate_ptr, up_ptr, width, gate_stride, up_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = silu(gate) * up, silu rounded to its type first. Grid (rows, blocks of width)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = c < width
    gate = tl.load(gate_ptr + row * gate_stride + c, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + c, mask=in_row, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + c, (active * up).to(out_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_stride, q_head_stride, k_stride, k_head_stride, angle_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotary position embedding of queries and keys, in place: x * cos + rotate_half(x) * sin, each product rounded.

    Grid (tokens, blocks of ROWS query heads, then of KV heads).
    """
    token = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    c = tl.arange(0, HALF)[None, :]
    angle = token * angle_stride + c
    cos_first = tl.load(cos_ptr + angle).to(tl.float32)
    cos_second = tl.load(cos_ptr + angle + HALF).to(tl.float32)
    sin_first = tl.load(sin_ptr + angle).to(tl.float32)
    sin_second = tl.load(sin_ptr + angle + HALF).to(tl.float32)
    block = tl.program_id(1)
    of_queries = block < BLOCKS
    head = tl.where(of_queries, block, block - BLOCKS) * ROWS + tl.arange(0, ROWS)[:, None]
    if of_queries:
        at = q_ptr + token * q_stride + head * q_head_stride + c
    else:
        at = k_ptr + token * k_stride + head * k_head_stride + c
    in_heads = head < tl.where(of_queries, HEADS, KV_HEADS)
    dtype = q_ptr.dtype.element_ty
    first = tl.load(at, mask=in_heads, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=in_heads, other=0.0).to(tl.float32)
    a = (first * cos_first).to(dtype).to(tl.float32) - (second * sin_first).to(dtype).to(tl.float32)
    b = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
    tl.store(at, a.to(dtype), mask=in_heads)
    tl.store(at + HALF, b.to(dtype), mask=in_heads)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def write_kv(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, width, row_stride, k_stride, v_stride, rows_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each token's key and value [width] to its row of the caches. Grid (tokens, blocks of width)."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = c < width
    row = tl.load(rows_ptr + token).to(tl.int64) * row_stride
    tl.store(k_cache_ptr + row + c, tl.load(k_ptr + token * k_stride + c, mask=in_row), mask=in_row)
    tl.store(v_cache_ptr + row + c, tl.load(v_ptr + token * v_stride + c, mask=in_row), mask=in_row)
