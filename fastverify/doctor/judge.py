"""Facts -> findings. Pure functions, tested on made-up machines."""

import re
from dataclasses import asdict, dataclass

from .facts import OPTIONAL, REQUIRED

DRIVER_OF_CUDA = {13: 580, 12: 525}  # CUDA major -> the first driver that runs it
GIB = 2**30
STEP_OPS = ("probe", "draft_topk", "grow_tree", "build_tree", "prepare_tree", "rope_append", "tree_attention", "verify_tree",
            "compact_kv")  # what the decode loop calls
SLOW_ALLREDUCE_US, SLOW_BYTES_PER_US = 84.0, 7000.0  # 1.5 times untuned NCCL over PCIe; beyond, 7 GB/s of message


@dataclass(frozen=True)
class Finding:
    """level: "ok", "note", "slow" (costs speed) or "wrong" (something does not work). fix: what to do, "" for nothing."""

    part: str
    level: str
    text: str
    fix: str = ""

    def as_dict(self) -> dict:
        return asdict(self)


def judge(facts: dict) -> list:
    """Findings in the order of the report."""
    out: list = []
    for check in (python, packages, torch, install, architectures, driver, pcie, nccl, environment):
        out += check(facts)
    return out


def python(facts: dict) -> list:
    p = facts["python"]
    out = []
    if _numbers(p["version"])[:2] < (3, 10):
        out.append(Finding("python", "wrong", f"Python must be >= 3.10; this is {p['version']}", "use a newer Python"))
    if p["system"] != "linux":
        out.append(Finding("python", "wrong", f"the system must be Linux; this is {p['system']}", "on Windows, WSL 2 works"))
    return out or [Finding("python", "ok", f"{p['version']} on {p['machine']}, {p['libc'] or 'libc unknown'}: {p['executable']}")]


def packages(facts: dict) -> list:
    have = facts["packages"]
    missing = [n for n in REQUIRED if have.get(n) is None and not (n == "torch" and "version" in facts["torch"])]
    out = [Finding("packages", "wrong", f"missing: {', '.join(missing)}",
                   f"pip install {' '.join('torch>=2.10' if n == 'torch' else n for n in missing)}".replace("torch>=2.10", "'torch>=2.10'"))
           ] if missing else [Finding("packages", "ok", "everything that is required is installed")]
    absent = [f"{n} ({why})" for n, why in OPTIONAL.items() if have.get(n) is None]
    return out + ([Finding("packages", "note", f"not installed, optional: {', '.join(absent)}")] if absent else [])


def torch(facts: dict) -> list:
    t = facts["torch"]
    if "version" not in t:
        if facts["packages"].get("torch") is None:
            return []  # said already
        return [Finding("torch", "wrong", f"torch {facts['packages']['torch']} does not import: {t.get('error')}", of_torch(str(t.get("error"))))]
    out = []
    if _numbers(t["version"])[:2] < (2, 10):
        out.append(Finding("torch", "wrong", f"torch must be >= 2.10; this is {t['version']}", "pip install 'torch>=2.10'"))
    here = len(facts["pci"])
    gpus = ", ".join(sorted({f"{g['name']} (sm_{g['capability']})" for g in t["gpus"]}))
    if t["available"]:
        out.append(Finding("torch", "ok", f"{t['version']}, CUDA {t['cuda']}, {len(t['gpus'])} GPUs: {gpus}"))
    elif here and t["cuda"] is None:
        out.append(Finding("torch", "wrong", f"{t['version']} is a CPU build; this machine has {here} NVIDIA GPUs",
                           "install a CUDA build of torch (pytorch.org shows the line)"))
    elif here:
        out.append(Finding("torch", "wrong", f"{t['version']} (CUDA {t['cuda']}) sees no GPU; the machine has {here}",
                           "see the driver below; check CUDA_VISIBLE_DEVICES and, in a container, --gpus all"))
    else:
        out.append(Finding("torch", "ok", f"{t['version']}, no GPU: CPU with {t['threads']} threads"))
    return out


def of_torch(error: str) -> str:
    """What to do if torch does not import. Its CUDA libraries are wheels of their own."""
    if ".so" not in error:
        return "reinstall torch"
    return "install what torch requires: `pip check` names the packages that are missing" + (
        " (libnccl is in nvidia-nccl-cu13 or nvidia-nccl-cu12)" if "libnccl" in error else "")


