// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "nccl.h"

namespace fv::comm {

struct NcclApi {
    DynLib lib;
    int (*get_version)(int*);
    int (*get_unique_id)(NcclUniqueId*);
    int (*init_config)(void**, int, NcclUniqueId, int, NcclConfig*);
    int (*destroy)(void*);
    int (*finalize)(void*);
    int (*abort)(void*);
    int (*get_async_error)(void*, int*);
    const char* (*error_string)(int);
    const char* (*last_error)(void*);
    int (*all_reduce)(const void*, void*, size_t, int, int, void*, void*);
    int (*all_gather)(const void*, void*, size_t, int, void*, void*);
    int (*window_register)(void*, void*, size_t, void**, int);    // NCCL 2.27 and newer
    int (*window_deregister)(void*, void*);
    int (*mem_alloc)(void**, size_t);
    int (*mem_free)(void*);
    int version = 0;

    explicit NcclApi(const std::string& path) : lib(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE) {
        if (!lib) throw std::runtime_error("Communicator: NCCL must load from " + path + "; got " + lib.error() +
                                           ". Fix: pip install 'fastverify[nccl]', or set FASTVERIFY_NCCL_LIB.");
        get_version = lib.symbol<int(int*)>("ncclGetVersion");
        get_unique_id = lib.symbol<int(NcclUniqueId*)>("ncclGetUniqueId");
        init_config = lib.symbol<int(void**, int, NcclUniqueId, int, NcclConfig*)>("ncclCommInitRankConfig");
        destroy = lib.symbol<int(void*)>("ncclCommDestroy");
        finalize = lib.symbol<int(void*)>("ncclCommFinalize");
        abort = lib.symbol<int(void*)>("ncclCommAbort");
        get_async_error = lib.symbol<int(void*, int*)>("ncclCommGetAsyncError");
        error_string = lib.symbol<const char*(int)>("ncclGetErrorString");
        last_error = lib.symbol<const char*(void*)>("ncclGetLastError");
        all_reduce = lib.symbol<int(const void*, void*, size_t, int, int, void*, void*)>("ncclAllReduce");
        all_gather = lib.symbol<int(const void*, void*, size_t, int, void*, void*)>("ncclAllGather");
        window_register = lib.symbol<int(void*, void*, size_t, void**, int)>("ncclCommWindowRegister");
        window_deregister = lib.symbol<int(void*, void*)>("ncclCommWindowDeregister");
        mem_alloc = lib.symbol<int(void**, size_t)>("ncclMemAlloc");
        mem_free = lib.symbol<int(void*)>("ncclMemFree");
        if (!get_version || get_version(&version) != 0 || !get_unique_id || !init_config || !destroy || !finalize || !abort ||
            !get_async_error || !error_string || !all_reduce || !all_gather) {
            throw std::runtime_error("Communicator: NCCL must be 2.14 or newer; got " + lib.path() + " (" +
                                     nccl_version_text(version) + "). Fix: pip install -U nvidia-nccl-cu12.");
        }
    }
    void check(int result, const char* what) const {
        if (result == 0) return;
        const char* more = last_error ? last_error(nullptr) : "";
        throw std::runtime_error(std::string("Communicator: ") + what + " must succeed; got NCCL error " + std::to_string(result) +
                                 " (" + error_string(result) + (more && *more ? std::string(": ") + more : "") +
                                 "). Fix: set NCCL_DEBUG=WARN and look at what it says.");
    }
};

struct NcclConnecting {
    std::mutex mutex;
    bool stopped = false;  // the communicator may be gone: no further call
    std::string state;
};

namespace {

constexpr int kInProgress = 7, kInt8 = 0, kFloat32 = 7, kSum = 0;  // as in nccl.h

// Runs `work`, which must not throw, in a thread that has this thread's CUDA context and keeps what it needs alive.
void beside(std::function<void()> work) {
    auto cuda = std::make_shared<DynLib>("libcuda.so.1");
    auto* get_context = cuda->symbol<int(void**)>("cuCtxGetCurrent");
    auto* set_context = cuda->symbol<int(void*)>("cuCtxSetCurrent");
    void* context = nullptr;
    if (get_context) get_context(&context);
    std::thread([cuda, work = std::move(work), set_context, context] {
        if (context && set_context) set_context(context);
        work();
    }).detach();
}

// beside(), and waits for at most `seconds`. False: it still runs.
bool within(double seconds, std::function<void()> work) {
    struct Shared {
        std::mutex mutex;
        std::condition_variable changed;
        bool done = false;
    };
    auto shared = std::make_shared<Shared>();
    beside([shared, work = std::move(work)] {
        work();
        const std::lock_guard<std::mutex> lock(shared->mutex);
        shared->done = true;
        shared->changed.notify_all();
    });
    std::unique_lock<std::mutex> lock(shared->mutex);
    return shared->changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return shared->done; });
}

}  // namespace

std::string nccl_unique_id(const std::string& library) {
    const NcclApi api(library);
    NcclUniqueId id = {};
    api.check(api.get_unique_id(&id), "ncclGetUniqueId");
    return std::string(id.bytes, sizeof id.bytes);
}

