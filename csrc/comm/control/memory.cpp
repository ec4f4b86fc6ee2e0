// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "dynlib.h"

namespace fv::comm {
namespace {

struct IpcHandle {
    char bytes[64];
};

// The few driver entry points used here (cuda.h: CUresult is an int, CUdeviceptr 64 bits).
struct Cuda {
    DynLib lib{"libcuda.so.1"};
    int (*mem_alloc)(uint64_t*, size_t) = lib.symbol<int(uint64_t*, size_t)>("cuMemAlloc_v2");
    int (*mem_free)(uint64_t) = lib.symbol<int(uint64_t)>("cuMemFree_v2");
    int (*memset8)(uint64_t, unsigned char, size_t) = lib.symbol<int(uint64_t, unsigned char, size_t)>("cuMemsetD8_v2");
    int (*synchronize)() = lib.symbol<int()>("cuCtxSynchronize");
    int (*ipc_get)(IpcHandle*, uint64_t) = lib.symbol<int(IpcHandle*, uint64_t)>("cuIpcGetMemHandle");
    int (*ipc_open)(uint64_t*, IpcHandle, unsigned) = lib.symbol<int(uint64_t*, IpcHandle, unsigned)>("cuIpcOpenMemHandle_v2");
    int (*ipc_close)(uint64_t) = lib.symbol<int(uint64_t)>("cuIpcCloseMemHandle");
    int (*host_register)(void*, size_t, unsigned) = lib.symbol<int(void*, size_t, unsigned)>("cuMemHostRegister_v2");
    int (*host_unregister)(void*) = lib.symbol<int(void*)>("cuMemHostUnregister");
    int (*host_device)(uint64_t*, void*, unsigned) = lib.symbol<int(uint64_t*, void*, unsigned)>("cuMemHostGetDevicePointer_v2");
    int (*error_string)(int, const char**) = lib.symbol<int(int, const char**)>("cuGetErrorString");
};

const Cuda& cuda() {
    static const Cuda c;
    if (!c.lib || !c.host_device || !c.ipc_open) {
        throw std::runtime_error("Communicator: libcuda.so.1 must load; got " + c.lib.error() +
                                 ". Fix: install the NVIDIA driver, or use CPU tensors.");
    }
    return c;
}

void check(int code, const std::string& what, const std::string& fix) {
    if (code == 0) return;
    const char* text = nullptr;
    cuda().error_string(code, &text);
    throw std::runtime_error("Communicator: " + what + " must succeed; got CUDA error " + std::to_string(code) + " (" +
                             (text ? text : "unknown") + "). Fix: " + fix + ".");
}

[[noreturn]] void fail(const std::string& what, const std::string& fix) {
    throw std::runtime_error("Communicator: " + what + " must succeed; got " + std::strerror(errno) + ". Fix: " + fix + ".");
}

}  // namespace

DeviceSlab::DeviceSlab(int64_t bytes) : bytes_(bytes) {
    check(cuda().mem_alloc(&address_, static_cast<size_t>(bytes)), "allocating " + std::to_string(bytes) + " bytes on the GPU",
          "free memory or lower max_bytes");
}
DeviceSlab::~DeviceSlab() {
    if (address_) cuda().mem_free(address_);
}
std::string DeviceSlab::ipc_handle() const {
    IpcHandle handle;
    check(cuda().ipc_get(&handle, address_), "cuIpcGetMemHandle", "start containers with --ipc=host, or use backend=\"host\"");
    return std::string(handle.bytes, sizeof(handle.bytes));
}
void DeviceSlab::fill(int64_t offset, int64_t bytes, uint8_t value) {
    if (offset < 0 || bytes < 0 || offset + bytes > bytes_) throw std::invalid_argument("DeviceSlab: range outside the slab");
    if (bytes > 0) check(cuda().memset8(address_ + static_cast<uint64_t>(offset), value, static_cast<size_t>(bytes)), "cuMemsetD8", "run fastverify doctor");
    check(cuda().synchronize(), "cuCtxSynchronize", "an earlier kernel may be at fault");
}

PeerSlab::PeerSlab(const std::string& handle) {
    IpcHandle h;
    if (handle.size() != sizeof(h.bytes)) throw std::invalid_argument("PeerSlab: a handle has 64 bytes");
    std::memcpy(h.bytes, handle.data(), sizeof(h.bytes));
    constexpr unsigned kLazyEnablePeerAccess = 1;
    check(cuda().ipc_open(&address_, h, kLazyEnablePeerAccess), "cuIpcOpenMemHandle",
          "start all ranks in one IPC namespace (docker --ipc=host) and check peer access with fastverify doctor, or use "
          "backend=\"host\"");
}
PeerSlab::~PeerSlab() {
    if (address_) cuda().ipc_close(address_);
}

HostRegion::HostRegion(const std::string& name, int64_t bytes, bool create) : name_(name), bytes_(bytes) {
    const std::string fix = "mount a larger /dev/shm (docker --shm-size) or lower max_bytes";
    const int fd = shm_open(name.c_str(), create ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    if (fd < 0) fail("shm_open of " + name, create ? fix : "start all ranks in one IPC namespace (docker --ipc=host)");
    linked_ = create;
    const int full = create ? posix_fallocate(fd, 0, bytes) : 0;  // a full /dev/shm is an error here, not a SIGBUS later
    if (full == 0) memory_ = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const int saved = full ? full : errno;
    close(fd);
    if (full != 0 || memory_ == MAP_FAILED) {
        memory_ = nullptr;
        unlink();
        errno = saved;
        fail("reserving " + std::to_string(bytes) + " bytes in /dev/shm", fix);
    }
}
HostRegion::~HostRegion() {
    if (registered_) cuda().host_unregister(memory_);
    if (memory_) munmap(memory_, static_cast<size_t>(bytes_));
    unlink();
}
void HostRegion::bind(int numa_node) {
#ifdef SYS_mbind
    if (numa_node < 0 || numa_node > 63) return;
    const unsigned long mask = 1ul << numa_node;
    constexpr int kPreferred = 1;
    constexpr unsigned kMove = 2;
    syscall(SYS_mbind, memory_, static_cast<unsigned long>(bytes_), kPreferred, &mask, 64ul, kMove);  // a wish: failure is no error
#else
    (void)numa_node;
#endif
}
void HostRegion::fill(int64_t offset, int64_t bytes, uint8_t value) {
    if (offset < 0 || bytes < 0 || offset + bytes > bytes_) throw std::invalid_argument("HostRegion: range outside the region");
    std::memset(static_cast<uint8_t*>(memory_) + offset, value, static_cast<size_t>(bytes));
}
void HostRegion::register_cuda() {
    constexpr unsigned kPortableMapped = 1 | 2;
    check(cuda().host_register(memory_, static_cast<size_t>(bytes_), kPortableMapped), "cuMemHostRegister of " +
          std::to_string(bytes_) + " bytes", "raise `ulimit -l` (docker --ulimit memlock=-1) or lower max_bytes");
    registered_ = true;
    check(cuda().host_device(&device_address_, memory_, 0), "cuMemHostGetDevicePointer", "run fastverify doctor");
}
void HostRegion::unlink() {
    if (linked_) shm_unlink(name_.c_str());
    linked_ = false;
}

}  // namespace fv::comm
