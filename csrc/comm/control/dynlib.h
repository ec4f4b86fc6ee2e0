// SPDX-License-Identifier: Apache-2.0
// A shared library that may be absent: opened at run time, never linked.
#pragma once
#include <dlfcn.h>
#include <link.h>

#include <string>
#include <utility>

namespace fv::comm {

class DynLib {
public:
    DynLib() = default;
    // `flags` of dlopen; RTLD_NOLOAD finds only a copy that is mapped already.
    explicit DynLib(const std::string& name, int flags = RTLD_LAZY | RTLD_LOCAL) {
        handle_ = dlopen(name.c_str(), flags);
        if (!handle_) {
            const char* why = dlerror();
            error_ = why ? why : name + ": not mapped into this process";
        }
    }
    DynLib(DynLib&& o) noexcept : handle_(std::exchange(o.handle_, nullptr)), error_(std::move(o.error_)) {}
    DynLib& operator=(DynLib&& o) noexcept {
        std::swap(handle_, o.handle_);
        std::swap(error_, o.error_);
        return *this;
    }
    ~DynLib() {
        if (handle_) dlclose(handle_);
    }

    explicit operator bool() const { return handle_ != nullptr; }
    const std::string& error() const { return error_; }

    // nullptr when the symbol is absent.
    template <class F>
    F* symbol(const char* name) const {
        return handle_ ? reinterpret_cast<F*>(dlsym(handle_, name)) : nullptr;
    }

    // Where the loader found it.
    std::string path() const {
        struct link_map* map = nullptr;
        if (!handle_ || dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || !map) return "";
        return map->l_name;
    }

private:
    void* handle_ = nullptr;
    std::string error_;
};

}  // namespace fv::comm