def install(facts: dict) -> list:
    own, got = facts["fastverify"], facts["install"]
    build = own["build"]
    if not build and own.get("other"):
        return [Finding("fastverify", "wrong", f"{own['path']}, a source tree that was never built, hides the install in {own['other']}",
                        "leave this folder, or type `fastverify` instead of `python -m fastverify`")]
    if not build:
        return [Finding("fastverify", "wrong", f"{own['version']} in {own['path']} was never built",
                        "pip install --no-build-isolation -e .")]
    what = f"{own['version']} ({build.get('git') or 'no git'}), " + (
        f"CUDA {build['cuda']} for sm_{', sm_'.join(build['cuda_archs'])}" + (f" and PTX {build['cuda_ptx']}" if build.get("cuda_ptx") else "")
        if build.get("cuda") else "CPU ops only")
    out = [Finding("fastverify", "ok", f"{what}: {own['path']}")]
    if build.get("version") not in (None, own["version"]):
        out.append(Finding("fastverify", "wrong", f"the libraries are those of {build['version']}", "reinstall fastverify"))
    if "version" not in facts["torch"]:
        return out  # nothing loads without torch: said already
    if got.get("error"):
        out.append(Finding("fastverify", "wrong", f"_C does not load: {got['error']}",
                           f"pip install 'torch>={build.get('torch_target', '2.10')}' and reinstall fastverify"))
        return out
    broken = {d: text for d, text in got["probe"].items() if text != "ok"}
    for device, text in broken.items():
        out.append(Finding("fastverify", "wrong", f"the probe op on {device}: {text}", "see the architectures and the driver below"))
    if not broken:
        out.append(Finding("fastverify", "ok", f"the probe op is right on {', '.join(got['probe'])}"))
    if facts["torch"]["available"]:
        out += gpu_kernels(bool(build.get("cuda")), got["ops"])
    return out


def gpu_kernels(built: bool, ops: dict) -> list:
    """Which ops run on a GPU. built: the build has CUDA kernels; ops: {name: ["cpu", "cuda" or "triton"]}."""
    without = [n for n, kinds in ops.items() if "cuda" not in kinds and "triton" not in kinds]
    by_triton = [n for n, kinds in ops.items() if "triton" in kinds]
    reinstall = "install the CUDA toolkit (nvcc) and reinstall: pip install --no-build-isolation ."
    out = []
    step = [n for n in without if n in STEP_OPS]
    if not built and step:
        out.append(Finding("fastverify", "wrong", f"there is a GPU but this build has no CUDA kernels, and no Triton ones of "
                           f"{', '.join(step)}, which every step needs", reinstall))
    elif not built:
        out.append(Finding("fastverify", "slow", "this build has no CUDA kernels: Triton's run where there are some", reinstall))
    if without:
        out.append(Finding("fastverify", "note", f"ops without a GPU kernel: {', '.join(without)}"))
    if by_triton:
        out.append(Finding("fastverify", "note", f"Triton's kernels run for {', '.join(by_triton)}"))
    return out


def architectures(facts: dict) -> list:
    build, gpus = facts["fastverify"]["build"], facts["torch"].get("gpus") or []
    if not build.get("cuda") or not gpus:
        return []
    out = []
    for capability in sorted({g["capability"] for g in gpus}):
        how = code_for(capability, build["cuda_archs"], build.get("cuda_ptx"))
        if how == "binary":
            out.append(Finding("architectures", "ok", f"sm_{capability}: code of its own"))
        elif how == "ptx":
            out.append(Finding("architectures", "slow", f"sm_{capability}: compiled by the driver at the first use (PTX {build['cuda_ptx']})",
                               f"FASTVERIFY_CUDA_ARCHS={capability} pip install --no-build-isolation --force-reinstall --no-deps ."))
        else:
            out.append(Finding("architectures", "wrong", f"sm_{capability}: no code in this build (sm_{', sm_'.join(build['cuda_archs'])})",
                               f"FASTVERIFY_CUDA_ARCHS={capability} pip install --no-build-isolation --force-reinstall --no-deps ."))
    return out


