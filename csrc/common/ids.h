// SPDX-License-Identifier: Apache-2.0
// Token ids in memory: int32 or int64, decided by the tensor. Host and device.
#pragma once
#include "common/types.h"

namespace fv {

struct IdView {
    const void* data;
    bool wide;  // int64, else int32
    FV_HD int64_t operator[](int64_t i) const {
        return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    }
};

struct IdStore {
    void* data;
    bool wide;
    FV_HD void set(int64_t i, int64_t v) const {
        if (wide) static_cast<int64_t*>(data)[i] = v;
        else static_cast<int32_t*>(data)[i] = static_cast<int32_t>(v);
    }
};

}  // namespace fv
