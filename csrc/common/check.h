// SPDX-License-Identifier: Apache-2.0
// Argument checks of all ops, CPU and CUDA: "op: argument must be X; got Y. Fix: Z."
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "common/ids.h"

#define FV_CHECK(cond, ...)                                   \
    do {                                                      \
        if (!(cond)) [[unlikely]] {                           \
            throw std::runtime_error(fv::concat(__VA_ARGS__)); \
        }                                                     \
    } while (0)

namespace fv {

using torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;
using OptTensor = std::optional<Tensor>;

template <class... A>
std::string concat(const A&... a) {
    std::ostringstream s;
    (s << ... << a);
    return s.str();
}

inline const char* dtype_name(ScalarType t) {
    switch (t) {
        case ScalarType::Float: return "float32";
        case ScalarType::Double: return "float64";
        case ScalarType::Half: return "float16";
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Int: return "int32";
        case ScalarType::Long: return "int64";
        case ScalarType::Short: return "int16";
        case ScalarType::Byte: return "uint8";
        case ScalarType::Char: return "int8";
        case ScalarType::Bool: return "bool";
        case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
        default: return "another dtype";
    }
}

// "int32 [8, 64] on cpu"
inline std::string describe(const Tensor& t) {
    std::ostringstream s;
    s << dtype_name(t.scalar_type()) << " [";
    for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
    s << "] on " << (t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device");
    return s.str();
}

constexpr int64_t kAny = -1;  // wildcard in a wanted shape

// Checks one tensor: dtype in `dtypes`, shape (kAny = free), same device as `like`, last dimension dense;
// `rows_free` lets the leading stride be anything (>= 0), else the tensor must be contiguous.
inline void check_tensor(
    const char* op, const char* name, const Tensor& t, std::initializer_list<ScalarType> dtypes,
    std::initializer_list<int64_t> shape, const Tensor& like, bool rows_free = false) {
    bool ok = t.dim() == static_cast<int64_t>(shape.size());
    if (ok) {
        int64_t i = 0;
        for (int64_t want : shape) ok = ok && (want == kAny || t.size(i) == want), ++i;
    }
    bool dtype_ok = false;
    for (ScalarType d : dtypes) dtype_ok = dtype_ok || t.scalar_type() == d;
    const bool device_ok = t.is_cuda() == like.is_cuda() && t.get_device_index() == like.get_device_index();
    if (!(ok && dtype_ok && device_ok)) [[unlikely]] {
        std::ostringstream s;
        s << op << ": " << name << " must be ";
        int64_t i = 0;
        for (ScalarType d : dtypes) s << (i++ ? "|" : "") << dtype_name(d);
        s << " [";
        i = 0;
        for (int64_t want : shape) {
            s << (i++ ? ", " : "");
            if (want == kAny) s << "any"; else s << want;
        }
        s << "] on " << (like.is_cpu() ? "cpu" : "cuda:" + std::to_string(like.get_device_index()))
          << "; got " << describe(t) << ". Fix: ";
        s << (!ok ? "pass that shape" : !dtype_ok ? "cast with .to(dtype)" : "move it with .to(device)") << ".";
        throw std::runtime_error(s.str());
    }
    if (t.numel() == 0) return;
    const bool last_dense = t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1;
    const bool dense = rows_free ? last_dense : t.is_contiguous();
    FV_CHECK(dense, op, ": ", name, " must be ", rows_free ? "dense in its last dimension" : "contiguous",
             "; got ", describe(t), " with other strides. Fix: call .contiguous() once, outside the loop.");
}

inline void check_optional(
    const char* op, const char* name, const OptTensor& t, std::initializer_list<ScalarType> dtypes,
    std::initializer_list<int64_t> shape, const Tensor& like, bool rows_free = false) {
    if (t) check_tensor(op, name, *t, dtypes, shape, like, rows_free);
}

// Whether each dimension steps over all that the dimensions with smaller strides reach.
inline void check_own_memory(const char* op, const char* name, const Tensor& t) {
    if (t.numel() == 0 || t.is_contiguous()) return;
    int64_t reach = 0, below = -1;  // last offset of the dimensions with strides up to `below`
    for (;;) {
        int64_t next = -1, span = 0;
        bool twice = false;
        for (int64_t d = 0; d < t.dim(); ++d) {
            if (t.size(d) <= 1 || t.stride(d) <= below) continue;
            if (next >= 0 && t.stride(d) > next) continue;
            twice = t.stride(d) == next;
            next = t.stride(d), span = (t.size(d) - 1) * t.stride(d);
        }
        if (next < 0) return;
        FV_CHECK(!twice && next > reach, op, ": ", name, " must have memory of its own for every element; got ", describe(t),
                 " with strides that overlap. Fix: pass a tensor of its own, not an expanded one.");
        reach += span, below = next;
    }
}

// A tensor that is written: as check_tensor with rows_free, and every element has memory of its own. Strides that only interleave are
// refused with the ones that overlap.
inline void check_output(const char* op, const char* name, const Tensor& t, std::initializer_list<ScalarType> dtypes,
                         std::initializer_list<int64_t> shape, const Tensor& like) {
    check_tensor(op, name, t, dtypes, shape, like, true);
    check_own_memory(op, name, t);
}

inline void check_output(const char* op, const char* name, const OptTensor& t, std::initializer_list<ScalarType> dtypes,
                         std::initializer_list<int64_t> shape, const Tensor& like) {
    if (t) check_output(op, name, *t, dtypes, shape, like);
}

// Whether two contiguous tensors have a byte in common.
inline bool share_memory(const Tensor& a, const Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    const auto from = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
    const auto bytes = [](const Tensor& t) { return static_cast<uintptr_t>(t.numel()) * static_cast<uintptr_t>(t.element_size()); };
    return from(a) < from(b) + bytes(b) && from(b) < from(a) + bytes(a);
}

template <class T>
const T* cptr(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <class T>
T* mptr(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }
template <class T>
const T* cptr(const OptTensor& t) { return t ? cptr<T>(*t) : nullptr; }
template <class T>
T* mptr(const OptTensor& t) { return t ? mptr<T>(*t) : nullptr; }

// Token ids may be int32 or int64; structure is int32 only. Kernels take the bases (common/ids.h).
struct IdArray : IdView {
    explicit IdArray(const Tensor& t) : IdView{t.const_data_ptr(), t.scalar_type() == ScalarType::Long} {}
};
struct IdArrayOut : IdStore {
    explicit IdArrayOut(const Tensor& t) : IdStore{t.mutable_data_ptr(), t.scalar_type() == ScalarType::Long} {}
};

}  // namespace fv
