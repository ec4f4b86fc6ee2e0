// SPDX-License-Identifier: Apache-2.0
// rope_append on CUDA: per-head RMSNorm of q and k, RoPE, and the append of K and V to the paged cache, one launch.
// One warp per (row, head) of q, k and v; a head lies in shared memory as fp32 while its partial sums and rotation
// partners are exchanged. Every sum runs in the order of the CPU op (16 partial sums, then those in turn) and every
// operation is a single IEEE one, so all results that are not NaN have the bits of the CPU op.
// A row is left alone when its slot is negative, or when its slot or position is out of range.
// Cost: one read of q, k, v and the rows' table entries, one write of q, K and V. Graph-safe.
// Instantiations: 3 (dtype of q, k, v); the dtypes of cache and norm weights are uniform branches.
#include <torch/csrc/stable/library.h>

#include "algo/convert.h"
#include "attention/rope_append_args.h"
#include "common/launch.h"

namespace fv {
namespace {

constexpr int kWarps = 4;  // per block
constexpr int kLanes = 16;  // partial sums of the norm
constexpr unsigned kAll = 0xffffffffu;

enum Format : int32_t { kF32, kBf16, kF16, kE4m3 };

struct Rows {  // a [rows, heads, D] tensor, dense in D; strides in elements
    void* data;
    int64_t row, head;
};
struct Cache {  // [pages, page_size, heads, D], dense in D
    void* data;
    int64_t page, slot, head;
    const float* scale;  // null: 1
    int64_t scale_stride;
};
struct Norm {  // [D], null: none
    const void* weight;
    Format format;
};
struct Params {
    Rows q, k, v;
    Cache k_cache, v_cache;
    Norm q_norm, k_norm;
    const int32_t* positions;  // [rows]
    const int64_t* slots;      // [rows]
    const float* cos_sin;      // [max_positions, rot]
    int64_t rows, max_positions, capacity;
    int32_t q_heads, kv_heads, head_dim, rot, page_size, style;
    Format format, cache_format;
    float eps;
    bool vector, vector_table;  // four elements at a time: everything is aligned for it
};

struct alignas(16) Four {
    float v[4];
};
struct alignas(8) Halves {
    uint16_t v[4];
};
struct alignas(4) Bytes {
    uint8_t v[4];
};

__device__ float load_one(const void* p, Format f, int64_t i) {
    if (f == kF32) return static_cast<const float*>(p)[i];
    const uint16_t h = static_cast<const uint16_t*>(p)[i];
    return f == kBf16 ? bf16_to_float(h) : half_to_float(h);
}

// Elements i .. i + n of p, n <= 4; the others are 0.
__device__ Four load_four(const void* p, Format f, int64_t i, int n, bool vector) {
    Four x = {};
    if (!vector) {
        for (int j = 0; j < n; ++j) x.v[j] = load_one(p, f, i + j);
    } else if (f == kF32) {
        x = *reinterpret_cast<const Four*>(static_cast<const float*>(p) + i);
    } else {
        const Halves h = *reinterpret_cast<const Halves*>(static_cast<const uint16_t*>(p) + i);
        for (int j = 0; j < 4; ++j) x.v[j] = f == kBf16 ? bf16_to_float(h.v[j]) : half_to_float(h.v[j]);
    }
    return x;
}

__device__ void store_four(void* p, Format f, int64_t i, const Four& x, int n, bool vector) {
    if (f == kF32) {
        float* at = static_cast<float*>(p) + i;
        if (vector) *reinterpret_cast<Four*>(at) = x;
        else for (int j = 0; j < n; ++j) at[j] = x.v[j];
    } else if (f == kE4m3) {
        uint8_t* at = static_cast<uint8_t*>(p) + i;
        Bytes b;
        for (int j = 0; j < 4; ++j) b.v[j] = float_to_e4m3(x.v[j]);
        if (vector) *reinterpret_cast<Bytes*>(at) = b;
        else for (int j = 0; j < n; ++j) at[j] = b.v[j];
    } else {
        uint16_t* at = static_cast<uint16_t*>(p) + i;
        Halves h;
        for (int j = 0; j < 4; ++j) h.v[j] = f == kBf16 ? float_to_bf16(x.v[j]) : float_to_half(x.v[j]);
        if (vector) *reinterpret_cast<Halves*>(at) = h;
        else for (int j = 0; j < n; ++j) at[j] = h.v[j];
    }
}

// 1 / rms of y [d] in shared memory, in every lane.
__device__ float inverse_rms(const float* y, int d, float eps, int lane) {
    float partial = 0.0f;
    for (int i = lane % kLanes; i < d / kLanes * kLanes; i += kLanes) partial += y[i] * y[i];
    float sum = 0.0f;
    for (int j = 0; j < kLanes; ++j) sum += __shfl_sync(kAll, partial, j);
    for (int i = d / kLanes * kLanes; i < d; ++i) sum += y[i] * y[i];
    return 1.0f / sqrtf(sum / static_cast<float>(d) + eps);
}

// Elements i .. i + 3 of y [d] rotated by the table row cs = cosines | sines.
__device__ Four rotate(const float* y, const float* cs, int i, int n, const Params& p) {
    const int half = p.rot / 2;
    Four out = *reinterpret_cast<const Four*>(y + i);
    if (i >= p.rot) return out;
    if (p.vector_table) {  // neox, half % 4 == 0: the four lie on one side
        const bool low = i < half;
        const int pair = low ? i : i - half;
        const Four c = *reinterpret_cast<const Four*>(cs + pair), s = *reinterpret_cast<const Four*>(cs + half + pair);
        const Four other = *reinterpret_cast<const Four*>(y + (low ? i + half : pair));
        for (int j = 0; j < 4; ++j) {
            const float a = out.v[j] * c.v[j], b = other.v[j] * s.v[j];
            out.v[j] = low ? a - b : a + b;
        }
        return out;
    }
    for (int j = 0; j < n && i + j < p.rot; ++j) {
        const int e = i + j;
        const bool low = p.style == 0 ? e < half : e % 2 == 0;
        const int pair = p.style == 0 ? (low ? e : e - half) : e / 2;
        const int partner = p.style == 0 ? (low ? e + half : e - half) : e ^ 1;
        const float a = y[e] * cs[pair], b = y[partner] * cs[half + pair];
        out.v[j] = low ? a - b : a + b;
    }
    return out;
}

// grid: ceil(rows * (q_heads + 2 kv_heads) / kWarps); shared: kWarps * head_dim (rounded up to 4) floats.
template <Format kFormat>
__global__ void __launch_bounds__(kWarps * 32) rope_append_kernel(const Params p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = p.head_dim;
    const int heads = p.q_heads + 2 * p.kv_heads;
    const int64_t task = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    const int64_t row = task / heads;
    if (row >= p.rows) return;
    const int which = static_cast<int>(task - row * heads);  // a head of q, then of k, then of v
    const bool is_q = which < p.q_heads, is_v = which >= p.q_heads + p.kv_heads;
    const int head = is_q ? which : which - p.q_heads - (is_v ? p.kv_heads : 0);

    const int64_t slot = p.slots[row];
    const int32_t position = p.positions[row];
    const Rows& in = is_q ? p.q : is_v ? p.v : p.k;
    const int64_t at = row * in.row + head * in.head;
    const int first = 4 * lane;  // the first four elements of this lane, loaded before slot and position are known
    Four x = {};
    if (first < d) x = load_four(in.data, kFormat, at + first, min(4, d - first), p.vector);
    if (slot < 0 || slot >= p.capacity || position < 0 || position >= p.max_positions) return;

    const Cache& cache = is_v ? p.v_cache : p.k_cache;
    float scale = 1.0f;
    void* out = p.q.data;
    Format out_format = kFormat;
    int64_t out_at = at;
    if (!is_q) {
        const int64_t page = slot / p.page_size;
        out = cache.data;
        out_format = p.cache_format;
        out_at = page * cache.page + (slot - page * p.page_size) * cache.slot + head * cache.head;
        if (cache.scale) scale = cache.scale[head * cache.scale_stride];
    }

    float* y = reinterpret_cast<float*>(dynamic_shared()) + warp * ((d + 3) / 4 * 4);
    const float* cs = p.cos_sin + position * static_cast<int64_t>(p.rot);
    const Norm& norm = is_q ? p.q_norm : p.k_norm;
    if (!is_v) {
        for (int i = first; i < d; i += 128) {
            if (i != first) x = load_four(in.data, kFormat, at + i, min(4, d - i), p.vector);
            *reinterpret_cast<Four*>(y + i) = x;
        }
        __syncwarp();
        if (norm.weight) {
            const float r = inverse_rms(y, d, p.eps, lane);
            __syncwarp();
            for (int i = first; i < d; i += 128) {
                const Four w = load_four(norm.weight, norm.format, i, min(4, d - i), p.vector);
                for (int j = 0; j < 4; ++j) y[i + j] = y[i + j] * r * w.v[j];
            }
            __syncwarp();
        }
    }
    for (int i = first; i < d; i += 128) {
        const int n = min(4, d - i);
        if (!is_v) x = rotate(y, cs, i, n, p);
        else if (i != first) x = load_four(in.data, kFormat, at + i, n, p.vector);
        if (scale != 1.0f) {
            for (int j = 0; j < 4; ++j) x.v[j] = x.v[j] / scale;
        }
        store_four(out, out_format, out_at + i, x, n, p.vector);
    }
}

Format format_of(ScalarType t) {
    return t == ScalarType::Float ? kF32 : t == ScalarType::BFloat16 ? kBf16 : t == ScalarType::Half ? kF16 : kE4m3;
}

bool aligned(const void* p, Format f) {
    return reinterpret_cast<uintptr_t>(p) % (f == kF32 ? 16 : f == kE4m3 ? 4 : 8) == 0;
}
bool aligned(const Rows& r, Format f) { return aligned(r.data, f) && r.row % 4 == 0 && r.head % 4 == 0; }
bool aligned(const Cache& c, Format f) {
    return aligned(c.data, f) && c.page % 4 == 0 && c.slot % 4 == 0 && c.head % 4 == 0;
}

Rows rows_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1)}; }
Cache cache_of(const Tensor& t, const HeadScale& s) {
    return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), s.data, s.stride};
}
Norm norm_of(const OptTensor& t) {
    return t ? Norm{t->const_data_ptr(), format_of(t->scalar_type())} : Norm{nullptr, kF32};
}

