// SPDX-License-Identifier: Apache-2.0
// NCCL: which library this process would use, and communicators of our own on it. NCCL is loaded, never linked; the few
// declarations needed are here, in words of nccl.h (checked against the wheel's header by a test).
#pragma once
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/fv_comm.h"
#include "dynlib.h"

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

constexpr int kNcclUndefined = INT_MIN;

// ncclConfig_t as of NCCL 2.27. A library reads min(size, its own size) bytes and takes its defaults for fields newer than
// `version`, so this serves older and newer ones (2.14 on).
struct NcclConfig {
    size_t size = sizeof(NcclConfig);
    unsigned magic = 0xcafebeefu;
    unsigned version = 22700;
    int blocking = kNcclUndefined;
    int cga_cluster_size = kNcclUndefined;
    int min_ctas = kNcclUndefined;
    int max_ctas = kNcclUndefined;
    const char* net_name = nullptr;
    int split_share = kNcclUndefined;
    int traffic_class = kNcclUndefined;
    const char* comm_name = nullptr;
    int collnet_enable = kNcclUndefined;
    int cta_policy = kNcclUndefined;
    int shrink_share = kNcclUndefined;
    int nvls_ctas = kNcclUndefined;
};

// What a caller may ask for; kNcclUndefined leaves NCCL's choice.
struct NcclOptions {
    int blocking = 1, cga_cluster_size = kNcclUndefined, min_ctas = kNcclUndefined, max_ctas = kNcclUndefined;
    int cta_policy = kNcclUndefined;
};

struct NcclUniqueId {
    char bytes[128];
};

struct NcclApi;         // the library's entry points, kept open while a communicator lives
struct NcclConnecting;  // what a thread that connects and its communicator both know

// For rank 0 to hand to the others. Needs no GPU.
std::string nccl_unique_id(const std::string& library);

// A communicator of the process's current CUDA device. Every wait ends: what NCCL does not finish within `seconds` is
// left behind in a thread of its own and becomes a std::runtime_error in words.
class NcclComm {
public:
    NcclComm(const std::string& library, int world, int rank, const std::string& unique_id, const NcclOptions& options,
             double seconds);
    ~NcclComm();
    NcclComm(const NcclComm&) = delete;
    NcclComm& operator=(const NcclComm&) = delete;
    NcclCalls calls() const;
    int version_code() const;
    std::string async_error() const;  // "" while all is well
    // Kernels that wait for a lost peer end. False: not within `seconds`; the communicator is given up all the same.
    bool abort(double seconds);
    // The orderly end, after the last use; graphs that captured calls keep NCCL from finishing: drop them first.
    bool close(double seconds);
    // Collective. Issues sums and gathers of zeros on `stream`, in place in [buffer, buffer + bytes), from a thread of its own: NCCL
    // connects in the first call of each algorithm, and one rank may fail there while the others wait for it inside NCCL for ever,
    // until abort(). Returns at once; the memory and the stream must live until connect_state() says something.
    void start_connect(uint64_t buffer, int64_t bytes, uint64_t stream);
    std::string connect_state() const;  // "" while that runs, "done" (queued on the stream), or what went wrong
    // Collective. False where this NCCL has no windows or refuses this memory; the address must be a multiple of 4096.
    bool register_window(uint64_t address, int64_t bytes);

private:
    bool end(bool abort, double seconds);
    std::shared_ptr<NcclApi> api_;
    std::shared_ptr<NcclConnecting> connecting_;
    int world_, rank_;
    void* comm_ = nullptr;
    std::vector<void*> windows_;
};

// Memory of ncclMemAlloc, which windows take.
class NcclBuffer {
public:
    NcclBuffer(const std::string& library, int64_t bytes);
    ~NcclBuffer();
    NcclBuffer(const NcclBuffer&) = delete;
    NcclBuffer& operator=(const NcclBuffer&) = delete;
    uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }

private:
    std::shared_ptr<NcclApi> api_;
    void* memory_ = nullptr;
};

}  // namespace fv::comm
