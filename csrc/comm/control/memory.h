// SPDX-License-Identifier: Apache-2.0
// Memory that several processes and GPUs see: device slabs shared by CUDA IPC, and host regions in /dev/shm that every
// process maps and registers. RAII; every failure is a std::runtime_error in words. The CUDA context is the current one.
#pragma once
#include <cstdint>
#include <string>

namespace fv::comm {

// Plain cuMemAlloc memory, never torch's: its handle stays valid and no allocator setting can break it.
class DeviceSlab {
public:
    explicit DeviceSlab(int64_t bytes);
    ~DeviceSlab();
    DeviceSlab(const DeviceSlab&) = delete;
    DeviceSlab& operator=(const DeviceSlab&) = delete;
    uint64_t address() const { return address_; }
    std::string ipc_handle() const;  // 64 bytes
    void fill(int64_t offset, int64_t bytes, uint8_t value);  // complete when it returns

private:
    uint64_t address_ = 0;
    int64_t bytes_ = 0;
};

// A DeviceSlab of another process, mapped here.
class PeerSlab {
public:
    explicit PeerSlab(const std::string& ipc_handle);
    ~PeerSlab();
    PeerSlab(const PeerSlab&) = delete;
    PeerSlab& operator=(const PeerSlab&) = delete;
    uint64_t address() const { return address_; }

private:
    uint64_t address_ = 0;
};

// A region of /dev/shm; the creator sizes it (really reserving the pages) and unlinks its name when `unlink` is called.
class HostRegion {
public:
    HostRegion(const std::string& name, int64_t bytes, bool create);
    ~HostRegion();
    HostRegion(const HostRegion&) = delete;
    HostRegion& operator=(const HostRegion&) = delete;
    uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }
    const std::string& name() const { return name_; }
    void bind(int numa_node);     // pages on that node from the first touch on; before register_cuda
    void fill(int64_t offset, int64_t bytes, uint8_t value);
    void register_cuda();         // one process at a time
    uint64_t device_address() const { return device_address_; }
    void unlink();

private:
    std::string name_;
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
    uint64_t device_address_ = 0;
    bool registered_ = false, linked_ = false;
};

}  // namespace fv::comm