def code_for(capability: str, archs: list, ptx: "str | None") -> str:
    """"binary", "ptx" or "": what of a build runs on a GPU. Code of one major runs on its later minors; 90a only on 90."""
    want = int(capability)
    for arch in archs:
        have = int(re.match(r"\d+", arch)[0])
        if have == want or (arch.isdigit() and have // 10 == want // 10 and have <= want):
            return "binary"
    return "ptx" if ptx and str(ptx).isdigit() and int(ptx) <= want else ""


def driver(facts: dict) -> list:
    here, topo = facts["pci"], facts["topology"]
    version = (topo.get("driver") or {}).get("version") or facts["nvidia_smi"] or None
    if not here:
        return [Finding("driver", "ok", f"{version}; no NVIDIA GPU on the PCI bus that this system sees")] if version else [
            Finding("driver", "ok", "no NVIDIA GPU on the PCI bus")]
    if version is None:
        bound = sorted({g["driver"] or "none" for g in here})
        return [Finding("driver", "wrong", f"{len(here)} NVIDIA GPUs, but the driver does not answer (bound: {', '.join(bound)})",
                        "install the NVIDIA driver; in a container, start it with --gpus all")]
    out = [Finding("driver", "ok", f"{version}, {len(here)} GPUs")]
    for who, cuda in (("torch", facts["torch"].get("cuda")), ("fastverify", facts["fastverify"]["build"].get("cuda"))):
        need = DRIVER_OF_CUDA.get(_numbers(cuda)[0]) if cuda else None
        if need and _numbers(version)[0] < need:
            out.append(Finding("driver", "wrong", f"{who} is built with CUDA {cuda}, which needs driver >= {need}; this is {version}",
                               f"update the driver, or install a CUDA 12 build of {who}"))
    return out


def pcie(facts: dict) -> list:
    """Links, switches, IOMMU: what an all-reduce between several GPUs meets."""
    topo = facts["topology"]
    if topo.get("error"):
        level = "slow" if len(facts["pci"]) > 1 else "note"
        return [Finding("pcie", level, f"the wiring of the GPUs is not known: {topo['error']}",
                        "reinstall fastverify with pybind11 (fastverify._comm)" if level == "slow" else "")]
    gpus = topo.get("gpus") or []
    out = []
    for g in gpus:
        link = g.get("link") or {}
        if link.get("width") and link.get("max_width") and link["width"] < link["max_width"]:
            out.append(Finding("pcie", "slow", f"GPU {g['bus_id']} runs at x{link['width']} of x{link['max_width']}",
                               "check the slot, the riser and the BIOS's bifurcation"))
    if len(gpus) < 2:
        return out
    links = topo["links"]
    pairs = [(i, j) for i in range(len(gpus)) for j in range(len(gpus)) if i < j]
    kinds = sorted({links[i][j] for i, j in pairs})
    out.append(Finding("pcie", "ok", f"{len(gpus)} GPUs, connected by {', '.join(kinds)} (PIX, PXB: switches; PHB: host bridge; NODE, "
                       "SYS: through the CPU)"))
    access = topo.get("peer_access")
    if access:
        bad = [(i, j, access["read"][i][j]) for i, j in pairs if access["read"][i][j] != "ok" or access["write"][i][j] != "ok"]
        if bad:
            i, j, why = bad[0]
            out.append(Finding("pcie", "slow", f"the driver refuses peer access on {len(bad)} of {len(pairs)} pairs (GPU {i} and {j}: {why})",
                               "GeForce boards need a driver that allows it; else all-reduces go through host memory"))
        else:
            out.append(Finding("pcie", "ok", "the driver allows peer access on every pair"))
    if (topo.get("iommu") or {}).get("state") == "translated":
        out.append(Finding("pcie", "slow", "the IOMMU translates addresses: peer writes may be slow, or be lost",
                           "boot with iommu=pt (or off: amd_iommu=off, intel_iommu=off)"))
    redirect = [bus for bus, b in (topo.get("bridges") or {}).items() if b.get("acs") == "redirect"]
    if redirect:
        out.append(Finding("pcie", "slow", f"ACS sends peer traffic up to the root complex at {len(redirect)} bridges ({redirect[0]}, ...)",
                           "turn ACS off in the BIOS, or clear it with setpci on those bridges"))
    return out


def nccl(facts: dict) -> list:
    topo = facts["topology"]
    found = topo.get("nccl") or {}
    version = found.get("version") or facts["torch"].get("nccl")
    several = len(facts["pci"]) > 1
    out = []
    if version:
        out.append(Finding("nccl", "ok", f"{version}" + (f", {found['path']} ({found['source']})" if found.get("path") else " (torch's)")))
    elif several:
        out.append(Finding("nccl", "slow", "no NCCL library: communicators over several GPUs fall back to torch's",
                           "pip install 'fastverify[nccl]' ([nccl-cu13] with a CUDA 13 torch)"))
    shm = facts["shm"]
    if several and (shm is None or shm["total"] < GIB):
        size = "is missing" if shm is None else f"holds {shm['total'] >> 20} MiB"
        out.append(Finding("nccl", "slow", f"/dev/shm {size}: NCCL and the host mailboxes need about 1 GiB",
                           "start the container with --ipc=host or --shm-size=8g"))
    links = topo.get("links") or []
    far = any(kind in ("PHB", "NODE", "SYS") for row in links for kind in row)
    if several and far and "NCCL_P2P_LEVEL" not in facts["environment"]:
        out.append(Finding("nccl", "slow", "some GPUs are connected through the CPU; NCCL's default may then copy through host memory "
                           "(205 us instead of 24 to 56 for a small all-reduce)",
                           "try NCCL_P2P_LEVEL=SYS, and see with NCCL_DEBUG=INFO that it says P2P and not SHM"))
    return out


def allreduce(measured: dict, calls: int = 0) -> list:
    """Times of torch's all-reduce against those that NCCL reaches over PCIe with P2P (24 to 56 us up to 64 KiB), and of ours.

    calls: all-reduces of a forward (two per layer), 0 if the model is not known.
    """
    if "error" in measured:
        return [Finding("all-reduce", "wrong", f"torch's all-reduce does not work here: {measured['error']}",
                        "NCCL_DEBUG=INFO tells more; see pcie and driver above")]
    out = []
    for row in measured["rows"]:
        us = row["graph_us"] if row["graph_us"] is not None else row["eager_us"]
        where = f"{measured['world']} {'GPUs' if measured['backend'] == 'nccl' else 'CPU processes'}, {row['bytes'] / 1024:.0f} KiB"
        text = f"{where}: {row['eager_us']:.0f} us a call" + (f", {us:.0f} us in a CUDA graph" if row["graph_us"] is not None else "")
        if measured["backend"] != "nccl":
            out.append(Finding("all-reduce", "note", f"{text} (gloo; says nothing about GPUs)"))
        elif us > SLOW_ALLREDUCE_US + row["bytes"] / SLOW_BYTES_PER_US:
            out.append(Finding("all-reduce", "slow", f"{text}; NCCL with P2P takes 24 to 56 us up to 64 KiB",
                               "see pcie and nccl above; NCCL_DEBUG=INFO must say P2P and not SHM; fastverify trace tells waiting from wire"))
        else:
            out.append(Finding("all-reduce", "ok", text))
        works = {name: ours for name, ours in row.get("ours", {}).items() if ours is not None}
        if works:
            best = min(works, key=works.get)
            text = f"{where}, ours: " + ", ".join(f"{name} {ours:.1f} us" for name, ours in works.items())
            if calls:
                text += f"; {calls} of them in a forward: {best} {calls * works[best] / 1e3:.2f} ms, NCCL {calls * us / 1e3:.2f} ms"
            out.append(Finding("all-reduce", "note", text))
    out += [Finding("all-reduce", "note", f"ours does not work: {reason}") for reason in measured.get("reasons", [])]
    return out


def environment(facts: dict) -> list:
    env = facts["environment"]
    out = []
    if env.get("NCCL_P2P_DISABLE", "0") not in ("", "0") and len(facts["pci"]) > 1:
        out.append(Finding("environment", "slow", f"NCCL_P2P_DISABLE={env['NCCL_P2P_DISABLE']}: NCCL copies through host memory",
                           "unset NCCL_P2P_DISABLE"))
    if env:
        out.append(Finding("environment", "note", ", ".join(f"{k}={v}" for k, v in env.items())))
    return out


def _numbers(text: "str | None") -> tuple:
    return tuple(int(x) for x in re.findall(r"\d+", text or "")) or (0,)
