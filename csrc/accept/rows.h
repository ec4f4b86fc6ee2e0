// SPDX-License-Identifier: Apache-2.0
// One row of logits on the CPU: load, process, cut, choose. Vectorised; scratch is reused per thread.
#pragma once
#include <cstdint>
#include <vector>

#include "algo/sampling.h"
#include "common/check.h"

namespace fv {

// What a request adds to its rows. Pointers are already offset to the request (and to the shard).
struct RowExtras {
    const int32_t* counts = nullptr;   // [V] or null
    const float* bias = nullptr;       // [V] or null
    const int32_t* bitmask = nullptr;  // bits of this row, global ids, or null
    const int64_t* ancestors = nullptr;  // drafted tokens on the path above the row (root excluded)
    int32_t num_ancestors = 0;
    bool penalties = false;
};

struct RowScratch {
    std::vector<float> z;          // processed row, -inf = excluded
    std::vector<int32_t> block;    // maximum of each 64 entries (ordered_int)
    std::vector<int32_t> ids;      // candidates
    std::vector<float> values;     // their z
};
RowScratch& row_scratch();

constexpr int kBlock = 64;

// Type of the logits, resolved once per call.
enum class LogitType { kFloat, kHalf, kBFloat16 };
LogitType logit_type(const Tensor& t);
const void* row_pointer(const Tensor& logits, int64_t row);

// row [v] -> out [n] in fp32.
void load_row(const void* row, LogitType type, int64_t n, float* out);
float load_one(const void* row, LogitType type, int64_t i);

// Fills scratch.z (scaled; unscaled for greedy) and scratch.block; returns true if a NaN or +inf was met.
// Entry i is vocabulary id offset + i.
bool process_row(const void* row, LogitType type, int64_t n, int64_t offset, const RowParams& p, const RowExtras& x,
                 RowScratch& s);

// Highest value of the processed row (-inf: no finite entry).
float row_max(const RowScratch& s);
// k-th largest value (ties counted one by one); -inf when at most k entries are left.
float top_k_cut(RowScratch& s, int64_t n, int32_t k);
// Sum of masses of entries >= cut.
uint64_t row_mass(const RowScratch& s, int64_t n, float zmax, float cut);
// Smallest value kept by top-p among entries >= cut.
float top_p_cut(RowScratch& s, int64_t n, float zmax, float cut, uint64_t need);
// Best key among entries z >= cut that min-p keeps: z (greedy) or z + noise(position t).
uint64_t best_key(RowScratch& s, int64_t n, int64_t offset, const RowParams& p, float zmax, float cut, uint32_t t);

// Raw log-sum-exp parts of a row: finite maximum, and masses relative to a given maximum.
float raw_max(const void* row, LogitType type, int64_t n);
uint64_t raw_mass(const void* row, LogitType type, int64_t n, float max);

// The whole row at once. key 0 = no finite entry.
struct RowResult {
    uint64_t key;
    bool bad;
};
RowResult choose_token(const void* row, LogitType type, int64_t n, const RowParams& p, const RowExtras& x, uint32_t t);

}  // namespace fv
