// SPDX-License-Identifier: Apache-2.0
// The paged cache as CPU ops see it. The CPU can read cu_nodes, prefix_len and page ids, so it checks them
// before it touches a page; CUDA kernels bound them instead.
#pragma once
#include <cmath>

#include "check.h"

namespace fv {

struct PageTable {
    const int32_t* ids;  // [B, columns]
    int64_t row_stride, columns, page_size, num_pages;

    PageTable(const Tensor& table, int64_t page_size_, int64_t num_pages_)
        : ids(cptr<int32_t>(table)), row_stride(table.stride(0)), columns(table.size(1)), page_size(page_size_),
          num_pages(num_pages_) {}

    int64_t id(int64_t b, int64_t page) const { return ids[b * row_stride + page]; }

    // Positions [begin, end) of request b must be backed by pages of the cache.
    void check(const char* op, int64_t b, int64_t begin, int64_t end) const {
        if (begin >= end) return;
        FV_CHECK(end <= columns * page_size, op, ": page_table must cover positions [0, ", end, ") of request ", b,
                 "; got ", columns, " pages of ", page_size, " tokens. Fix: reserve pages for prompt + new tokens + ",
                 "the tree at admission.");
        for (int64_t p = begin / page_size; p <= (end - 1) / page_size; ++p) {
            FV_CHECK(id(b, p) >= 0 && id(b, p) < num_pages, op, ": page_table must hold page ids in [0, ", num_pages,
                     ") for positions [", begin, ", ", end, ") of request ", b, "; got ", id(b, p), " in column ", p,
                     ". Fix: reserve pages for prompt + new tokens + the tree at admission.");
        }
    }
};

inline void check_cu_nodes(const char* op, const int32_t* cu, int64_t requests, int64_t rows) {
    FV_CHECK(cu[0] == 0, op, ": cu_nodes must start with 0; got ", cu[0], ". Fix: pass prefix sums of the node counts.");
    for (int64_t b = 0; b < requests; ++b) {
        FV_CHECK(cu[b + 1] >= cu[b] && cu[b + 1] <= rows, op, ": cu_nodes must not decrease nor pass ", rows,
                 " rows; got ", cu[b], " then ", cu[b + 1], " at request ", b,
                 ". Fix: pass prefix sums of the node counts.");
    }
}

inline void check_prefix_len(const char* op, const int32_t* prefix_len, int64_t requests) {
    for (int64_t b = 0; b < requests; ++b) {
        FV_CHECK(prefix_len[b] >= 0, op, ": prefix_len must be >= 0; got ", prefix_len[b], " at request ", b,
                 ". Fix: pass the committed length of each request.");
    }
}

constexpr double kMostScale = 2e38, kLeastSoftcap = 1e-37;  // float32 holds these times log2(e), and 1 / softcap

// Forest columns are int32.
inline void check_row_base(const char* op, int64_t row_base, int64_t rows) {
    FV_CHECK(row_base >= 0, op, ": row_base must be >= 0; got ", row_base,
             ". Fix: pass the forest column of each request's first row.");
    FV_CHECK(row_base <= INT32_MAX - rows, op, ": row_base must be at most ", INT32_MAX - rows, " with ", rows, " rows; got ", row_base,
             ". Fix: pass the forest column of each request's first row.");
}

inline void check_scale(const char* op, double scale, const char* fix) {
    FV_CHECK(std::isfinite(scale), op, ": scale must be finite; got ", scale, ". Fix: ", fix);
    FV_CHECK(std::fabs(scale) <= kMostScale, op, ": scale must be at most ", kMostScale, " (float32); got ", scale, ". Fix: ", fix);
}

// float32 [1] or [heads]; value of head h is data[h * stride].
struct HeadScale {
    const float* data = nullptr;
    int64_t stride = 0;

    HeadScale() = default;
    HeadScale(const char* op, const char* name, const OptTensor& t, int64_t heads, const Tensor& like) {
        if (!t) return;
        check_tensor(op, name, *t, {ScalarType::Float}, {t->dim() == 1 && t->size(0) == 1 ? 1 : heads}, like);
        data = cptr<float>(t);
        stride = t->size(0) == 1 ? 0 : 1;
    }
    float operator[](int64_t h) const { return data ? data[h * stride] : 1.0f; }
};

}  // namespace fv
