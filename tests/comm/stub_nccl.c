// SPDX-License-Identifier: Apache-2.0
// As much of NCCL as NcclComm calls, without a GPU. $STUB_NCCL when a communicator is opened says what its third call does: "works",
// "fails", "hangs" (until the abort) or, for a communicator that does not block, "fails later" and "hangs later". A second end, a
// wrong address and a call after the abort end the process (one may have been on its way).
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kSystemError = 2, kInternalError = 3, kInProgress = 7 };
typedef struct { char bytes[128]; } Id;
typedef struct {
    int world, rank, calls, late, polls, pending;
    char does[32];
    atomic_int ended;
} Comm;

static void must(int what) { if (!what) abort(); }

int ncclGetVersion(int* version) { *version = 22809; return 0; }
int ncclGetUniqueId(Id* id) { memset(id, 1, sizeof *id); return 0; }
int ncclCommInitRankConfig(void** out, int world, Id id, int rank, void* config) {
    Comm* c = calloc(1, sizeof *c);
    (void)id, (void)config;
    c->world = world, c->rank = rank;
    strncpy(c->does, getenv("STUB_NCCL"), sizeof c->does - 1);
    *out = c;
    return 0;
}
static int end(Comm* c) { must(!atomic_exchange(&c->ended, 1)); return 0; }
int ncclCommAbort(void* c) { return end(c); }
int ncclCommDestroy(void* c) { return end(c); }
int ncclCommFinalize(void* c) { must(!((Comm*)c)->ended); return 0; }
int ncclCommGetAsyncError(void* comm, int* result) {
    Comm* c = comm;
    must(!c->ended);
    *result = 0;
    if (c->pending) {
        *result = !strcmp(c->does, "fails later") && ++c->polls > 3 ? kSystemError : kInProgress;
    }
    return 0;
}
const char* ncclGetErrorString(int code) { return code == kSystemError ? "unhandled system error" : "internal error"; }
const char* ncclGetLastError(void* c) { (void)c; return "No space left on device"; }
static int call(Comm* c) {
    if (c->ended) {
        must(!c->late++);
        return kInternalError;
    }
    if (++c->calls != 3 || !strcmp(c->does, "works")) return 0;
    if (!strcmp(c->does, "fails")) return kSystemError;
    if (!strcmp(c->does, "hangs")) {
        while (!c->ended) usleep(1000);
        return kInternalError;
    }
    c->pending = 1;
    return kInProgress;
}
int ncclAllReduce(const void* send, void* receive, size_t count, int type, int sum, void* c, void* stream) {
    must(send == receive && type == 7 && sum == 0 && !stream);
    memset(receive, 0, count * 4);
    return call(c);
}
int ncclAllGather(const char* send, char* receive, size_t count, int type, void* comm, void* stream) {
    Comm* c = comm;
    must(send == receive + c->rank * count && type == 0 && !stream);
    memset(receive, 0, c->world * count);
    return call(c);
}
