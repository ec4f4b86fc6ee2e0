// SPDX-License-Identifier: Apache-2.0
// The walk of lm_head_verify_tree for requests whose rows left the product as keys: one block per request.
#pragma once
#include "accept/head_score.cuh"

namespace fv {

struct HeadOutputs {
    int64_t max_path;
    int32_t* remaining;       // [B]
    HeadIds stop_ids;         // [num_stops]
    int64_t num_stops;
    void* out_tokens;         // [B,D]
    int32_t* num_tokens_out;  // [B]
    int32_t* path;            // [B,D]
    void* next_root;          // [B]
    int32_t* flags;           // [B]
    int32_t* counts;          // [B,V] or null
    bool wide_tokens, wide_root;  // int64, else int32
};

__device__ __forceinline__ void store_id(void* p, bool wide, int64_t i, int64_t value) {
    if (wide) static_cast<int64_t*>(p)[i] = value;
    else static_cast<int32_t*>(p)[i] = static_cast<int32_t>(value);
}

// Requests with filters (wants_logits) are left alone: verify_tree's kernel has written theirs.
// The keys of the request's rows are zero again afterwards.
__global__ void __launch_bounds__(kHeadThreads) head_walk_kernel(const HeadArgs a, const HeadOutputs o) {
    __shared__ Key keys[kMaxNodes];
    __shared__ int64_t emitted[kMaxNodes];
    __shared__ int32_t child[2];
    const int64_t b = blockIdx.x, d = o.max_path;
    const bool in_order = ranges_in_order(a);
    const RowParams p = a.params(b);
    const bool active = a.active[b] != 0;
    if (active && wants_logits(a, in_order, p)) return;
    for (int64_t i = threadIdx.x; i < d; i += blockDim.x) {
        o.path[b * d + i] = -1;
        store_id(o.out_tokens, o.wide_tokens, b * d + i, -1);
    }
    if (!active) {  // remaining and next_root stay as they are
        if (threadIdx.x == 0) o.num_tokens_out[b] = o.flags[b] = 0;
        return;
    }

    const NodeRange r = node_range(a.cu_nodes, b, a.rows);
    const int32_t* parents = a.parents + r.begin;
    bool bad_tree = threadIdx.x == 0 && r.n > 0 && parents[0] != -1, bad_token = false;
    for (int i = threadIdx.x; i < r.n; i += blockDim.x) {
        // rows that are bad carry it in a bit of their key
        keys[i] = a.keys[r.begin + i] | (a.bad[r.begin + i] ? kKeyBad : 0);
        a.keys[r.begin + i] = 0;
        a.bad[r.begin + i] = 0;
        if (i > 0) bad_tree = bad_tree || parents[i] < 0 || parents[i] >= i;
        const int64_t t = a.tokens[r.begin + i];
        if (i > 0) bad_token = bad_token || t < 0 || t >= a.vocab;
    }
    int32_t flags = p.flags, n = r.n;
    if (__syncthreads_or(bad_tree || n == 0)) {
        flags |= kFlagBadTree;  // the root's row is still right: plain decoding for this step
        n = n > 0 ? 1 : 0;
    }
    const bool any_bad_token = __syncthreads_or(bad_token && n > 1) != 0;
    if (any_bad_token) flags |= kFlagBadToken;

    int32_t count = 0, visited = 0;  // the same in every thread
    for (int32_t node = n > 0 ? 0 : -1; node >= 0 && visited < d;) {
        const Key key = keys[node] & ~kKeyBad;
        const bool bad = (keys[node] & kKeyBad) != 0;
        const int64_t token = key_id(key);
        if (threadIdx.x == 0) {
            o.path[b * d + visited] = node;
            emitted[count] = token;
            child[visited & 1] = kMaxNodes;
        }
        ++visited;
        if (bad) flags |= kFlagBadRow;
        if (!key_has_token(key)) {
            flags |= kFlagEmptyRow;
            break;
        }
        ++count;
        if (bad) break;
        __syncthreads();
        int32_t* const found = child + ((visited - 1) & 1);
        for (int32_t j = node + 1 + static_cast<int32_t>(threadIdx.x); j < n; j += static_cast<int32_t>(blockDim.x)) {
            if (parents[j] == node && a.tokens[r.begin + j] == token) {
                atomicMin(found, j);
                break;
            }
        }
        __syncthreads();
        node = *found < kMaxNodes ? *found : -1;
        if (node >= 0 && visited == d) flags |= kFlagPathFull;
    }
    if (threadIdx.x != 0) return;
    const int32_t kept = clip_tokens(emitted, count, o.remaining[b], &o.stop_ids, o.num_stops, &flags);
    for (int32_t i = 0; i < kept; ++i) {
        store_id(o.out_tokens, o.wide_tokens, b * d + i, emitted[i]);
        if (o.counts) o.counts[b * a.vocab + emitted[i]] += 1;
    }
    if (kept > 0) store_id(o.next_root, o.wide_root, b, emitted[kept - 1]);
    o.remaining[b] -= kept;
    o.num_tokens_out[b] = kept;
    o.flags[b] = flags;
}

}  // namespace fv