void rope_append_cuda(Tensor q, const Tensor k, const Tensor v, const Tensor positions, const Tensor slots,
                      const Tensor cos_sin, const OptTensor q_norm, const OptTensor k_norm, const OptTensor k_scale,
                      const OptTensor v_scale, Tensor k_cache, Tensor v_cache, double eps, int64_t rotary_style) {
    const RopeAppendArgs a("rope_append", q, k, v, positions, slots, cos_sin, q_norm, k_norm, k_scale, v_scale, k_cache,
                           v_cache, eps, rotary_style);
    const int64_t heads = a.q_heads + 2 * a.kv_heads;
    if (a.rows * heads == 0) return;
    Params p = {};
    p.q = rows_of(q), p.k = rows_of(k), p.v = rows_of(v);
    p.k_cache = cache_of(k_cache, a.k_scale), p.v_cache = cache_of(v_cache, a.v_scale);
    p.q_norm = norm_of(q_norm), p.k_norm = norm_of(k_norm);
    p.positions = cptr<int32_t>(positions), p.slots = cptr<int64_t>(slots), p.cos_sin = cptr<float>(cos_sin);
    p.rows = a.rows, p.max_positions = a.max_positions, p.capacity = a.capacity;
    p.q_heads = static_cast<int32_t>(a.q_heads), p.kv_heads = static_cast<int32_t>(a.kv_heads);
    p.head_dim = static_cast<int32_t>(a.head_dim), p.rot = static_cast<int32_t>(a.rot);
    p.page_size = static_cast<int32_t>(a.page_size), p.style = static_cast<int32_t>(rotary_style);
    p.format = format_of(a.type), p.cache_format = format_of(a.cache_type);
    p.eps = static_cast<float>(eps);
    p.vector = a.head_dim % 4 == 0 && aligned(p.q, p.format) && aligned(p.k, p.format) && aligned(p.v, p.format) &&
               aligned(p.k_cache, p.cache_format) && aligned(p.v_cache, p.cache_format) &&
               aligned(p.q_norm.weight, p.q_norm.format) && aligned(p.k_norm.weight, p.k_norm.format);
    p.vector_table = rotary_style == 0 && a.rot % 8 == 0 && aligned(p.cos_sin, kF32);

    const Launch launch("rope_append", q);
    const dim3 grid(static_cast<unsigned>(ceil_div(a.rows * heads, kWarps)));
    const size_t shared = kWarps * static_cast<size_t>((a.head_dim + 3) / 4 * 4) * sizeof(float);
    const auto kernel = p.format == kF32 ? rope_append_kernel<kF32>
                        : p.format == kBf16 ? rope_append_kernel<kBf16> : rope_append_kernel<kF16>;
    launch.run(kernel, grid, dim3(kWarps * 32), shared, p);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("rope_append", TORCH_BOX(&rope_append_cuda)); }

}  // namespace fv
