// SPDX-License-Identifier: Apache-2.0
// The kernel of short sequences: whether it takes a call, and its launch (tree_attention_short.cu).
#pragma once
#include "algo/short_plan.h"
#include "attention/attention_params.h"

namespace fv {

class Launch;

// rows of K, V, q and out are aligned to 16 bytes.
inline bool takes_short(const AttentionParams& p, int major, int sms) {
    return p.q_type == Element::kBf16 && p.kv_type == Element::kBf16 && p.softcap == 0.0f && p.head_dim == p.v_dim &&
           short_attention(p.batch, p.kv_heads, p.head_dim, p.capacity, major, sms);
}
void run_short(const Launch& launch, const AttentionParams& p);
void run_block(const Launch& launch, const AttentionParams& p);  // tree_attention_block.cu

}  // namespace fv
