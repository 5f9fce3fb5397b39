"""GPU kernels of one decode step: five launches a layer in place of some thirty, and none that waits for the host.

Axes: L lane, S row of a lane, R = L*S, D hidden, F feed-forward, H query head, K key/value head, G = H/K, d head, V
vocabulary, T tile of the vocabulary. `fused_step` holds the buffers and says what is launched when. The residual
stream is float32 whatever the weights are. A program whose rows all sleep returns at once.

With `TRITON_INTERPRET=1` set before import the kernels run on a CPU, slowly: that is how their numbers are tested.
"""

import triton
import triton.language as tl

__all__ = ["attend", "begin", "head", "project", "sample"]


@triton.jit
def _read(at, mask, EVEN: tl.constexpr):
    """A tile; where it is not even, zeros outside the mask."""
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=mask, other=0.0)
    return found


@triton.jit
def _product(
    source,  # [R, IN]
    weights,  # [OUT (twice when GATED), IN] of the rows' lane
    norm,  # [IN] of the rows' lane, used when NORMED
    eps,
    row,
    real,  # which rows there are
    out,
    known,  # which outputs there are
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows times weights, and times the second half of them when GATED, after an RMS norm or not.

    The norm's weight scales the row before the product and its inverse root mean square after it, so that one
    pass over the row does both.
    """
    product = tl.zeros((BM, BN), tl.float32)
    other = tl.zeros((BM, BN), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    kind = weights.dtype.element_ty
    for start in range(0, IN, BK):
        k = start + tl.arange(0, BK)
        inside = k < IN
        seen = inside[:, None] & known[None, :]
        a = _read(source + row[:, None] * IN + k[None, :], real[:, None] & inside[None, :], EVEN)
        if NORMED:
            square += tl.sum(a * a, 1)
            a = a * _read(norm + k, inside, EVEN).to(tl.float32)[None, :]
        a = a.to(kind)
        at = weights + out[None, :] * IN + k[:, None]
        product = tl.dot(a, _read(at, seen, EVEN), product, input_precision=PRECISION)
        if GATED:
            b = _read(at + OUT * IN, seen, EVEN)
            other = tl.dot(a, b, other, input_precision=PRECISION)
    if NORMED:
        inverse = tl.rsqrt(square / IN + eps)[:, None]
        product *= inverse
        other *= inverse
    return product, other


@triton.jit
def begin(
    ids,  # [R, W]
    length,  # [R]
    active,  # [R]
    flat,  # [L, P], from the embedding on
    x,  # [R, D]
    first,
    W: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The vector of each row's last token."""
    row = (first * S + tl.program_id(0)).to(tl.int64)
    if tl.load(active + row) > 0:
        place = tl.load(length + row) - 1
        token = tl.load(ids + row * W + place)
        lane = row // S
        for start in range(0, D, BLOCK):
            at = start + tl.arange(0, BLOCK)
            found = tl.load(flat + lane * P + token * D + at, mask=at < D, other=0.0)
            tl.store(x + row * D + at, found.to(tl.float32), mask=at < D)


@triton.jit
def project(
    source,  # [R, IN]
    flat,  # [L, P]
    target,  # [R, OUT]
    active,  # [R]
    first,
    eps,
    weight_at,  # offset of the weights in a lane's P
    norm_at,  # offset of the norm over the source, used when NORMED
    S: tl.constexpr,
    P: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,  # write silu(gate) * up, whose weights stand one half after the other
    ADDED: tl.constexpr,  # add to the target, the residual stream
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,  # tiles end where rows, outputs and inputs do
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """One projection of every layer's four."""
    lane = (first + tl.program_id(2)).to(tl.int64)
    place = tl.program_id(1) * BM + tl.arange(0, BM)
    row = lane * S + place
    real = place < S
    if tl.max(tl.load(active + row, mask=real, other=0), 0) > 0:
        out = tl.program_id(0) * BN + tl.arange(0, BN)
        known = out < OUT
        own = flat + lane * P
        product, other = _product(
            source, own + weight_at, own + norm_at, eps, row, real, out, known,
            IN, OUT, NORMED, GATED, PRECISION, EVEN, BM, BN, BK,
        )  # fmt: skip
        if GATED:
            product = product * tl.sigmoid(product) * other
        to = target + row[:, None] * OUT + out[None, :]
        held = real[:, None] & known[None, :]
        if ADDED:
            product += tl.load(to, mask=held, other=0.0)
        tl.store(to, product.to(target.dtype.element_ty), mask=held)


@triton.jit
def attend(
    qkv,  # [R, (H + 2K) * d]
    keys,  # [rows, K, max_len, d]
    values,
    y,  # [R, H * d]
    length,
    active,
    cos,  # [max_len, d / 2]
    sin,
    first,
    scale,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    d: tl.constexpr,
    MAX_LEN: tl.constexpr,
    GROUP: tl.constexpr,  # rows of the query tile: 1, or at least 16 for the matrix units
    PRECISION: tl.constexpr,
    BW: tl.constexpr,
):
    """Rotate, put key and value into the cache, and attend to all positions up to the row's last."""
    row = (first * S + tl.program_id(0)).to(tl.int64)
    if tl.load(active + row) > 0:
        kv = tl.program_id(1)
        G: tl.constexpr = H // K
        HALF: tl.constexpr = d // 2
        position = (tl.load(length + row) - 1).to(tl.int32)
        half = tl.arange(0, HALF)
        whole = tl.arange(0, d)
        member = tl.arange(0, GROUP)
        c = tl.load(cos + position * HALF + half)
        s = tl.load(sin + position * HALF + half)
        fused = qkv + row * ((H + 2 * K) * d)
        one = fused + (kv * G + member)[:, None] * d + half[None, :]
        asks = (member < G)[:, None]
        qa = tl.load(one, mask=asks, other=0.0).to(tl.float32)
        qb = tl.load(one + HALF, mask=asks, other=0.0).to(tl.float32)
        q1 = (qa * c[None, :] - qb * s[None, :]) * scale
        q2 = (qb * c[None, :] + qa * s[None, :]) * scale
        ka = tl.load(fused + (H + kv) * d + half).to(tl.float32)
        kb = tl.load(fused + (H + kv) * d + HALF + half).to(tl.float32)
        kind = keys.dtype.element_ty
        k1 = (ka * c - kb * s).to(kind)
        k2 = (kb * c + ka * s).to(kind)
        v = tl.load(fused + (H + K + kv) * d + whole).to(kind)
        own_keys = keys + (row * K + kv) * (MAX_LEN * d)
        own_values = values + (row * K + kv) * (MAX_LEN * d)
        tl.store(own_keys + position * d + half, k1)
        tl.store(own_keys + position * d + HALF + half, k2)
        tl.store(own_values + position * d + whole, v)
        highest = tl.sum(q1 * k1.to(tl.float32)[None, :], 1)
        highest += tl.sum(q2 * k2.to(tl.float32)[None, :], 1)
        total = tl.full((GROUP,), 1.0, tl.float32)
        mixed = tl.zeros((GROUP, d), tl.float32) + v.to(tl.float32)[None, :]
        for start in range(0, position, BW):
            at = start + tl.arange(0, BW)
            past = at < position
            there = own_keys + at[:, None] * d + half[None, :]
            old1 = tl.load(there, mask=past[:, None], other=0.0)
            old2 = tl.load(there + HALF, mask=past[:, None], other=0.0)
            old_v = tl.load(
                own_values + at[:, None] * d + whole[None, :], mask=past[:, None], other=0.0
            )
            if GROUP == 1:
                score = tl.sum(q1 * old1.to(tl.float32), 1) + tl.sum(q2 * old2.to(tl.float32), 1)
                score = score[None, :]
            else:
                score = tl.dot(q1.to(kind), tl.trans(old1), input_precision=PRECISION)
                score = tl.dot(q2.to(kind), tl.trans(old2), score, input_precision=PRECISION)
            score = tl.where(past[None, :], score, float("-inf"))
            top = tl.maximum(highest, tl.max(score, 1))
            shrink = tl.exp(highest - top)
            weight = tl.exp(score - top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None]
            if GROUP == 1:
                flat_weight = tl.reshape(weight, (BW,))
                mixed += tl.sum(flat_weight[:, None] * old_v.to(tl.float32), 0)[None, :]
            else:
                mixed = tl.dot(weight.to(kind), old_v, mixed, input_precision=PRECISION)
            highest = top
        to = y + row * (H * d) + (kv * G + member)[:, None] * d + whole[None, :]
        tl.store(to, (mixed / total[:, None]).to(y.dtype.element_ty), mask=asks)


@triton.jit
def head(
    x,  # [R, D]
    flat,
    logits,  # [R, T * BN] float32, tempered
    peak,  # [R, T] largest logit of a tile
    mass,  # [R, T] sum of exp(logit - peak)
    temperature,  # [R]
    active,
    first,
    eps,
    weight_at,
    norm_at,
    S: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Final norm and next-token logits, with what each tile adds to the softmax."""
    lane = (first + tl.program_id(2)).to(tl.int64)
    place = tl.program_id(0) * BM + tl.arange(
        0, BM
    )  # rows vary fastest: they share a tile's weights
    row = lane * S + place
    real = place < S
    if tl.max(tl.load(active + row, mask=real, other=0), 0) > 0:
        tile = tl.program_id(1)
        token = tile * BN + tl.arange(0, BN)
        known = token < V
        own = flat + lane * P
        product, _ = _product(
            x, own + weight_at, own + norm_at, eps, row, real, token, known,
            D, V, True, False, PRECISION, EVEN, BM, BN, BK,
        )  # fmt: skip
        warmth = tl.load(temperature + row, mask=real, other=1.0)
        product /= tl.where(warmth > 0, warmth, 1.0)[:, None]
        product = tl.where(known[None, :], product, float("-inf"))
        top = tl.max(product, 1)
        tl.store(logits + row[:, None] * (T * BN) + token[None, :], product, mask=real[:, None])
        tl.store(peak + row * T + tile, top, mask=real)
        tl.store(mass + row * T + tile, tl.sum(tl.exp(product - top[:, None]), 1), mask=real)


@triton.jit
def sample(
    logits,
    peak,
    mass,
    temperature,
    uniforms,  # [R, W]
    ids,  # [R, W]
    sampled,  # [R, W]
    logp,  # [R, W]
    state,  # [6, R]: length, active, known, limit, turn start, turn limit
    first,
    turn_end,
    R: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,  # T rounded up to a power of two
    BN: tl.constexpr,
):
    """Draw each row's next token by inverting the cumulative distribution, and move the row on."""
    row = (first * S + tl.program_id(0)).to(tl.int64)
    if tl.load(state + R + row) > 0:
        length = tl.load(state + row)
        if length >= tl.load(state + 2 * R + row):
            tile = tl.arange(0, TILES)
            tops = tl.load(peak + row * T + tile, mask=tile < T, other=float("-inf"))
            sums = tl.load(mass + row * T + tile, mask=tile < T, other=0.0)
            top = tl.max(tops, 0)
            sums = sums * tl.exp(tops - top)
            total = tl.sum(sums, 0)
            is_greedy = tl.load(temperature + row) <= 0
            drawn = tl.load(uniforms + row * W + length) * total
            before = tl.sum((tl.cumsum(sums, 0) <= drawn).to(tl.int32), 0)
            chosen = tl.where(is_greedy, tl.argmax(tops, 0), tl.minimum(before, T - 1))
            passed = tl.sum(tl.where(tile < chosen, sums, 0.0), 0)
            member = tl.arange(0, BN)
            scores = tl.load(logits + row * (T * BN) + chosen * BN + member)
            reached = passed + tl.cumsum(tl.exp(scores - top), 0)
            inside = tl.sum((reached <= drawn).to(tl.int32), 0)
            inside = tl.where(is_greedy, tl.argmax(scores, 0), tl.minimum(inside, BN - 1))
            token = tl.minimum(chosen * BN + inside, V - 1)
            score = tl.load(logits + row * (T * BN) + token)
            tl.store(ids + row * W + length, token.to(tl.int64))
            tl.store(sampled + row * W + length, tl.full((), 1, tl.int1))
            tl.store(logp + row * W + length, score - top - tl.log(total))
            ended = (
                (token == turn_end)
                | (length + 1 >= tl.load(state + 3 * R + row))
                | (length + 1 - tl.load(state + 4 * R + row) >= tl.load(state + 5 * R + row))
            )
            tl.store(state + R + row, 1 - ended.to(tl.int64))
        tl.store(state + row, length + 1)
