"""Device code for weights: merges, and products with integers of four and eight bits; see `atmm.triton.kernels`.

Integers are stored as in `atmm.grouped`, or as signed bytes with a scale per row, and are restored in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(numbers):
    """To the nearest integer, halves to the even one; for numbers below 2**22."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def _low_rank_sums(
    a_ptr, a_row, bt_ptr, bt_row, n, k, in_row, in_sum, rank,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Bt^T A for outputs n and inputs k of a layer, in float32."""
    r = tl.arange(0, BLOCK_R)
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in tl.static_range(0, MAX_RANK, BLOCK_R):
        if first < rank:
            in_rank = (first + r) < rank
            bt_mask = in_rank[:, None] if EVEN else in_rank[:, None] & in_row[None, :]
            a_mask = in_rank[:, None] if EVEN else in_rank[:, None] & in_sum[None, :]
            row = (first + r)[:, None]
            bt = tl.load(bt_ptr + row * bt_row + n[None, :], mask=bt_mask, other=0.0)
            a = tl.load(a_ptr + row * a_row + k[None, :], mask=a_mask, other=0.0)
            sums = tl.dot(tl.trans(bt), a, sums, input_precision=PRECISION)
    return sums


@triton.jit
def _merged(
    base_ptr, base_row, base_scale, a_ptr, a_row, bt_ptr, bt_row, n, k, in_row, in_sum, rank, scale,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """base * base_scale + scale * Bt^T A for outputs n and inputs k of a layer, in float32; undefined outside."""
    sums = _low_rank_sums(
        a_ptr, a_row, bt_ptr, bt_row, n, k, in_row, in_sum, rank, BLOCK_N, BLOCK_K, BLOCK_R, MAX_RANK, EVEN, PRECISION
    )
    mask = None if EVEN else in_row[:, None] & in_sum[None, :]
    base = tl.load(base_ptr + n.to(tl.int64)[:, None] * base_row + k[None, :], mask=mask)
    return base.to(tl.float32) * base_scale + scale * sums


@triton.jit
def merge(
    out_ptr, base_ptr, a_ptr, bt_ptr, rank, d_out, d_in,
    out_stride, out_row, base_stride, base_row, a_stride, a_row, bt_stride, bt_row, scale,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out = base + scale * Bt^T A for one block of one layer. Grid (layers, blocks of d_out, blocks of d_in)."""
    layer = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_row, in_sum = n < d_out, k < d_in
    merged = _merged(
        base_ptr + layer * base_stride, base_row, 1.0, a_ptr + layer * a_stride, a_row, bt_ptr + layer * bt_stride,
        bt_row, n, k, in_row, in_sum, rank, scale, BLOCK_N, BLOCK_K, BLOCK_R, MAX_RANK, EVEN, PRECISION,
    )  # fmt: skip
    mask = None if EVEN else in_row[:, None] & in_sum[None, :]
    out_at = out_ptr + layer * out_stride + n.to(tl.int64)[:, None] * out_row + k[None, :]
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_rows(
    values_ptr, scale_ptr, base_ptr, base_scale_ptr, a_ptr, bt_ptr, rank, d_out, d_in,
    values_stride, values_row, scale_stride, base_stride, base_row, base_scale_stride, a_stride, a_row, bt_stride,
    bt_row, largest,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr,
    INTEGERS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """values * scale = base * base_scale + Bt^T A for whole rows of one layer, with scales as in `quantize_rows`.

    Grid (layers, blocks of d_out). A row's scale depends on all of its sums, which are therefore computed twice.
    """
    layer = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = n < d_out
    base_ptr, a_ptr, bt_ptr = base_ptr + layer * base_stride, a_ptr + layer * a_stride, bt_ptr + layer * bt_stride
    base_scale = tl.load(base_scale_ptr + layer * base_scale_stride + n, mask=in_row, other=0.0)[:, None]
    most = tl.full((BLOCK_N,), 1e-12, dtype=tl.float32)
    for first in range(0, d_in, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        merged = _merged(
            base_ptr, base_row, base_scale, a_ptr, a_row, bt_ptr, bt_row, n, k, in_row, k < d_in, rank, 1.0,
            BLOCK_N, BLOCK_K, BLOCK_R, MAX_RANK, EVEN, PRECISION,
        )  # fmt: skip
        in_rows = in_row[:, None] & (k < d_in)[None, :]
        most = tl.maximum(most, tl.max(tl.where(in_rows, tl.abs(merged), 0.0), 1))
    scale = most / largest
    tl.store(scale_ptr + layer * scale_stride + n, scale, mask=in_row)
    values_at = values_ptr + layer * values_stride + n.to(tl.int64)[:, None] * values_row
    for first in range(0, d_in, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        merged = _merged(
            base_ptr, base_row, base_scale, a_ptr, a_row, bt_ptr, bt_row, n, k, in_row, k < d_in, rank, 1.0,
            BLOCK_N, BLOCK_K, BLOCK_R, MAX_RANK, EVEN, PRECISION,
        )  # fmt: skip
        mask = None if EVEN else in_row[:, None] & (k < d_in)[None, :]
        numbers = merged / scale[:, None]
        if INTEGERS:
            numbers = _rounded(numbers)
        tl.store(values_at + k[None, :], numbers.to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows(
    values_ptr, scale_ptr, x_ptr, width, x_stride, largest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """values[row] = x[row] / scale[row]; the scale maps the row's largest value to `largest`. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    in_row = c < width
    x = tl.load(x_ptr + row * x_stride + c, mask=in_row, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / largest
    tl.store(scale_ptr + row, scale)
    tl.store(values_ptr + row * width + c, (x / scale).to(values_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def _restored(
    values, scale, offset, ZERO: tl.constexpr, FLIPPED: tl.constexpr, SCALED: tl.constexpr, OFFSETS: tl.constexpr
):
    """(bytes - ZERO) * scale + offset, in float32. FLIPPED: the bytes are signed, and 128 is added to each first.

    A byte is put into the mantissa of 2**23, because a conversion is several times slower than a subtraction.
    """
    bits = values.to(tl.uint8, bitcast=True).to(tl.int32)
    if FLIPPED:
        bits = bits ^ 128
    weights = (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    if SCALED:
        weights *= scale
    if OFFSETS:
        weights += offset
    return weights


@triton.jit
def _of_groups(numbers, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, GROUPS], a number for each group, as [ROWS, COLUMNS]."""
    wide = tl.broadcast_to(numbers[:, :, None], (ROWS, GROUPS, COLUMNS // GROUPS))
    return tl.reshape(wide, (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_integers(
    y_ptr, part_ptr, x_ptr, values_ptr, scale_ptr, bias_ptr,
    d_out, d_in, y_stride, x_stride, values_stride, scale_stride, num_tokens,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, FLIPPED: tl.constexpr, OFFSETS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x W^T + bias for one block of tokens and of outputs, over one share of d_in.

    Grid (blocks of d_out, blocks of tokens, SPLITS). The weights are the left operand, because tensor cores take 16
    or more rows of it, and a decode step has few tokens. With one split the result goes to y, else sums go to part
    [SPLITS, num_tokens, d_out], which `join_products` adds. GROUP: inputs with one scale; 0: all of a row. ZERO: the
    value of weight 0. OFFSETS: the scales of a row are followed by its offsets.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row, in_batch = n < d_out, m < num_tokens
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8  # bytes of a block's rows
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP > BLOCK_K else BLOCK_K // GROUP
    IN_LOOP: tl.constexpr = GROUP > 0 or OFFSETS  # else the sums are scaled
    k, b, g = tl.arange(0, BLOCK_K), tl.arange(0, WIDTH), tl.arange(0, GROUPS)
    share = tl.cdiv(tl.cdiv(d_in, BLOCK_K), SPLITS) * BLOCK_K
    start = tl.program_id(2) * share
    stop = tl.minimum(start + share, d_in)
    x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    values_at = values_ptr + n.to(tl.int64)[:, None] * values_stride + b[None, :]
    scales_at = scale_ptr + n.to(tl.int64)[:, None] * scale_stride
    num_groups = d_in // GROUP if GROUP > 0 else 1
    dtype = x_ptr.dtype.element_ty
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for first in range(start, stop, BLOCK_K):
        in_x, in_values = in_batch[:, None], in_row[:, None]
        if not EVEN_K:
            in_x = in_x & (first + k < d_in)[None, :]
            in_values = in_values & (first + b * 8 // BITS < d_in)[None, :]
        x = tl.load(x_at + first, mask=in_x, other=0.0)
        packed = tl.load(values_at + first * BITS // 8, mask=in_values, other=0)
        scale, offset = 1.0, 0.0
        if IN_LOOP:
            group = first // GROUP + g if GROUP > 0 else g
            in_scales = in_row[:, None] & (group < num_groups)[None, :]
            at = scales_at + group[None, :]
            scale = _of_groups(tl.load(at, mask=in_scales, other=0.0), BLOCK_N, GROUPS, WIDTH)
            if OFFSETS:
                offset = _of_groups(tl.load(at + num_groups, mask=in_scales, other=0.0), BLOCK_N, GROUPS, WIDTH)
        if BITS == 4:  # the lower halves of the bytes are even inputs, the higher ones odd inputs
            even, odd = tl.split(tl.reshape(x, (BLOCK_M, WIDTH, 2)))
            low = _restored(packed & 15, scale, offset, ZERO, FLIPPED, IN_LOOP, OFFSETS)
            high = _restored(packed >> 4, scale, offset, ZERO, FLIPPED, IN_LOOP, OFFSETS)
            sums = tl.dot(low.to(dtype), tl.trans(even), sums, input_precision=PRECISION)
            sums = tl.dot(high.to(dtype), tl.trans(odd), sums, input_precision=PRECISION)
        else:
            weights = _restored(packed, scale, offset, ZERO, FLIPPED, IN_LOOP, OFFSETS)
            sums = tl.dot(weights.to(dtype), tl.trans(x), sums, input_precision=PRECISION)
    if not IN_LOOP:
        sums *= tl.load(scale_ptr + n * scale_stride, mask=in_row, other=0.0)[:, None]
    own = tl.trans(sums)
    mask = in_batch[:, None] & in_row[None, :]
    place = m.to(tl.int64)[:, None]
    if SPLITS == 1:
        if BIAS:
            own += tl.load(bias_ptr + n, mask=in_row, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + place * y_stride + n[None, :], own.to(dtype), mask=mask)
    else:
        plane = tl.program_id(2).to(tl.int64) * num_tokens
        tl.store(part_ptr + (plane + place) * d_out + n[None, :], own, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def join_products(
    y_ptr, part_ptr, bias_ptr, d_out, y_stride, num_tokens,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """y = the sum of the shares of `multiply_integers`, in their order, plus bias. Grid (tokens, blocks of d_out)."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = c < d_out
    at = part_ptr + token * d_out + c
    sums = tl.load(at, mask=in_row, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(at + num_tokens.to(tl.int64) * split * d_out, mask=in_row, other=0.0)
    if BIAS:
        sums += tl.load(bias_ptr + c, mask=in_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * y_stride + c, sums.to(y_ptr.dtype.element_ty), mask=in_row)


@triton.jit
def merge_groups(
    values_ptr, scale_ptr, base_ptr, base_scale_ptr, a_ptr, bt_ptr, rank, d_out, d_in,
    values_stride, values_row, scale_stride, scale_row, base_stride, base_row, base_scale_stride, base_scale_row,
    a_stride, a_row, bt_stride, bt_row,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, MAX_RANK: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, OFFSETS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """values and scales = base + Bt^T A for one block of one layer, rounded as by `Grouped.encode`.

    Grid (layers, blocks of d_out, blocks of d_in).
    """
    layer = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    HIGHEST: tl.constexpr = 2**BITS - 1
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    b, group = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH), first // GROUP + tl.arange(0, GROUPS)
    in_row = n < d_out
    in_scales = in_row[:, None] & (group * GROUP < d_in)[None, :]
    in_bytes = in_row[:, None] & (b * 8 // BITS < d_in)[None, :]
    sums = _low_rank_sums(
        a_ptr + layer * a_stride, a_row, bt_ptr + layer * bt_stride, bt_row, n, k, in_row, k < d_in, rank,
        BLOCK_N, BLOCK_K, BLOCK_R, MAX_RANK, EVEN, PRECISION,
    )  # fmt: skip
    at = base_ptr + layer * base_stride + n.to(tl.int64)[:, None] * base_row + b[None, :]
    packed = tl.load(at, mask=in_bytes, other=0)
    ZERO: tl.constexpr = 0 if OFFSETS else MIDDLE
    if BITS == 4:
        packed = tl.reshape(tl.join(packed & 15, packed >> 4), (BLOCK_N, BLOCK_K))
    at = base_scale_ptr + layer * base_scale_stride + n.to(tl.int64)[:, None] * base_scale_row + group[None, :]
    scale, offset = _of_groups(tl.load(at, mask=in_scales, other=0.0), BLOCK_N, GROUPS, BLOCK_K), 0.0
    if OFFSETS:
        offset = tl.load(at + d_in // GROUP, mask=in_scales, other=0.0)
        offset = _of_groups(offset, BLOCK_N, GROUPS, BLOCK_K)
    weights = _restored(packed, scale, offset, ZERO, False, True, OFFSETS)
    merged = tl.reshape(weights + sums, (BLOCK_N, GROUPS, GROUP))
    highest, lowest = tl.max(merged, 2), tl.min(merged, 2)
    scale_at = scale_ptr + layer * scale_stride + n.to(tl.int64)[:, None] * scale_row + group[None, :]
    if OFFSETS:
        scale = (highest - lowest) / HIGHEST
        tl.store(scale_at + d_in // GROUP, lowest, mask=in_scales)
        numbers = (merged - lowest[:, :, None]) / tl.where(scale == 0, 1.0, scale)[:, :, None]
    else:
        scale = tl.where(highest > -lowest, highest, lowest) / -MIDDLE
        numbers = merged / tl.where(scale == 0, 1.0, scale)[:, :, None] + MIDDLE
    tl.store(scale_at, scale, mask=in_scales)
    numbers = tl.minimum(tl.maximum(_rounded(numbers), 0.0), 1.0 * HIGHEST)
    codes = tl.reshape(numbers, (BLOCK_N, BLOCK_K)).to(tl.int32)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (BLOCK_N, WIDTH, 2)))
        codes = low | (high << 4)
    values_at = values_ptr + layer * values_stride + n.to(tl.int64)[:, None] * values_row + b[None, :]
    tl.store(values_at, codes.to(tl.uint8), mask=in_bytes)
