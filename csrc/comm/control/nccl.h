// SPDX-License-Identifier: Apache-2.0
// Which NCCL this process would use. NCCL is loaded, never linked.
#pragma once
#include <string>
#include <vector>

namespace fv::comm {

struct NcclReport {
    std::string path;                // empty: none
    std::string source;              // "FASTVERIFY_NCCL_LIB", "mapped" (torch's copy) or "wheel"
    int version_code = 0;            // of ncclGetVersion: 22707 = 2.27.7
    std::vector<std::string> tried;  // one line per place that had none
};

// Order: `env_path` (if not empty it is the only place asked), the copy that is mapped already, `wheel_path`.
// The library is closed again; a copy that was mapped before stays.
NcclReport find_nccl(const std::string& env_path, const std::string& wheel_path);

std::string nccl_version_text(int code);

}  // namespace fv::comm
