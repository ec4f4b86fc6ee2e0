// SPDX-License-Identifier: Apache-2.0
// Bounds, flag bits and the host/device marker shared by every stage.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define FV_HD __host__ __device__ __forceinline__
#else
#define FV_HD inline __attribute__((always_inline))
#endif

// One body, three x86 levels, picked once at load time by the dynamic linker. All floating-point
// arithmetic in these functions is single IEEE operations and explicit fmaf, so the levels agree bit for bit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__) && \
    !defined(FV_NO_CLONES)
#define FV_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FV_CLONES
#endif

namespace fv {

constexpr int kMaxNodes = 1024;      // nodes of one request's tree (verify_tree, build_tree)
constexpr int kMaxBeam = 64;         // k of draft_topk / grow_tree
constexpr int kMaxMaskWords = 16;    // 64 * 16 = 1024 columns (attention itself is asked for up to 128)
constexpr int kMaxVocab = 1 << 20;   // 2^20 masses of at most 2^43 fit in 63 bits

// verify_tree rules
constexpr int kRuleGreedy = 0;       // argmax whatever the temperature
constexpr int kRuleSampleMatch = 1;  // Gumbel-max with noise keyed by (seed, position, id); T = 0 is greedy

// bits of flags[b]
enum Flag : int32_t {
    kFlagStop = 1 << 0,         // a stop id was emitted; what followed it was cut
    kFlagBudget = 1 << 1,       // remaining[b] reached zero
    kFlagBadTree = 1 << 2,      // malformed parents/cu_nodes: treated as the bare root (or no node)
    kFlagBadToken = 1 << 3,     // a drafted id outside [0, vocab): never matched (build_tree: clamped)
    kFlagBadRow = 1 << 4,       // NaN or +inf in a visited row: its finite argmax was emitted, then stop
    kFlagEmptyRow = 1 << 5,     // no finite entry in a visited row: no token from it
    kFlagPathFull = 1 << 6,     // the path buffer ended before the walk did
    kFlagBadParam = 1 << 7,     // a sampling parameter out of range: replaced (see verify_tree)
};

}  // namespace fv
