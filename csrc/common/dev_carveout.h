// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdlib>
namespace fv {
template <class K> void dev_carveout(K* kernel) {
#ifndef FV_EMULATE
    static const char* v = std::getenv("FV_DEV_CARVEOUT");
    if (v) cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributePreferredSharedMemoryCarveout, std::atoi(v));
#endif
}
}
