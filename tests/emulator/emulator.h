// SPDX-License-Identifier: Apache-2.0
// Runs CUDA kernels on the CPU so that their logic is tested where there is no GPU. Force-included before every .cu file
// (build.sh). Each thread of a block is a fiber, blocks run one after the other; a fiber gives way only at barriers,
// shuffles and the like. It shows wrong indexing, missing barriers that deadlock, bad reductions, out-of-bounds accesses
// (under ASan); it cannot show races between threads, memory order, or time.
#pragma once
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/csrc/stable/library.h>

#define FV_EMULATE 1

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

// The same registrations, in a namespace of their own, for CPU tensors.
#undef STABLE_TORCH_LIBRARY_IMPL
#undef STABLE_TORCH_LIBRARY_FRAGMENT
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) _STABLE_TORCH_LIBRARY_IMPL(ns##_emulated, CPU, m, STABLE_UID)
#define STABLE_TORCH_LIBRARY_FRAGMENT(ns, m) _STABLE_TORCH_LIBRARY_FRAGMENT(ns##_emulated, m, STABLE_UID)

namespace emu {

constexpr int kMaxThreads = 1024;

struct Fiber {  // what the running thread sees
    uint3 thread_idx;
    int linear, lane, warp;
};
extern Fiber* current;
extern uint3 block_idx;
extern dim3 block_dim, grid_dim;
extern unsigned char* dynamic_memory;

// resident: all blocks are alive together and may wait for each other (spin() in the loop); static __shared__ arrays
// would be shared by all of them, so such kernels use dynamic shared memory only.
// cluster > 1: clusters run one after the other, the blocks of one together; dynamic shared memory only, as above.
void run_grid(dim3 grid, dim3 block, size_t smem, bool resident, unsigned cluster, const std::function<void()>& body);
extern unsigned cluster_blocks;
void cluster_barrier();
unsigned char* cluster_memory(unsigned rank);  // dynamic shared memory of a block of the running cluster
void spin();

// Barrier of the whole block; returns sum over threads of `value` (for __syncthreads_count/or/and).
int block_barrier(int value);
// Barrier of the lanes of `mask` in the running warp. Every lane gives 8 bytes and sees all 32 slots afterwards
// (valid until the next warp call of this warp).
const uint64_t* warp_exchange(unsigned mask, uint64_t value, const char* what);
// The same with a block of bytes per lane.
void warp_share(unsigned mask, const void* mine, size_t bytes, void* all);

template <class T>
uint64_t to_bits(T v) {
    static_assert(sizeof(T) <= 8);
    uint64_t u = 0;
    std::memcpy(&u, &v, sizeof(T));
    return u;
}
template <class T>
T from_bits(uint64_t u) {
    T v;
    std::memcpy(&v, &u, sizeof(T));
    return v;
}

}  // namespace emu

#define threadIdx (emu::current->thread_idx)
#define blockIdx (emu::block_idx)
#define blockDim (emu::block_dim)
#define gridDim (emu::grid_dim)
constexpr int warpSize = 32;

// ---- barriers ---------------------------------------------------------------------------------------------
inline void __syncthreads() { emu::block_barrier(0); }
inline int __syncthreads_count(int p) { return emu::block_barrier(p != 0); }
inline int __syncthreads_or(int p) { return emu::block_barrier(p != 0) != 0; }
inline int __syncthreads_and(int p) { return emu::block_barrier(p == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_exchange(mask, 0, "__syncwarp"); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() { std::abort(); }

// ---- warp -------------------------------------------------------------------------------------------------
template <class T>
T __shfl_sync(unsigned mask, T v, int src, int width = 32) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__shfl_sync");
    const int lane = emu::current->lane, base = lane & ~(width - 1);
    return emu::from_bits<T>(all[base + (src & (width - 1))]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__shfl_xor_sync");
    const int lane = emu::current->lane, base = lane & ~(width - 1), src = (lane ^ x);
    return emu::from_bits<T>(all[src < base + width ? src : lane]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__shfl_up_sync");
    const int lane = emu::current->lane, base = lane & ~(width - 1), src = lane - static_cast<int>(d);
    return emu::from_bits<T>(all[src >= base ? src : lane]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__shfl_down_sync");
    const int lane = emu::current->lane, base = lane & ~(width - 1), src = lane + static_cast<int>(d);
    return emu::from_bits<T>(all[src < base + width ? src : lane]);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
    const uint64_t* all = emu::warp_exchange(mask, p != 0, "__ballot_sync");
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (mask >> i & 1) && all[i] ? 1u << i : 0u;
    return r;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <class T, class F>
T emu_reduce(unsigned mask, T v, F f) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__reduce_sync");
    bool have = false;
    T r{};
    for (int i = 0; i < 32; ++i) {
        if (!(mask >> i & 1)) continue;
        const T x = emu::from_bits<T>(all[i]);
        r = have ? f(r, x) : x;
        have = true;
    }
    return r;
}
#define EMU_REDUCE(NAME, T, EXPR) \
    inline T NAME(unsigned mask, T v) { return emu_reduce(mask, v, [](T a, T b) { return static_cast<T>(EXPR); }); }
EMU_REDUCE(__reduce_add_sync, unsigned, a + b)
EMU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMU_REDUCE(__reduce_or_sync, unsigned, a | b)
EMU_REDUCE(__reduce_and_sync, unsigned, a & b)
EMU_REDUCE(__reduce_add_sync, int, a + b)
EMU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
    const uint64_t* all = emu::warp_exchange(mask, emu::to_bits(v), "__match_any_sync");
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (mask >> i & 1) && all[i] == emu::to_bits(v) ? 1u << i : 0u;
    return r;
}

// ---- atomics: blocks and fibers never run at the same time ------------------------------------------------
#define EMU_ATOMIC(NAME, EXPR)                                        \
    template <class T, class U>                                       \
    T NAME(T* p, U value) {                                           \
        const T old = *p, v = static_cast<T>(value);                  \
        *p = static_cast<T>(EXPR);                                    \
        return old;                                                   \
    }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicMax, old > v ? old : v)
EMU_ATOMIC(atomicMin, old < v ? old : v)
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicAdd_block, old + v)
EMU_ATOMIC(atomicMax_block, old > v ? old : v)
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    const unsigned old = *p;
    *p = old >= limit ? 0 : old + 1;
    return old;
}
template <class T>
T atomicCAS(T* p, T compare, T value) {
    const T old = *p;
    if (old == compare) *p = value;
    return old;
}

// ---- arithmetic -------------------------------------------------------------------------------------------
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
    return r;
}
inline unsigned __fns(unsigned mask, unsigned base, int offset) {  // offset > 0 only
    for (unsigned i = base; i < 32; ++i) {
        if ((mask >> i & 1) && --offset == 0) return i;
    }
    return 0xffffffffu;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
    return static_cast<unsigned>(((static_cast<uint64_t>(hi) << 32) | lo) >> (s & 31));
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
    return static_cast<unsigned>((((static_cast<uint64_t>(hi) << 32) | lo) << (s & 31)) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t v = (static_cast<uint64_t>(b) << 32) | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= static_cast<unsigned>(v >> (8 * (s >> (4 * i) & 7)) & 255) << (8 * i);
    return r;
}
inline unsigned __float_as_uint(float f) { return static_cast<unsigned>(emu::to_bits(f)); }
inline int __float_as_int(float f) { return static_cast<int>(emu::to_bits(f)); }
inline float __uint_as_float(unsigned u) { return emu::from_bits<float>(u); }
inline float __int_as_float(int u) { return emu::from_bits<float>(static_cast<unsigned>(u)); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline float __saturatef(float a) { return a < 0 ? 0 : a > 1 ? 1 : a; }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stwt(T* p, T v) { *p = v; }
template <class A, class B> auto min(A a, B b) -> std::common_type_t<A, B> {
    using C = std::common_type_t<A, B>;
    return C(a) < C(b) ? C(a) : C(b);
}
template <class A, class B> auto max(A a, B b) -> std::common_type_t<A, B> {
    using C = std::common_type_t<A, B>;
    return C(a) > C(b) ? C(a) : C(b);
}

namespace fv {

inline unsigned char* dynamic_shared() { return emu::dynamic_memory; }
inline unsigned char* dynamic_shared_aligned() { return emu::dynamic_memory; }

}  // namespace fv

#include "launch.h"

namespace fv {

// csrc/common/launch.h's Launch, on the CPU. The device it claims: FV_EMULATED_DEVICE=<sm>:<multiprocessors>, else 90:132.
class Launch {
public:
    const char* op;
    DeviceProps props;
    cudaStream_t stream = nullptr;

    Launch(const char* op_name, const Tensor&) : op(op_name) {
        const char* device = std::getenv("FV_EMULATED_DEVICE");
        int sm = 90, sms = 132;
        if (device) std::sscanf(device, "%d:%d", &sm, &sms);
        props.major = sm / 10;
        props.minor = sm % 10;
        props.sms = sms;
        props.max_smem = sm == 80 ? 163 * 1024 : sm == 89 || sm == 120 ? 99 * 1024 : 227 * 1024;
        props.l2 = 50 << 20;
        props = apply_profile(props, std::getenv("FASTVERIFY_PROFILE"));
    }

    template <class... P, class... A>
    void run(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(false, 1, kernel, grid, block, smem, args...);
    }
    // Every block of the grid runs at the same time (kernels that wait for other blocks).
    template <class... P, class... A>
    void run_overlapped(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        run(kernel, grid, block, smem, args...);
    }
    template <class... P, class... A>
    void run_resident(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(true, 1, kernel, grid, block, smem, args...);
    }
    template <class... P, class... A>
    void run_resident_cluster(void (*kernel)(P...), int cluster, dim3 grid, dim3 block, size_t smem, A... args) const {
        launch(true, cluster, kernel, grid, block, smem, args...);
    }
    template <class... P>
    int resident_blocks(void (*)(P...), int cluster, int blocks, dim3, size_t) const {
        return blocks / cluster * cluster;
    }
    template <class... P, class... A>
    void run_cluster(void (*kernel)(P...), int cluster, dim3 grid, dim3 block, size_t smem, A... args) const {
        const int most = props.major == 9 || props.major == 10 ? 16 : props.major > 10 ? 8 : 1;
        FV_CHECK(cluster >= 1 && cluster <= most && grid.x % cluster == 0, op, ": clusters must have 1..", most,
                 " blocks and divide the grid; got ", cluster, " and ", grid.x, ". Fix: the launcher.");
        launch(false, cluster, kernel, grid, block, smem, args...);
    }
    template <class... P, class... A>
    void launch(bool resident, int cluster, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... args) const {
        FV_CHECK(grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.y < 65536 && grid.z < 65536 && grid.x < (1u << 31), op,
                 ": the grid must be valid; got ", grid.x, " x ", grid.y, " x ", grid.z, ". Fix: the launcher.");
        FV_CHECK(block.x * block.y * block.z >= 1 && block.x * block.y * block.z <= emu::kMaxThreads, op,
                 ": the block must have 1..1024 threads; got ", block.x * block.y * block.z, ". Fix: the launcher.");
        FV_CHECK(smem <= static_cast<size_t>(props.max_smem), op, ": shared memory must fit ", props.max_smem,
                 " bytes; got ", smem, ". Fix: the launcher.");
        std::tuple<std::decay_t<P>...> values(static_cast<std::decay_t<P>>(args)...);
        emu::run_grid(grid, block, smem, resident, static_cast<unsigned>(cluster), [&] { std::apply(kernel, values); });
    }
    void fill(void* ptr, int byte, size_t bytes) const { std::memset(ptr, byte, bytes); }
};

}  // namespace fv
