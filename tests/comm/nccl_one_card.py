"""Two ranks on one GPU, over NCCL and over our own transports: what test_nccl.py and test_real_ranks.py do over two, and microseconds per call.

    nvidia-cuda-mps-control -d
    FASTVERIFY_NCCL_LIB=.../libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_VISIBLE_DEVICES=0 python tests/comm/nccl_one_card.py

NCCL >= 2.30 takes several ranks on one GPU when asked so; without MPS they would take turns of milliseconds. Exit status 1 if a
part failed.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as pytest has it
import test_nccl  # noqa: E402
import test_real_ranks  # noqa: E402
import torch  # noqa: E402
from rank_pool import spawn  # noqa: E402

from fastverify import Communicator, all_reduce, all_reduce_rms_norm  # noqa: E402


def times(rank, world, device) -> None:
    """us per call of chained calls in a graph, least over ranks of the medians."""
    import torch.distributed as dist
    with Communicator(device=device, backend="nccl", nccl=dict(max_ctas=8)) as comm:
        for rows in (1, 4, 16, 64, 256):
            x, weight = torch.zeros(rows, 7168, dtype=torch.bfloat16, device=device), torch.ones(7168, dtype=torch.bfloat16, device=device)
            out, residual = torch.empty_like(x), torch.zeros_like(x)
            for name, call in (("all_reduce", lambda: all_reduce(x, comm, out)),
                               ("all_reduce_rms_norm", lambda: all_reduce_rms_norm(x, residual, weight, comm, out=out))):
                call()
                graph, samples = torch.cuda.CUDAGraph(), []
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(50):
                        call()
                for _ in range(8):
                    dist.barrier()
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    samples.append(start.elapsed_time(end) * 20)
                us = comm._exchange(sorted(samples[2:])[3])
                if rank == 0:
                    print(f"{name} [{rows}, 7168] bf16, NCCL {comm.nccl.version}, {world} ranks on one GPU: {min(us):.1f} us", flush=True)
                del graph


PARTS = [("ranks agree", test_nccl._agree, (None,)), ("ranks agree, 1 to 4 CTAs", test_nccl._agree, (dict(min_ctas=1, max_ctas=4),)),
         ("ranks agree, not blocking", test_nccl._agree, (dict(blocking=0),)), ("capture and close", test_nccl._capture, ()),
         ("two graphs, two communicators", test_real_ranks._graphs, ("nccl",)), ("linear in pieces", test_real_ranks._linear, ("nccl",)),
         ("NCCL beside own kernels", test_nccl._beside, ("peer",)), ("columns as they come, mailbox", test_real_ranks._columns, ("host",)),
         ("columns as they come, peer memory", test_real_ranks._columns, ("peer",)), ("linear in pieces, mailbox", test_real_ranks._linear, ("host",)),
         ("two graphs, two communicators, mailbox", test_real_ranks._graphs, ("host",)), ("a killed peer is aborted", None, ()), ("times", times, ())]


def main() -> int:
    failed = 0
    for name, body, args in PARTS:
        start = time.monotonic()
        try:
            if body is None:
                test_nccl.test_a_lost_peer_is_aborted_without_a_hang()
            else:
                spawn(body, *args)
            said = "passed"
        except BaseException as error:
            failed, said = failed + 1, "FAILED: " + str(error).strip().splitlines()[-1][:300]
        print(f"{name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
