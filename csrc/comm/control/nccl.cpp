// SPDX-License-Identifier: Apache-2.0
#include "nccl.h"

namespace fv::comm {
namespace {

bool ask(NcclReport& report, const char* source, const std::string& name, int flags) {
    const DynLib lib(name, flags);
    if (!lib) {
        report.tried.push_back(std::string(source) + ": " + lib.error());
        return false;
    }
    const auto get_version = lib.symbol<int(int*)>("ncclGetVersion");
    if (!get_version || get_version(&report.version_code) != 0) {
        report.tried.push_back(std::string(source) + ": " + lib.path() + " is not NCCL (no working ncclGetVersion)");
        return false;
    }
    report.path = lib.path();
    report.source = source;
    return true;
}

}  // namespace

NcclReport find_nccl(const std::string& env_path, const std::string& wheel_path) {
    NcclReport report;
    constexpr int kLoad = RTLD_LAZY | RTLD_LOCAL;
    if (!env_path.empty()) {
        ask(report, "FASTVERIFY_NCCL_LIB", env_path, kLoad);
        return report;
    }
    if (ask(report, "mapped", "libnccl.so.2", kLoad | RTLD_NOLOAD)) return report;
    if (wheel_path.empty()) {
        report.tried.push_back("wheel: no nvidia-nccl package in this environment");
    } else {
        ask(report, "wheel", wheel_path, kLoad);
    }
    return report;
}

std::string nccl_version_text(int code) {  // 2.9 and later: major*10000 + minor*100 + patch; before: major*1000
    const int unit = code >= 10000 ? 10000 : 1000;
    return std::to_string(code / unit) + "." + std::to_string(code % unit / 100) + "." + std::to_string(code % 100);
}

}  // namespace fv::comm
