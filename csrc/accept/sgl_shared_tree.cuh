// SPDX-License-Identifier: Apache-2.0
// SglTree from shared memory: all links of a request are read in one round, so that a walk is no chain of global loads.
#pragma once
#include "accept/sgl_verify_args.h"

namespace fv {

struct SglSharedTree {
    int32_t next[kMaxNodes], sibling_of[kMaxNodes], tokens[kMaxNodes], flats[kMaxNodes];
    int32_t* index_row;
    int32_t* predicts;
    // All threads; a barrier must follow.
    __device__ void load(const SglTreeArgs& a, int64_t b) {
        const int64_t base = b * a.nodes;
        for (int i = threadIdx.x; i < a.nodes; i += blockDim.x) {
            next[i] = sgl_link(a.next[base + i], a.nodes);
            sibling_of[i] = sgl_link(a.sibling[base + i], a.nodes);
            tokens[i] = sgl_token(a.candidates[base + i]);
            flats[i] = sgl_flat(a.index[base + i], a.slots);
        }
        if (threadIdx.x == 0) {
            index_row = a.accept_index + b * a.levels;
            predicts = a.predicts;
        }
    }
    __device__ int32_t first_child(int32_t i) const { return next[i]; }
    __device__ int32_t sibling(int32_t i) const { return sibling_of[i]; }
    __device__ int32_t token(int32_t i) const { return tokens[i]; }
    __device__ int32_t flat(int32_t i) const { return flats[i]; }
    __device__ void accept(int32_t k, int32_t flat) { index_row[k] = flat; }
    __device__ void predict(int32_t flat, int64_t token) { predicts[flat] = static_cast<int32_t>(token); }
};

}  // namespace fv
