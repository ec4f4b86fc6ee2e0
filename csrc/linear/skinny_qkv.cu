// SPDX-License-Identifier: Apache-2.0
// skinny_qkv on CUDA: RMSNorm, merged QKV product, RoPE and append to the paged cache in one launch: a block's 16 weight rows
// are eight pairs that RoPE turns into each other. Same bits as the product rounded to bf16, then rope_append.
// Cost: N * K * 2 bytes, one launch. Graph-safe. Instantiations: 8 (short and long K), 16, 24, 32 rows.
#include <torch/csrc/stable/library.h>

#include "algo/attention_plan.h"
#include "linear/skinny_args.h"
#include "linear/skinny_kernel.cuh"

namespace fv {
namespace skinny {
namespace {

struct Cache {
    uint16_t* data;
    int64_t page, slot, head;
};

struct Qkv {
    uint16_t* q;
    int64_t q_row, q_head;
    Cache k, v;
    const int32_t* positions;
    const int64_t* slots;
    const float* cos_sin;
    int64_t max_positions, capacity;
    int32_t heads, kv_heads, head_dim, page_size;
    Divider by_page_size;  // of slots below 2^32
    bool settled;          // positions and slots were written before the launch before this one began

    __device__ void rows(int tile, int& low, int& high) const {
        const int per_head = head_dim / kTile, head = tile / per_head;
        low = head * head_dim + tile % per_head * 8;
        high = low + head_dim / 2;
    }
    struct Early {
        int64_t slot;
        float c, s;
        bool live;
    };
    __device__ bool early_before_wait() const { return settled; }
    __device__ Early early(int row, int, int low) const {
        const int64_t slot = __ldcg(slots + row);  // not what an L1 may still hold
        const int32_t position = __ldcg(positions + row);
        if (slot < 0 || slot >= capacity || position < 0 || position >= max_positions) return {0, 0.0f, 0.0f, false};
        const float* at = cos_sin + position * static_cast<int64_t>(head_dim) + low % head_dim;
        return {slot, at[0], at[head_dim / 2], true};
    }
    __device__ void store(const Early& e, int row, int tile, int low, int, float a, float b) const {
        if (!e.live) return;
        const int head = tile / (head_dim / kTile), half = head_dim / 2, i = low - head * head_dim;
        a = bf16_to_float(float_to_bf16(a));
        b = bf16_to_float(float_to_bf16(b));
        if (head < heads + kv_heads) {
            const float u = a * e.c - b * e.s;
            b = b * e.c + a * e.s;
            a = u;
        }
        uint16_t* to = q + row * q_row + head * q_head;
        if (head >= heads) {
            const Cache& cache = head < heads + kv_heads ? k : v;
            const int64_t page = e.slot >> 32 ? e.slot / page_size : by_page_size.quotient(static_cast<uint32_t>(e.slot));
            to = cache.data + page * cache.page + (e.slot - page * page_size) * cache.slot + (head - heads) % kv_heads * cache.head;
        }
        to[i] = float_to_bf16(a);
        to[i + half] = float_to_bf16(b);
    }
};

Cache cache_of(const Tensor& t) { return {mptr<uint16_t>(t), t.stride(0), t.stride(1), t.stride(2)}; }

void skinny_qkv_cuda(const Tensor x, const Tensor weight, const OptTensor bias, const OptTensor norm, const Tensor positions,
                     const Tensor slots, const Tensor cos_sin, Tensor q, Tensor k_cache, Tensor v_cache, double eps, bool settled) {
    const QkvSizes n = check_skinny_qkv(x, weight, bias, norm, positions, slots, cos_sin, q, k_cache, v_cache, eps);
    if (n.s.rows == 0) return;
    const Params p = params("skinny_qkv", n.s, x, weight, bias, norm, eps);
    const Launch launch("skinny_qkv", x);
    run_skinny(launch, p, Qkv{mptr<uint16_t>(q), q.stride(0), q.stride(1), cache_of(k_cache), cache_of(v_cache),
                              cptr<int32_t>(positions), cptr<int64_t>(slots), cptr<float>(cos_sin), n.max_positions, n.capacity,
                              static_cast<int32_t>(n.heads), static_cast<int32_t>(n.kv_heads), static_cast<int32_t>(n.head_dim),
                              static_cast<int32_t>(n.page_size), divider(static_cast<uint32_t>(n.page_size)), settled});
}

}  // namespace
}  // namespace skinny

STABLE_TORCH_LIBRARY_IMPL(fastverify, CUDA, m) { m.impl("skinny_qkv", TORCH_BOX(&skinny::skinny_qkv_cuda)); }

}  // namespace fv