NcclComm::NcclComm(const std::string& library, int world, int rank, const std::string& unique_id, const NcclOptions& options,
                   double seconds)
    : api_(std::make_shared<NcclApi>(library)), world_(world), rank_(rank) {
    NcclUniqueId id = {};
    if (unique_id.size() != sizeof id.bytes) throw std::invalid_argument("NcclComm: a unique id has 128 bytes");
    std::memcpy(id.bytes, unique_id.data(), sizeof id.bytes);
    struct Opening {
        NcclConfig config;
        void* comm = nullptr;
        int result = kInProgress;
    };
    auto opening = std::make_shared<Opening>();
    opening->config.blocking = options.blocking;
    opening->config.cga_cluster_size = options.cga_cluster_size;
    opening->config.min_ctas = options.min_ctas;
    opening->config.max_ctas = options.max_ctas;
    opening->config.cta_policy = options.cta_policy;
    opening->config.comm_name = "fastverify";
    const auto api = api_;
    const bool ended = within(seconds, [api, opening, world, id, rank] {
        opening->result = api->init_config(&opening->comm, world, id, rank, &opening->config);
        while (opening->result == kInProgress) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (api->get_async_error(opening->comm, &opening->result) != 0) opening->result = kInProgress;
        }
    });
    if (!ended) {
        throw std::runtime_error("Communicator: all " + std::to_string(world) + " ranks must open NCCL within " +
                                 std::to_string(static_cast<int>(seconds)) + " s; got no answer. Fix: see which ranks hang "
                                 "(NCCL_DEBUG=INFO), or use another backend.");
    }
    api_->check(opening->result, "ncclCommInitRankConfig");
    comm_ = opening->comm;
}

NcclComm::~NcclComm() { end(false, 2.0); }

NcclCalls NcclComm::calls() const {
    return NcclCalls{comm_, api_->all_reduce, api_->all_gather, api_->get_async_error, api_->error_string};
}

int NcclComm::version_code() const { return api_->version; }

std::string NcclComm::async_error() const {
    int result = 0;
    if (!comm_) return "the communicator was closed";
    const int code = api_->get_async_error(comm_, &result);
    if (code == 0 && (result == 0 || result == kInProgress)) return "";
    return api_->error_string(code ? code : result);
}

void NcclComm::start_connect(uint64_t buffer, int64_t bytes, uint64_t stream) {
    if (!comm_) {
        throw std::runtime_error("Communicator: NCCL must be open to connect; got one that was closed. Fix: make the communicator again.");
    }
    const auto shared = connecting_ = std::make_shared<NcclConnecting>();
    const auto api = api_;
    beside([api, shared, comm = comm_, world = world_, rank = rank_, memory = reinterpret_cast<char*>(buffer), bytes,
            on = reinterpret_cast<void*>(stream)] {
        const auto go_on = [&] {
            if (shared->stopped) throw std::runtime_error("Communicator: NCCL must stay open while it connects; got an abort. "
                                                          "Fix: look at the other ranks.");
        };
        const auto made = [&](const char* what, const auto& call) {
            {
                const std::lock_guard<std::mutex> lock(shared->mutex);
                go_on();
            }
            int result = call();
            while (result == kInProgress) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                const std::lock_guard<std::mutex> lock(shared->mutex);
                go_on();
                if (const int code = api->get_async_error(comm, &result)) result = code;
            }
            api->check(result, what);
        };
        std::string said = "done";
        try {
            // In steps that no algorithm's range of sizes falls between.
            for (int64_t n = bytes; n >= 1024; n /= 8) {
                const auto count = static_cast<size_t>(n / 4);
                made("ncclAllReduce", [&] { return api->all_reduce(memory, memory, count, kFloat32, kSum, comm, on); });
            }
            for (int64_t n = std::min<int64_t>(kGatherBytes, bytes / world); n >= 1024; n /= 8) {
                made("ncclAllGather", [&] { return api->all_gather(memory + rank * n, memory, static_cast<size_t>(n), kInt8, comm, on); });
            }
        } catch (const std::exception& error) {
            said = error.what();
        }
        const std::lock_guard<std::mutex> lock(shared->mutex);
        shared->state = said;
    });
}

std::string NcclComm::connect_state() const {
    if (!connecting_) return "";
    const std::lock_guard<std::mutex> lock(connecting_->mutex);
    return connecting_->state;
}

bool NcclComm::end(bool abort, double seconds) {
    if (!comm_) return true;
    if (connecting_) {
        const std::lock_guard<std::mutex> lock(connecting_->mutex);
        connecting_->stopped = true;
        abort = abort || connecting_->state.empty();  // the orderly end would wait for the call that hangs
    }
    void* comm = std::exchange(comm_, nullptr);
    auto windows = std::exchange(windows_, {});
    const auto api = api_;
    return within(seconds, [api, comm, windows, abort] {
        if (abort) {
            api->abort(comm);
            return;
        }
        for (void* w : windows) api->window_deregister(comm, w);
        int result = api->finalize(comm);
        while (result == kInProgress && api->get_async_error(comm, &result) == 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        api->destroy(comm);
    });
}

bool NcclComm::abort(double seconds) { return end(true, seconds); }
bool NcclComm::close(double seconds) { return end(false, seconds); }

bool NcclComm::register_window(uint64_t address, int64_t bytes) {
    constexpr int kCollectiveSymmetric = 1;
    void* window = nullptr;
    if (!comm_ || !api_->window_register || !api_->window_deregister) return false;
    const int result = api_->window_register(comm_, reinterpret_cast<void*>(address), static_cast<size_t>(bytes), &window,
                                             kCollectiveSymmetric);
    if (result != 0 || !window) return false;
    windows_.push_back(window);
    return true;
}

NcclBuffer::NcclBuffer(const std::string& library, int64_t bytes) : api_(std::make_shared<NcclApi>(library)) {
    if (!api_->mem_alloc || !api_->mem_free) {
        throw std::runtime_error("Communicator: NCCL must have ncclMemAlloc (2.19 or newer); got " +
                                 nccl_version_text(api_->version) + ". Fix: pip install -U nvidia-nccl-cu12.");
    }
    api_->check(api_->mem_alloc(&memory_, static_cast<size_t>(bytes)), "ncclMemAlloc");
}
NcclBuffer::~NcclBuffer() {
    if (memory_) api_->mem_free(memory_);
}

}  // namespace fv::comm
